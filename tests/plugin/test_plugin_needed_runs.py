"""Runs that end before the run of a test is submitted (``prepare``); tests/program_files.py has what is the same on every system."""

import signal

import pytest

COUNTED = """
    from pytest_mlhpc import prepare

    made = prepare("sh -c 'echo x >> {folder}/count; echo result > made'")

    @pytest.mark.parametrize("number", range(4))
    @script("echo rate: 4; cat {{made}}/made")
    def test_it(run, made, number):
        assert "result" in run.output
        assert (made.folder / "made").read_text() == "result\\n"
"""


def counted(suite):
    suite.write(COUNTED.format(folder=suite.folder))


def times_made(suite):
    return (suite.folder / "count").read_text().count("x")


@pytest.mark.parametrize("way", ["n0", "n2", "packed"])
def test_a_run_is_made_once_for_all_tests_and_workers_that_need_it(suite, way):
    counted(suite)
    result = suite.run_workers() if way == "n2" else suite.run(*(["--mlhpc-pack"] if way == "packed" else []))
    result.assert_outcomes(passed=4)
    assert times_made(suite) == 1
    assert sorted(one["node_id"].partition("[")[0].rpartition("::")[2] for one in suite.records()) == [
        "made", "test_it", "test_it", "test_it", "test_it",
    ]  # fmt: skip


def test_only_runs_that_a_selected_test_needs_are_made(suite):
    counted(suite)
    suite.write(COUNTED.format(folder=suite.folder) + "\n    @job()\n    def test_other(run): pass\n")
    suite.run("-k", "test_other").assert_outcomes(passed=1, deselected=4)
    assert not (suite.folder / "count").exists()


def test_each_session_makes_it_anew(suite):
    counted(suite)
    for number in (1, 2):
        suite.run("-k", "test_it and 1").assert_outcomes(passed=1, deselected=3)
        assert times_made(suite) == number


def test_what_failed_is_shown_without_the_tests_that_need_it_being_run(suite):
    suite.write(
        """
        from pytest_mlhpc import prepare
        broken = prepare("sh -c 'echo no room; exit 7'")
        after = prepare("cat {broken}/x")

        @script("touch ran")
        def test_it(run, broken): pass

        @script("touch ran")
        def test_after(run, after): pass
        """
    )
    result = suite.run()
    result.expect(
        1,
        "*prepare_failed: the run broken (sh -c echo no room; exit 7) that it needs: worker_exit: the program ended with exit code 7; "
        "its last lines:",
        "*prepare_failed: the run after (cat {broken}/x) that it needs: prepare_failed: the run broken*",
        errors=2,
    )
    assert list(suite.state.glob("**/ran")) == []
    assert sorted(one["verdict"] for one in suite.records()) == [*["prepare_failed"] * 3, "worker_exit"]


def test_runs_that_cannot_be_are_errors_of_the_tests_that_take_them(suite):
    suite.write(
        """
        from pytest_mlhpc import build, prepare, train
        misspelt, nodes, judged = prepare("x", file="a"), prepare("x"), prepare("x", reference={"local": 1})
        function, lost = prepare("x", sanity=lambda run: True), prepare("x", files="nowhere")
        circle, round_ = prepare("x {round_}"), prepare("x {circle}")
        many, fine = prepare("x", nodes=9), prepare("x")

        @job("x")
        def test_misspelt(run, misspelt): pass
        @job("x")
        def test_nodes(run, nodes): pass
        @job("x")
        def test_judged(run, judged): pass
        @job("x")
        def test_function(run, function): pass
        @job("x")
        def test_lost(run, lost): pass
        @job("x")
        def test_circle(run, circle): pass
        @job("x")
        def test_many(run, many): pass
        @train("cosmoflow")
        def test_training(run, fine): pass
        """
    )
    result = suite.run()
    result.expect(1, errors=7, deselected=1)
    result.stdout.fnmatch_lines_random(
        [
            "*: misspelt: file: program has no such field (did you mean 'files'?)",
            "*: nodes: {nodes} is a figure of the run; give the fixture another name",
            "*: judged: reference: only a test can have it",
            "*: function: sanity: only a test can have functions; give patterns",
            "*: lost: files: there is no 'nowhere' in *",
            "*: circle: the run needs itself: circle needs round_ needs circle",
            "*: fine: builds and runs that go before are for programs: @program(...), not @train",
        ]
    )


def test_a_test_that_declares_no_run_is_refused_with_that_reason(suite):
    suite.write(
        """
        from pytest_mlhpc import prepare
        made = prepare("true")
        def test_it(made): pass
        """
    )
    suite.run().expect(1, "*this test declares no run: decorate it, as by @train('cosmoflow')", errors=1)


def test_a_run_that_no_test_waits_for_any_more_is_cancelled(suite):
    """With one job at a time, the second test would wait for it longer than a session may take."""
    suite.write(
        """
        from pytest_mlhpc import prepare
        first = prepare("sleep 6000")
        made = prepare("cat {first}/x")

        @pytest.fixture
        def away():
            pytest.skip("not today")

        @job("x")
        def test_away(away, run, made): pass

        @job()
        def test_other(run): pass
        """
    )
    suite.run("-omlhpc_max_jobs=1").assert_outcomes(passed=1, skipped=1)


SHARED = """
from pytest_mlhpc import build, prepare
tool = build("sh -c 'echo echo built > tool'")
made = prepare(f"sh -c 'sh {{tool}}/tool > made; echo x >> {__file__}.count'")
"""
TAKES_SHARED = """
from pytest_mlhpc import program
@program("cat {made}/made")
def test_it(run, made):
    assert run.output == "built\\n"
"""


def test_a_run_of_a_conftest_serves_the_tests_of_several_files(suite):
    (suite.folder / "inner").mkdir()
    suite.file("inner/conftest.py", SHARED)
    for name in ("a", "b"):
        (suite.folder / "inner" / name).mkdir()
        suite.file(f"inner/{name}/test_{name}.py", TAKES_SHARED)
    suite.run("inner").assert_outcomes(passed=2)
    assert (suite.folder / "inner/conftest.py.count").read_text() == "x\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_session_that_is_killed_under_a_run_that_others_need_leaves_nothing_and_the_next_makes_it_anew(
    suite, number
):
    first = "    " + COUNTED.format(folder=suite.folder).strip()
    suite.write(first.replace("echo result > made'", f"touch {suite.folder}/begun; exec sleep 600'"))
    suite.end_by(number, suite.folder / "begun")
    counted(suite)
    suite.run().expect(0, passed=4)
    assert times_made(suite) == 2
    assert not list(suite.state.glob("ledger/*.jsonl"))
