"""Commands that hang, die, are missing, or report a fault by their own messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from pytest_mlhpc.node import processes
from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerRefused,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.slurm import commands
from pytest_mlhpc.provision.slurm.commands import CliClient

NOWHERE = {"PATH": "/nonexistent"}


@pytest.fixture
def submission(tmp_path):
    def write(line=""):
        (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{line}\n")
        return JobSubmission("x", tmp_path / "job.sh", tmp_path)

    return write


def test_a_command_that_hangs_and_ignores_sigterm_is_ended_with_its_children(
    command, submission, tmp_path, limited_once_there_is
):
    hangs = ("trap '' TERM", "sleep 600 &", "echo half a word >&2", f"touch {tmp_path}/up", "wait")
    limited_once_there_is(tmp_path / "up")
    with pytest.raises(SchedulerUnavailable, match=r"no answer from sbatch within 0\.2 s: half a word"):
        # The fixture `nothing_left` sees to its child.
        CliClient(command("sbatch", *hangs), limit_s=0.2).submit(submission())


def test_a_child_in_another_session_that_holds_the_pipes_does_not_hold_us(
    command, tmp_path, limited_once_there_is, monkeypatch
):
    monkeypatch.setattr(processes, "DRAIN_S", 0.1)
    pid = tmp_path / "pid"
    script = f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"
    limited_once_there_is(pid)
    client = CliClient(command("sinfo", f"setsid bash -c '{script}' &", "wait"), limit_s=0.2)
    try:
        with pytest.raises(SchedulerUnavailable, match=r"no answer from sinfo within 0\.2 s"):
            client.version()
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    "asked", [{"ids": [*map(str, range(1, 2000))]}, {"names": [*map("n{}".format, range(2000))]}]
)
def test_more_jobs_than_a_command_line_holds_are_sought_among_our_own(command, tmp_path, asked):
    environ = command("squeue", f'echo "$@" >{tmp_path}/arguments')
    assert CliClient(environ).jobs(**asked) == []
    assert f"--user={os.getuid()}" in (tmp_path / "arguments").read_text().split()


#: What squeue of every version does where getpwuid(3) fails, as it does while directory services are away.
STRANGER = 'case "$*" in *--user*) echo "squeue: error: Invalid user: 0" >&2;; esac'


@pytest.mark.parametrize(
    "asked",
    [{"user": str(os.getuid())}, {"names": [f"n{number}" for number in range(2000)]}],
    ids=["user", "names"],
)
def test_a_user_whom_this_machine_does_not_know_is_not_one_without_jobs(command, asked):
    text = r"Invalid user: 0: do the directory services.*squeue"
    with pytest.raises(SchedulerUnavailable, match=text):
        CliClient(command("squeue", STRANGER)).jobs(**asked)


def test_listed_jobs_are_found_without_the_name_of_their_user(command, tmp_path):
    environ = command("squeue", STRANGER, f'echo "$@" >{tmp_path}/arguments')
    assert CliClient(environ).jobs(names=["mlhpc-a"], user=str(os.getuid())) == []
    arguments = (tmp_path / "arguments").read_text()
    assert "--name=mlhpc-a" in arguments.split()
    assert "--user" not in arguments


def test_a_missing_command_is_named():
    with pytest.raises(SchedulerUnusable, match=r"the command 'squeue' is not on PATH \(/nonexistent\)"):
        CliClient(NOWHERE).jobs(ids=["1"])


def test_a_command_of_another_machine_is_none_that_answers_later(command, tmp_path):
    environ = command("squeue")
    (tmp_path / "bin" / "squeue").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(SchedulerUnusable, match=r"cannot be started: .*Exec format error"):
        CliClient(environ).jobs(ids=["1"])


def test_a_command_that_waits_for_its_configuration_would_wait_for_ever(
    command, tmp_path, limited_once_there_is
):
    words = "s_p_parse_file: cannot stat file /x: No such file or directory, retrying in 1sec up to 60sec"
    limited_once_there_is(tmp_path / "up")
    with pytest.raises(SchedulerUnusable, match="cannot stat file /x"):
        CliClient(
            command("sinfo", f"echo '{words}' >&2", f"touch {tmp_path}/up", "exec sleep 600"), limit_s=0.2
        ).version()


def test_a_command_that_does_not_even_die_is_left_after_a_while(command, monkeypatch):
    class Undying(subprocess.Popen):
        def communicate(self, *args, **kwargs):
            raise subprocess.TimeoutExpired(self.args, 0)

        def wait(self, timeout=None):
            super().wait()  # for the test's own sake: nothing may be left
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Undying)
    with pytest.raises(SchedulerUnavailable, match="no answer from sinfo within"):
        CliClient(command("sinfo", "true")).version()


@pytest.mark.parametrize(
    ("name", "script", "call", "error", "text"),
    [
        pytest.param(
            "sinfo",
            "kill -9 $$",
            CliClient.version,
            SchedulerUnavailable,
            r"sinfo was killed by SIGKILL: it said nothing \(sinfo -V\)",
            id="it is killed",
        ),
        pytest.param(
            "scontrol",
            "echo 'scontrol: error: it is so' >&2; exit 3",
            lambda client: client.partition("cpu"),
            SchedulerRefused,
            r"scontrol: error: it is so \(exit code 3 of scontrol --oneliner show partition cpu\)",
            id="it refuses, and its command line is named but not its environment",
        ),
        pytest.param(
            "scontrol",
            "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
            CliClient.cluster,
            SchedulerUnavailable,
            ".*Unable to contact slurm controller.*",
            id="a cluster that does not answer is none without a name",
        ),
    ],
)
def test_a_command_that_fails_is_named(command, name, script, *, call, error, text):
    client = CliClient(command(name, script) | {"SECRET": "swordfish"})
    with pytest.raises(error) as caught:
        call(client)
    assert re.fullmatch(text, str(caught.value), re.DOTALL)


def test_words_of_a_command_become_one_printable_line_of_bounded_length():
    text = str(
        commands.command_error(
            ["sinfo", "-V"], commands.CommandResult(1, "", "one\n\x1b[31mtwo\n" + "x" * 100_000)
        )
    )
    assert text.startswith("one; ?[31mtwo; xxx")
    assert (len(text) < 2200, text.isprintable()) == (True, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SchedulerUnavailable, "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"),
        (SchedulerUnavailable, "slurm_load_jobs error: Socket timed out on send/recv operation"),
        (SchedulerUnavailable, "slurm_load_jobs error: Zero Bytes were transmitted or received"),
        (SchedulerUnavailable, "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:localhost:18001: Connection refused"),
        (SchedulerUnavailable, "sbatch: error: If munged is up, restart with --num-threads=10"),
        (SchedulerUnavailable, 'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory'),
        (SchedulerUnavailable, "slurm_load_partitions: Slurm backup controller in standby mode"),
        (SchedulerUnavailable, "sinfo: fatal: Could not establish a configuration source"),
        (SchedulerUnavailable, "sinfo: error: fetch_config: failed to fetch remote configs: Unable to contact slurm controller (connect failure)\nsinfo: fatal: Could not establish a configuration source"),
        (SchedulerUnusable, "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: error: _establish_config_source: failed to fetch config\nsbatch: fatal: Could not establish a configuration source"),
        (SchedulerUnusable, 'sinfo: error: s_p_parse_file: unable to read "/etc/slurm/slurm.conf": Permission denied\nsinfo: fatal: Unable to process configuration file'),
        (SchedulerUnavailable, "Slurm accounting storage is disabled"),
        (SchedulerUnavailable, "sacctmgr: error: Problem talking to the database: Connection refused"),
        (SchedulerRefused, "sbatch: error: Batch job submission failed: Invalid partition name specified"),
        (SchedulerRefused, "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"),
        (SchedulerRefused, "sbatch: error: Batch job submission failed: Invalid qos specification"),
        (SchedulerRefused, "sbatch: error: Batch job submission failed: Requested node configuration is not available"),
        (SchedulerRefused, "slurm_update error: Invalid user id"),
        (SchedulerRefused, "scancel: error: Kill job error on job id 12: Access/permission denied"),
        (SchedulerRefused, "words that no version had before"),
        (SchedulerRefused, ""),
    ],
)  # fmt: skip
def test_by_its_words_a_failure_is_no_answer_or_a_refusal(error, words):
    assert type(commands.command_error(["sbatch"], commands.CommandResult(1, "", words))) is error


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Invalid account or account/partition combination specified", "; check `account` under `slurm:` of the partition in"),
        ("Invalid qos specification", "; check `qos` under `slurm:` of the partition in"),
        ("Requested node configuration is not available", " (exit code 1 of sbatch)"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_key_of_systems_yaml_to_check(words, advice):
    error = commands.command_error(
        ["sbatch"], commands.CommandResult(1, "", f"sbatch: error: Batch job submission failed: {words}")
    )
    assert f"{words}{advice}" in str(error)


def test_variables_that_change_commands_silently_are_dropped():
    base = {
        "SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "a", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SBATCH_QOS": "x",
        "SCANCEL_STATE": "x", "SINFO_ALL": "1", "SLURM_JOB_ID": "7", "LC_ALL": "de_DE", "HOME": "/h",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/etc/x", "HOME": "/h", "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    assert commands.command_environment(base) == kept


@pytest.mark.parametrize("word", ["--help", "1 2", "1,2", "", "1;ls", "x"])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client, word: client.cancel([word]), id="cancel"),
        pytest.param(lambda client, word: client.jobs(ids=[word]), id="jobs"),
        pytest.param(lambda client, word: client.accounting([word]), id="accounting"),
    ],
)
def test_no_id_becomes_an_option_or_several_ids(ask, word):
    with pytest.raises(SchedulerRefused, match="is no job"):
        ask(CliClient(NOWHERE), word)


@pytest.mark.parametrize("word", ["--all", "a b", "a,b", "", "n[1-2]", "a\nb"])
def test_no_node_name_becomes_an_option_or_several_nodes(word):
    with pytest.raises(SchedulerRefused, match="is no node"):
        CliClient(NOWHERE).drain([word], "x")


def test_thousands_of_ids_go_in_parts(command, tmp_path):
    client = CliClient(command("scancel", f"echo $# >>{tmp_path}/numbers"))
    client.cancel([str(number) for number in range(1, 1202)])
    assert (tmp_path / "numbers").read_text().split() == ["500", "500", "201"]
    assert client.calls == {"scancel": 3}


@pytest.mark.parametrize(
    ("printed", "job"), [("12", "12"), ("12;cluster", "12"), ("welcome to this site\n12;c", "12")]
)
def test_the_job_id_is_what_stands_before_the_cluster(command, submission, printed, job):
    assert CliClient(command("sbatch", f"echo '{printed}'")).submit(submission()) == job


def test_a_submission_without_an_id_may_have_got_through(command, submission):
    with pytest.raises(SchedulerUnavailable, match="no job id in"):
        CliClient(command("sbatch", "exit 0")).submit(submission())


@pytest.mark.parametrize(
    ("line", "argv"),
    [("#SBATCH --export=NIL", "--parsable"), ("#SBATCH --time=1", "--parsable --export=NONE")],
)
def test_the_job_exports_nothing_unless_its_script_says_what(command, submission, tmp_path, line, argv):
    written = submission(line)
    CliClient(command("sbatch", f'echo "$@" >{tmp_path}/arguments; echo 1')).submit(written)
    assert (tmp_path / "arguments").read_text() == f"{argv} {written.script}\n"


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("Configuration data as of 2026\nClusterName             = archer2\nComm = y\n", "archer2"),
        ("", ""),
        ("ClusterName             = (null)\n", ""),
        ("MyClusterName = x\n", ""),
    ],
)
def test_a_cluster_has_the_name_of_its_configuration_or_an_empty_one(command, printed, name):
    environ = command("scontrol", '[ "$*" = "show config" ] || exit 3', f"cat <<END\n{printed}END")
    assert CliClient(environ).cluster() == name
