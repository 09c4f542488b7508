"""Faults around a session: full disks, dying workers, and errors of our own or of a third party's scheduler."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers  # several sessions of pytest in each test

BROKEN_SCHEDULER = """
from pytest_mlhpc.hookspecs import hookimpl
from pytest_mlhpc.provision.base import Handle
from pathlib import Path

class Broken:
    def validate(self, spec): return ""
    def longest(self): return None
    def submit(self, plan): return Handle(plan.allocation_id, Path(plan.directory))
    def events(self, handles, timeout_s): raise RuntimeError("a bug of the scheduler's")
    def wake(self): pass
    def cancel(self, handles): return []
    def close(self): pass

@hookimpl
def mlhpc_schedulers(): return {"elsewhere": None}

@hookimpl
def mlhpc_provisioner(partition, state_dir, session_id):
    return Broken() if partition.scheduler == "elsewhere" else None
"""


@pytest.mark.parametrize("blocked", ["records", "ledger", "runs"])
def test_a_file_that_cannot_be_written_is_named_and_the_test_is_an_error(suite, workers, blocked):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    suite.state.mkdir()
    (suite.state / blocked).write_text("a file where a folder is needed")
    result = suite.run("--infra-exit-code", "75", n=workers)
    result.assert_outcomes(errors=1)
    assert result.ret == 75
    result.stdout.fnmatch_lines([f"disk_full: *{suite.state.name}/{blocked}*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_an_internal_error_ends_the_session_with_code_3_and_its_traceback(suite, workers):
    suite.pytester.makeconftest(BROKEN_SCHEDULER)
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(run): pass
    """)
    result = suite.run(system="site", n=workers)
    result.assert_outcomes(errors=2)
    assert result.ret == 3
    result.stdout.fnmatch_lines(["*RuntimeError: a bug of the scheduler's*"])


def test_a_submission_that_is_refused_has_a_record_with_the_schedulers_words(suite, workers):
    submit = "def submit(self, plan): return Handle(plan.allocation_id, Path(plan.directory))"
    assert submit in BROKEN_SCHEDULER
    refuse = (
        "def submit(self, plan):\n"
        "        from pytest_mlhpc.errors import ProvisionError\n"
        "        raise ProvisionError('rejected', 'no such account')"
    )
    suite.pytester.makeconftest(BROKEN_SCHEDULER.replace(submit, refuse))
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    result = suite.run("--infra-exit-code", "75", system="site", n=workers)
    result.assert_outcomes(errors=1)
    assert result.ret == 75
    result.stdout.fnmatch_lines(["rejected: no such account*"])
    (record,) = suite.records()
    assert record["verdict"] == "rejected"
    assert record["failure"].startswith("rejected: no such account")
    assert (record["attempt"], record["nodes"], record["node_hours"]) == (0, [], 0.0)


#: Writes down of which tests the budget was told that no more will be spent on them.
TOLD = """
from pytest_mlhpc.spending import Spending

over = Spending.over

def told(self, spec):
    with open("told", "a") as file:
        file.write(spec.node_id.rpartition("::")[2] + " ")
    over(self, spec)

Spending.over = told
"""


@pytest.mark.parametrize(("option", "code"), [("--infra-exit-code=75", 75), ("--resume", 5)])
def test_the_budget_is_told_of_jobs_that_end_without_a_judge(suite, option, code):
    refusing = BROKEN_SCHEDULER.replace(
        'validate(self, spec): return ""', 'validate(self, spec): return "too big"'
    )
    suite.pytester.makeconftest(refusing + TOLD)
    suite.write("""
    @job()
    def test_one(run): pass

    @job()
    def test_other(run): pass
    """)
    result = suite.run("--budget", "9nh", option, system="site")
    assert result.ret == code
    told = suite.pytester.path.joinpath("told").read_text().split()
    assert sorted(told) == ["test_one[site:part]", "test_other[site:part]"]


