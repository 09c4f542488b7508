"""`mlhpc reap`, and what sessions do with allocations whose lease has ended."""

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import ledgers
import pytest
from ledgers import later, left_behind, states
from login_worlds import write_ssh

from pytest_mlhpc.cli import main
from pytest_mlhpc.cli import reap as command
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.ledger import Ledger, NotYet, adopt, reap_expired_leases
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, user_name
from pytest_mlhpc.provision.reapers import (
    cluster_name,
    job_reaper,
    our_reapers,
    reachable_with,
)
from pytest_mlhpc.provision.scheduler import submit
from pytest_mlhpc.provision.scheduler.client import (
    UNDER_WAY_S,
    SchedulerJob,
    SchedulerState,
    SchedulerUnavailable,
)
from pytest_mlhpc.provision.ssh import host_of

HOST, ME = os.uname().nodename, user_name()


class Slurm:
    """Answers like a cluster that has these jobs. The real one is asked in tests/real.

    Args:
        jobs: what it knows.
        down: what it says in place of answers.
        ends: how many answers have a cancelled job before it has ended.
    """

    title = "Slurm"

    def __init__(self, *jobs, down="", ends=0):
        self.known, self.down, self.ends = jobs, down, ends
        self.asked, self.cancelled = [], []
        self.cancel = lambda ids, signal="": self.cancelled.extend(ids)

    def jobs(self, *, ids=(), names=(), user=""):
        self.asked.append((frozenset(names), user))
        if self.down:
            raise SchedulerUnavailable(self.down)
        if self.cancelled and self.ends == 0:
            self.known = tuple(replace(job, state=SchedulerState.CANCELLED) for job in self.known)
        self.ends -= bool(self.cancelled)
        return [job for job in self.known if job.name in names]


@pytest.fixture
def state(tmp_path):
    """Return a state directory; ledgers that a test leaves open in it are removed in the end."""
    yield tmp_path / "state"
    for path in (tmp_path / "state" / "ledger").glob("*.jsonl"):
        path.unlink()


@pytest.fixture
def entry(tmp_path):
    """Make an entry of a job that was submitted an hour ago."""

    def make(name, **other):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        values = {"native_id": "12", "directory": str(folder), "submitted_ns": later(-1), **other}
        return ledgers.entry(name, **values)

    return make


def job(name, number="12", state=SchedulerState.RUNNING, user=ME):
    return SchedulerJob(number, f"mlhpc-{name}", user, state)


def reapers(slurm, **options):
    return {"slurm": lambda entries: job_reaper(slurm, entries, **options)}


def reap(state, slurm, name="me", **options):
    """Let a session reap what has expired; return what it did with each allocation."""
    ledger = Ledger(state, name)
    found = reap_expired_leases(ledger, reapers(slurm, **options))[1]
    ledger.close()
    return found


def reaped(state, slurm, name="me"):
    """Reap and return what is said of it."""
    return [str(one) for one in reap(state, slurm, name)]


def test_expired_jobs_are_cancelled_by_their_names_and_user_in_one_call_and_awaited(state, entry):
    left_behind(state, "s1", entry("a"), entry("b", native_id="13"))
    slurm = Slurm(job("a"), job("b", "99", SchedulerState.PENDING), ends=2)
    why = f"on sys:part: its session on {HOST} (process {os.getpid()}) ended without detaching"
    assert reaped(state, slurm) == [
        f"mlhpc-a (job 12) {why}: cancelled job 12 (RUNNING)",
        f"mlhpc-b (job 13) {why}: cancelled job 99 (PENDING)",
    ]
    assert slurm.cancelled == ["12", "99"]  # what has the name now, not what had the id then
    assert slurm.asked == [(frozenset({"mlhpc-a", "mlhpc-b"}), str(os.getuid()))] * 4
    assert (states(state), list((state / "ledger").glob("*.jsonl"))) == ({}, [])


def test_a_cancelled_job_stays_in_the_ledger_until_it_has_ended(state, entry, monkeypatch):
    monkeypatch.setattr(submit, "GONE_S", 0.0)
    one = entry("a")
    (Path(one.directory) / "data").mkdir()
    left_behind(state, "s1", one)
    (found,) = reap(state, Slurm(job("a"), ends=99))
    assert (found.ended, found.later) == (False, True)
    assert found.done.endswith("cancelled job 12 (RUNNING), which Slurm has not ended yet")
    assert (Path(one.directory) / "data").exists()  # its ranks may write there
    assert states(state) == {"a": "expired"}


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([job("a", user="somebody-else"), job("other")], "Slurm knows no job of this name any more"),
        ([job("a", state=SchedulerState.TIMEOUT)], "job 12 has ended (TIMEOUT)"),
    ],
    ids=["the name is another user's and the id another job's", "it has ended"],
)
def test_a_job_that_is_not_there_any_more_is_not_cancelled(state, entry, jobs, says):
    left_behind(state, "s1", entry("a"))
    slurm = Slurm(*jobs)
    (line,) = reaped(state, slurm)
    assert line.endswith(f"nothing to cancel: {says}")
    assert slurm.cancelled == []


