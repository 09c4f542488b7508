"""The real Slurm behind a real sshd: suites as of a laptop, whose jobs are another user's."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, check_started, write_suite
from running_suites import wait_for
from sshd_service import LOGIN, login_node

#: Words of shell that say that the job of a test has begun, and wait.
GATE = "touch {gate}/begun-{name}; while [ ! -e {gate}/go ]; do sleep 0.2; done; echo rate: 4"


@pytest.fixture
def login(request, slurm, tmp_path, monkeypatch):
    """A login node of the shared cluster, whose scripts print something; Slurm's commands on this machine lead nowhere."""
    programs = Path(shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")).parent
    variables = {
        "SLURM_CONF": slurm.environment["SLURM_CONF"], "SBATCH_WCKEY": os.environ["MLHPC_TEST"],
        "PATH": f"{{folder}}/programs:{programs}:/usr/bin:/bin", "HOME": "{folder}/home",
    }  # fmt: skip
    for node in login_node(request.config, tmp_path, variables):
        for name, value in node.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
        (node.directory / "home").mkdir()
        login_script(node, "echo 'Welcome to the cluster'")
        (node.directory / "programs").mkdir()
        gate = node.directory / "gate"
        gate.mkdir()
        gate.chmod(0o777)
        yield node


@pytest.fixture
def far(make_suite, slurm, login):
    """A suite whose system is reached by ssh."""
    suite = make_suite(slurm)
    write_systems(suite, login)
    return suite


def write_systems(suite, login, destination=LOGIN, shared="", **slurm):
    """Let the system of *suite* be reached by ssh."""
    suite.partition(python="python3", shared_directory=shared or str(login.shared), **slurm)
    path = suite.folder / "systems.yaml"
    content = json.loads(path.read_text())
    content["systems"]["cluster"]["transport"] = {"ssh": destination}
    path.write_text(json.dumps(content))


def jobs(far, login):
    """Return all jobs that were submitted by way of *login*."""
    return [job for job in far.slurm.jobs() if job.folder.startswith(f"{login.shared}/")]


def begin(far, login, *options):
    """Start a session, and wait until the job of its one test runs."""
    gate = login.directory / "gate"
    far.tests(
        f"@script({GATE.format(gate=gate, name='one')!r})\ndef test_one(run): assert run['rate'].value == 4\n"
    )
    session = far.start(*options)
    session.until("begin", (gate / "begun-one").exists)
    return session


def go(login):
    """Let the job end."""
    (login.directory / "gate" / "go").touch()


def test_a_program_runs_as_the_user_of_the_login_node_and_leaves_nothing_there(far, login):
    far.tests(
        """
@script("id -un; echo rate: 4; echo a warning >&2")
def test_it(run):
    assert run["rate"].value == 4
    assert run.output.splitlines()[0] == "mlhpc-ssh"
    assert run.errors == "a warning\\n"
"""
    )
    far.run().expect(0, passed=1)
    (job,) = jobs(far, login)
    assert far.records()[0]["job_id"] == job.id
    assert login.left() == ["runs"]
    assert far.ledgers() == []
    wait_for(lambda: not login.processes())


def test_the_command_of_the_page_shows_what_the_login_node_has(login):
    page = (Path(__file__).parents[3] / "docs" / "ssh.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    words = block.replace("ada@login.example.org", LOGIN)
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
    found = [Path(line).name for line in done.stdout.splitlines() if line.startswith("/")]
    assert found == ["python3", "sbatch", "squeue", "scontrol", "scancel"]


def test_files_artifacts_builds_and_ranks_are_the_same_as_on_this_machine(far, login):
    write_suite(far.folder, nodes=2, ranks=2)
    far.run("test_files.py", "--mlhpc-pack").expect(
        1, *FAILS, *ERRORS, passed=TESTS, failed=len(FAILS), error=WITH_ERRORS
    )
    check_started(far.records())
    assert {name.partition("/")[0] for name in login.left()} == {"runs", "builds"}


def test_a_dropped_connection_is_no_dropped_job(far, login):
    session = begin(far, login)
    session.until("the begin of the job here", lambda: list(far.lines("up")))
    keys = login.directory / "authorized_keys"
    content = keys.read_text()
    keys.write_text("")
    login.drop()
    session.until("trouble", lambda: "it does not let you in" in session.text)
    go(login)
    keys.write_text(content)
    session.end().expect(0, passed=1)
    assert len(jobs(far, login)) == 1
    assert login.left() == ["runs"]


def test_a_job_whose_submission_got_no_answer_is_found_again(far, login):
    broken = login.directory / "programs" / "sbatch"
    broken.write_text(
        f'#!/bin/sh\n/usr/bin/sbatch "$@" && [ ! -e {login.directory}/gate/once ] && touch {login.directory}/gate/once && kill -9 $PPID\n'
    )
    broken.chmod(0o755)
    far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    far.run().expect(0, passed=1)
    assert len(jobs(far, login)) == 1


def test_the_next_session_goes_on_where_a_killed_one_stopped(far, login):
    session = begin(far, login)
    session.until(
        "the id", lambda: jobs(far, login)[0].id in "".join(path.read_text() for path in far.ledgers())
    )
    session.kill()
    wait_for(lambda: not login.processes())  # the shared connection, too
    go(login)
    far.run().expect(0, "going on with 1 run of an earlier session", passed=1)
    assert len(jobs(far, login)) == 1
    assert login.left() == ["runs"]
    assert far.ledgers() == []


def test_what_nobody_goes_on_with_is_ended_by_reap(far, login):
    session = begin(far, login)
    (job,) = jobs(far, login)
    session.kill()
    assert f"cancelled job {job.id}" in far.reap()
    assert [one.state for one in jobs(far, login)] == ["CANCELLED"]
    assert login.left() == ["runs"]
    assert far.ledgers() == []


def test_ctrl_c_cancels_the_job_and_closes_the_connection(far, login):
    session = begin(far, login)
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    assert [one.state for one in jobs(far, login)] == ["CANCELLED"]
    assert login.left() == ["runs"]
    wait_for(lambda: not login.processes())


def login_script(login, text):
    """Let the shell of each login read this first: bash does where sshd starts it."""
    (login.directory / "home" / ".bashrc").write_text(text)


def empty_known_hosts(login):
    (login.directory / "known_hosts").write_text("")


def another_host_key(login):
    (login.directory / "known_hosts").write_text(
        f"[127.0.0.1]:{login.service.environment['MLHPC_TEST_SSHD_PORT']} {(login.directory / 'user_key.pub').read_text()}"
    )


def another_key(login):
    (login.directory / "authorized_keys").write_text("")


def no_python(login):
    login_script(login, "PATH=/nonexistent\n")


def no_slurm(login):
    python = login.directory / "programs" / "python3"
    python.symlink_to(shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin"))
    login_script(login, f"PATH={python.parent}\n")


def too_talkative(login):
    login_script(login, "/usr/bin/head -c 1000000 /dev/zero | /usr/bin/tr '\\0' x\n")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (empty_known_hosts, f"its host key is not known, so nothing was sent: compare it with what the site publishes, and accept it once by `ssh {LOGIN} true`"),
        (another_host_key, f"its host key is not the one in known_hosts: ask the site; if it was replaced, run `ssh-keygen -R {LOGIN}`"),
        (another_key, "it does not let you in: add the key to the agent (ssh-add)"),
        (no_python, "has no python3 on the PATH of a shell that is not interactive; add it there"),
        (no_slurm, "the command 'sinfo' is not on PATH"),
        (too_talkative, "its login scripts print more than 65536 bytes; let them print only where the shell is interactive"),
    ],
)  # fmt: skip
def test_a_login_node_that_cannot_be_used_is_named_before_anything_is_submitted(far, login, fault, text):
    fault(login)
    far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    result = far.run()
    result.expect(4, text, "nothing was submitted")
    assert "Traceback" not in result.text
    assert (jobs(far, login), login.left(), far.ledgers()) == ([], [], [])


def test_a_host_that_no_name_server_knows_is_named(far, login):
    write_systems(far, login, destination="user@no-such-host.invalid")
    far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    far.run().expect(
        4, "user@no-such-host.invalid: there is no host of this name: correct `transport: {ssh: ...}`"
    )


def test_a_login_node_that_takes_no_connection_ends_the_session_before_anything_is_submitted(far, login):
    with socket.socket() as closed:  # bound and not listening: connections to it are refused
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        write_systems(far, login, destination=f"ssh://user@127.0.0.1:{port}")
        far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
        result = far.run("-o", "mlhpc_infra_exit_code=75")
    result.expect(
        75, "no connection in 4 attempts", f"port {port}: Connection refused", "nothing was submitted"
    )
    assert "Traceback" not in result.text
    assert far.ledgers() == []


def test_a_folder_that_cannot_be_written_there_is_named(far, login):
    shared = login.directory / "theirs"
    shared.mkdir()
    write_systems(far, login, shared=str(shared))
    far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    far.run().expect(
        1, f"cannot write: {LOGIN}: {shared}/runs: Permission denied", "another shared_directory", error=1
    )


def test_a_full_disk_there_is_named(far, login):
    shared = login.directory / "small"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0777", "tmpfs", shared], check=True)
    try:
        write_systems(far, login, shared=str(shared))
        far.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
        far.run().expect(1, "disk_full", "No space left on device", f"than {shared}", error=1)
    finally:
        subprocess.run(["umount", shared], check=True)
