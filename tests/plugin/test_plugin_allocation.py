"""The fixture `allocation` on this machine: a test holds nodes and runs its own programs on them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.servers


def test_a_test_runs_its_own_programs(suite, workers):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            assert allocation.nodes == (os.uname().nodename,)
            assert allocation.partition == "cpu"
            said = allocation.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
            assert (said.returncode, said.stdout, said.stderr, said.ranks) == (3, "out\\n", "err\\n", ("out\\n",))
            assert said.log.is_dir() and said.seconds > 0
            both = allocation.run(["sh", "-c", "echo $RANK of $WORLD_SIZE"], ranks_per_node=2)
            assert both.ranks == ("0 of 2\\n", "1 of 2\\n")
            assert allocation.run(["sh", "-c", "echo $A; pwd"], env={"A": "b c"}, cwd="/").stdout == "b c\\n/\\n"
            assert allocation.run(["sh", "-c", "kill -9 $$"]).returncode == 137
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    (record,) = suite.records()
    assert record["verdict"] == "unjudged"
    assert record["nodes"] == [os.uname().nodename]
    assert record["node_hours"] > 0
    assert record["failure"] == ""


def test_a_program_that_takes_too_long_is_ended_and_the_nodes_stay(suite):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            with pytest.raises(TimeoutError, match="'sh' did not end within 0.5 s on ") as raised:
                allocation.run(["sh", "-c", "echo first words; trap '' TERM; while :; do sleep 0.1; done"], timeout=0.5)
            assert raised.value.finished.stdout == "first words\\n"
            assert allocation.run(["echo", "still here"]).stdout == "still here\\n"
    """)
    suite.run().assert_outcomes(passed=1)


def test_what_a_program_leaves_running_ends_with_it(suite):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            pid = allocation.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]).stdout.strip()
            assert not pathlib.Path("/proc", pid).exists()
    """)
    suite.run().assert_outcomes(passed=1)


def test_a_program_that_does_not_exist_says_so(suite):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            done = allocation.run(["no-such-program"])
            assert done.returncode == 127
            assert done.launcher == "cannot start 'no-such-program': No such file or directory\\n"
            done.check()
    """)
    result = suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*worker_exit: 'no-such-program' ended with exit code 127*", "*cannot start*"]
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ('"echo hi"', "give program and arguments as a list"),
        ("[]", "give program and arguments as a list"),
        ('["echo", None]', "None is neither text nor a number or a path"),
        ('["a\\0b"]', "holds a NUL character"),
        ('["true"], nodes=2', "nodes=2: .* has 1"),
        ('["true"], nodes=["other"]', r"nodes=\['other'\]: name one or more nodes"),
        ('["true"], ranks_per_node=0', "ranks_per_node=0: expected a whole number"),
        ('["true"], ranks_per_node=2, cores_per_rank=1', "2 ranks of 1 cores on a node; one of cpu has 1"),
        ('["true"], timeout=0', "timeout=0: expected seconds"),
        ('["true"], env={"A": 1}', "values are text"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tmp_path, call, text):
    from pytest_mlhpc.allocation_fixture import Allocation
    from pytest_mlhpc.results.outcome import Held

    held = Allocation(Held("7", ("node1",), "cpu", 1, str(tmp_path)), lambda: None)
    with pytest.raises((TypeError, ValueError), match=text):
        eval(f"held.run({call})", {"held": held})  # noqa: S307 - the texts above
    assert list(tmp_path.iterdir()) == []


def test_a_kept_allocation_refuses_after_its_test(suite):
    suite.write("""
        kept = []
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            kept.append(allocation)
        def test_next():
            with pytest.raises(RuntimeError, match="was only held while its test ran"):
                kept[0].run(["true"])
    """)
    suite.run().assert_outcomes(passed=2)


