"""The command `mlhpc ci`, on records as sessions write them."""

import time

import pytest
import yaml
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.results.store import Store

SYSTEMS = """\
schema: 1
systems:
  mine:
    description: x
    partitions: {cpu: {scheduler: local, accelerator: cpu}}
"""
HOUR = 3_600_000_000_000


def fill(state_dir, *records):
    store = Store(state_dir, "s1")
    for one in records:
        store.append(one)  # type: ignore[arg-type]
    store.close()


def at(number, hours_ago, value=100.0, **changes):
    created = time.time_ns() - int(hours_ago * HOUR)
    return record(number, created_ns=created, measurement=measurement(value), **changes)


def test_metrics_are_of_the_newest_first_attempt_since_then(state_dir, tmp_path):
    fill(
        state_dir, at(1, 48, 1.0), at(2, 3, 2.0), at(3, 2, 3.0), at(4, 1, 4.0, attempt=1), at(5, 1, 5.0, system="other")
    )  # fmt: skip
    path = tmp_path / "out/metrics.txt"
    assert main(["ci", "metrics", "--system", "cirrus", "--since", "1d", "--output", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "} 3.0\n" in text
    assert text.count("mlhpc_rate_samples_per_second{") == 1


def test_metrics_of_nothing_are_an_empty_file_and_exit_code_5(state_dir, tmp_path):
    assert main(["ci", "metrics", "--output", str(tmp_path / "m.txt")]) == 5
    assert (tmp_path / "m.txt").read_text(encoding="utf-8") == "# EOF\n"


@pytest.mark.parametrize("since", ["2d", "2000-01-01T00:00:00Z", "2000-01-01"])
def test_since_is_a_duration_or_a_date(state_dir, since):
    fill(state_dir, at(1, 1))
    assert main(["ci", "metrics", "--since", since]) == 0


@pytest.mark.parametrize("since", ["", "yesterday", "99999-01-01", "-1d"])
def test_anything_else_is_a_usage_error(since, capsys):
    with pytest.raises(SystemExit) as end:
        main(["ci", "metrics", f"--since={since}"])
    assert end.value.code == 4
    assert "neither a duration such as 2d nor a date" in capsys.readouterr().err


def test_a_note_compares_a_change_with_the_nights_of_the_default_branch(state_dir, tmp_path, capsys):
    nights = [at(number, 24.0 * number, 100.0) for number in range(1, 6)]
    fill(state_dir, *nights, at(9, 1, 80.0, purpose="change", branch="mine", commit="c0ffee"))
    argv = ["ci", "note", "--changes", "--baselines-dir", str(tmp_path / "baselines")]
    assert main(argv) == 0
    assert "80 samples/s |  |  | 100 (of 5) | -20.0%" in capsys.readouterr().out


def test_generate_writes_a_pipeline_for_each_system(tmp_path, monkeypatch, capsys):
    (tmp_path / "systems.yaml").write_text(SYSTEMS, encoding="utf-8")
    (tmp_path / "mlhpc-ci.yaml").write_text(
        "systems: {mine: {tags: [a], service_tags: [b]}}\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI_PIPELINE_SOURCE", "schedule")
    assert main(["ci", "generate", "--output", "out"]) == 0
    assert "out/mine.yml: schedule" in capsys.readouterr().out
    found = yaml.safe_load((tmp_path / "out/mine.yml").read_text(encoding="utf-8"))
    assert found["include"][0]["inputs"] == {"system": "mine", "tags": ["a"], "service_tags": ["b"]}


def test_a_missing_config_is_a_usage_error_that_names_it(tmp_path, monkeypatch, capsys):  # fmt: skip
    (tmp_path / "systems.yaml").write_text(SYSTEMS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["ci", "generate", "--output", "out"]) == 4
    assert "mlhpc-ci.yaml: cannot be read" in capsys.readouterr().err
