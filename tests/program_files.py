"""A suite of programs with files, variables, artifacts and ranks: the same on every system, its folder seen by nodes or not."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

SUITE = r"""
import pytest
from pytest_mlhpc import Metric, build, prepare, program

STARTS = Metric("starts", r"start: (\S+)", "1", better="none", reduce="sum")


@program(
    "work.sh {nodes}", STARTS,
    Metric("nodes", file="m.json", key="nodes", unit="1", better="none"),
    Metric("letters", extract=lambda run: len(run.text("out/copy.txt")), unit="1", better="none"),
    files=["work.sh", "input/", "*.csv"], artifacts=["m.json", "out/*"],
    env={"GREETING": "hello {ranks}, numa {numa_nodes}", "MY_TOKEN": "not for records"},
    sanity=["all is well", r"hello 1, numa \d", lambda run: run.errors == "a warning\n"],
)
def test_files(run):
    assert {name: run[name].value for name in run} == {"starts": 1, "nodes": 1, "letters": 11}
    assert run.errors == "a warning\n"
    assert "a warning" in run.output.splitlines()
    assert run.json("m.json") == {"nodes": 1}
    assert run.text("out/copy.txt") == "from input\n"
    assert run.path("out/copy.txt").stat().st_size == 11
    assert run.log.read_text() == run.output


@program("work.sh 1", STARTS, files=["work.sh", "input", "table.csv"], nodes=NODES)
def test_it_is_started_once_on_however_many_nodes(run):
    assert run["starts"].value == 1


@program("work.sh 1", STARTS, files=["work.sh", "input", "table.csv"], nodes=NODES, ranks_per_node=RANKS)
def test_ranks_are_started_on_every_node(run):
    assert run["starts"].value == NODES * RANKS
    assert run.errors.splitlines().count("a warning") == NODES * RANKS
    assert [one.errors for one in run.ranks] == ["a warning\n"] * NODES * RANKS
    assert all("start: 1\n" in one.output and one.output.count("\n") == 4 for one in run.ranks)


LONG = "import os; print(os.environ.get('SLURM_PROCID', os.environ.get('RANK')) * 1024); print('y' * 70_001)"


@program(["python3", "-c", LONG], ranks_per_node=RANKS)
def test_long_lines_of_ranks_stay_whole(run):
    assert [one.output for one in run.ranks] == [f"{str(rank) * 1024}\n{'y' * 70_001}\n" for rank in range(RANKS)]
    assert run.output.splitlines().count("y" * 70_001) == RANKS


@program("sh -c 'echo out; echo err >&2'")
def test_a_program_that_is_started_once_has_one_rank(run):
    assert [(one.output, one.errors) for one in run.ranks] == [(run.output, "err\n")]


@program("work.sh 1", files=["work.sh", "input", "table.csv"])
def test_a_program_without_metric_has_to_succeed(run):
    assert "all is well" in run.output


RATE = Metric("rate", r"start: (\S+)", "items/s")


@program("sh -c 'echo start: 1; echo in $WHERE'", RATE, environment="other", reference={"SYSTEM": (1.05, -0.1, 0.1)}, sanity="in the other")
def test_in_another_environment_within_the_bounds_of_a_reference(run): pass


@program("work.sh 1", RATE, files=["work.sh", "input", "table.csv"], reference={"SYSTEM": (2, -0.1, None)}, judge=["rate"])
def test_below_a_reference(run): pass


tool = build("sh make-tool.sh", files=["make-tool.sh"], env={"SAYS": "built"})
broken = build("sh -c 'echo no such library >&2; exit 3'")
idle = build("true", files=["make-tool.sh"])


@pytest.mark.parametrize("number", [1, 2])
@program("{tool}/tool", STARTS)
def test_a_program_that_is_built(run, tool, number):
    assert "built" in run.output


@program("sh -c 'exec $TOOL'", STARTS, env={"TOOL": "{tool}/tool"}, ranks_per_node=RANKS)
def test_a_variable_names_a_build(run, tool):
    assert run["starts"].value == RANKS


sized = build("sh -c 'echo {cores_per_rank} {last_level_cache} $MINE $GREETING > sizes'", env={"MINE": "{numa_nodes}"})


@program("cat {sized}/sizes", env={"GREETING": "of the test"})
def test_a_build_has_values_and_no_variable_of_a_test(run, sized):
    assert [word.isdigit() for word in run.output.split()] == [True] * 3, run.output


@program("{broken}/tool", STARTS)
def test_a_build_that_fails(run, broken): pass


@program("{idle}/tool", STARTS)
def test_a_build_that_writes_nothing(run, idle): pass