def test_with_the_controller_down_jobs_stay_in_the_ledger_and_are_ended_later(state, entry):
    left_behind(state, "s1", entry("a"), until_ns=later(-1))
    report = command._reap(state, reapers(Slurm(down="squeue: Unable to contact slurm controller")))
    assert report.code == 1
    assert ": its lease ended 20" in report.text
    text = "not ended, stays in the ledger: squeue: Unable to contact slurm controller\n0 ended\n"
    assert report.text.endswith(text)
    (line,) = reaped(state, Slurm(job("a")), "me2")
    assert line.endswith("cancelled job 12 (RUNNING)")


def test_a_submission_that_may_be_under_way_is_not_called_gone(entry):
    now_ns = time.time_ns()
    young = entry("a", native_id="", submitted_ns=now_ns - 10**9)
    with pytest.raises(NotYet, match="its submission may be under way; try again in 300 s"):
        job_reaper(Slurm(), [young])(young)
    later = job_reaper(Slurm(), [young], lambda: now_ns + int(UNDER_WAY_S * 1e9))
    assert later(young).startswith("nothing to cancel")


def test_a_job_whose_directory_is_not_found_may_be_another_clusters(entry):
    elsewhere = entry("a", directory="/lustre/of/another/cluster/a")
    with pytest.raises(MlhpcError, match="is it a job of another cluster\\?"):
        job_reaper(Slurm(), [elsewhere])(elsewhere)


def test_a_job_of_another_cluster_with_the_same_home_is_left_to_that_cluster(entry):
    theirs, ours, old = entry("a", cluster="archer2"), entry("b", cluster="cirrus"), entry("c")
    slurm = Slurm(job("a"), job("b"))
    reaper = job_reaper(slurm, [theirs, ours, old], cluster=lambda: "cirrus")
    with pytest.raises(NotYet, match="it is a job of the cluster archer2; run `mlhpc reap` there"):
        reaper(theirs)
    assert reaper(ours) == "cancelled job 12 (RUNNING)"
    assert reaper(old).startswith("nothing to cancel")
    assert slurm.asked[0][0] == {"mlhpc-b", "mlhpc-c"}


def test_a_cluster_whose_name_cannot_be_asked_reaps_nothing(state, entry):
    left_behind(state, "s1", entry("a", cluster="cirrus"))
    (one,) = reap(state, Slurm(), cluster=Mock(side_effect=SchedulerUnavailable("scontrol: no answer")))
    assert (one.ended, one.later, one.done.endswith("scontrol: no answer")) == (False, False, True)


def test_reaping_leaves_jobs_of_other_clusters_in_the_ledger_where_their_own_sessions_find_them(state, entry):
    left_behind(state, "s1", entry("a", cluster="archer2"), entry("b", cluster="cirrus"))
    left_behind(state, "s2", entry("c", cluster="archer2"))
    here = reapers(Slurm(), cluster=lambda: "cirrus")
    report = command._reap(state, here, lambda one: one.cluster != "archer2")
    assert report.code == 0
    assert "left, as it is a job of the cluster archer2; run `mlhpc reap` there\n" in report.text
    assert report.text.endswith("\n1 ended\n")
    assert states(state) == {"a": "expired", "c": "expired"}
    assert adopt(Ledger(state, "me"), lambda one: True, lambda one: False).adopted == []


def test_a_session_that_was_killed_before_it_made_the_directory_is_written_off(tmp_path, entry):
    folder = tmp_path / "runs" / "s1"
    one = entry("a", native_id="", session="s1", directory=str(folder / "a"))
    with pytest.raises(MlhpcError, match="is it a job of another cluster\\?"):
        job_reaper(Slurm(), [one])(one)  # nothing of the session can be seen here
    folder.mkdir()
    assert job_reaper(Slurm(), [one])(one).startswith("nothing to cancel")
    elsewhere = entry("b", native_id="", session="s1", directory="/lustre/b", cluster="cirrus")
    there = job_reaper(Slurm(), [elsewhere], cluster=lambda: "cirrus")
    assert there(elsewhere).startswith("nothing to cancel")


def test_the_name_of_the_cluster_is_asked_once_and_empty_without_an_answer(tmp_path):
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    assert cluster_name({"PATH": str(tmp_path)}) == ""
    script = f"#!/bin/sh\necho asked >> {tmp_path}/count\necho 'ClusterName             = cirrus'\n"
    (tmp_path / "scontrol").write_text(script)
    (tmp_path / "scontrol").chmod(0o755)
    assert cluster_name(environ) == cluster_name({**environ, "PYTEST_CURRENT_TEST": "x"}) == "cirrus"
    assert (tmp_path / "count").read_text() == "asked\n"
    reachable = reachable_with(environ)
    clusters = [name for name in ("", "cirrus", "archer2") if reachable(LedgerEntry("a", "p", cluster=name))]
    assert clusters == ["", "cirrus"]


