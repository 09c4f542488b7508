"""Other people on the same machine: what a member of the group may do that shares our state directory, and what not."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from inner_sessions import COMMAND, Suite
from running_suites import wait_for

import pytest_mlhpc

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users"),
]

US, OTHER, GROUP = 65501, 65502, 65500

#: Holds this machine, and asks it for a program once the other user has had his turn.
HOLDING = """
import pathlib, time
@nodes()
def test_it(allocation):
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    allocation.run(["true"])
"""

#: Puts a file that holds a command in the place of each that the session obeys, as far as he can: argv are the folder of
#: the state directory, the name of that file, and what his command makes.
ATTACK = """
import ctypes, json, os, pathlib, sys
state, path, made = map(pathlib.Path, sys.argv[1:])
request = {"kind": "run", "id": "1", "argv": ["touch", str(made)], "nodes": [os.uname().nodename], "ranks_per_node": 1,
           "cores_per_rank": 1, "timeout_s": 60.0, "env": {}, "cwd": None}
try:
    path.write_text(json.dumps(request) + "\\n")
except PermissionError:
    path = state / "mine" / path.relative_to(state / "runs")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(request) + "\\n")
    for folder in (path, *path.parents):
        if folder != state and folder.is_relative_to(state):
            folder.chmod(0o777)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: nobody sees a moment without the folder
    assert ctypes.CDLL(None).renameat2(here, bytes(state / "mine"), here, bytes(state / "runs"), exchange) == 0
"""


def as_user(user, *argv, **options):
    return subprocess.Popen(argv, user=user, group=GROUP, extra_groups=[], umask=0o002, text=True, **options)


@pytest.fixture(scope="module")
def python():
    """Return an interpreter with all our packages that another user may run: root's own may lie in a closed folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(pytest_mlhpc.__file__).parents[1]), *filter(None, sys.path)]),
        )
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
            with contextlib.suppress(OSError), as_user(US, path, "-c", "import pytest, yaml") as tried:
                if tried.wait() == 0:
                    yield path
                    return
    pytest.skip("there is no interpreter that another user may run")


@pytest.fixture
def shared(monkeypatch):
    """Return a suite whose state directory belongs to the other user, and to the group of both."""
    folder = Path(tempfile.mkdtemp(prefix="mlhpc-test-", dir="/tmp"))
    folder.chmod(0o777)
    monkeypatch.setenv("MLHPC_STATE", str(folder / "state"))
    monkeypatch.setenv("MLHPC_LOCK_DIR", str(folder / "locks"))
    monkeypatch.setenv("HOME", str(folder))
    suite = Suite(folder / "suite", folder / "state")
    suite.write(HOLDING)
    for path, owner in ((suite.folder, 0), (suite.state, OTHER)):
        path.mkdir(exist_ok=True)
        os.chown(path, owner, GROUP)
        path.chmod(0o2777 if path == suite.folder else 0o2775)
    yield suite
    shutil.rmtree(folder)


@pytest.fixture
def held(shared, python, request):
    """Start a session that holds this machine; return the suite, the session, and the file of its requests."""
    argv = (*COMMAND[:2], python, *COMMAND[3:], "-rA", "-omlhpc_infra_exit_code=75", "--system=local")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with as_user(request.param, *argv, cwd=shared.folder, **pipes) as session:
        try:
            wait_for(lambda: (shared.folder / "begun").exists() or session.poll() is not None)
            found = list(shared.state.glob("runs/*/*/*/requests.jsonl"))
            assert found, session.communicate()[0]
            yield shared, session, found[0]
        finally:
            session.kill()


def said(shared, session):
    """Let the session end; return its exit code and all that it printed."""
    (shared.folder / "go").touch()
    text, _ = session.communicate()
    return session.returncode, text


SESSIONS = pytest.mark.parametrize("held", [0, US], indirect=True, ids=["root's session", "a user's session"])


@SESSIONS
def test_in_a_folder_that_a_group_shares_a_session_keeps_to_itself_what_it_obeys(held):
    shared, session, requests = held
    code, text = said(shared, session)
    assert (code, shared.verdicts()) == (0, ["unjudged"]), text
    session_folder = requests.parents[2]
    modes = {path: path.stat().st_mode for path in (session_folder, *session_folder.rglob("*"))}
    assert {oct(mode & 0o7777) for path, mode in modes.items() if path.is_dir()} == {"0o700"}
    assert {oct(mode & 0o7777) for path, mode in modes.items() if path.is_file()} == {"0o600"}
    assert {path.stat().st_mode & 0o7777 for path in shared.state.glob("payload*")} == {0o700}
    assert (shared.state / "records").stat().st_mode & 0o7777 == 0o2775


@SESSIONS
def test_what_another_member_puts_in_the_place_of_a_request_is_not_obeyed(held, python):
    shared, session, requests = held
    made = shared.folder / "made"
    with as_user(OTHER, python, "-c", ATTACK, str(shared.state), str(requests), str(made)) as attack:
        assert attack.wait() == 0
    code, text = said(shared, session)
    assert code == 75, text
    assert (
        "unsafe_directory: " in text
    )  # from the session as it writes, or from the batch as it reads: who looks first
    assert f" {requests.parent}: it belongs to user {OTHER}" in text
    assert not made.exists()


def test_two_members_have_payloads_of_their_own(shared, python):
    build = "from pytest_mlhpc.provision import payload; import pathlib, sys; print(payload.build(pathlib.Path(sys.argv[1])).path)"
    paths = []
    for user in (US, OTHER):
        with as_user(user, python, "-c", build, str(shared.state), stdout=subprocess.PIPE) as built:
            paths.append(Path(built.communicate()[0].strip()))
    assert [path.parent.name for path in paths] == ["payload", f"payload-{OTHER}"]
    assert [path.stat().st_uid for path in paths] == [US, OTHER]
