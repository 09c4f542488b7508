"""All that knows of pytest-xdist: the controller owns the session, its workers ask it (see ``remote.py``)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.session.bench import BENCH, Bench

if TYPE_CHECKING:
    from pytest_mlhpc.session.remote import Server

#: Key of our part in xdist's ``workerinput``.
INPUT = "mlhpc"


class ControllerHooks:
    """Registered in the controller if pytest-xdist is there."""

    def __init__(self, bench: Bench, maxfail: int) -> None:
        self._bench = bench
        self._maxfail = maxfail
        self._failed = 0
        self._server: Server | None = None

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a new worker where to ask, and what the controller has found out already."""
        bench = self._bench
        if bench.session is None:
            return
        if self._server is None:
            from pytest_mlhpc.session.remote import Server

            self._server = Server(bench.session)
        address, key = self._server.address
        known = pickle.dumps(
            (bench.settings, bench.targets, dict(bench.workloads), dict(bench.launchers), dict(bench.models))
        )
        node.workerinput[INPUT] = {"address": address, "key": key, "known": known}

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Start the jobs once the first worker has collected.

        Raises:
            pytest.UsageError: what the invocation as a whole asks for cannot be.
        """
        del ids
        server, session = self._server, self._bench.session
        if server is None or server.specs is None or session is None:
            return
        if session.jobs:
            return  # an earlier worker has collected the same
        try:
            session.declare(server.specs)
        except MlhpcError as error:
            raise pytest.UsageError(str(error)) from None
        if (reporter := node.config.pluginmanager.getplugin("terminalreporter")) is not None:
            for line in session.announcement:
                reporter.write_line(line)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """With -x or --maxfail, free workers that wait: xdist stops only when their current tests have ended."""
        session = self._bench.session
        self._failed += report.failed
        if session is not None and 0 < self._maxfail <= self._failed:
            session.stop(f"the session stops after {self._failed} failures")

    def pytest_unconfigure(self) -> None:
        """Close the socket when the workers are gone."""
        if self._server is not None:
            self._server.close()


def activate_worker(config: pytest.Config) -> None:
    """Take over what the controller found out; an invocation without ``--system`` has sent nothing."""
    given = getattr(config, "workerinput", {}).get(INPUT)
    if given is None:
        return
    settings, targets, workloads, launchers, models = pickle.loads(given["known"])  # noqa: S301 - from our own controller, by xdist
    from pytest_mlhpc.session.remote import WorkerSource

    bench = Bench(settings, targets, workloads, launchers, models)
    bench.source = source = WorkerSource(given["address"], given["key"])
    bench.declare_remotely = source.declare
    config.stash[BENCH] = bench
