"""Where programs start on this machine; tests/real/slurm has the same of a cluster."""

import os
import signal
from pathlib import Path

import pytest
from inner_sessions import ONE_JOB
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, check_started, write_suite
from program_folders import write_programs
from running_suites import wait_for


def test_a_program_starts_in_a_new_folder_and_finds_what_lies_next_to_its_test(suite):
    write_programs(suite.folder)
    suite.run("deep").assert_outcomes(passed=4)
    assert sorted(path.name for path in suite.folder.glob("**/made")) == []


def test_a_folder_that_a_program_left_empty_does_not_stay(suite):
    suite.write("@job()\ndef test_it(run): pass\n")
    suite.run().assert_outcomes(passed=1)
    (record,) = suite.records()
    assert list(suite.state.glob(f"runs/*/*/{record['id']}")) == []


def test_a_program_that_is_nowhere_is_named_with_where_it_was_looked_for(suite):
    suite.write('@program("./bench", RATE)\ndef test_it(run): pass\n')
    suite.run().expect(
        1,
        "*cannot start './bench': No such file or directory (looked for among the test's files, and beside the test*",
    )


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_a_cluster(suite):
    systems = suite.folder / "systems.yaml"
    systems.write_text(systems.read_text().replace("cores: 1", "cores: 2"))
    write_suite(suite.folder, nodes=1, ranks=2)
    result = suite.run("test_files.py")
    result.assert_outcomes(passed=TESTS, failed=len(FAILS), errors=WITH_ERRORS)
    assert all(text in " ".join(result.outlines) for text in (*FAILS, *ERRORS))
    (built,) = (one.parent for one in suite.state.glob("builds/*/tool"))  # of two runs
    assert len(list(suite.state.glob("builds/*"))) == 2  # nothing of the one that failed
    assert sorted(path.name for path in built.iterdir()) == [".complete", "make-tool.sh", "rank0.log", "tool"]
    (record,) = [one for one in suite.records() if "test_files[" in one["node_id"]]
    assert record["asked"]["env"] == {"GREETING": "hello {ranks}, numa {numa_nodes}", "MY_TOKEN": "***"}
    assert "not for records" not in str(suite.records())
    check_started(suite.records())
    assert [path.name for path in suite.folder.glob("out")] == []


def test_what_a_run_does_not_hold_is_named(suite):
    suite.write(
        """
        @program("sh -c 'echo rate: 4; echo {} > a.json; echo [ > b.json'", RATE, artifacts=["*.json"])
        @pytest.mark.parametrize("read", ["a.json", "b.json", "c.json", "d.txt", "../plan.json"])
        def test_it(run, read):
            assert run.json(read) == {}
        """
    )
    result = suite.run()
    result.expect(1, "*b.json is no JSON: Expecting value*", passed=1, failed=4)
    result.stdout.fnmatch_lines_random(
        [
            "*the program wrote no 'c.json' into */*; artifacts there: a.json, b.json",
            "*'d.txt' is no artifact of the test (it has *.json); add artifacts=?'d.txt'? to its decorator",
            "*'../plan.json' is no artifact of the test*",
        ]
    )


def test_a_program_that_does_not_say_what_its_test_wants_fails_before_it_is_measured(suite):
    suite.write('@script("echo rate: 4", sanity=["rate", "Solution Validates"])\ndef test_it(run): pass\n')
    suite.run().expect(
        1,
        "sanity_failed: nothing in the program's output matches 'Solution Validates' (sanity); its last lines:",
        "rate: 4",
    )


def test_an_environment_that_a_partition_does_not_have_is_named_with_the_nearest(suite):
    suite.write('@job(environment="defualt")\ndef test_it(run): pass\n')
    suite.run().expect(
        1, "*environment: local:cpu has no environment 'defualt'; it has default (did you mean 'default'?)*"
    )


BUILDS = """
made = build("sh -c 'date +%N > made'", files="*.src")
@program("sh -c 'echo rate: 4; cat {made}/made'", RATE, judge=False)
def test_it(run, made):
    print("built at", run.output.split()[-1])
"""


def test_a_build_is_made_again_when_its_files_change(suite):
    source = suite.file("a.src", "one")
    suite.write("from pytest_mlhpc import build\n" + BUILDS)

    def time_of_build():
        result = suite.run()
        result.assert_outcomes(passed=1)
        return next(line for line in result.outlines if line.startswith("built at"))

    first = time_of_build()
    assert time_of_build() == first
    source.write_text("two")
    assert time_of_build() != first


def test_builds_that_cannot_be_are_errors_of_their_tests(suite):
    suite.write(
        """
        from pytest_mlhpc import build
        quoted, nothing, nodes = build("make 'x"), build(""), build("make")
        lost, named = build("make", files="scr"), build("make", env={"A B": 1})
        placed = build("make", where="logn")

        @job("x")
        def test_quoted(run, quoted): pass
        @job("x")
        def test_nothing(run, nothing): pass
        @job("x")
        def test_nodes(run, nodes): pass
        @job("x")
        def test_lost(run, lost): pass
        @job("x")
        def test_named(run, named): pass
        @job("x")
        def test_placed(run, placed): pass
        """
    )
    result = suite.run()
    result.expect(1, errors=6)
    result.stdout.fnmatch_lines_random(
        [
            "*: quoted: no closing quotation in *",
            "*: nothing: the build names no program; write build('make bench')",
            "*: nodes: {nodes} is a figure of the run; give the fixture another name",
            "*: lost: files: there is no 'scr' in *",
            "*: named: env: 'A B' is no name of a variable",
            "*: placed: where 'logn' is not one of node, login (did you mean 'login'?)",
        ]
    )


