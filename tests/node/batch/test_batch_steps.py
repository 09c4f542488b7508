"""Steps that outlive their srun: found by the run's name, ended, and waited for."""

import pytest

from pytest_mlhpc.node import processes


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return a function that puts a squeue and a scancel of ours before any other."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def put(squeue, scancel):
        for name, script in (("squeue", squeue), ("scancel", scancel)):
            (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return put


def test_only_the_runs_own_steps_and_openmpis_daemons_are_found(commands):
    commands("echo '7.0|run-1'; echo '7.1|other'; echo '7.2|orted'; echo '7.batch|batch'", "exit 1")
    assert processes.find("7", "run-1") == ["7.0", "7.2"]


def test_a_step_is_cancelled_and_waited_for(commands, tmp_path):
    commands("test -e gone || echo '7.0|run-1'", 'echo "$@" > gone')
    assert processes.end("7", "run-1")
    assert (tmp_path / "gone").read_text() == "--signal=KILL 7.0\n"


def test_a_job_that_is_being_ended_is_left_to_slurm(commands, capfd):
    commands("echo '7.0|run-1'", "echo Invalid job id specified >&2; exit 1")
    assert not processes.end("7", "run-1")
    said = capfd.readouterr().err
    assert said == "scancel --signal=KILL 7.0 ended with exit code 1: Invalid job id specified\n"


def test_no_answer_means_no_step(commands, capfd):
    commands("exit 3", "true")
    assert processes.end("7", "run-1")
    assert "squeue" in capfd.readouterr().err