mesh = prepare(
    "sh -c '{tool}/tool; echo in $$ >&2; mkdir grid; echo {ranks} cells, $$ > grid/cells'",
    artifacts=["grid/*"], sanity="built", nodes=NODES, ranks_per_node=1,
)
halves = prepare("sh -c 'cat {mesh}/grid/cells; cp {mesh}/grid/cells halves'", artifacts=["halves"])
torn = prepare("sh -c 'echo no such mesh >&2; exit 3'", artifacts=["mesh"])


@pytest.mark.parametrize("number", [1, 2])
@program("sh -c 'echo start: 1; cat {mesh}/grid/cells'", STARTS)
def test_a_program_that_needs_another_run(run, mesh, number):
    assert run.output == "start: 1\n" + mesh.text("grid/cells")
    assert mesh.text("grid/cells").startswith("NODES cells")
    assert "built" in mesh.output
    assert "in " in mesh.errors


@program("cat {halves}/halves", files=["input/"])
def test_a_run_that_needs_another(run, halves, mesh):
    assert run.output == halves.text("halves") == halves.output == mesh.text("grid/cells")


@pytest.mark.parametrize("number", [1, 2])
@program("cat {torn}/mesh")
def test_a_run_that_fails_is_an_error_of_what_needs_it(run, torn, number): pass
"""

MAKE_TOOL = """\
printf '#!/bin/sh\\necho start: 1\\necho %s\\n' "$SAYS" > tool
chmod +x tool
"""

WORK = """\
#!/bin/sh
set -e
mkdir -p out
cat input/deep/text.txt > out/copy.txt
printf '{"nodes": %s}' "$1" > m.json
test -f table.csv
echo "$GREETING"
echo a warning >&2
echo start: 1
echo all is well
"""

#: How many tests the suite has.
TESTS = 14

#: What a session says of those that fail, and of those whose needs do: two of them need the same run.
FAILS = ("below_reference",)
ERRORS = (
    "prepare_failed: the run torn (sh -c echo no such mesh >&2; exit 3) that it needs: worker_exit: ",
    "build_failed: the build idle (true) wrote nothing into its folder",
    "build_failed: the build broken (sh -c echo no such library >&2; exit 3): ended with exit code 3; its last lines: no such library",
)

#: How many tests it is that need what fails.
WITH_ERRORS = 4


def check_started(records: Iterable[Mapping[str, Any]]) -> None:
    """Records of the suite hold arguments and variables as nodes started them, definitions as the test says them."""
    found = {record["node_id"].partition("::")[2].partition("[")[0]: record for record in records}
    files, variable = found["test_files"], found["test_a_variable_names_a_build"]
    sized = found["test_a_build_has_values_and_no_variable_of_a_test"]
    assert [Path(word).name for word in files["argv"]] == ["work.sh", "1"]
    assert re.fullmatch(r"hello 1, numa \d+", files["variables"]["GREETING"])
    assert files["variables"]["MY_TOKEN"] == ""
    assert "{nodes}" in files["definition"]
    assert "{numa_nodes}" in files["definition"]
    assert Path(variable["variables"]["TOOL"]).name == "tool"
    assert sized["argv"][0] == "cat"
    folders = [Path(variable["variables"]["TOOL"]).parents[1], Path(sized["argv"][1]).parents[1]]
    assert all(one.is_absolute() and one.name == "builds" for one in folders), folders
    assert "{sized}" in sized["definition"]


def write_suite(folder: Path, nodes: int, ranks: int) -> None:
    """Write the suite for *nodes* nodes with *ranks* ranks each into *folder*, and another environment into its systems.yaml."""
    path = folder / "systems.yaml"
    systems = yaml.safe_load(path.read_text())
    name = next(iter(systems["systems"]))
    for partition in systems["systems"][name]["partitions"].values():
        environments = partition.setdefault("environments", {"default": {"python": sys.executable}})
        usual = environments["default"]
        environments["other"] = {**usual, "variables": {**usual.get("variables", {}), "WHERE": "the other"}}
    path.write_text(yaml.safe_dump(systems))
    suite = SUITE.replace("NODES", str(nodes)).replace("RANKS", str(ranks)).replace("SYSTEM", name)
    (folder / "test_files.py").write_text(suite)
    script = folder / "work.sh"
    script.write_text(WORK)
    script.chmod(0o755)
    (folder / "make-tool.sh").write_text(MAKE_TOOL)
    (folder / "input" / "deep").mkdir(parents=True)
    (folder / "input" / "deep" / "text.txt").write_text("from input\n")
    (folder / "table.csv").write_text("a,b\n")
