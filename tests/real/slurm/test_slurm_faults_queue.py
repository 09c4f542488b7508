"""Jobs that do not start, end to end on the real cluster: what a user reads, the exit code, the record, nothing left."""

from __future__ import annotations

import os
import shutil

import pytest

ONE = """\
@script("echo rate: 4")
def test_one(run):
    assert run["rate"].value == 4
"""


def test_a_sound_job_passes_and_is_recorded(suite):
    suite.tests(ONE)
    result = suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    (job,) = suite.jobs()
    assert (record["verdict"], record["job_id"], record["nodes"]) == ("unjudged", job.id, [job.nodes])


def test_an_unknown_partition_is_refused_in_slurms_words(suite):
    suite.partition(partition="nowhere")
    suite.tests(ONE)
    result = suite.run("--infra-exit-code", "75")
    result.expect(75, "rejected:", "invalid partition specified: nowhere", error=1)
    assert suite.jobs() == []


@pytest.mark.parametrize(
    ("nodes", "time_limit", "text"),
    [
        (2, "10s", "2 nodes are wanted, but MaxNodes of Slurm's partition small is 1"),
        (
            1,
            "10m",
            "660 s are needed (time_limit and margin), but MaxTime of Slurm's partition small is 60 s",
        ),
    ],
)
def test_what_is_beyond_the_partition_is_refused_before_it_is_submitted(suite, nodes, time_limit, text):
    suite.partition("small", time_limit=time_limit)
    suite.tests(
        f'@script("echo rate: 4", nodes={nodes}, devices={nodes}, launcher="srun")\ndef test_one(run): pass\n'
    )
    suite.run().expect(1, "rejected:", text, error=1)
    assert suite.jobs() == []


@pytest.mark.parametrize("what", ["account", "qos"])
def test_an_unknown_account_or_qos_is_refused_in_slurms_words(suite, what):
    suite.partition(**{what: "nobodys"})
    suite.tests(ONE)
    result = suite.run()
    words = {
        "account": "Invalid account or account/partition combination",
        "qos": "Invalid qos specification",
    }
    result.expect(1, "rejected:", words[what], error=1)
    assert suite.jobs() == []


def test_a_held_job_is_given_up_after_the_pending_limit_which_is_named(suite):
    suite.partition(sbatch=["--hold"], pending_limit="4s")
    suite.tests(ONE)
    result = suite.run()
    (job,) = suite.jobs()
    result.expect(
        1,
        f"never_scheduled: job {job.id} is pending: JobHeldUser; cancelled after ",
        "the pending limit is 4 s (slurm: pending_limit)",
        error=1,
    )
    assert (job.state, result.verdicts()) == ("CANCELLED", ["never_scheduled"])


def test_a_pending_job_that_somebody_cancels_is_not_our_fault(suite):
    suite.partition(sbatch=["--hold"])
    suite.tests(ONE)
    session = suite.start()
    job = session.job("PENDING")
    suite.slurm.run("scancel", job.id)
    result = session.end()
    result.expect(
        1, f"cancelled_outside: Slurm job {job.id} CANCELLED", "somebody else cancelled it", error=1
    )
    assert result.verdicts() == ["cancelled_outside"]


def test_a_job_for_a_node_that_is_not_available_names_slurms_reason(own_slurm, make_suite):
    own_slurm.run("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=hot spare burnt")
    suite = make_suite(own_slurm)
    suite.partition(nodelist="node4", pending_limit="4s")
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "never_scheduled:", "node4", "hot spare burnt", "pending limit is 4 s", error=1)


def test_a_node_drained_while_its_job_waits_is_named_with_the_admins_reason(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    blocker = own_slurm.run(
        "sbatch",
        "--parsable",
        "-w",
        "node4",
        "--exclusive",
        "-o",
        "/dev/null",
        "-D",
        "/tmp",
        "--wrap",
        "sleep 600",
    )
    suite.partition(nodelist="node4", exclusive=True, pending_limit="8s")
    suite.tests(ONE)
    session = suite.start()
    session.job("PENDING")
    own_slurm.run("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=fan 3 broken")
    own_slurm.run("scancel", blocker.stdout.strip())
    session.end().expect(1, "never_scheduled:", "node4", "fan 3 broken", error=1)


def test_a_job_that_no_waiting_starts_is_cancelled_at_once(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.partition(sbatch=["--hold"], pending_limit="10s")
    suite.tests('@script("echo rate: 4", nodes=2, devices=2, launcher="srun")\ndef test_one(run): pass\n')
    session = suite.start()
    job = session.job("PENDING")
    own_slurm.run("scontrol", "update", "PartitionName=cpu", "MaxNodes=1")
    own_slurm.run("scontrol", "release", job.id)
    result = session.end()
    result.expect(
        1, "never_scheduled:", "PartitionNodeLimit", "waiting does not help, so it was cancelled", error=1
    )


def test_a_submission_whose_answer_was_lost_is_neither_lost_nor_made_twice(suite):
    # The real sbatch submits, and what it says is lost the first time, as when slurmctld is too busy to answer.
    folder = suite.folder / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(
        "#!/bin/sh\n"
        f'[ -e {folder}/lost ] && exec {shutil.which("sbatch")} "$@"\n'
        f"touch {folder}/lost\n"
        f'{shutil.which("sbatch")} "$@" >/dev/null\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2\n"
        "exit 1\n"
    )
    (folder / "sbatch").chmod(0o755)
    suite.tests(ONE)
    result = suite.run(environment={"PATH": f"{folder}:{os.environ['PATH']}"})
    result.expect(0, passed=1)
    (job,) = suite.jobs()
    assert [record["job_id"] for record in result.records] == [job.id]
