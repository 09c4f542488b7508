"""Which files count that a container or a Slurm job met its memory limit, and what their growth means."""

import pytest

from pytest_mlhpc.node.processes import GrowthWatch, job_counters

V1 = "6:freezer:/slurm_node1/uid_0/job_12/step_batch\n4:cpu,memory:/slurm_node1/uid_0/job_12/step_batch/task_0\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0\n"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (V1, ("/t/memory/slurm_node1/uid_0/job_12/memory.failcnt",)),
        (V2, ("/t/system.slice/slurmstepd.scope/job_12/memory.events",)),
        ("4:memory:/user.slice\n0::/user.slice\n", ()),
        ("0::/jobs/job_12x/step_0\n", ()),
        ("4:cpuset:/slurm/uid_0/job_12/step_0\n", ()),
        ("", ()),
    ],
    ids=["v1", "v2", "no-job", "another-name", "no-memory-controller", "empty"],
)
def test_the_counter_of_a_slurm_job_is_that_of_the_jobs_own_folder(tmp_path, own, expected):
    (tmp_path / "cgroup").write_text(own)
    assert job_counters(tmp_path / "cgroup", "/t") == expected


def test_a_system_without_cgroups_has_no_counter(tmp_path):
    assert job_counters(tmp_path / "none") == ()
    assert not GrowthWatch(()).grown()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("memory.failcnt", "3\n", "162\n"),
        ("memory.events", "low 0\noom 1\noom_kill 1\n", "low 0\noom 2\noom_kill 2\n"),
        ("memory.oom_control", "oom_kill_disable 0\noom_kill 0\n", "oom_kill_disable 1\noom_kill 1\n"),
    ],
)
def test_a_counter_that_grew_says_that_the_limit_was_met(tmp_path, name, before, after):
    counter = tmp_path / name
    counter.write_text(before)
    watch = GrowthWatch((str(tmp_path / "none"), str(counter)))
    assert not watch.grown()
    counter.write_text(after)
    assert watch.grown()


@pytest.mark.parametrize("text", ["", "unlimited\n", "max\n", "-1\n"])
def test_a_counter_that_is_none_never_grows(tmp_path, text):
    counter = tmp_path / "memory.failcnt"
    counter.write_text(text)
    assert not GrowthWatch((str(counter),)).grown()
