"""The fixture `allocation` on the real Slurm: nodes held by a job, programs of the test as its steps."""

from __future__ import annotations

import os
import signal

import pytest
from labs import LIMIT_S, Lab, until


def states(slurm) -> dict[str, str]:
    """Return the state of each job of this test."""
    return {job.id: job.state for job in slurm.jobs() if job.key.lstrip("*") == os.environ["MLHPC_TEST"]}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["n0", "n2"])
def test_programs_run_on_the_nodes_of_the_job(slurm, lab, workers):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            said = allocation.run(["sh", "-c", "echo $SLURM_JOB_ID $SLURMD_NODENAME; echo err >&2"])
            assert said.ranks == tuple(f"{allocation.id} {node}\\n" for node in allocation.nodes)
            assert said.stderr == "err\\nerr\\n"
            assert said.returncode == 0 and len(allocation.nodes) == 2

            four = allocation.run(["sh", "-c", "echo $SLURM_PROCID $SLURM_CPUS_PER_TASK"], ranks_per_node=2)
            assert four.ranks == ("0 8\\n", "1 8\\n", "2 8\\n", "3 8\\n")

            one = allocation.run(["printenv", "A", "SLURMD_NODENAME"], nodes=[allocation.nodes[1]], env={"A": "b 'c"})
            assert one.stdout == f"b 'c\\n{allocation.nodes[1]}\\n"

            mixed = allocation.run(["sh", "-c", "echo $SLURM_PROCID; exit $((3 * SLURM_PROCID))"])
            assert (mixed.returncode, mixed.ranks) == (3, ("0\\n", "1\\n"))
            assert "Exited with exit code 3" in mixed.launcher
            none = allocation.run(["no-such-program"])
            assert none.returncode != 0 and "No such file or directory" in none.launcher
    """)
    done = lab.run(*workers)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert list(states(slurm).values()) == ["COMPLETED"]
    (record,) = lab.records()
    assert record["verdict"] == "unjudged"
    assert len(record["nodes"]) == 2
    assert record["node_hours"] > 0
    assert record["job_id"] in states(slurm)


def test_a_program_out_of_time_is_ended_and_the_job_stays(lab):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            with pytest.raises(TimeoutError, match="did not end within 1 s on ") as raised:
                allocation.run(["sh", "-c", "trap '' TERM; echo first; while :; do sleep 0.1; done"], timeout=1)
            assert raised.value.finished.ranks == ("first\\n", "first\\n")
            assert allocation.run(["hostname"], timeout=30).returncode == 0
    """)
    done = lab.run()
    assert done.returncode == 0, done.stdout


def test_each_test_has_nodes_of_its_own_that_go_when_it_is_over(slurm, lab):
    """With all four nodes each and one job at a time, none would start before the other's were given back."""
    lab.write("""
        RATE = {"rate": {"pattern": r"rate: (\\S+)", "unit": "items/s", "better": "higher"}}

        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.job("nodes", nodes=4, time_limit=600)
        def test_it(allocation, number):
            allocation.run(["true"]).check()

        @pytest.mark.job("command", argv=["echo", "rate: 4"], metrics=RATE, judge=False)
        def test_measured(run):
            pass
    """)
    done = lab.run("--pack", "--max-jobs", "1")
    assert done.returncode == 0, done.stdout
    assert list(states(slurm).values()) == ["COMPLETED"] * 3
    assert len({record["job_id"] for record in lab.records()}) == 3


def test_ctrl_c_during_a_program_cancels_the_job(slurm, lab):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            allocation.run(["sh", "-c", f"touch {pathlib.Path.cwd()}/runs; exec sleep 100"])
    """)
    process = lab.start()
    until((lab.folder / "runs").exists, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert list(states(slurm).values()) == ["CANCELLED"]
    (record,) = lab.records()
    assert record["verdict"] == "cancelled"
    assert record["node_hours"] > 0


def test_a_session_that_is_told_to_leave_its_jobs_does_not_leave_held_nodes(slurm, lab):
    """SIGTERM detaches jobs under Slurm; nobody could go on with this one."""
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            allocation.run(["sh", "-c", f"touch {pathlib.Path.cwd()}/runs; exec sleep 100"])

        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_next(allocation):
            pass
    """)
    process = lab.start()
    until((lab.folder / "runs").exists, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert set(states(slurm).values()) == {"CANCELLED"}


def test_a_job_that_somebody_cancels_is_told_to_the_test(slurm, lab):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            allocation.run(["sh", "-c", f"touch {pathlib.Path.cwd()}/runs; exec sleep 100"])
    """)
    process = lab.start("--infra-exit-code", "75")
    until((lab.folder / "runs").exists, process)
    slurm.run("scancel", *states(slurm))
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "cancelled_outside: <allocation" in output
    assert "ended before or while 'sh' ran" in output
    (record,) = lab.records()
    assert record["verdict"] == "cancelled_outside"


def test_a_killed_session_leaves_its_nodes_to_the_next_that_gives_them_back(slurm, lab):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            (pathlib.Path.cwd() / "runs").touch()
            if not pathlib.Path("second").exists():
                time.sleep(100)
    """)
    process = lab.start()
    until((lab.folder / "runs").exists, process)
    process.kill()
    process.communicate()
    (first,) = states(slurm)
    (lab.folder / "second").touch()
    done = lab.run()
    assert done.returncode == 0, done.stdout
    assert "reaped" in done.stdout
    found = states(slurm)
    assert found.pop(first) == "CANCELLED"
    assert list(found.values()) == ["COMPLETED"]


@pytest.mark.slow
def test_a_node_that_dies_is_named(own_slurm, tmp_path, state_dir):
    lab = Lab(tmp_path / "lab", state_dir)
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=120)
        def test_it(allocation):
            assert allocation.nodes == ("node1", "node2")
            allocation.run(["sh", "-c", f"touch {pathlib.Path.cwd()}/runs; exec sleep 100"])
    """)
    process = lab.start("--infra-exit-code", "75")
    until((lab.folder / "runs").exists, process)
    own_slurm.kill_node("node2")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "node_failure: " in output
    assert "node2" in output.partition("node_failure: ")[2].splitlines()[0]
    (record,) = lab.records()
    assert record["verdict"] == "node_failure"
    own_slurm.start_node("node2")


def test_a_detached_session_asks_for_no_nodes_that_nobody_would_use(slurm, lab):
    lab.write("""
        @pytest.mark.job("nodes", nodes=2, time_limit=60)
        def test_it(allocation):
            pass
    """)
    done = lab.run("--detach", "-rs")
    assert "no later session can go on with nodes that a test holds" in done.stdout
    assert done.returncode == 5, done.stdout
    assert set(states(slurm).values()) <= {"CANCELLED"}


def test_one_of_two_workers_that_is_interrupted_leaves_nothing(own_slurm, tmp_path, state_dir):
    # A cluster of its own: the second job would wait for ever behind another test's that needs the first one's node.
    lab = Lab(tmp_path / "lab", state_dir)
    lab.write("""
        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.job("nodes", nodes=1, time_limit=900)
        def test_it(allocation, number):
            program = f"touch {pathlib.Path.cwd()}/runs{number}; exec sleep 900"
            allocation.run(["sh", "-c", program], timeout=900)
    """)
    process = lab.start("-n", "2")
    until(lambda: (lab.folder / "runs1").exists() and (lab.folder / "runs2").exists(), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert list(states(own_slurm).values()) == ["CANCELLED"] * 2
