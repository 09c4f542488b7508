"""`mlhpc reap` against a real cluster: own expired jobs go, nobody else's."""

import os
import time
from pathlib import Path

import ledgers
import pytest
from ledgers import HOUR_NS, left_behind

from pytest_mlhpc.cli import main
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, job_name
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.provision.reapers import cluster_name


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit a job that would run for an hour, by this user or another; return its id."""

    def make(name: str, *options: str, user: str = "") -> str:
        usual = ["--parsable", f"--job-name={name}", "--output=/dev/null", "--time=60", "--chdir=/tmp"]
        command = ["sbatch", *usual, *options, "--wrap", "exec sleep 3600"]
        done = slurm.run(*(["runuser", "-u", user, "--", *command] if user else command))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return make


def entry(tmp_path: Path, allocation: str, **other) -> LedgerEntry:
    (tmp_path / allocation).mkdir()
    ours = {"partition": "testcluster:cpu", "job_name": job_name(allocation)}
    when = time.time_ns() - HOUR_NS
    return ledgers.entry(allocation, directory=str(tmp_path / allocation), submitted_ns=when, **ours, **other)


def states(slurm, *ids: str) -> list[str]:
    there = {job.id for job in slurm.jobs() if not job.ended and job.state != "COMPLETING"}
    return ["there" if number in there else "gone" for number in ids]


def test_own_expired_jobs_are_cancelled_and_all_others_live_on(slurm, submit, tmp_path, capsys):
    state, lost, held, good, foreign = tmp_path / "state", uuid7(), uuid7(), uuid7(), uuid7()
    jobs = [
        submit(job_name(lost)),
        submit(job_name(held), "--hold"),
        submit(job_name(good)),
        submit("mlhpc-by-hand"),
        submit(job_name(foreign), user="nobody"),
    ]
    # The ledger has an id that Slurm gave to another job meanwhile.
    left_behind(
        state, "s1", entry(tmp_path, lost, native_id=jobs[3]), entry(tmp_path, held), entry(tmp_path, foreign)
    )
    left_behind(state, "s2", entry(tmp_path, good), until_ns=time.time_ns() + HOUR_NS)
    try:
        assert main(["reap", "--dry-run", "--state-dir", str(state)]) == 1
        assert states(slurm, *jobs) == ["there"] * 5
        capsys.readouterr()
        assert main(["reap", "--state-dir", str(state)]) == 0
        assert states(slurm, *jobs) == ["gone", "gone", "there", "there", "there"]
        out = capsys.readouterr().out.splitlines()
        assert f"cancelled job {jobs[0]} (" in out[0]
        assert out[1].endswith(f"cancelled job {jobs[1]} (PENDING)")
        assert out[2].endswith("nothing to cancel: Slurm knows no job of this name any more")
        assert out[3] == "3 ended; 1 left, as a session watches them or their lease is good"
        assert main(["reap", "--state-dir", str(state)]) == 0
        assert capsys.readouterr().out.startswith("0 ended; 1 left")
    finally:
        slurm.run("scancel", *jobs)
    for path in (state / "ledger").glob("*.jsonl"):
        path.unlink()


def test_jobs_are_ended_on_their_own_cluster_and_left_alone_on_another(slurm, submit, tmp_path, capsys):
    state, here, elsewhere = tmp_path / "state", uuid7(), uuid7()
    jobs = [submit(job_name(here)), submit(job_name(elsewhere))]
    name = cluster_name(os.environ)
    left_behind(state, "s1", entry(tmp_path, here, cluster=name), entry(tmp_path, elsewhere, cluster="other"))
    try:
        assert name
        assert main(["reap", "--state-dir", str(state)]) == 0
        assert states(slurm, *jobs) == ["gone", "there"]
        out = capsys.readouterr().out
        assert f"cancelled job {jobs[0]} (" in out
        assert "left, as it is a job of the cluster other; run `mlhpc reap` there" in out
        assert out.endswith("\n1 ended\n")
    finally:
        slurm.run("scancel", *jobs)
    for path in (state / "ledger").glob("*.jsonl"):
        path.unlink()


def test_while_the_controller_is_down_nothing_is_forgotten(start_own_slurm, tmp_path, capsys):
    slurm = start_own_slurm()
    state, lost = tmp_path / "state", uuid7()
    done = slurm.run(
        "sbatch", "--parsable", f"--job-name={job_name(lost)}", "--output=/dev/null", "--chdir=/tmp", "--wrap", "sleep 3600"
    )  # fmt: skip
    left_behind(state, "s1", entry(tmp_path, lost))
    slurm.stop_controller()
    assert main(["reap", "--state-dir", str(state)]) == 1
    out = capsys.readouterr().out
    assert "not ended, stays in the ledger: " in out
    slurm.start_controller()
    assert main(["reap", "--state-dir", str(state)]) == 0
    assert f"cancelled job {done.stdout.strip()} (" in capsys.readouterr().out
    assert states(slurm, done.stdout.strip()) == ["gone"]
