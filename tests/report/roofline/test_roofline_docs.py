"""docs/roofline.md says what is: its commands are accepted, its suite is collected, its tables name every metric."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pytest_mlhpc import cli
from pytest_mlhpc.report import roofline_cli
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of
from pytest_mlhpc.worker.workloads.characters import CHARACTERS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/roofline.md").read_text(encoding="utf-8")
COMMANDS = [line.strip().partition("#")[0].split() for line in PAGE.splitlines() if line.startswith("    ")]


def test_every_command_is_accepted():
    ours = [words[2:] for words in COMMANDS if words[:2] == ["mlhpc", "roofline"]]
    assert ours == [[], ["--html", "roofline.html"]]
    for words in ours:
        parser = cli.Parser()
        roofline_cli.add_arguments(parser)
        parser.parse_args(words)


def test_the_page_of_the_commands_is_written(state_dir, tmp_path, monkeypatch):
    from roofline_records import kernels, peaks

    from pytest_mlhpc.results.store import Store

    store = Store(state_dir, "s1")
    store.append(peaks())
    store.append(kernels())
    store.close()
    monkeypatch.chdir(tmp_path)
    for words in COMMANDS:
        if words[0] == "mlhpc":
            assert cli.main(words[1:]) == 0
    assert (tmp_path / "roofline.html").read_text().startswith("<!doctype html>")


def collected(pytester, *words):
    done = pytester.runpytest_subprocess(*words, "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.ret == 0, done.outlines
    return [line for line in done.outlines if "::" in line]


def suites(pytester):
    for name in ("agreement", "characterisation", "training"):
        folder = pytester.path / "suites" / name
        folder.mkdir(parents=True)
        for file in (ROOT / "suites" / name).glob("*.py"):
            (folder / file.name).write_text(file.read_text())


def test_the_suite_of_the_page_is_collected(pytester):
    suites(pytester)
    (words,) = [words[1:] for words in COMMANDS if words[0] == "pytest"]
    found = collected(pytester, *words)
    assert {re.sub(r".*::(\w+).*", r"\1", line) for line in found} == {
        "test_peaks", "test_kernels", "test_gradients", "test_reading",
    }  # fmt: skip
    assert all("local:cpu" in line for line in found)


def test_all_suites_together_do_not_characterise(pytester):
    suites(pytester)
    found = collected(pytester, "suites", "--system", "local", "--preset", "smoke")
    assert any("test_cosmoflow" in line for line in found)
    assert any("test_agreement" in line for line in found)
    assert not any("characterisation" in line for line in found)


def test_a_project_that_is_called_like_the_folder_does_not_characterise(pytester, monkeypatch):
    """And who stands in the folder does not have to say where that is."""
    suites(pytester)
    project = pytester.mkdir("characterisation")
    (pytester.path / "suites").rename(project / "suites")
    monkeypatch.chdir(project)
    words = ("--system", "local", "--preset", "smoke")
    assert not any("test_peaks" in line for line in collected(pytester, str(project / "suites"), *words))
    monkeypatch.chdir(project / "suites" / "characterisation")
    assert any("test_peaks" in line for line in collected(pytester, ".", *words))


def test_the_table_names_every_metric_that_must_be_reported():
    rows = {
        shlex.split(line.split("|")[1].replace("`", ""))[0]: set(re.findall(r"`(\w+)`", line))
        for line in PAGE.splitlines()
        if re.match(r"\| `(peaks|kernels|gradients|reading|lowering|compilation|agreement)` ", line)
    }
    assert set(rows) == {workload.name for workload in CHARACTERS}
    for workload in CHARACTERS:
        expected = {*workload.expected, *workload.judged}
        assert expected <= rows[workload.name], workload.name


def test_fields_of_the_example_are_fields():
    (arguments,) = re.findall(r'mark\.job\("kernels", (.*)\)\n', PAGE)
    fields = eval(f"dict({arguments})")  # noqa: S307 - our own page
    kernels = next(workload for workload in WORKLOADS if workload.name == "kernels")
    assert kernels.contradictions(parameters_of(kernels, "smoke", **fields)) == ()


@pytest.mark.parametrize(
    "name", ["peaks", "kernels", "gradients", "reading", "lowering", "compilation", "agreement"]
)
def test_presets_train_the_preset_of_the_test(name):
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    for preset in ("smoke", "small", "reference"):
        values = parameters_of(workload, preset)
        # A CPU computes it too, in float64.
        expected = "small" if (name, preset) == ("agreement", "reference") else preset
        assert values.get("size", expected) == expected
