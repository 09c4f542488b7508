"""`--mlhpc-against`: two sides of each test in turns, what is refused with what would do, and what is left of it."""

import json
import signal

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture
from inner_sessions import output

#: A program that is as fast as SPEED says; each run differs a little, by its number. Environments of this machine set it.
SYSTEMS = """
schema: 1
systems:
  local:
    partitions:
      cpu:
        scheduler: local
        accelerator: cpu
        nodes: {cores: 1, memory: 1GiB, max: 1}
        environments:
          new: {python: python3, variables: {SPEED: "100", ONLY_NEW: "1"}}
          old: {python: python3, variables: {SPEED: "OLD"}}
          same: {python: python3, variables: {SPEED: "100", ONLY_NEW: "1"}}
"""

TEST = """
COUNT = "import os, random; runs = open(os.environ['RUNS'], 'a'); print(file=runs, flush=True)"
SPEED = "; print('rate:', float(os.environ['SPEED']) * random.Random(runs.tell()).gauss(1, NOISE))"
SIDE = "; print('only:', os.environ.get('ONLY_NEW'))"

@program([sys.executable, "-c", COUNT + SPEED + SIDE], RATE, env={"RUNS": "FOLDER/runs"})
def test_speed(run):
    assert "only: 1" in run.output
"""

OLD = "--mlhpc-against=environment=old"


def arrange(suite, old: float = 80, noise: float = 0.004, test: str = TEST) -> None:
    """Write the suite: B's rate is *old* of A's 100, and runs vary by *noise*."""
    suite.file("systems.yaml", SYSTEMS.replace("OLD", str(old)))
    suite.write(test.replace("NOISE", str(noise)).replace("FOLDER", str(suite.folder)))


def ended(suite) -> list[dict]:
    """Return the records of runs that measured something, in the order of their runs."""
    found = [record for record in suite.records() if record["measurement"]]
    return sorted(found, key=lambda record: record["attempt"])


def test_sides_alternate_in_one_allocation_until_the_difference_is_known(suite):
    arrange(suite)
    result = suite.run(OLD)
    result.expect(0, "A against B: B has environment=old; 1 test*8 to 30 runs", "test_speed*better", passed=1)
    records = ended(suite)
    assert [record["environment"] for record in records][:8] == ["new", "old", "old", "new"] * 2
    assert [record["attempt"] for record in records][:8] == list(range(1, 9))
    assert len({record["run_s"] > 0 for record in records}) == 1
    assert len(list(suite.state.glob("runs/*/*/plan.json"))) == 1
    assert not list(suite.state.glob("ledger/*.jsonl"))


def test_a_test_whose_side_is_worse_fails_and_says_by_how_much(suite):
    arrange(suite, old=125)
    result = suite.run(OLD)
    result.expect(1, "*rate of A is *worse than B's (*runs)*", "test_speed*worse", failed=1)
    assert "Traceback" not in output(result)


def test_sides_that_are_the_same_speed_pass_as_equal(suite):
    arrange(suite, old=100, noise=0.001)
    suite.run(OLD).expect(0, "test_speed*equal", "plus: A is better. B has environment=old.*1.5%.", passed=1)


def test_what_is_not_known_after_all_runs_is_unclear_and_passes_with_a_warning(suite):
    arrange(suite, old=100, noise=0.2)
    result = suite.run(OLD, "--mlhpc-against=precision=0.01%", "-W", "error")
    result.expect(0, "*test_speed*unclear", passed=1)
    assert len(ended(suite)) == 30


def test_no_more_runs_are_made_than_are_asked_for(suite):
    arrange(suite, old=100, noise=0.2)
    options = (OLD, "--mlhpc-against=precision=0.01%", "--mlhpc-against=runs=4")
    suite.run(*options).expect(0, "*in turns, 4 runs", "*test_speed*unclear", passed=1)
    assert len(ended(suite)) == 4


def test_a_run_that_goes_before_is_made_once_for_both_sides(suite):
    arrange(
        suite,
        test="""
from pytest_mlhpc import prepare
data = prepare("sh -c 'echo rate: $SPEED > rate.txt'", artifacts=["rate.txt"])

@program("sh -c 'cat {data}/rate.txt; echo rate: $SPEED'", Metric("rate", r"rate: (\\S+)", "items/s", reduce="last"))
def test_it(run, data): pass
""",
    )
    suite.run("--mlhpc-environment=new", OLD).expect(0, "*; 1 test, each*", "test_it*better", passed=1)
    before = [record for record in suite.records() if "::data" in record["node_id"]]
    assert [(record["attempt"], record["environment"]) for record in before] == [(0, "new")]


