"""What `ci/slurm` and `ci/kubernetes` do alike: whom they refuse, where daemons listen, what a killed `up` leaves."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from services import ROOT, command, killed_up, marked_processes, wait_until

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(
    ("script", "folder", "words"),
    [
        ("slurm", "/tmp/a b", "cannot quote"),
        ("slurm", "/tmp/" + "x" * 90, "too long"),
        ("kubernetes", "/tmp/" + "x" * 100, "is too long for a socket"),
        ("kubernetes", "/tmp/mlhpc-a b", "' ' would be misread"),
    ],
)
def test_a_directory_that_cannot_work_is_refused(script: str, folder: str, words: str) -> None:
    done = command(script, "up", "--directory", folder)

    assert done.returncode == 1
    assert words in done.stderr
    assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("script", ["slurm", "kubernetes"])
def test_without_root_it_says_so(script: str) -> None:
    words = ["/usr/bin/python3", ROOT / "ci" / script, "up", "--directory", "/tmp/mlhpc-none"]
    done = subprocess.run(
        ["runuser", "-u", "nobody", "--", *words],
        capture_output=True, text=True, timeout=600, check=False, cwd="/",
    )  # fmt: skip

    assert done.returncode == 4, done.stderr
    assert "run this as root" in done.stderr


@pytest.mark.parametrize(("script", "least"), [("slurm", 2), ("kubernetes", 5)])
def test_daemons_listen_on_loopback_only(request: pytest.FixtureRequest, script: str, least: int) -> None:
    directory = request.getfixturevalue(script).directory
    if directory is None:
        pytest.skip("MLHPC_TEST_KUBECONFIG names somebody else's cluster")
    pids = [entry.read_text().split()[0] for entry in (directory / "pids").glob("[!.]*")]
    sockets = set()
    for entry in (entry for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as connections are
            sockets.add(str(entry.readlink()))
    listening = [
        words[1]
        for name in ("tcp", "tcp6")
        for words in map(str.split, Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:])
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets
    ]

    assert len(listening) >= least
    assert [address for address in listening if not address.partition(":")[0].endswith("00007F")] == []


@pytest.mark.parametrize(
    ("script", "begun", "option"),
    [
        ("slurm", "watcher", "--accounting=filetxt"),
        ("slurm", "slurmctld", "--accounting=filetxt"),
        ("kubernetes", "etcd", "--api-only"),
    ],
)
def test_what_an_up_leaves_that_is_killed_together_with_its_user_goes_by_itself(
    tmp_path_factory: pytest.TempPathFactory, script: str, begun: str, option: str
) -> None:
    directory = tmp_path_factory.mktemp("c")
    with subprocess.Popen(["sleep", "600"]) as user:
        try:
            with killed_up(script, directory, begun, option, "--for", str(user.pid)):
                user.kill()
                user.wait()
                assert wait_until(lambda: not directory.exists())
                assert wait_until(
                    lambda: not marked_processes(f"MLHPC_{script.upper()}_DIRECTORY", directory)
                )
        finally:
            user.kill()  # else a test that is skipped or fails waits for its end
