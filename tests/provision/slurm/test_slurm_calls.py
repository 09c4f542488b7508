"""Calls of commands that hang, die, are missing, or say in their own words what is wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pytest_mlhpc.provision.slurm import calls
from pytest_mlhpc.provision.slurm.cli import CliClient
from pytest_mlhpc.provision.slurm.client import SlurmRefused, SlurmUnavailable, Submission


@pytest.fixture
def command(tmp_path):
    """Write a command that stands first, and alone with the system's, on PATH; return the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, *lines):
        path = folder / name
        path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        path.chmod(0o755)
        return {"PATH": f"{folder}:/usr/bin:/bin"}

    return write


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid):
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end, f"{pid} still runs"
        time.sleep(0.02)
    return True


def test_a_command_that_hangs_and_ignores_sigterm_is_ended_with_its_children(command, tmp_path):
    pids = tmp_path / "pids"
    environ = command(
        "sbatch", "trap '' TERM", f"sleep 600 & echo $$ $! >{pids}", "echo half a word >&2", "wait"
    )
    client = CliClient(environ, limit_s=1.0)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(SlurmUnavailable, match=r"sbatch --parsable .*no answer within 1 s: half a word"):
        client.submit(Submission("x", script, tmp_path))
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_child_in_another_session_that_holds_the_pipes_does_not_hold_us(command, tmp_path):
    pid = tmp_path / "pid"
    environ = command("sinfo", f"setsid bash -c 'echo $$ >{pid}; exec sleep 20' &", "wait")
    with pytest.raises(SlurmUnavailable, match=r"no answer within 0\.5 s"):
        CliClient(environ, limit_s=0.5).version()
    os.kill(int(pid.read_text()), 9)


@pytest.mark.parametrize(
    "asked", [{"ids": map(str, range(1, 2000))}, {"names": map("n{}".format, range(2000))}]
)
def test_more_jobs_than_a_command_line_holds_are_sought_among_our_own(command, tmp_path, asked):
    environ = command("squeue", f'echo "$@" >{tmp_path}/said')
    assert CliClient(environ).jobs(**{how: list(words) for how, words in asked.items()}) == []
    assert f"--user={os.getuid()}" in (tmp_path / "said").read_text().split()


#: What squeue of every version does where getpwuid(3) fails, as it does while directory services are away.
STRANGER = 'case "$*" in *--user*) echo "squeue: error: Invalid user: 0" >&2;; esac'


def test_a_user_whom_this_machine_does_not_know_is_not_one_without_jobs(command):
    client = CliClient(command("squeue", STRANGER))
    with pytest.raises(SlurmUnavailable, match=r"squeue .*Invalid user: 0 \(do the directory services"):
        client.jobs(user=str(os.getuid()))
    with pytest.raises(SlurmUnavailable, match="Invalid user"):
        client.jobs(names=[f"n{number}" for number in range(2000)])


def test_listed_jobs_are_found_without_the_name_of_their_user(command, tmp_path):
    environ = command("squeue", STRANGER, f'echo "$@" >{tmp_path}/said')
    assert CliClient(environ).jobs(names=["mlhpc-a"], user=str(os.getuid())) == []
    assert "--name=mlhpc-a" in (tmp_path / "said").read_text().split()
    assert "--user" not in (tmp_path / "said").read_text()


def test_a_missing_command_is_named():
    with pytest.raises(SlurmUnavailable, match="the command 'squeue' is not on PATH"):
        CliClient({"PATH": "/nonexistent"}).jobs(ids=["1"])


def test_a_command_that_is_killed_did_not_answer(command):
    with pytest.raises(SlurmUnavailable, match="killed by SIGKILL"):
        CliClient(command("sinfo", "kill -9 $$")).version()


def test_an_error_names_the_command_line_but_not_the_environment(command):
    environ = command("scontrol", "echo 'scontrol: error: it is so' >&2; exit 3") | {"SECRET": "swordfish"}
    with pytest.raises(SlurmRefused) as caught:
        CliClient(environ).partition("cpu")
    assert str(caught.value) == (
        "scontrol --oneliner show partition cpu: exit code 3: scontrol: error: it is so"
    )


