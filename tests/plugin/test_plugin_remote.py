"""Controller and workers of pytest-xdist: what travels between them, and what each does with it, in one process."""

import os
import tempfile
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_mlhpc.errors import MlhpcError, ProtocolError, UsageError
from pytest_mlhpc.jobs.job import Outcome
from pytest_mlhpc.session import workers
from pytest_mlhpc.session.bench import BENCH, Bench
from pytest_mlhpc.session.workers import INPUT, ControllerHooks, activate_worker
from pytest_mlhpc.store.record import Failure

OUTCOME = Outcome("test_a.py::test_a", "test_a.py::test_a", failure=Failure("worker_exit", "3"))
FAILURE = Failure("time_limit", "the nodes were held for 5 s")
#: After so many seconds a test hangs.
HANG_S = 300.0


class Session:
    """Stands for the session: answers at once, but for a test whose outcome is waited for."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.settings = SimpleNamespace(preset="")
        self.deselected: list[str] = []
        self.announcement = ["at most 3 node-hours"]
        self.stopped: list[str] = []
        self.asked, self.ended = threading.Event(), threading.Event()
        self.refusal: MlhpcError | None = None

    def wait(self, node_id):
        if node_id == "unknown":
            raise UsageError("unknown: nothing was submitted for this test")
        if node_id == "slow":
            self.asked.set()
            self.ended.wait()
        return OUTCOME

    def lost(self, node_id):
        return FAILURE if node_id == "lost" else None

    def declare(self, specs):
        if self.refusal:
            raise self.refusal
        self.jobs = dict.fromkeys(specs, SimpleNamespace(spec=SimpleNamespace(is_training=False)))

    def stop(self, reason):
        self.stopped.append(reason)


@pytest.fixture
def session():
    session = Session()
    yield session
    session.ended.set()


@pytest.fixture
def server(session):
    server = workers.ResultServer(session)
    yield server
    server.close()


@pytest.fixture
def worker(server):
    return workers.WorkerSource(*server.address)


#: What a controller finds out for its workers; what it is does not matter here.
FOUND_OUT = {
    "settings": "settings", "targets": ("target",), "workloads": {"w": "workload"}, "launchers": {"l": "launcher"},
    "models": {"m": "model"},
}  # fmt: skip


def bench(**changes) -> Bench:
    return Bench(**{**FOUND_OUT, **changes})


# --- requests and answers


def test_a_worker_raises_what_the_controller_refuses(worker):
    with pytest.raises(UsageError, match="unknown: nothing was submitted"):
        worker.wait("unknown")


def test_a_worker_learns_whether_its_nodes_are_lost(worker):
    assert (worker.lost("lost"), worker.lost("another")) == (FAILURE, None)


def test_a_worker_that_waits_holds_up_no_other(worker, session):
    outcomes = []
    waiting = threading.Thread(target=lambda: outcomes.append(worker.wait("slow")))
    waiting.start()
    session.asked.wait()
    assert worker.wait("test_a.py::test_a") == OUTCOME
    assert outcomes == []
    session.ended.set()
    waiting.join()
    assert outcomes == [OUTCOME]


def test_what_the_first_worker_declares_counts(worker, server, session):
    worker.declare([], bench(deselected=["test_b: too large"]))
    worker.declare(["other"], bench())
    assert server.specs == ()
    assert session.deselected == ["test_b: too large"]


def test_the_end_of_a_test_is_not_sent(worker, server):
    server.close()
    worker.test_over("test_a.py::test_a")


def test_a_worker_whose_controller_is_gone_has_a_broken_channel(worker, server):
    server.close()
    server.close()
    for ask in (worker.wait, worker.lost):
        with pytest.raises(ProtocolError, match="the controller does not answer"):
            ask("test_a.py::test_a")


def test_strangers_and_workers_that_die_harm_nobody(worker, server):
    path, key = server.address
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        Client(path, "AF_UNIX", authkey=b"another key")
    Client(path, "AF_UNIX", authkey=key).close()  # it says nothing
    with Client(path, "AF_UNIX", authkey=key) as connection:
        connection.send(("wait", "test_a.py::test_a"))  # it does not read the answer
    assert worker.wait("test_a.py::test_a") == OUTCOME


# --- the socket


def test_a_server_is_closed_though_its_thread_is_between_two_connections(session, monkeypatch):
    accept, accepted = workers.Listener.accept, threading.Event()

    def accept_and_pause(listener):
        connection = accept(listener)
        accepted.set()
        while not server._closing:
            threading.Event().wait(0.01)
        return connection

    monkeypatch.setattr(workers.Listener, "accept", accept_and_pause)
    server = workers.ResultServer(session)
    with Client(server.address[0], "AF_UNIX", authkey=server.address[1]):
        accepted.wait()
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(HANG_S)
    assert not closing.is_alive()


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    """A directory for temporary files whose path, of characters of two bytes each, no Unix socket can have."""
    directory = tmp_path / ("ü" * 50)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_long_tmpdir_is_left_for_one_that_a_socket_can_lie_in(long_tmpdir):
    server = workers.ResultServer(None)
    path = Path(server.address[0])
    try:
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path)) < workers.SUN_PATH
    finally:
        server.close()
    assert not path.parent.exists()


def test_a_socket_that_cannot_be_made_leaves_no_folder_behind(long_tmpdir, monkeypatch):
    monkeypatch.setattr(workers, "SUN_PATH", 10_000)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        workers.ResultServer(None)
    assert list(long_tmpdir.iterdir()) == []


# --- the hooks of both sides


@pytest.fixture
def node():
    """A worker as xdist shows it to its controller, whose terminal writes to ``lines``."""
    lines = []
    reporter = SimpleNamespace(write_line=lines.append)
    manager = SimpleNamespace(getplugin=lambda name: reporter)
    return SimpleNamespace(workerinput={}, config=SimpleNamespace(pluginmanager=manager), lines=lines)


@pytest.fixture
def controller(session):
    hooks = ControllerHooks(bench(session=session), maxfail=2)
    yield hooks
    hooks.pytest_unconfigure()


def activated(workerinput) -> Bench | None:
    config = SimpleNamespace(workerinput=workerinput, stash=pytest.Stash())
    activate_worker(config)
    return config.stash.get(BENCH, None)


def test_a_worker_takes_over_what_its_controller_found_out_and_asks_it(controller, node):
    controller.pytest_configure_node(node)
    taken = activated(node.workerinput)
    assert taken.session is None
    assert {name: getattr(taken, name) for name in FOUND_OUT} == FOUND_OUT
    assert taken.source.wait("test_a.py::test_a") == OUTCOME


def test_without_system_a_worker_has_nothing_to_take_over(node):
    ControllerHooks(bench(), maxfail=0).pytest_configure_node(node)
    assert node.workerinput == {}
    assert activated({}) is None


def test_all_workers_ask_one_socket_which_goes_with_the_session(controller, node):
    controller.pytest_configure_node(node)
    address = node.workerinput[INPUT]["address"]
    controller.pytest_configure_node(node)
    assert node.workerinput[INPUT]["address"] == address
    controller.pytest_unconfigure()
    assert not Path(address).exists()


def collected(controller, node, *specs: str) -> None:
    controller.pytest_configure_node(node)
    worker = activated(node.workerinput)
    worker.declare_remotely(specs, worker)
    controller.pytest_xdist_node_collection_finished(node, [])


def test_jobs_start_when_the_first_worker_has_collected_and_never_again(controller, session, node):
    collected(controller, node, "spec")
    session.refusal = AssertionError("declared twice")
    collected(controller, node, "spec")
    assert list(session.jobs) == ["spec"]
    assert node.lines == ["at most 3 node-hours"]


def test_a_session_that_cannot_start_is_a_usage_error(controller, session, node):
    session.refusal = UsageError("beyond the budget")
    with pytest.raises(pytest.UsageError, match="beyond the budget"):
        collected(controller, node, "spec")


@pytest.mark.parametrize(("failed", "stopped"), [(1, []), (2, ["the session stops after 2 failures"])])
def test_workers_that_wait_are_freed_when_the_session_stops(controller, session, failed, stopped):
    for report in [SimpleNamespace(failed=False), *[SimpleNamespace(failed=True)] * failed]:
        controller.pytest_runtest_logreport(report)
    assert session.stopped == stopped