def test_a_receiver_of_records_that_fails_costs_no_record(suite, workers):
    suite.pytester.path.joinpath("conftest.py").write_text(
        "from pytest_mlhpc.hookspecs import hookimpl\n"
        "@hookimpl\ndef mlhpc_schedulers(): return {'elsewhere': None}\n"
        "@hookimpl\ndef mlhpc_record(record): raise RuntimeError('no network')\n"
    )
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    result = suite.run("--infra-exit-code", "75", n=workers)
    result.assert_outcomes(passed=1)
    assert result.ret == 75
    assert len(suite.records()) == 1
    result.stdout.fnmatch_lines(["record * was stored, but a receiver of records failed: *no network*"])


FULL_DISK = """
import errno, os
from pytest_mlhpc.hookspecs import hookimpl
write = os.write
def full(file, content):
    if b'"event": "ended"' in content:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(file, content)
os.write = full
@hookimpl
def mlhpc_schedulers(): return {"elsewhere": None}
"""


def test_a_disk_that_is_full_when_a_job_ends_costs_no_other_job(suite, workers):
    suite.pytester.makeconftest(FULL_DISK)
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(run): pass
    """)
    result = suite.run("--infra-exit-code", "75", "--max-jobs", "1", n=workers)
    result.assert_outcomes(passed=2)
    assert result.ret == 75
    assert len(suite.records()) == 2
    result.stdout.fnmatch_lines(["cannot write the ledger */ledger/*.jsonl: No space left on device"])


def test_a_ledger_that_cannot_be_put_aside_is_told_at_the_end(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    (suite.state / "ledger").mkdir(parents=True)
    (suite.state / "ledger" / "closed").write_text("a file where a folder is needed")
    first = ""
    for _ in range(2):
        result = suite.run("--infra-exit-code", "75", n=workers)
        result.assert_outcomes(passed=1)
        assert result.ret == 75
        told = [line for line in result.outlines if line.startswith("cannot move the ledger")]
        assert len(told) == 1
        assert first in told[0]  # the second session meets what the first has left
        first = first or told[0].split(" to ")[0].rpartition("/")[2].removesuffix(".jsonl")
        assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    for left in suite.state.glob("ledger/**/*.jsonl"):  # the first has closed, the second keeps its claim
        left.unlink()


@pytest.mark.parametrize(
    "end", ["pytest.fail('no network')", "pytest.skip('no network')", "sys.exit('no network')"]
)
def test_a_receiver_of_records_that_wants_to_end_the_test_ends_nothing(suite, end):
    suite.pytester.path.joinpath("conftest.py").write_text(
        "import sys, pytest\n"
        "from pytest_mlhpc.hookspecs import hookimpl\n"
        "@hookimpl\ndef mlhpc_schedulers(): return {'elsewhere': None}\n"
        f"@hookimpl\ndef mlhpc_record(record): {end}\n"
    )
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(run): pass
    """)
    result = suite.run("--infra-exit-code", "75", "--max-jobs", "1")
    result.assert_outcomes(passed=2)
    assert result.ret == 75
    assert len(suite.records()) == 2
    result.stdout.fnmatch_lines(["record * was stored, but a receiver of records failed: *no network*"])


def test_a_worker_of_xdist_that_dies_takes_only_its_test_along(suite):
    suite.write("""
    @job()
    def test_dies(run): os._exit(7)
    @script("sleep 0.2; echo rate: 4", name="other")
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_other(run): assert run["rate"].value == 4
    """)
    result = suite.run(n=2)
    assert result.ret == 1
    assert "1 failed, 3 passed" in result.stdout.str()
    assert len(suite.records()) == 4  # the worker that took its place submitted nothing again


@pytest.mark.parametrize("distribution", ["load", "loadfile", "loadgroup", "worksteal", "each"])
def test_however_xdist_distributes_each_job_runs_once(suite, distribution):
    suite.write("""
    @job()
    @pytest.mark.xdist_group("g")
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_it(run): assert run["rate"].value == 4
    """)
    result = suite.run("--dist", distribution, n=2)
    assert result.ret == 0
    assert len(suite.records()) == 3
