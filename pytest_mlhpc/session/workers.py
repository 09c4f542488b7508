"""The workers of pytest-xdist: the controller owns the session, and its workers ask it through a Unix socket."""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.errors import MlhpcError, ProtocolError, UsageError
from pytest_mlhpc.jobs.job import Job, Outcome
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.batch.server import SUN_PATH
from pytest_mlhpc.session.bench import BENCH, Bench
from pytest_mlhpc.session.session import BenchmarkSession
from pytest_mlhpc.store.record import Failure


class ResultServer:
    """In the controller: hands results to workers. The specs of the first worker to collect count."""

    def __init__(self, session: BenchmarkSession) -> None:
        self._session = session
        # A path that a Unix socket cannot have is no error of the user's: job-specific TMPDIRs are long.
        base = None if len(os.fsencode(tempfile.gettempdir())) < SUN_PATH - 40 else "/tmp"  # noqa: S108 - mkdtemp makes it private
        self._directory = Path(tempfile.mkdtemp(prefix="mlhpc-", dir=base))
        self._key = secrets.token_bytes(32)
        try:
            self._listener = Listener(self.address[0], "AF_UNIX", backlog=64, authkey=self._key)
            Path(self.address[0]).chmod(0o600)
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="mlhpc-xdist", daemon=True)
        self._thread.start()
        self.specs: tuple[JobSpec, ...] | None = None

    @property
    def address(self) -> tuple[str, bytes]:
        """Where and with which key workers connect."""
        return str(self._directory / "socket"), self._key

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        if self._closing:
            return
        self._closing = True
        try:
            # Closing a listening socket does not wake who waits on it; one more connection does. Nobody may answer it.
            with socket.socket(socket.AF_UNIX) as one_more:
                one_more.connect(self.address[0])
            self._thread.join()
        finally:
            self._listener.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # a peer that died or is not ours
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            with connection:
                kind, content = connection.recv()
                connection.send(self._answer(kind, content))
        except (OSError, EOFError):
            return  # the worker is gone; xdist tells what became of its test

    def _answer(self, kind: str, content: Any) -> Any:
        if kind == "wait":
            try:
                return self._session.wait(content)
            except UsageError as error:
                return error  # for the worker to raise
        if kind == "lost":
            return self._session.lost(content)
        specs, deselected = content
        if self.specs is None:
            self.specs = specs
            self._session.deselected = list(deselected)
        return None


class WorkerSource:
    """In a worker: asks the controller for results."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address = address
        self._key = key

    def declare(self, specs: Sequence[JobSpec], bench: Bench) -> None:
        """Send what this worker collected."""
        self._ask("declare", (tuple(specs), tuple(bench.deselected)))

    def wait(self, node_id: str, tick: Callable[[Job], None] | None = None) -> Outcome:
        """Block until the controller has the outcome of *node_id*.

        Raises:
            UsageError: nothing was submitted for *node_id*.
            ProtocolError: the controller is gone.
        """
        del tick  # the controller has the terminal
        outcome = self._ask("wait", node_id)
        if isinstance(outcome, UsageError):
            raise outcome
        assert isinstance(outcome, Outcome)  # noqa: S101 - the protocol of two halves of this module
        return outcome

    def lost(self, node_id: str) -> Failure | None:
        """Return why the nodes that the test holds are gone.

        Raises:
            ProtocolError: the controller is gone.
        """
        failure = self._ask("lost", node_id)
        assert failure is None or isinstance(failure, Failure)  # noqa: S101 - the protocol of two halves of this module
        return failure

    def test_over(self, node_id: str) -> None:
        """Nothing to do: xdist tells the controller when a test is over."""

    def _ask(self, kind: str, content: Any) -> Any:
        try:
            with Client(self._address, "AF_UNIX", authkey=self._key) as connection:
                connection.send((kind, content))
                return connection.recv()
        except (OSError, EOFError) as error:
            raise ProtocolError("channel_broken", f"the controller does not answer: {error!r}") from error


#: Key of our part in xdist's ``workerinput``.
INPUT = "mlhpc"


class ControllerHooks:
    """Registered in the controller if pytest-xdist is there."""

    def __init__(self, bench: Bench, maxfail: int) -> None:
        self._bench = bench
        self._maxfail = maxfail
        self._failed = 0
        self._server: ResultServer | None = None

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a new worker where to ask, and what the controller has found out already."""
        bench = self._bench
        if bench.session is None:
            return
        if self._server is None:
            self._server = ResultServer(bench.session)
        address, key = self._server.address
        known = pickle.dumps(
            (
                bench.settings,
                bench.targets,
                dict(bench.workloads),
                dict(bench.launchers),
                dict(bench.models),
                bench.code_owners,
                bench.revision,
            )
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
            from pytest_mlhpc.session.terminal import announced

            for line in announced(session):
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
    settings, targets, workloads, launchers, models, owners, revision = pickle.loads(given["known"])  # noqa: S301 - from our own controller, by xdist

    bench = Bench(settings, targets, workloads, launchers, models, code_owners=owners, revision=revision)
    bench.source = source = WorkerSource(given["address"], given["key"])
    bench.declare_remotely = source.declare
    config.stash[BENCH] = bench
