"""One run: its ranks are started, heard, timed and ended; what they said goes to the controller."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import selectors
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from pytest_mlhpc.node.batch.output import ControllerLost, Lines, RankIndex, RunLogs
from pytest_mlhpc.node.batch.ranks import (
    ERRORS,
    ERRORS_RANKS,
    LAUNCHER,
    OUTPUT_RANKS,
    LauncherOutput,
    RankBook,
    RankState,
)
from pytest_mlhpc.node.batch.server import RankConnection, RankMessage, RankServer, RemoteServer, open_pidfd
from pytest_mlhpc.node.batch.warm import ForkedRanks, WarmRanks
from pytest_mlhpc.node.processes import (
    MOST_STRANGERS,
    JoinedLines,
    end_descendants,
    exit_code_of_foreign,
    last_lines,
    reap,
)
from pytest_mlhpc.node.run_files import start_error
from pytest_mlhpc.node.spawn import LABELLING, RankLines

#: Time between SIGTERM and SIGKILL, in seconds.
GRACE_S = 5.0

#: Most reads of 64 KiB in one go: four times the largest pipe (fs.pipe-max-size, 1 MiB unless root says otherwise), so
#: that nothing is lost of what was printed before a program ended.
READS = 64

#: How long the launcher may take to say how a rank ended whose connection broke, and how much longer for what follows
#: (slurmstepd reports a memory limit after srun has reported the death), in seconds. Each is for a node that has no memory or
#: processors left: a launcher that ends needs no more.
WORDS_S, MORE_WORDS_S = 60.0, 10.0

#: How long the end of a rank may come after a peer's word that it is gone, in seconds: then that word counts.
PEERS_S = 5.0

#: Longest time between two checks of connections that have not proved what they are, in seconds.
LOOK_S = 5.0


Server = Union[RankServer, RemoteServer]


class Supervisor:
    """Runs one run's processes to their end; ``book`` knows what came of it.

    *wakeup* is readable when a child ended or a signal came, standard input when the controller is gone (unless there is
    no such *lifeline*), and *stop* tells whether a signal asked the batch to end. *warm* forks the ranks of a run that may be warm, and
    outlives each run.
    """

    def __init__(
        self,
        book: RankBook,
        directory: Path,
        relay: Lines,
        wakeup: int,
        stop: Callable[[], bool],
        *,
        lifeline: bool = True,
        warm: Optional[WarmRanks] = None,
    ) -> None:
        self.book = book
        self.directory = directory
        self.launcher_exit: Optional[int] = None
        self.logs = RunLogs(book, directory, functools.partial(relay.log, book.run))
        self.launcher_output = LauncherOutput()
        self._relay, self._wakeup, self._stop, self._has_lifeline = relay, wakeup, stop, lifeline
        self._settle_at: Optional[float] = None
        self._peers_until: Optional[float] = None
        self._selector = selectors.DefaultSelector()
        self._pidfds: Dict[int, int] = {}  # rank -> pidfd
        self._connections: List[RankConnection] = []
        self._process: Union[subprocess.Popen[bytes], ForkedRanks, None] = None
        self._warm = warm
        self._joined = JoinedLines()
        labelled = book.run.workload == "command" and book.run.launcher in LABELLING
        ranks = book.run.started if labelled else 0
        self._labels = (
            [RankLines(ranks, error=error, srun=book.run.launcher == "srun") for error in (False, True)]
            if labelled
            else []
        )
        self._indices = {OUTPUT_RANKS: RankIndex(), ERRORS_RANKS: RankIndex()}

    def execute(
        self, argv: List[str], environment: Mapping[str, str], server: Server, *, behind: bool
    ) -> None:
        """Start *argv* and stay until nothing of it is left. *behind*: the ranks are children of a launcher.

        Raises:
            ControllerLost: the batch has to end; everything of this run is ended already.
        """
        deadline = time.monotonic() + self.book.run.time_limit_s
        self.logs.own = LAUNCHER if behind else 0
        try:
            self._start(argv, environment)
            self._watch(self._wakeup, self._children_ended)
            if self._has_lifeline:
                self._watch(0, self._lifeline)
            self._watch(server.socket.fileno(), lambda: self._accept(server))
            while self._process is not None and self.launcher_exit is None and self.book.trouble is None:
                if self._settled():
                    break
                if time.monotonic() >= deadline:
                    self.book.out_of_time()
                else:
                    self._turn(deadline)
                    self._drop_strangers()  # after who has spoken was heard: this process may have been stopped
            self._finish(server)
        except ControllerLost:
            self._note_exits(end_descendants(os.getpid(), 1.0, self._wakeup)[0])
            raise
        finally:
            self._close()

    @property
    def broken_off(self) -> bool:
        """Whether the run failed in a way that a signal to the whole job would look like."""
        trouble = self.book.trouble
        killed = trouble is not None and trouble.outcome in (
            "worker_killed",
            "cancelled_outside",
            "node_failure",
        )
        gone = self.book.suspect is not None or (self.launcher_exit or 0) < 0
        return killed or (trouble is not None and (gone or self.launcher_output.cancelled))

    def last_lines(self, rank: int, lines: int, characters: int) -> str:
        """Return the last lines of a rank's output: of a launcher's log those that this rank printed."""
        path = self.logs.path(LAUNCHER) if self._labels else ""
        if not path:
            return self.logs.last_lines(rank, lines, characters)
        return last_lines(self._indices[OUTPUT_RANKS].of(rank, Path(path).read_bytes()), lines, characters)

    def await_signal(self, seconds: float) -> None:
        """Give a signal *seconds* to arrive.

        Raises:
            ControllerLost: it came, and said to end.
        """
        deadline = time.monotonic() + seconds
        while not self._stop() and time.monotonic() < deadline:
            if select.select([self._wakeup], [], [], max(0.0, deadline - time.monotonic()))[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
        if self._stop():
            raise ControllerLost

    def _start(self, argv: List[str], environment: Mapping[str, str]) -> None:
        if self.logs.open(self.logs.own) is None:
            return
        run = self.book.run
        program = run.workload == "command"
        cwd = run.cwd if program and run.cwd else str(self.directory)
        process: Union[subprocess.Popen[bytes], ForkedRanks, None] = None
        try:
            if self._warm is not None and run.warm:
                process = self._warm.fork(run.python, environment, cwd, run.started)
            process = process or subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if program else subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            outcome = "command_not_found" if program else "launch_failed"
            own = program and argv[:1] == list(run.argv[:1])
            why = start_error(run, error) if own else f"cannot start {argv[0]!r}: {error}"
            self.book.fail(outcome, why)
            return
        self._process = process
        for fd, is_error in self._pipes():
            os.set_blocking(fd, False)
            self._watch(fd, functools.partial(self._output, fd, error=is_error))
        if self._warm is not None and self._warm.connection is not None and self._warm.asked is not None:
            asked = self._warm.connection.fileno()
            self._watch(asked, lambda: self._forked(self._warm, asked, argv, environment))

    def _forked(
        self, warm: Optional[WarmRanks], asked: int, argv: List[str], environment: Mapping[str, str]
    ) -> None:
        """Learn the pids of the ranks that were to be forked; where there are none, start ranks as any others."""
        why = None if warm is None else warm.answer()
        if why == "":
            return
        self._selector.unregister(asked)
        if why is None:
            self._note_exits({})
            return
        if self._process is not None and self._process.stdout is not None:
            self._selector.unregister(self._process.stdout.fileno())
            self._process.stdout.close()
        self._process, self._warm = None, None
        self._start(argv, environment)

    def _pipes(self) -> List[Tuple[int, bool]]:
        """Return the descriptors at which the process is heard, and whether each is its standard error."""
        process = self._process
        found = [(process.stdout, False), (process.stderr, True)] if process is not None else []
        return [(pipe.fileno(), error) for pipe, error in found if pipe is not None]

    def _watch(self, fd: int, act: Callable[[], Any]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _turn(self, deadline: float) -> None:
        """Do what is ready, or wait for it until *deadline* or an earlier time at which something has to be looked at."""
        now = time.monotonic()
        until = min(
            deadline, *(one for one in (self._settle_at, self._peers_until) if one is not None), deadline
        )
        if any(not one.purpose for one in self._connections):
            until = min(until, now + LOOK_S)
        for key, _ in self._selector.select(max(0.0, until - now)):
            key.data()

    def _settled(self) -> bool:
        """Return whether the launcher has had its time to say why a rank is gone."""
        suspect = self.book.suspect
        if suspect is None and self.book.peers_lost:
            if self._peers_until is None:
                self._peers_until = time.monotonic() + PEERS_S
            elif time.monotonic() >= self._peers_until:
                self.book.settle()
        if suspect is None:  # a message alone ends nothing: a program may print what its launcher would
            return False
        now = time.monotonic()
        if self._settle_at is None:
            self._settle_at = now + WORDS_S
        if any(death.task == suspect for death in self.launcher_output.deaths):
            self._settle_at = min(self._settle_at, now + MORE_WORDS_S)
        return now >= self._settle_at

    def _drop_strangers(self) -> None:
        waiting = [one for one in self._connections if not one.purpose]
        too_many = max(0, len(waiting) - MOST_STRANGERS - 2 * self.book.run.started)
        for number, connection in enumerate(waiting):  # the oldest first
            if number < too_many or connection.stranger:
                self._turn_away(connection)

    def _turn_away(self, connection: RankConnection) -> None:
        """Close the connection of who did not prove to be of this run: it changes nothing but a count."""
        self.book.strangers += 1
        self._forget(connection)

    def _forget(self, connection: RankConnection) -> None:
        with contextlib.suppress(KeyError):  # accepted after the last turn
            self._selector.unregister(connection.socket)
        self._connections.remove(connection)
        connection.close()

    def _lifeline(self) -> None:
        if not os.read(0, 4096):
            raise ControllerLost

    def _children_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        if self._stop():
            raise ControllerLost
        self._note_exits(reap())

    def _note_exits(self, ended: Mapping[int, int]) -> None:
        if self._warm is not None:
            self._warm.note_exits(ended)
        if isinstance(self._process, ForkedRanks):
            self._process.note_exits(ended)
            self.launcher_exit = self._process.returncode
        elif self._process is not None and self._process.pid in ended:
            self.launcher_exit = ended[self._process.pid]
            self._process.returncode = self.launcher_exit  # reaped here, not by Popen
        for rank in self.book.ranks.values():
            if rank.pid in ended:
                rank.exit = ended[rank.pid]

    def _output(self, fd: int, *, error: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, 1 << 16)
            if data:
                self._read_from(data, error=error)
            else:
                self._selector.unregister(fd)

    def _read_from(self, data: bytes, *, error: bool, last: bool = False) -> None:
        if self._labels:
            self._take_lines(self._labels[error].feed(data, last=last))
            return
        if error:
            self.logs.write(ERRORS, data)
        if joined := self._joined.feed(data, error=error):
            self._printed(joined)

    def _take_lines(self, lines: Sequence[Tuple[int, bool, bytes]]) -> None:
        """Log what ranks printed, and which of them it was."""
        errors = [(rank, line) for rank, error, line in lines if error]
        for number, some in (
            (OUTPUT_RANKS, [(rank, line) for rank, _, line in lines]),
            (ERRORS_RANKS, errors),
        ):
            for rank, line in some:
                self._indices[number].add(rank, len(line))
        if errors:
            self.logs.write(ERRORS, b"".join(line for _, line in errors))
        if lines:
            self._printed(b"".join(line for _, _, line in lines))

    def _printed(self, data: bytes) -> None:
        self.logs.write(self.logs.own, data)
        if self.logs.own == LAUNCHER:
            self.launcher_output.feed(data)
            log = self.logs.open(LAUNCHER) if self.launcher_output.dropped else None
            if log is not None:
                log.dropped += self.launcher_output.dropped
                self.launcher_output.dropped = 0

    def _accept(self, server: Server) -> None:
        for connection in server.accept():
            self._connections.append(connection)
            self._watch(connection.socket.fileno(), lambda connection=connection: self._read_rank(connection))  # type: ignore[misc]  # mypy cannot infer a lambda's default

    def _read_rank(self, connection: RankConnection) -> None:
        self._listen(connection)
        if connection.stranger:
            self._turn_away(connection)
        elif connection.ended:
            self._forget(connection)
            if connection.rank in self.book.ranks and connection.purpose == "messages":
                self._rank_ended(connection.rank)
                if connection.remote and self.book.ranks[connection.rank].exit is None:
                    self.book.lost(connection.rank, connection.error)

    def _listen(self, connection: RankConnection) -> None:
        for message in connection.read():
            if message.kind == "hello":
                self._greet(connection, message)
            elif connection.rank is None:
                self.book.fail(
                    "foreign_result", f"a process of this run did not identify itself: {message.body}"
                )
            elif message.kind == "output":
                self.logs.write(connection.rank, message.body)
            else:
                line = self.book.say(connection.rank, message.kind, message.body, time.monotonic())
                if line is not None:
                    self._relay.send(self.book.run, *line)

    def _greet(self, connection: RankConnection, message: RankMessage) -> None:
        if self.book.greet(message.body, connection.pid) and connection.purpose == "messages":
            number = int(message.body["rank"])
            pidfd = open_pidfd(connection.pid)
            if pidfd is not None:
                self._pidfds[number] = pidfd
                self._watch(pidfd, lambda: self._rank_ended(number))

    def _rank_ended(self, number: int) -> None:
        """Find out how a rank's process ended. Its connection may close a moment before, or may have broken alone."""
        rank = self.book.ranks[number]
        pidfd = self._pidfds.get(number)
        if pidfd is not None and not select.select([pidfd], [], [], 0)[0]:
            return  # it is still ending; the pidfd tells when
        if rank.exit is None:
            rank.exit = exit_code_of_foreign(rank.pid)
        self._note_exits(reap())
        if pidfd is not None:
            del self._pidfds[number]
            self._selector.unregister(pidfd)
            os.close(pidfd)
        for connection in [one for one in self._connections if one.rank == number]:
            self._listen(connection)  # what it said before it ended
        self.book.ended(number)

    def _finish(self, server: Server) -> None:
        """Judge how ranks and launcher ended by themselves, and end what is left."""
        self._connections += server.accept()
        self._listen_to_all()
        for number in list(self._pidfds):
            self._rank_ended(number)
        if isinstance(self._process, ForkedRanks):
            for number, code in self._process.exits().items():  # of those, too, that never said anything
                self.book.ranks.setdefault(number, RankState()).exit = code
        for number, rank in self.book.ranks.items():
            if rank.exit is not None:
                self.book.ended(number)
        if self.launcher_exit or self.book.suspect is not None:
            behind = self.logs.own == LAUNCHER
            shown = self.logs.last_lines(self.logs.own, lines=1000, characters=1 << 16)
            code = self.launcher_exit or 0
            self.book.launcher_ended(code, shown, is_rank=not behind, launcher_output=self.launcher_output)
        spared = () if self._warm is None else self._warm.pids
        ended, stuck = end_descendants(os.getpid(), GRACE_S, self._wakeup, spared)
        self._note_exits(ended)
        self._listen_to_all()
        for index in (OUTPUT_RANKS, ERRORS_RANKS) if self._labels else ():
            self.logs.write(index, self._indices[index].content())
        self.book.settle()
        if self.logs.own == LAUNCHER:
            self.book.learn(self.launcher_output, "")
        if stuck:
            self.book.fail(
                "node_failure", f"SIGKILL does not end these processes: {', '.join(map(str, stuck))}"
            )

    def _listen_to_all(self) -> None:
        """Hear what was said so far on every connection, and what the launcher printed."""
        for connection in self._connections:
            self._listen(connection)
        for fd, error in self._pipes():
            with contextlib.suppress(BlockingIOError):
                for _ in range(READS):  # a program that prints for ever is heard no longer than that
                    data = os.read(fd, 1 << 16)
                    if not data:
                        break
                    self._read_from(data, error=error)
        if rest := self._joined.finish():
            self._printed(rest)
        for error in (False, True) if self._labels else ():
            self._read_from(b"", error=error, last=True)

    def _close(self) -> None:
        self._selector.close()
        if self._warm is not None and self._warm.asked is not None:
            self._warm.close()  # what it may still fork would be of a run that has ended
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for connection in self._connections:
            connection.close()
        self.logs.close()
        for pipe in (self._process.stdout, self._process.stderr) if self._process is not None else ():
            if pipe is not None:
                pipe.close()
