"""A drill on a real cluster: faults are planted in jobs, nothing is sent, and neither jobs nor files are left."""

import json
from pathlib import Path

from drilled_suites import digest, drill, nothing_planted, write_site
from running_suites import LIMIT_S, wait_for


def test_faults_are_planted_in_jobs_and_the_site_is_as_it_was(suite):
    write_site(suite)
    assert suite.run(environment={"MLHPC_PURPOSE": "nightly"}).code == 0
    before = digest(suite.state, suite.folder)
    own_jobs = {job.id for job in suite.jobs()}
    faults = [word for name in ("slow-rank=50%", "lying-exit", "missing-night") for word in ("--fault", name)]
    process = drill(suite, *faults)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 1, out + err
    slow, lying, _ = json.loads(out)["faults"]
    training, copy = suite.ids("training", "copy")
    assert slow["planted"] == [training]
    assert (slow["noticed"], slow["not_noticed"]) == (
        None, [f"{training} passed: of 17 nights that the judge needs, 17 nights are missing"],
    )  # fmt: skip
    assert lying["tests"] == {copy: 1, training: 1}
    assert {tuple(one["channels"]) for one in lying["alerts"]} == {("team",)}
    assert digest(suite.state, suite.folder) == before
    wait_for(lambda: all(job.ended for job in suite.jobs()))
    assert {job.state for job in suite.jobs() if job.id not in own_jobs} <= {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    }


def test_a_job_that_is_cancelled_from_outside_is_said_and_its_test_is_no_failure(suite):
    begun = write_site(suite, seconds=300)
    process = drill(suite, "--fault", "lying-exit")
    wait_for(begun.exists)
    running = [job for job in suite.jobs() if job.state == "RUNNING"]
    (job,) = [one for one in running if "sleep 300" in (Path(one.folder) / "plan.json").read_text()]
    suite.slurm.run("scancel", job.id)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 75, out + err
    found = json.loads(out)
    (lost,) = [one for one in found["lost"] if one["test"] == suite.ids("copy")[0]]
    assert (lost["fault"], lost["why"].partition(":")[0]) == ("nothing", "cancelled_outside")
    assert nothing_planted(suite)


def test_jobs_of_a_killed_drill_are_ended_by_the_next_one(suite):
    begun = write_site(suite, seconds=600)
    process = drill(suite, "--fault", "lying-exit")
    wait_for(begun.exists)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_for(lambda: "removed" in suite.reap(code=None))
    wait_for(lambda: not [job for job in suite.jobs() if job.state in {"PENDING", "RUNNING"}])
    assert nothing_planted(suite)
