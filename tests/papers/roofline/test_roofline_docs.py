"""docs/roofline.md says what is: its commands are accepted, its suite is collected, its tables name every metric."""

import re
import shutil
from pathlib import Path

import pytest
from cli_calls import parsed
from nights_of import store
from roofline_records import kernels, peaks

from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.characters import CHARACTERS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/roofline.md").read_text(encoding="utf-8")
COMMANDS = [line.strip().partition("#")[0].split() for line in PAGE.splitlines() if line.startswith("    ")]
HERE = ("--system", "local", "--mlhpc-preset", "smoke")


def test_every_command_is_accepted():
    ours = [words[3:] for words in COMMANDS if words[:3] == ["mlhpc", "papers", "roofline"]]
    assert ours == [[], ["--output", "roofline.html"]]
    assert all(parsed("papers", "roofline", *words) for words in ours)


def test_the_page_of_the_commands_is_written(state_dir, tmp_path, monkeypatch, mlhpc):
    store(state_dir, [peaks(), kernels()])
    monkeypatch.chdir(tmp_path)
    for words in COMMANDS:
        if words[0] == "mlhpc":
            mlhpc(*words[1:])
    assert (tmp_path / "roofline.html").read_text().startswith("<!doctype html>")


@pytest.fixture
def collected(pytester):
    """Return what collects the suites, which lie below the folder of the test."""
    for name in ("agreement", "characterisation", "training"):
        shutil.copytree(ROOT / "suites" / name, pytester.path / "suites" / name)

    def collect(*words):
        done = pytester.runpytest_subprocess(*words, "--collect-only", "-q", "-p", "no:cacheprovider")
        assert done.ret == 0, done.outlines
        return [line for line in done.outlines if "::" in line]

    return collect


def test_the_suite_of_the_page_is_collected(collected):
    (words,) = [words[1:] for words in COMMANDS if words[0] == "pytest"]
    found = collected(*words)
    names = {re.sub(r".*::(\w+).*", r"\1", line) for line in found}
    assert names == {"test_peaks", "test_kernels", "test_gradients", "test_reading"}
    assert all("local:cpu" in line for line in found)


def test_all_suites_together_do_not_characterise(collected):
    found = "\n".join(collected("suites", *HERE))
    assert "test_cosmoflow" in found
    assert "test_agreement" in found
    assert "characterisation" not in found


def test_a_project_that_is_called_like_the_folder_does_not_characterise(collected, pytester, monkeypatch):
    """And who stands in the folder does not have to say where that is."""
    project = pytester.mkdir("characterisation")
    (pytester.path / "suites").rename(project / "suites")
    monkeypatch.chdir(project)
    assert not any("test_peaks" in line for line in collected(project / "suites", *HERE))
    monkeypatch.chdir(project / "suites" / "characterisation")
    assert any("test_peaks" in line for line in collected(".", *HERE))


def test_the_table_names_every_metric_that_must_be_reported():
    entries = re.findall(r"^- `(\w+)`(.*?)(?=\n- `|\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    rows = {name: set(re.findall(r"`(\w+)`", text)) for name, text in entries}
    assert set(rows) == {workload.name for workload in CHARACTERS}
    for workload in CHARACTERS:
        assert {*workload.expected, *workload.judged} <= rows[workload.name], workload.name


def test_fields_of_the_example_are_fields():
    (arguments,) = re.findall(r'@roofline\("kernels", (.*)\)\n', PAGE)
    fields = eval(f"dict({arguments})")  # noqa: S307 - our own page
    kernels = next(workload for workload in WORKLOADS if workload.name == "kernels")
    assert kernels.contradictions(parameters_of(kernels, "smoke", **fields)) == ()


@pytest.mark.parametrize("workload", CHARACTERS, ids=lambda one: one.name)
def test_presets_train_the_preset_of_the_test(workload):
    for preset in ("smoke", "small", "reference"):
        # A CPU computes it too, in float64.
        expected = "small" if (workload.name, preset) == ("agreement", "reference") else preset
        assert parameters_of(workload, preset).get("size", expected) == expected
