"""Jobs that do not start, end to end on the real cluster: what a user reads, the exit code, the record, nothing left."""

import os
import shutil

from faults import ONE, read_faults
from test_slurm_sweep import drain, reserve


def test_a_sound_job_passes_and_is_recorded(suite):
    suite.tests(ONE)
    result = suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    (job,) = suite.jobs()
    assert (record["verdict"], record["job_id"], record["nodes"]) == ("unjudged", job.id, [job.nodes])


def test_what_slurm_or_its_partition_refuses_is_rejected_with_its_own_message_and_nothing_is_submitted(suite):
    suite.run_faults(read_faults(__file__, "rejected"))
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


def test_jobs_that_waiting_does_not_start_name_slurms_reason(own_slurm, make_suite):
    own_slurm.run("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=hot spare burnt")
    suite = make_suite(own_slurm)
    suite.partition(
        also={"drained": {"nodelist": "node4", "pending_limit": "4s"}, "never": {"sbatch": ["--hold"]}}
    )
    suite.tests("""\
        @script("echo rate: 4")
        def test_drained(run): pass

        @script("echo rate: 4", nodes=2, ranks_per_node=1)
        def test_never(run): pass
    """)
    session = suite.start(*suite.ids("drained", "never"))
    session.until("two jobs", lambda: len(suite.jobs()) == 2)
    own_slurm.run("scontrol", "update", "PartitionName=cpu", "MaxNodes=1")
    suite.release()
    session.end().expect(
        1, "never_scheduled:", "node4", "hot spare burnt", "pending limit is 4 s",
        "PartitionNodeLimit", "waiting does not help, so it was cancelled", error=2,
    )  # fmt: skip


def test_a_submission_whose_answer_was_lost_is_neither_lost_nor_made_twice(suite):
    # The real sbatch submits, and its answer is lost the first time, as when slurmctld is too busy to give it.
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
    suite.run(environment={"PATH": f"{folder}:{os.environ['PATH']}"}).expect(0, passed=1)
    suite.once()


def test_a_job_whose_reservation_ends_will_not_start_and_says_so(own_slurm, make_suite):
    reserve(own_slurm, "today", "now+1days", nodes="node1")
    drain(own_slurm, "node1", "hot spare burnt")
    suite = make_suite(own_slurm)
    suite.partition(reservation="today")
    suite.tests(ONE)
    session = suite.start()
    job = suite.job("PENDING")
    done = own_slurm.run(
        "scontrol", "update", "reservationname=today", "starttime=now", "endtime=now+1seconds"
    )
    assert done.returncode == 0, done.stderr
    result = session.end()
    result.expect(
        1, f"never_scheduled: job {job.id} is RESV_DEL_HOLD: Reservation today was deleted", error=1
    )
    assert result.verdicts() == ["never_scheduled"]