SLOW_BUILD = """
from pytest_mlhpc import build

slow = build("sh -c 'echo $$ > {folder}/pid; mv {folder}/pid {folder}/began; exec sleep 600'")

@job("x")
def test_it(run, slow): pass
"""


@pytest.mark.parametrize("killed", ["session", "batch"])
def test_who_is_killed_while_a_build_runs_leaves_no_process(suite, killed):
    """The shared fixture looks for processes and locks after the test; here is when they go, and what is said."""
    suite.write(SLOW_BUILD.format(folder=suite.folder))
    began = suite.folder / "began"
    with suite.start() as process:
        wait_for(began.exists)
        compiler = int(began.read_text())
        batch = parent_of(compiler)
        os.kill(process.pid if killed == "session" else batch, signal.SIGKILL)
        said, _ = process.communicate()
        wait_for(lambda: not Path(f"/proc/{compiler}").exists())
    if killed == "batch":
        assert process.returncode == 1
        assert "before its runs had ended" in said
    suite.write(ONE_JOB)
    suite.run().assert_outcomes(passed=1)  # the next session ends what the ledger has of the killed one
    assert [path.name for path in suite.state.glob("builds/*/.complete")] == []


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_parameter_that_is_named_like_a_field_of_software_sets_it(suite):
    suite.write(
        """
        @pytest.mark.parametrize("env", [{"SAYS": 3}, {"SAYS": 5}], ids=["three", "five"])
        @script("echo rate: $SAYS")
        def test_it(run, env):
            assert run["rate"] == env["SAYS"]
        """
    )
    suite.run().assert_outcomes(passed=2)
    assert len({record["definition"] for record in suite.records()}) == 2


def test_a_test_with_an_environment_of_its_own_runs_in_it_once(suite):
    suite.file(
        "systems.yaml",
        """
systems:
  local:
    partitions:
      cpu:
        {scheduler: local, accelerator: cpu, environments: {one: {variables: {SAYS: "1"}}, two: {variables: {SAYS: "2"}}}}
""",
    )
    suite.write(
        """
        @script("echo rate: $SAYS", environment="two")
        def test_it(run):
            assert run["rate"] == 2
        """
    )
    suite.run().assert_outcomes(passed=1)
    suite.run("--mlhpc-environment", "all").expect(
        0, "*test_it?local:cpu+one?: its environment is two", passed=1, deselected=1
    )
    assert {record["environment"] for record in suite.records()} == {"two"}


FUNCTIONS = """
    def sound(run):
        return "not bad" in run.errors

    @program(
        "sh -c 'echo rate: 4; echo not bad >&2; echo 7 > t.txt; printf a,b\\\\\\\\n1,2\\\\\\\\n3,6\\\\\\\\n > t.csv'",
        Metric("lines", extract=lambda run: len(run.output.splitlines()), unit="1", better="none"),
        Metric("twice", extract=lambda run: [2 * float(run.text("t.txt"))], unit="ms"),
        Metric("b", file="t.csv", key="b", unit="MB/s", reduce="max"),
        Metric("text", r"^(\\S+)$", "us", file="t.txt"),
        artifacts=["t.txt"], sanity=["rate", sound], judge=False,
    )
    def test_it(run):
        assert run.errors == "not bad\\n"
        assert sorted(run.output.splitlines()) == ["not bad", "rate: 4"]
        assert {name: run[name].value for name in run} == {"lines": 2, "twice": 0.014, "b": 6e6, "text": 7e-6}
        assert run.text("t.csv").startswith("a,b")
"""


@pytest.mark.parametrize("workers", [False, True], ids=["n0", "n2"])
def test_figures_of_files_and_functions_are_the_same_with_workers_that_collect(suite, workers):
    suite.write(FUNCTIONS)
    (suite.run_workers if workers else suite.run)().assert_outcomes(passed=1)
    (record,) = suite.records()
    assert record["asked"]["sanity"] == ["rate", "(?function)sound"]


def test_a_function_in_a_parameter_is_refused_as_no_process_finds_it_again(suite):
    suite.write(
        """
        @pytest.mark.parametrize("sanity", [lambda run: True])
        @job()
        def test_it(run, sanity): pass
        """
    )
    suite.run().expect(
        1, "*: sanity: a function stands in the test's decorator, where it is found again*", errors=1
    )


def test_a_program_that_is_not_sound_for_its_function_is_not_measured(suite):
    suite.write(
        """
        def check(run):
            assert "fine" in run.output, "it is not fine"
            return True

        @job(sanity=check)
        def test_it(run): pass
        """
    )
    suite.run().expect(
        1, "sanity_failed: check: AssertionError: it is not fine (test_suite.py:*: assert *", failed=1
    )