def test_jobs_of_a_scheduler_that_nobody_serves_stay(state, entry):
    left_behind(state, "s1", entry("a", scheduler="pbs"))
    (line,) = reaped(state, Slurm())
    assert line.endswith(
        "not ended, stays in the ledger: no installed provisioner can end jobs of scheduler 'pbs'"
    )


def test_a_run_that_is_reaped_leaves_its_logs_and_not_its_data(state, tmp_path, entry):
    one, outside = entry("a"), tmp_path / "data"
    for folder in (Path(one.directory) / "data", outside):
        folder.mkdir()
        (folder / "set.h5").write_text("made for the run")
    (Path(one.directory) / "plan.json").write_text("{}")
    left_behind(state, "s1", one, entry("b", directory=str(tmp_path)), entry("c", directory="."))
    reaped(state, Slurm())
    assert [path.name for path in Path(one.directory).iterdir()] == ["plan.json"]
    assert outside.exists()  # not the folder of an allocation


def test_reap_says_so_where_there_is_nothing(tmp_path, capsys):
    assert main(["reap", "--state-dir", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "0 ended\n"
    assert not (tmp_path / "none").exists()


def test_a_dry_run_changes_nothing(state, entry, capsys):
    left_behind(state, "s1", entry("a"))
    left_behind(state, "s2", entry("good"), until_ns=later())
    assert main(["reap", "--dry-run", "--state-dir", str(state)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"mlhpc-a \(job 12\) on sys:part: .*: would be ended", first)
    assert last == "1 would be ended; 1 left, as a session watches them or their lease is good"
    names = ["a@s1.jsonl", "good@s2.jsonl", "s1.jsonl", "s2.jsonl"]
    assert sorted(path.name for path in (state / "ledger").iterdir()) == names


def test_reap_on_a_full_disk_says_which_file_and_exits_with_one(state, entry, capsys, monkeypatch):
    left_behind(state, "s1", entry("a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Mock(side_effect=OSError(28, "No space left on device")))
        assert main(["reap", "--state-dir", str(state)]) == 1
    error = capsys.readouterr().err
    assert "cannot write the ledger " in error
    assert error.endswith("No space left on device\n")
    assert sorted(path.name for path in (state / "ledger").iterdir()) == ["a@s1.jsonl", "s1.jsonl"]


def test_reap_tells_on_stderr_what_it_could_not_read(tmp_path, capsys):
    path = tmp_path / "ledger" / "newer.jsonl"
    path.parent.mkdir()
    path.write_text('{"schema": 99}\n')
    assert main(["reap", "--state-dir", str(tmp_path)]) == 0
    why = "written by a newer version (schema 99; this version reads 4 alone), left as it is"
    assert capsys.readouterr() == ("0 ended\n", f"{path}:1: {why}\n")


def test_processes_of_a_dead_local_session_are_ended(state, capsys):
    """The session's own guardian would have done so, if it had not died too."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "MLHPC_SESSION": "s1"}) as orphan:
        try:
            left_behind(state, "s1", LedgerEntry("a", "local:cpu", session="s1"))
            assert main(["reap", "--state-dir", str(state)]) == 0
            assert capsys.readouterr().out.endswith("its processes were ended, if there were any\n1 ended\n")
            assert orphan.poll() is not None
        finally:
            orphan.kill()


SQUEUE = """\
printf '%s\\n' "$@" >> {folder}/asked
"""


def test_a_job_behind_ssh_is_ended_there_and_one_login_that_is_away_does_not_keep_the_others(tmp_path):
    words = """case " $* " in *away*) echo no route >&2; exit 255;; esac; exec sh -c "$last\""""
    folder = tmp_path / "bin"
    environ = write_ssh(folder, words)
    (folder / "squeue").write_text(f"#!/bin/sh\n{SQUEUE.format(folder=folder)}")
    (folder / "squeue").chmod(0o755)
    shared = tmp_path / "shared"
    there = shared / "runs/s/b"
    there.mkdir(parents=True)
    near, away = (
        LedgerEntry(
            id=name, partition="lab:cpu", scheduler="slurm", job_name=f"mlhpc-{name}", native_id="7",
            directory=str(tmp_path / "state/runs/s" / name), session="s", user=ME, uid=os.getuid(),
            cluster=f"ssh:ada@{login}:{shared}",
        )
        for name, login in (("b", "near"), ("c", "away"))
    )  # fmt: skip
    reaper = our_reapers(environ)["slurm"]([near, away])
    assert reaper(near) == "nothing to cancel: Slurm knows no job of this name any more"
    assert "--name=mlhpc-b" in (folder / "asked").read_text().splitlines()
    assert not there.exists()
    with pytest.raises(MlhpcError, match=r"ada@away: ssh ended with exit code 255 \(no route\)"):
        reaper(away)
    assert reachable_with(environ)(away)
    host_of("ada@near", environ).close()