def test_the_next_test_does_not_wait_for_the_time_limit(suite, workers):
    """Both want the whole machine, and `--max-jobs 1` lets one job out at a time."""
    suite.write("""
        @pytest.mark.job("nodes", time_limit=600)
        def test_first(allocation):
            allocation.run(["true"]).check()
        @pytest.mark.job("nodes", time_limit=600)
        def test_unused(allocation):
            pass
        @pytest.mark.job("nodes", time_limit=600)
        def test_broken(allocation):
            assert False
        @script("echo rate: 4", exclusive=True, judge=False)
        def test_last(run):
            pass
    """)
    result = suite.run("--max-jobs", "1", "--pack", n=workers)
    result.assert_outcomes(passed=3, failed=1)
    assert [record["verdict"] for record in suite.records()].count("unjudged") == 4


def test_nodes_are_not_held_while_an_earlier_run_may_be_repeated(suite):
    """The first test's run is slower than its baseline: its re-runs need the machine that the second would hold."""
    suite.write("""
        @script("echo rate: $(cat rate)", exclusive=True, cwd=str(pathlib.Path.cwd()))
        def test_first(run, baseline):
            assert run >= baseline
        @pytest.mark.job("nodes", time_limit=600)
        def test_second(allocation):
            allocation.run(["true"]).check()
    """)
    rate = suite.pytester.path / "rate"
    rate.write_text("100")
    suite.run("--update-baselines").assert_outcomes(passed=2)
    rate.write_text("50")
    result = suite.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*regressed*"])


def test_the_end_of_the_time_limit_is_told_to_the_test(suite, workers):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=1.5)
        def test_it(allocation):
            allocation.run(["sleep", "60"])
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*time_limit: <allocation *> ended before or while 'sleep' ran: the nodes were held*1.5 s*"]
    )
    (record,) = suite.records()
    assert record["verdict"] == "time_limit"


def test_a_marked_test_without_the_fixture_is_refused(suite, workers):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it():
            pass
    """)
    result = suite.run(n=workers)
    assert result.ret == 4
    assert (
        "holds nodes and never uses them: take the fixture `allocation`"
        in result.stdout.str() + result.stderr.str()
    )
    assert suite.nothing_was_written()


def test_the_fixture_without_the_marker_is_refused(suite):
    suite.write("""
        def test_it(allocation):
            pass
    """)
    result = suite.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(['*mark this one @pytest.mark.job("nodes", nodes=2, time_limit=600)*'])


def test_the_fixture_with_another_workload_is_refused(suite):
    suite.write("""
        @job()
        def test_it(allocation):
            pass
    """)
    result = suite.run()
    assert result.ret == 4
    assert (
        "`allocation` is for tests that hold nodes: job('nodes', nodes=2), not 'command'"
        in result.stderr.str()
    )


def test_fields_of_measured_runs_are_refused(suite):
    suite.write("""
        @pytest.mark.job("nodes", steps=3, launcher="torchrun", argv=["true"])
        def test_it(allocation):
            pass
    """)
    result = suite.run()
    assert result.ret == 4
    assert "argv: nodes has no such field" in result.stderr.str()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_signal_during_a_program_leaves_nothing(suite, number):
    suite.write("""
        @pytest.mark.job("nodes", time_limit=60)
        def test_it(allocation):
            allocation.run(["sh", "-c", f"touch {pathlib.Path.cwd()}/runs; trap '' TERM; while :; do sleep 0.1; done"])
    """)
    process = subprocess.Popen(
        [
            *("env", "--default-signal=INT,TERM", sys.executable, "-m", "pytest", "--system", "local"),
            *("-p", "no:randomly", "-p", "no:benchmark", "-p", "no:cacheprovider"),
        ],
        cwd=suite.pytester.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (suite.pytester.path / "runs").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    # The fixtures of conftest.py look for processes and for open entries of the ledger.
    (record,) = suite.records()
    assert record["verdict"] == "cancelled"


def test_without_a_system_the_test_is_skipped(suite):
    suite.write("""
        @pytest.mark.job("nodes", nodes=2)
        def test_it(allocation):
            pass
    """)
    suite.run(system="").assert_outcomes(skipped=1)


def test_more_nodes_than_this_machine_are_not_run(suite):
    suite.write("""
        @pytest.mark.job("nodes", nodes=2)
        def test_it(allocation):
            pass
    """)
    result = suite.run()
    assert re.search(r"gives at most 1 nodes?, 2 asked", result.stdout.str())
    assert suite.records() == []
