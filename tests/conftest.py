"""Shared by all tests: a state directory of their own, and the proof that nothing is left."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from house import House, read_house
from installed_wheel import installed, stranger  # noqa: F401 - fixtures
from polling import LIMIT_S, poll
from worker_queues import arrange

from pytest_mlhpc.node.files import MOUNTS, file_system
from pytest_mlhpc.node.processes import stat_fields

# Wall time is no property of what is tested, and tests run on busy machines. The same examples each time, but by `make fuzz`.
_ANY_PACE = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
}
hypothesis.settings.register_profile("same", max_examples=100, derandomize=True, database=None, **_ANY_PACE)
hypothesis.settings.register_profile("fuzz", max_examples=2000, print_blob=True, **_ANY_PACE)
hypothesis.settings.load_profile("same")

# A file system in memory is never cold, and many systems have one at /tmp: tests that measure storage need a disk.
if file_system(Path(tempfile.gettempdir()), MOUNTS) in {"tmpfs", "ramfs"}:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")

# Programs inherit what is ignored, and whoever starts the tests in the background has Ctrl-C and hang-ups ignored.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_report_header() -> list[str]:
    """Say which Kubernetes the tests talk to, if it is none of ci/kubernetes."""
    other = os.environ.get("MLHPC_TEST_KUBECONFIG")
    if not other:
        return []
    from kubernetes_service import Kubernetes

    cluster = Kubernetes(Path(other))
    return [f"kubernetes: {cluster.version()} at {cluster.server()}, of MLHPC_TEST_KUBECONFIG={other}"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector pass over what thousands of collected tests hold, while they are made and ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after -m has chosen, and fixtures of modules have been grouped
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest where there are several workers."""
    if (worker := getattr(config, "workerinput", None)) and worker["workercount"] > 1:
        items[:] = arrange(items, worker["workercount"])


#: What has been killed takes a moment to end; on a machine that is busy, long.
_ENDED_WITHIN_S = 120.0


@pytest.fixture(scope="session", autouse=True)
def lean_inner_sessions() -> Iterator[None]:
    """Start every pytest that a test starts with our plug-in alone: starting the others is most of what it costs.

    Tests that are about other plug-ins remove these variables, or name the plug-in with ``-p``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_PLUGINS", "pytest_mlhpc.plugin")
        yield


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every test away from the user's records, and away from variables of a surrounding CI."""
    state = tmp_path / "mlhpc-state"
    monkeypatch.setenv("MLHPC_STATE", str(state))
    # Tests side by side must not wait for each other.
    monkeypatch.setenv("MLHPC_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.delenv("CI", raising=False)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)  # a pytest within a worker of ours is none itself
    monkeypatch.setenv("MLHPC_TEST", f"{os.getpid()}-{tmp_path.name}")
    return state


#: Flag of a thread of the kernel (include/linux/sched.h of Linux: PF_KTHREAD), in the sixth number after the state.
_KERNEL_THREAD = 0x00200000


def environment_of(pid: int) -> bytes:
    """Return the environment of a process as /proc has it; nothing of a thread of the kernel, of a zombie, of none.

    In the middle of execve(2) a process has its new memory and no environment in it yet, and Popen returns before that is
    over. It is read again: Linux says where a program's code begins (proc(5): field 26, startcode) once all is there.
    """
    while True:
        fields = stat_fields(pid)
        if len(fields) < 24 or fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
            return b""
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if environment or fields[23] != "0":
            return environment
        time.sleep(0.001)


def processes_of_test(cookie: str) -> list[str]:
    """Return the command lines of live processes whose environment holds this test's cookie."""
    found = []
    wanted = f"\0MLHPC_TEST={cookie}\0".encode()
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of tests do this, and Paths cost more than the reading
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if wanted not in b"\0" + environment_of(int(name)):
                continue
            found.append(
                Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
    return found


@pytest.fixture
def processes(state_dir: Path) -> Callable[[], list[str]]:
    """Return what lists the live processes that the test has started."""
    return lambda: processes_of_test(os.environ["MLHPC_TEST"])


@pytest.fixture
def limited_once_there_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let the time limit of a program begin when it has made a file: how long it takes to start is no matter of the test."""

    def until(path: Path) -> None:
        class Awaited(subprocess.Popen[bytes]):
            def communicate(self, *args: Any, **kwargs: Any) -> Any:
                poll(path.exists)
                return super().communicate(*args, **kwargs)

            def wait(self, timeout: float | None = None) -> int:
                """Give a process that was killed the time to go that a busy machine may need."""
                return super().wait(timeout and LIMIT_S)

        monkeypatch.setattr(subprocess, "Popen", Awaited)

    return until


#: What Python says of itself where a program or a copy of it is begun (its table of audit events).
_BEGINNINGS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})


class Beginnings:
    """Counts what this interpreter has started: a test that starts nothing leaves nothing, and /proc is slow to read."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _arguments: object) -> None:
        if event in _BEGINNINGS:
            self.count += 1


@pytest.fixture(scope="session")
def house() -> House:
    """The figures of the checkout, whose reading takes seconds."""
    return read_house()


@pytest.fixture(scope="session")
def beginnings() -> Beginnings:
    return Beginnings()


@pytest.fixture(autouse=True)
def nothing_left(state_dir: Path, tmp_path: Path, beginnings: Beginnings) -> Iterator[None]:
    """Fail a test after which a process that it started lives on, or a ledger has an open entry."""
    before = beginnings.count
    yield
    if beginnings.count != before:
        cookie = f"{os.getpid()}-{tmp_path.name}"
        deadline = time.monotonic() + _ENDED_WITHIN_S
        left = processes_of_test(cookie)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = processes_of_test(cookie)
        assert not left, f"still running after the test: {left}"
    ledgers = list(tmp_path.glob("*/ledger/*.jsonl"))
    assert not ledgers, f"the ledger says that something was submitted and has not ended: {ledgers}"