def test_neither_side_feeds_a_baseline_a_history_or_the_last_good_run(suite):
    arrange(suite, old=50)
    suite.run("--mlhpc-environment=new").expect(0, "*new", passed=1)
    baselines = {path: path.read_text() for path in suite.state.rglob("*.yaml")}
    suite.run(OLD).expect(0, passed=1)
    records = ended(suite)
    compared = [record for record in records if record["purpose"] == "against"]
    assert {record["verdict"] for record in compared} == {"unjudged"}
    assert min(record["attempt"] for record in compared) == 1
    assert {path: path.read_text() for path in suite.state.rglob("*.yaml")} == baselines
    result = suite.run("--mlhpc-environment=new")
    result.expect(0, "test_speed*items/s*items/s*passed", passed=1)  # not those of B, which is half as fast
    old = suite.run("--mlhpc-environment=old")
    old.expect(1, "test_speed*new", failed=1)  # its own first night; the test's body wants the other side


def test_a_variable_alone_may_differ_and_wins_over_all_others(suite):
    arrange(suite)
    result = suite.run("--mlhpc-environment=new", "--mlhpc-against=variables.SPEED=200")
    result.expect(1, "test_speed*worse", failed=1)
    assert {record["environment"] for record in ended(suite)} == {"new", "new, variables.SPEED=200"}


def test_a_secret_is_in_no_record_and_on_no_page(suite):
    arrange(suite)
    result = suite.run("--mlhpc-environment=new", "--mlhpc-against=variables.API_TOKEN=hunter2hunter2")
    written = "".join(path.read_text(errors="replace") for path in suite.state.glob("records/*/*.jsonl"))
    assert "hunter2" not in output(result) + written
    assert "variables.API_TOKEN=***" in output(result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["environment=od"], "no selected partition has it; there are new, old, same (did you mean 'old'?)"),
        (["environment=new"], "both sides are the same: environment=new is what it has"),
        (["environment=same"], "both sides are the same: environment=same is what it has"),
        (["variables.SPEED=100"], "both sides are the same: variables.SPEED=100 is what it has"),
        (["rev=main"], "is in no git checkout"),
        (["rev=main", "environment=old"], "environment= and rev= exclude each other"),
        (["image=a/b:1"], "has no container whose image could be another"),
        (["enviroment=old"], "did you mean environment=...?"),
        (
            ["environment="],
            "write environment=NAME, rev=REVISION, image=IMAGE, variables.NAME=VALUE, precision=1% or runs=12",
        ),
        (
            ["variables.A B=1"],
            "write environment=NAME, rev=REVISION, image=IMAGE, variables.NAME=VALUE, precision=1% or runs=12",
        ),
        (["environment=old", "environment=same"], "environment is 'old' already"),
        (["precision=1%"], "say what differs, too"),
        (["environment=old", "precision=0%"], "write a share above 0 and up to 50 %, such as 1%"),
        (["environment=old", "runs=7"], "runs=7: write an even number from 4 to 30"),
        (["environment=old", "runs=32"], "runs=32: write an even number from 4 to 30"),
    ],
)
@pytest.mark.parametrize("collect", [(), ("--collect-only",)], ids=["run", "collect"])
def test_what_cannot_be_compared_is_refused_with_what_would_do(suite, options, said, collect):
    arrange(suite)
    result = suite.run(
        "--mlhpc-environment=new", *(f"--mlhpc-against={one}" for one in options), *collect, system="local"
    )
    assert result.ret == 4, output(result)
    assert said in " ".join(output(result).split())
    assert "Traceback" not in output(result)
    assert suite.nothing_was_written()


@pytest.mark.parametrize(
    "option",
    ["--mlhpc-resume", "--mlhpc-wait=0", "--mlhpc-baseline=update", "--mlhpc-each-node=all"],
)
def test_options_that_leave_a_comparison_to_others_are_refused(suite, option):
    arrange(suite)
    result = suite.run(OLD, option)
    assert result.ret == 4, output(result)
    assert option.split("=")[0] in output(result)
    assert "leave one of them out" in output(result)


