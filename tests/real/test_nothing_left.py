"""Whatever becomes of a test, of its pytest, or of the start of its cluster: no process, cgroup or mount of it is left."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services import LIMIT_S, ROOT, marked_processes, step_daemons
from test_ci_kubernetes import rest_of

pytestmark = pytest.mark.servers

MARKS = ("MLHPC_SLURM_DIRECTORY", "MLHPC_KUBERNETES_DIRECTORY", "MLHPC_SERVICE_DIRECTORY")
KILLED = 128 + 9


def left_of(directory: Path) -> list[str]:
    """Return what there is of a cluster on this machine."""
    found = [line for mark in MARKS for line in marked_processes(mark, directory)]
    found += [str(pid) for pid in step_daemons(directory)]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return found + [line for line in mounts if str(directory) in line]


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("test_fails_with_a_busy_slurm_that_was_started_for_good", 1),
        ("test_is_killed_with_a_busy_slurm_that_was_started_for_good", KILLED),
        ("test_is_killed_while_nobody_has_the_folder_of_its_slurm", KILLED),
        ("test_is_killed_with_a_busy_gridengine_that_was_started_for_good", KILLED),
        ("test_fails_as_its_slurm_does_not_come_up", 1),
        ("test_fails_as_its_kubernetes_does_not_come_up", 1),
    ],
)
def test_a_cluster_is_gone_after_a_test_that(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, code: int
) -> None:
    needed = next(name for name in ("kubernetes", "gridengine", "slurm") if name in test)
    request.getfixturevalue(needed)  # skips where there is none
    monkeypatch.setenv("MLHPC_TEST_CLUSTERS", str(tmp_path / "clusters"))
    monkeypatch.delenv("MLHPC_CLUSTER_ENDS_WITH")

    # What the supervisor had to kill, nobody else would have ended.
    done = subprocess.run(
        [
            *(sys.executable, "tests/supervise.py", "--grace", str(LIMIT_S), "--", sys.executable, "-m", "pytest"),
            *("-q", "-p", "no:cacheprovider", f"tests/real/fails_on_purpose.py::{test}", "--basetemp", tmp_path / "t"),
        ],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == code, done.stdout + done.stderr
    assert "left running" not in done.stdout, done.stdout
    (directory,) = map(Path, (tmp_path / "clusters").read_text(encoding="utf-8").split())
    if needed != "kubernetes":
        shutil.rmtree(f"{directory}-gone", ignore_errors=True)  # one test renames it
        assert left_of(directory) == []
        assert not directory.exists()
    else:
        assert re.search("cannot start kubelet|kubelet ended", done.stdout), done.stdout
        assert rest_of(directory) == []