def test_words_of_a_command_become_one_printable_line_of_bounded_length(command):
    environ = command(
        "sinfo", r"printf 'one\n\033[31mtwo\n' >&2; head -c 100000 /dev/zero | tr '\0' x >&2; exit 1"
    )
    with pytest.raises(SlurmRefused) as caught:
        CliClient(environ).version()
    text = str(caught.value)
    assert text.startswith("sinfo -V: exit code 1: one; ?[31mtwo; xxx")
    assert len(text) < 2200
    assert text.isprintable()


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:localhost:18001: Connection refused",
        "sbatch: error: If munged is up, restart with --num-threads=10",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
        "slurm_load_partitions: Slurm backup controller in standby mode",
        "sinfo: fatal: Could not establish a configuration source",
        "Slurm accounting storage is disabled",
        "sacctmgr: error: Problem talking to the database: Connection refused",
    ],
)  # fmt: skip
def test_these_words_mean_that_nobody_answered(words):
    assert isinstance(calls.failure(["sbatch"], calls.Answer(1, "", words)), SlurmUnavailable)


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "sbatch: error: Batch job submission failed: Invalid qos specification",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "slurm_update error: Invalid user id",
        "scancel: error: Kill job error on job id 12: Access/permission denied",
        "words that no version had before",
        "",
    ],
)
def test_these_words_mean_no(words):
    assert isinstance(calls.failure(["sbatch"], calls.Answer(1, "", words)), SlurmRefused)


def test_variables_that_change_commands_silently_are_dropped():
    base = {
        "SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "a", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SBATCH_QOS": "x",
        "SCANCEL_STATE": "x", "SINFO_ALL": "1", "SLURM_JOB_ID": "7", "LC_ALL": "de_DE", "HOME": "/h",
    }  # fmt: skip
    assert calls.environment(base) == {
        "SLURM_CONF": "/etc/x", "HOME": "/h", "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["--help", "1 2", "1,2", "", "1;ls", "x"])
def test_no_id_becomes_an_option_or_several_ids(word):
    client = CliClient({"PATH": "/nonexistent"})
    for ask in (
        lambda: client.cancel([word]),
        lambda: client.jobs(ids=[word]),
        lambda: client.accounting([word]),
    ):
        with pytest.raises(SlurmRefused, match="is no job"):
            ask()


@pytest.mark.parametrize("word", ["--all", "a b", "a,b", "", "n[1-2]", "a\nb"])
def test_no_node_name_becomes_an_option_or_several_nodes(word):
    client = CliClient({"PATH": "/nonexistent"})
    with pytest.raises(SlurmRefused, match="is no node"):
        client.drain([word], "x")


def test_thousands_of_ids_go_in_parts(command, tmp_path):
    said = tmp_path / "said"
    client = CliClient(command("scancel", f"echo $# >>{said}"))
    client.cancel([str(number) for number in range(1, 1202)])
    assert said.read_text().split() == ["500", "500", "201"]
    assert client.calls == {"scancel": 3}


@pytest.mark.parametrize(
    ("said", "job"), [("12", "12"), ("12;cluster", "12"), ("welcome to this site\n12;c", "12")]
)
def test_the_job_id_is_what_stands_before_the_cluster(command, tmp_path, said, job):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    assert CliClient(command("sbatch", f"echo '{said}'")).submit(Submission("x", script, tmp_path)) == job


def test_a_submission_that_says_no_id_may_have_got_through(command, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(SlurmUnavailable, match="said no job id"):
        CliClient(command("sbatch", "exit 0")).submit(Submission("x", script, tmp_path))


@pytest.mark.parametrize(
    ("line", "argv"),
    [("#SBATCH --export=NIL", "--parsable"), ("#SBATCH --time=1", "--parsable --export=NONE")],
)
def test_the_job_exports_nothing_unless_its_script_says_what(command, tmp_path, line, argv):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    said = tmp_path / "said"
    CliClient(command("sbatch", f'echo "$@" >{said}; echo 1')).submit(Submission("x", script, tmp_path))
    assert said.read_text() == f"{argv} {script}\n"
