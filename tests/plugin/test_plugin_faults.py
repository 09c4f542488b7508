"""Faults around a session: full disks, and errors of our own, of a scheduler's or of a receiver's."""

import errno
import os

import pytest
from inner_sessions import CONFTEST, ONE_JOB, data, output

from pytest_mlhpc.provision.device_lock import DeviceLock, LockHolder, lock_directory

TWO_JOBS = "@job()\n@pytest.mark.parametrize('name', ['a', 'b'])\ndef test_it(run): pass\n"

SCHEDULER = data("suites/scheduler.py.txt")
CRASHING = SCHEDULER + "class OtherScheduler(Scheduler): pass\n"
REFUSING = SCHEDULER + (
    "class OtherScheduler(Scheduler):\n"
    "    def submit(self, plan): raise ProvisionError('rejected', 'no such account')\n"
)
INVALIDATING = (
    SCHEDULER + "class OtherScheduler(Scheduler):\n    def validate(self, spec): return 'too big'\n"
)


@pytest.mark.parametrize("blocked", ["records", "ledger", "runs"])
def test_a_file_that_cannot_be_written_is_named_and_the_test_is_an_error(suite, blocked):
    suite.write(ONE_JOB)
    suite.state.mkdir()
    (suite.state / blocked).write_text("a file where a folder is needed")
    result = suite.run("-o", "mlhpc_infra_exit_code=75").expect(
        75, f"not_writable: *{suite.state.name}/{blocked}*", errors=1
    )
    assert "Traceback" not in output(result)


def test_an_internal_error_ends_the_session_with_code_3_and_its_traceback(suite):
    suite.file("conftest.py", CRASHING)
    suite.write(TWO_JOBS)
    suite.run(system="site").expect(3, "*RuntimeError: a bug of the scheduler's*", errors=2)


def test_a_submission_that_is_refused_has_a_record_with_the_schedulers_message(suite):
    suite.file("conftest.py", REFUSING)
    suite.write(ONE_JOB)
    suite.run("-o", "mlhpc_infra_exit_code=75", system="site").expect(
        75, "rejected: no such account*", errors=1
    )
    (record,) = suite.records()
    assert record["verdict"] == "rejected"
    assert record["failure"].startswith("rejected: no such account")
    assert (record["attempt"], record["nodes"], record["node_hours"]) == (0, [], 0.0)


@pytest.mark.parametrize(("option", "code"), [("-omlhpc_infra_exit_code=75", 75), ("--mlhpc-resume", 5)])
def test_a_job_that_ends_without_a_judge_spends_no_more_of_the_budget(suite, monkeypatch, option, code):
    from pytest_mlhpc.session.preflight import Spending

    ended = []

    def over(spending, spec, original=Spending.over):
        ended.append(spec.node_id)
        original(spending, spec)

    monkeypatch.setattr(Spending, "over", over)
    suite.file("conftest.py", INVALIDATING)
    suite.write(TWO_JOBS)
    assert suite.run("-o", "mlhpc_budget=9nh", option, system="site").ret == code
    assert sorted(ended) == [f"test_suite.py::test_it[site:part-{name}]" for name in "ab"]


@pytest.mark.parametrize(
    "end",
    [
        "raise RuntimeError('no network')",
        "pytest.fail('no network')",
        "pytest.skip('no network')",
        "sys.exit('no network')",
    ],
)
def test_a_receiver_of_records_that_fails_costs_no_record_and_ends_nothing(suite, end):
    suite.file("conftest.py", f"import sys, pytest\n{CONFTEST}\n@hookimpl\ndef mlhpc_record(record): {end}\n")
    suite.write(TWO_JOBS)
    text = "record * was stored, but a receiver of records failed: *no network*"
    suite.run("-o", "mlhpc_infra_exit_code=75", "-o", "mlhpc_max_jobs=1").expect(75, text, passed=2)
    assert len(suite.records()) == 2


def test_receivers_begin_before_the_first_record_and_one_that_fails_there_costs_no_record(suite):
    hooks = "@hookimpl\ndef mlhpc_records_begin(): raise RuntimeError('no network')\n"
    suite.file("conftest.py", f"import sys, pytest\n{CONFTEST}\n{hooks}")
    suite.write(TWO_JOBS)
    text = "a receiver of records failed at the beginning: *no network*"
    suite.run("-o", "mlhpc_infra_exit_code=75", "-o", "mlhpc_max_jobs=1").expect(75, text, passed=2)
    assert len(suite.records()) == 2


def test_a_disk_that_fails_when_a_job_ends_costs_no_other_job_and_the_next_session_clears_the_ledger(
    suite, monkeypatch
):
    unlink = os.unlink

    def refuse(path, **options):
        if str(path).endswith(".jsonl"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **options)

    suite.write(TWO_JOBS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        text = "cannot remove */ledger/*@*.jsonl from the ledger: Permission denied"
        suite.run("-o", "mlhpc_infra_exit_code=75", "-o", "mlhpc_max_jobs=1").expect(75, text, passed=2)
    assert len(suite.records()) == 2
    suite.run().expect(0, passed=2)  # the next session ends them once more, and removes their files
    assert not list(suite.state.glob("ledger/*.jsonl"))


def test_a_run_without_the_lock_that_another_user_has_says_so(suite, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.device_lock.FOREIGN_LIMIT_S", 0.0)
    monkeypatch.setattr("pytest_mlhpc.provision.device_lock.holder_of", lambda _fd: LockHolder(4711, 65501))
    other = DeviceLock(lock_directory(os.environ))
    assert other.acquire([]) == ""
    suite.write("@job(exclusive=True)\ndef test_it(run): pass\n")
    words = "not alone on this machine: process 4711 of user 65501 did not give its lock back within 0 s"
    try:
        suite.run().expect(
            0, "measured beside another user of this machine:", f"*test_it?local:cpu?: {words}", passed=1
        )
    finally:
        other.release()
    assert suite.record("test_it")["explanation"][-1] == words