def test_tests_without_a_second_side_are_left_out_and_named(suite):
    arrange(
        suite,
        test=TEST
        + """
@job(judge=False)
def test_unjudged(run): pass

@nodes(count=1)
def test_nodes(allocation): pass
""",
    )
    result = suite.run(OLD)
    result.expect(
        0, "*test_unjudged*no metric of it is judged*", "*test_nodes*it measures nothing*", passed=1
    )


def test_collecting_alone_starts_nothing(suite):
    arrange(suite)
    suite.run(OLD, "--collect-only", "-q").expect(0, "*test_speed*")
    assert suite.nothing_was_written()


def test_a_side_that_breaks_is_named_and_ends_the_comparison(suite):
    arrange(
        suite,
        test="""
@program([sys.executable, "-c", "import os; print('rate: 4'); raise SystemExit(os.environ['SPEED'] != '100')"], RATE)
def test_it(run): pass
""",
    )
    suite.run(OLD).expect(1, "worker_exit: run 2 of 30 (B): *exit code 1*", "test_it*worker_exit", failed=1)


def test_of_several_tests_each_has_a_share_of_chance_and_there_is_a_row_over_all(suite):
    arrange(suite, test=TEST + TEST.replace("test_speed", "test_other"))
    result = suite.run(OLD)
    lines = ["over all*better", "All 2 intervals hold together with 95%: each has 2.50% of chance*"]
    result.expect(0, *lines, passed=2)


def test_the_table_is_in_a_file_for_programs_and_in_junit(suite):
    arrange(suite)
    report = suite.folder / "junit.xml"
    suite.run(OLD, f"--junitxml={report}").expect(0, "the same for programs: *against.json", passed=1)
    (path,) = suite.state.glob("runs/*/against.json")
    content = json.loads(path.read_text())
    (test,) = content["tests"]
    (result,) = test["results"]
    assert (content["against"], content["comparisons"]) == ("environment=old", 1)
    assert (result["metric"], result["verdict"], result["runs"]) == ("rate", "better", 8)
    assert 0 < result["low"] < result["change"] < result["high"]
    assert '<property name="mlhpc.against.rate" value="better 0.' in report.read_text()


def test_a_budget_that_is_too_small_is_refused_with_one_that_would_do(suite):
    arrange(suite)
    path = suite.folder / "systems.yaml"
    text = path.read_text().replace("scheduler: local", "scheduler: elsewhere").replace("  local:", "  site:")
    path.write_text(text)
    result = suite.run(OLD, "-o", "mlhpc_budget=0.01nh", system="site")
    assert result.ret == 4, output(result)
    assert "needs at least 8 runs of each test" in output(result)
    assert "Raise it to" in output(result)
    assert suite.nothing_was_written()


def test_a_smaller_budget_allows_fewer_runs(suite):
    arrange(suite)
    path = suite.folder / "systems.yaml"
    text = path.read_text().replace("scheduler: local", "scheduler: elsewhere").replace("  local:", "  site:")
    path.write_text(text.replace("nodes:", "time_limit: 1m\n        nodes:"))
    result = suite.run(OLD, "-o", "mlhpc_budget=0.5nh", system="site")
    assert "8 to 1" in output(result), output(result)
    result.expect(0, passed=1)


def test_workers_of_xdist_ask_the_one_session_that_compares(suite):
    arrange(suite, test=TEST + TEST.replace("test_speed", "test_other"))
    suite.run_workers(OLD).expect(0, "over all*better", passed=2)
    assert len({record["session"] for record in ended(suite)}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_nothing_is_left(suite, number):
    arrange(
        suite,
        test="""
@script("touch {0}/begun; exec sleep 600")
def test_it(run): pass
""".replace("{0}", str(suite.folder)),
    )
    suite.end_by(number, suite.folder / "begun", OLD)
    suite.write("@job()\ndef test_next(run): pass\n")
    suite.run("--mlhpc-environment=new").expect(0, passed=1)
    assert not list(suite.state.glob("ledger/*.jsonl"))


def test_what_was_measured_before_a_comparison_is_accepted_and_shown_all_the_same(suite, mlhpc, monkeypatch):
    arrange(suite)
    suite.run("--mlhpc-environment=new").expect(0, passed=1)
    suite.run(OLD).expect(0, passed=1)
    monkeypatch.chdir(suite.folder)
    assert "recorded no first attempt" not in mlhpc("status").out
    mlhpc("baseline", "accept", "test_suite.py::test_speed", "--reason", "x")
    (entry,) = (suite.folder / "baselines").glob("*.yaml")
    assert "old" not in entry.read_text()
