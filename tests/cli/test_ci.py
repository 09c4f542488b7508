"""The command `mlhpc ci`, on records as sessions write them."""

import json
import time

import pytest
import yaml
from nights_of import HOUR, store
from worlds import measurement, record

SYSTEMS = "systems: {mine: {partitions: {cpu: {scheduler: local, accelerator: cpu}}}}\n"


def at(number, hours_ago, value=100.0, **changes):
    created_ns = time.time_ns() - int(hours_ago * HOUR)
    return record(number, created_ns=created_ns, measurement=measurement(value), **changes)


def test_metrics_are_of_the_newest_first_attempt_since_then(state_dir, tmp_path, mlhpc):
    others = [at(4, 1, 4.0, attempt=1), at(5, 1, 5.0, system="other")]
    store(state_dir, [at(1, 48, 1.0), at(2, 3, 2.0), at(3, 2, 3.0), *others])
    path = tmp_path / "out/metrics.txt"
    mlhpc("report", "openmetrics", "--system", "cirrus", "--since", "1d", "--output", path)
    rates = [
        line
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("mlhpc_rate_samples_per_second{")
    ]
    assert [line.rpartition(" ")[2] for line in rates] == ["3.0"]


def test_metrics_of_nothing_are_an_empty_file(tmp_path, mlhpc):
    mlhpc("report", "openmetrics", "--output", tmp_path / "m.txt")
    assert (tmp_path / "m.txt").read_text(encoding="utf-8") == "# EOF\n"


@pytest.mark.parametrize("since", ["2d", "2000-01-01T00:00:00Z", "2000-01-01"])
def test_since_is_a_duration_or_a_date(state_dir, mlhpc, since):
    store(state_dir, [at(1, 1)])
    mlhpc("report", "openmetrics", "--since", since)


@pytest.mark.parametrize("since", ["", "yesterday", "99999-01-01", "-1d"])
def test_anything_else_is_a_usage_error(mlhpc, since):
    err = mlhpc("report", "openmetrics", f"--since={since}", code=2).err
    assert "is neither a time like 30d or 12h nor a date" in err


def test_a_note_compares_a_change_with_the_nights_of_the_default_branch(state_dir, tmp_path, mlhpc):
    nights = [at(number, 24.0 * number) for number in range(1, 6)]
    store(state_dir, [*nights, at(9, 1, 80.0, purpose="change", branch="mine", commit="c0ffee")])
    out = mlhpc("ci", "note", "--changes", "--baselines-dir", tmp_path / "baselines").out
    assert "80 samples/s |  |  | 100 (of 5) | -20.0%" in out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "systems.yaml").write_text(SYSTEMS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_generate_writes_a_pipeline_for_each_system(folder, monkeypatch, mlhpc):
    inputs = {"tags": ["a"], "service_tags": ["b"]}
    (folder / "mlhpc-ci.yaml").write_text(yaml.safe_dump({"systems": {"mine": inputs}}), encoding="utf-8")
    monkeypatch.setenv("CI_PIPELINE_SOURCE", "schedule")
    assert "out/mine.yml: schedule" in mlhpc("ci", "pipelines", "--output", "out").out
    data = json.loads(mlhpc("ci", "pipelines", "--output", "out", "--json").out)
    assert data["schema"] == "mlhpc/ci-pipelines/1"
    assert data["pipelines"] == [{"system": "mine", "file": "out/mine.yml", "for": "schedule"}]
    found = yaml.safe_load((folder / "out/mine.yml").read_text(encoding="utf-8"))
    assert found["include"][0]["inputs"] == {"system": "mine", **inputs}


def test_a_missing_config_is_a_usage_error_that_names_it(folder, mlhpc):
    assert "mlhpc-ci.yaml: cannot be read" in mlhpc("ci", "pipelines", "--output", "out", code=2).err
