"""What `mlhpc check` finds: every wrong declaration once, with the systems on which it is wrong."""

import json
import sys
from textwrap import dedent

import pytest

from pytest_mlhpc.cli.check import SuiteProblem, check, findings
from pytest_mlhpc.errors import Problem, UsageError

SYSTEMS = """
systems:
  here:
    partitions: {cpu: {scheduler: local, launcher: plain, accelerator: cpu, environments: {default: {}}}}
  site:
    partitions:
      small: &small
        scheduler: slurm
        launcher: srun
        accelerator: cpu
        nodes: {cores: 8, memory: 16GiB, max: 4}
        slurm: {account: "${NO_SUCH_ACCOUNT}"}
        environments: {default: {python: /usr/bin/python3}}
"""

TESTS = """
from pytest_mlhpc import program, train

@train("cosmoflow", steps=3)
def test_good(run): pass

@train("cosmoflow", global_bach=3)
def test_typo(run): pass

@program("")
def test_of_nothing(run): pass

@train("cosmoflow", steps=3, nodes=5)
def test_too_large(run): pass

@train("cosmoflow", data="that_of_a_site", requires="site")
def test_elsewhere(run): pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder with a systems file and a test file, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:randomly -p no:unraisableexception\nfilterwarnings = error\n"
    )
    (folder / "systems.yaml").write_text(dedent(SYSTEMS))
    (folder / "test_it.py").write_text(TESTS)
    monkeypatch.delitem(sys.modules, "test_it", raising=False)
    monkeypatch.chdir(folder)
    return folder


def test_every_mistake_is_named_once_for_every_system_and_variables_need_not_be_set(project):
    checked = check([], None)
    assert (checked.tests, checked.targets) == (3, ("here:cpu", "site:small"))
    typo, other = map(str, checked.findings)
    assert typo == "test_it.py:7: global_bach: cosmoflow has no such field (did you mean 'global_batch'?)"
    assert other.startswith("test_it.py:10: command: names no program")
    assert checked.nowhere == ("test_it.py::test_elsewhere", "test_it.py::test_too_large")


def test_a_file_that_cannot_be_collected_does_not_hide_the_others(project):
    (project / "test_broken.py").write_text("import no_such_module\n")
    checked = check([], None)
    assert str(checked.findings[0]) == "test_broken.py: ModuleNotFoundError: No module named 'no_such_module'"
    assert len(checked.findings) == 3


@pytest.mark.parametrize(
    ("paths", "systems", "text"),
    [
        (["no_such"], SYSTEMS, "no_such"),
        ([], "systems: {here: {partitions: {cpu: {schedule: local}}}}", "schedule"),
    ],
)
def test_what_cannot_be_checked_at_all_is_a_usage_error(project, paths, systems, text):
    (project / "systems.yaml").write_text(systems)
    with pytest.raises(UsageError, match=text):
        check(paths, None)


def test_a_mistake_that_only_some_targets_have_names_them():
    everywhere, there = Problem("test_a.py:1", "x", "wrong"), Problem("test_a.py:1", "nodes", "too many")
    faults = {"test_a.py::test[a:b]": [everywhere, there], "test_a.py::test[c:d+e-4]": [everywhere]}
    assert findings(faults, ["a:b", "c:d+e"]) == (SuiteProblem(everywhere), SuiteProblem(there, ("a:b",)))


def test_the_command_prints_a_line_for_each_and_exits_with_1(project, mlhpc):
    lines = mlhpc("check", code=1).out.splitlines()
    assert lines[3:] == [
        "note: test_it.py::test_too_large runs on none of the systems: no partition gives what it asks for",
        "3 tests checked on 2 targets: 2 problems",
    ]
    data = json.loads(mlhpc("check", "--json", "test_it.py", code=1).out)
    assert (data["schema"], data["problems"][0]["where"]) == ("mlhpc/check/1", "test_it.py:7")


def test_a_folder_without_benchmarks_has_nothing_to_check(project, mlhpc):
    (project / "test_it.py").write_text("def test_it(): pass\n")
    assert mlhpc("check").out == "no test here declares a run; `mlhpc init` writes a first suite\n"


def test_in_an_empty_folder_only_the_first_step_is_printed(tmp_path, mlhpc, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mlhpc("check").out == "no test here declares a run; `mlhpc init` writes a first suite\n"


def test_a_reference_for_a_system_that_nobody_knows_is_noted(project, mlhpc):
    (project / "test_it.py").write_text(
        """
from pytest_mlhpc import Metric, program

@program("x", Metric("a", "(.)", "s"), Metric("b", "(.)", "s"), reference={"a": {"here": 1, "sitee:small": 2}, "b": {"archer2": 3}})
def test_it(run): pass
"""
    )
    lines = mlhpc("check").out.splitlines()
    assert lines == [
        "note: test_it.py::test_it: no system or device is called 'sitee:small' (did you mean 'site'?); its reference judges nothing",
        "1 test checked on 2 targets: no problem",
    ]


def test_a_word_in_braces_that_is_nearly_a_figure_or_a_build_is_noted(project, mlhpc):
    (project / "test_it.py").write_text(
        """
from pytest_mlhpc import build, program

stream = build("make N={last_level_cash}")

@program("{stram}/stream {cores} {print}", env={"NUMA": "{numa_node}"})
def test_it(run, stream): pass
"""
    )
    assert mlhpc("check").out.splitlines() == [
        "note: test_it.py::test_it: {last_level_cash} is handed on as it stands (did you mean {last_level_cache}?)",
        "note: test_it.py::test_it: {numa_node} is handed on as it stands (did you mean {numa_nodes}?)",
        "note: test_it.py::test_it: {stram} is handed on as it stands (did you mean {stream}?)",
        "1 test checked on 2 targets: no problem",
    ]


def test_problems_stand_in_the_order_of_their_lines():
    """A plug-in may shuffle tests."""
    problems = [Problem(f"test_a.py:{line}", "files", "there is none") for line in (10, 9, 100)]
    found = findings(
        {f"test_a.py::test_{number}[a:b]": [one] for number, one in enumerate(problems)}, ["a:b"]
    )
    assert [one.problem.where for one in found] == ["test_a.py:9", "test_a.py:10", "test_a.py:100"]
