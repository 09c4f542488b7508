"""Servers on loopback whose answers tests give, and pauses and clocks that no busy machine disturbs."""

import contextlib
import itertools
import queue
from types import SimpleNamespace

import pytest
from kubernetes_wire import Listener, Scripted, kubeconfig
from local_allocations import HANG_S
from pod_worlds import World

from pytest_mlhpc.provision.kubernetes import client, errors, log_follower, watch
from pytest_mlhpc.provision.kubernetes.connect import connect

#: A server that nobody listens for.
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def generous_limits(monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.kubernetes.connect.PLUGIN_LIMIT_S", HANG_S)
    monkeypatch.setattr(client, "CONNECT_LIMIT_S", HANG_S)


@pytest.fixture
def closing():
    """What is closed at the end of the test, the youngest first."""
    with contextlib.ExitStack() as stack:
        yield lambda one: stack.enter_context(contextlib.closing(one))


@pytest.fixture
def reach(closing, tmp_path):
    """Connect to a server whose answers a function gives, or to any listener; return the api and the server."""

    def go(answer, *, limit_s=HANG_S, scheme="http"):
        server = closing(answer if isinstance(answer, Listener) else Scripted(answer))
        path = kubeconfig(tmp_path / "kubeconfig", f"{scheme}://127.0.0.1:{server.port}")
        return closing(connect(kubeconfig=str(path), environ={}, limit_s=limit_s)), server

    return go


@pytest.fixture
def short_pauses(monkeypatch):
    """Let watchers and followers pause for moments, by a clock that goes on by a hundredth second at each look."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 100)
    for module in (errors, watch):
        monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(errors, "LONGEST_DELAY_S", 0.1)
    monkeypatch.setattr(errors, "REFUSED_DELAY_S", 0.1)
    monkeypatch.setattr(log_follower, "STATUS_S", 0.1)
    monkeypatch.setattr(log_follower, "LAST_READ_S", 2.0)
    monkeypatch.setattr(log_follower, "time", clock)
    monkeypatch.setattr(watch, "time", clock)


class Reports:
    """What a watcher or follower reports, as it comes."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.put = self.queue.put

    def next(self, number: int | None = None):
        """Return the next report, or a list of the next ones."""
        if number is None:
            return self.queue.get(timeout=HANG_S)
        return [self.queue.get(timeout=HANG_S) for _ in range(number)]

    def rest(self) -> list:
        """Return what has come already."""
        return [self.queue.get() for _ in range(self.queue.qsize())]


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def world_of(tmp_path, monkeypatch):
    """Make a world whose partition has these options."""
    return lambda **options: World(tmp_path, monkeypatch, **options)


@pytest.fixture
def world(world_of) -> World:
    return world_of()
