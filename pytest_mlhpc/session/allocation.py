"""The fixtures ``allocation`` and ``vetting``: programs on nodes that a test holds, and what was found of these nodes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import InfrastructureError, MlhpcError, NodeFault, ProtocolError, RunFailure
from pytest_mlhpc.jobs.job import GrantedNodes
from pytest_mlhpc.node.batch.output import ANSWERS, REQUESTS, Inbox, append
from pytest_mlhpc.node.files import UNSAFE, UnsafeDirectoryError
from pytest_mlhpc.node.vet.finding import Fitness, Severity, VetVerdict
from pytest_mlhpc.store.record import Failure

#: How long a program may run unless the test says otherwise, in seconds.
TIMEOUT_S = 300.0

#: Time between two checks for the answer, first and last, and between two for the allocation's state, in seconds.
LOOK_FIRST_S, LOOK_MOST_S, STATE_S = 0.02, 0.25, 1.0

#: How much longer than a program's own time its answer may take, in seconds: it is ended first, and on a network file
#: system the answer arrives late.
ANSWER_S = 90.0

#: How long the scheduler may take to tell why srun could not start anything, in seconds.
WORDS_S = 10.0

#: A line, whatever else str.splitlines() takes for the end of one.
_LINE = re.compile(r"[^\n]*\n|[^\n]+")

#: A line of one rank, as ``srun --label`` prints it.
_LABEL = re.compile(r"^ *(\d+): ?(.*)$", re.DOTALL)


#: What Slurm's step daemon says in a rank's name, such as that there is no such program.
_STEPD = re.compile(r"slurmstepd[^: ]*: error: ")


@dataclass(frozen=True)
class Finished:
    """A program that has ended on all its ranks.

    ``returncode`` is 0 if every rank's was, else the greatest (128 + the number of a signal that killed). ``stdout`` is in
    order of arrival, ``ranks`` is the same by rank. ``launcher`` is what srun itself said, or why nothing was started.
    ``seconds`` include the start of the job step. ``log`` is the folder that keeps everything; ``dropped`` counts bytes
    beyond 16 MiB a stream.
    """

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    launcher: str
    ranks: tuple[str, ...]
    seconds: float
    log: Path
    dropped: int = 0

    def check(self) -> Finished:
        """Return this, or raise a RunFailure with the last lines if the exit code is not 0."""
        if self.returncode:
            last = "\n".join((self.launcher + (self.stderr or self.stdout)).strip().splitlines()[-5:])[-600:]
            code = self.returncode
            text = f"{self.argv[0]!r} ended with exit code {code}; its last lines:\n{last}\n  log: {self.log}"
            raise RunFailure("worker_exit", text)
        return self


class ProgramTimeoutError(TimeoutError):
    """A program was ended because its time was over; the nodes are still reserved. ``finished`` has what it printed."""

    def __init__(self, text: str, finished: Finished) -> None:
        super().__init__(text)
        self.finished = finished


class Allocation:
    """Nodes that a test holds until it is over.

    Args:
        held: the nodes, as plain data.
        lost: tells why they are gone, None while they are there.
    """

    def __init__(self, granted: GrantedNodes, lost: Callable[[], Failure | None]) -> None:
        self.id = granted.id  #: the scheduler's id of the job; of `local`, which has none, our own
        self.nodes = granted.nodes
        self.partition = granted.partition
        self.directory = Path(granted.directory)  #: where programs start, and keep their output
        self._cores = granted.cores_per_node
        self._lost = lost
        self._closed = False
        self._one_at_a_time = threading.Lock()
        self._answers = Inbox(self.directory / ANSWERS)

    def __repr__(self) -> str:
        return f"<allocation {self.id}: {', '.join(self.nodes)}>"

    def run(
        self,
        argv: Sequence[str | os.PathLike[str] | int | float],
        *,
        nodes: int | Sequence[str] | None = None,
        ranks_per_node: int = 1,
        cores_per_rank: int | None = None,
        timeout: float = TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Finished:
        """Run a program on nodes of this allocation, without a shell, and return what became of it.

        Args:
            argv: program and arguments.
            nodes: their names, or how many of the first ones; None: all.
            ranks_per_node: how often it is started on each.
            cores_per_rank: None: an equal share of a node's cores.
            timeout: seconds after which it is ended; the nodes stay.
            env: variables beside those of the environment.
            cwd: folder to start in, visible to the nodes; None: ``directory``.

        Raises:
            TypeError, ValueError: that cannot be started on these nodes.
            ProgramTimeoutError: the program was ended, as its time was over.
            InfrastructureError, RunFailure: the nodes are gone: failed (they are named), taken, or at their time limit.
        """
        __tracebackhide__ = True
        request = {
            "kind": "run",
            "id": uuid.uuid4().hex,
            "argv": _argv(argv),
            "nodes": self._chosen(nodes),
            "ranks_per_node": _at_least_one("ranks_per_node", ranks_per_node),
            "cores_per_rank": self._share(ranks_per_node, cores_per_rank),
            "timeout_s": _positive("timeout", timeout),
            "env": _variables(env or {}),
            "cwd": os.fspath(cwd) if cwd is not None else None,
        }
        with self._one_at_a_time:
            if self._closed:
                raise RuntimeError(f"{self!r} was only allocated while its test ran, which is over")
            return self._finished(request, self._answer(request))

    def close(self) -> None:
        """Refuse further programs: the test is over."""
        self._closed = True

    def _chosen(self, nodes: int | Sequence[str] | None) -> list[str]:
        if nodes is None:
            return list(self.nodes)
        if isinstance(nodes, int):
            if not 1 <= nodes <= len(self.nodes):
                raise ValueError(f"nodes={nodes}: {self!r} has {len(self.nodes)}")
            return list(self.nodes[:nodes])
        wanted = [nodes] if isinstance(nodes, str) else list(nodes)
        strangers = [node for node in wanted if node not in self.nodes]
        if strangers or not wanted or len(set(wanted)) < len(wanted):
            raise ValueError(f"nodes={wanted!r}: name one or more nodes of {self!r}, each once")
        return [node for node in self.nodes if node in wanted]  # ranks count in this order

    def _share(self, ranks_per_node: int, cores: int | None) -> int:
        if cores is None:
            return max(1, self._cores // ranks_per_node)
        if _at_least_one("cores_per_rank", cores) * ranks_per_node > self._cores:
            raise ValueError(
                f"{ranks_per_node} ranks of {cores} cores on a node; one of {self.partition} has {self._cores}"
            )
        return cores

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the batch and wait; whatever interrupts that also ends the program."""
        __tracebackhide__ = True
        self._refuse_if_lost(request)
        try:
            append(self.directory / REQUESTS, request)
            return self._wait_for(request)
        except UnsafeDirectoryError as error:
            raise InfrastructureError(UNSAFE, f"{error.filename}: {error.strerror}") from error
        except OSError as error:
            self._refuse_if_lost(request)
            text = f"cannot talk to the batch of {self!r}: {error.filename}: {error.strerror}"
            raise ProtocolError("channel_broken", text) from error
        except MlhpcError:
            raise
        except BaseException:
            with contextlib.suppress(OSError):  # then the end of the allocation ends it
                append(self.directory / REQUESTS, {"kind": "stop", "id": request["id"]})
            raise

    def _wait_for(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        __tracebackhide__ = True
        began = looked = time.monotonic()
        until, pause = began + request["timeout_s"] + ANSWER_S, LOOK_FIRST_S
        failure: Failure | None = None
        while True:
            for answer in self._answers.read():
                if answer.get("id") == request["id"]:
                    return answer
            if failure is not None:
                raise self._lost_error(failure, request)  # the answer did not come before the end either
            now = time.monotonic()
            if now > until:
                text = f"the batch of {self!r} did not answer within {now - began:.0f} s; log: {self.directory.parent}"
                raise ProtocolError("channel_broken", text)
            if now - looked >= STATE_S:
                looked, failure = now, self._lost()
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, LOOK_MOST_S)

    def _finished(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> Finished:
        __tracebackhide__ = True
        argv = tuple(request["argv"])
        if answer.get("failed_nodes"):
            named = [str(node) for node in answer["failed_nodes"]]
            text = f"{', '.join(named)} failed while {argv[0]!r} ran in {self!r}"
            raise NodeFault("node_failure", text, named)
        if answer.get("not_started"):
            for _ in self._for_a_while(WORDS_S):
                self._refuse_if_lost(request)
            text = f"cannot start {argv[0]!r} in {self!r}: {answer['not_started']}"
            raise InfrastructureError("launch_failed", text)
        outs, errors = self._texts(answer, "stdout"), self._texts(answer, "stderr")
        if answer.get("error"):
            return Finished(argv, 127, "", "", f"{answer['error']}\n", (), 0.0, self.directory)
        if answer["labelled"]:
            count = len(request["nodes"]) * request["ranks_per_node"]
            stdout, _, ranks = _by_rank("".join(outs), count)
            stderr, launcher, _ = _by_rank("".join(errors), count)
        else:
            stdout, stderr, launcher, ranks = "".join(outs), "".join(errors), "", tuple(outs)
        finished = Finished(
            argv=argv,
            returncode=int(answer["exit"]),
            stdout=stdout,
            stderr=stderr,
            launcher=launcher,
            ranks=ranks,
            seconds=float(answer["seconds"]),
            log=self._log(answer),
            dropped=int(answer["dropped"]),
        )
        if answer["timed_out"]:
            self._refuse_if_lost(request)
            if answer["time_limit"]:
                raise self._lost_error(Failure("time_limit", str(answer["time_limit"])), request)
            text = (
                f"{argv[0]!r} did not end within {request['timeout_s']:g} s on {', '.join(request['nodes'])}"
            )
            raise ProgramTimeoutError(f"{text}; log: {finished.log}", finished)
        return finished

    def _texts(self, answer: Mapping[str, Any], stream: str) -> list[str]:
        paths = [self.directory / str(name) for name in answer.get(stream, ())]
        try:
            return [path.read_bytes().decode("utf-8", "replace") for path in paths]
        except OSError as error:
            text = f"cannot read what a program printed: {error.filename}: {error.strerror}"
            raise ProtocolError("channel_broken", text) from error

    def _log(self, answer: Mapping[str, Any]) -> Path:
        return (self.directory / str(answer["stdout"][0])).parent if answer["stdout"] else self.directory

    def _for_a_while(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield
            time.sleep(LOOK_MOST_S)

    def _refuse_if_lost(self, request: Mapping[str, Any]) -> None:
        __tracebackhide__ = True
        failure = self._lost()
        if failure is not None:
            raise self._lost_error(failure, request)

    def _lost_error(self, failure: Failure, request: Mapping[str, Any]) -> MlhpcError:
        what = f"{self!r} ended before or while {request['argv'][0]!r} ran: {failure.text}"
        if failure.nodes:
            return NodeFault(failure.outcome, what, failure.nodes)
        if failure.infrastructure:
            return InfrastructureError(failure.outcome, what)
        return RunFailure(failure.outcome, what)


def _argv(argv: Sequence[Any]) -> list[str]:
    if isinstance(argv, (str, bytes)) or not argv:
        raise TypeError(f"argv={argv!r}: give program and arguments as a list, such as ['hostname', '-f']")
    texts = []
    for word in argv:
        if isinstance(word, bool) or not isinstance(word, (str, int, float, os.PathLike)):
            raise TypeError(f"argv: {word!r} is neither text nor a number or a path")
        texts.append(os.fspath(word) if isinstance(word, os.PathLike) else str(word))
    return _without_nul("argv", texts)


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    bad = [f"{name}={value!r}" for name, value in env.items() if not isinstance(value, str) or "=" in name]
    if bad:
        raise TypeError(f"env: values are text, and names hold no '=': {', '.join(bad)}")
    _without_nul("env", [*env, *env.values()])
    return dict(env)


def _without_nul(what: str, texts: list[str]) -> list[str]:
    if any("\0" in word for word in texts):
        raise ValueError(f"{what} holds a NUL character")
    return texts


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
    return value


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise ValueError(f"{name}={value!r}: expected seconds, more than 0")
    return float(value)


def _by_rank(text: str, count: int) -> tuple[str, str, tuple[str, ...]]:
    """Take output of ``srun --label`` apart: that of all ranks without labels, srun's own, and that of each of *count*."""
    ranks: list[list[str]] = [[] for _ in range(count)]
    whole, others = [], []
    for line in _LINE.findall(text):
        found = _LABEL.match(line)
        if found is None or int(found.group(1)) >= count or _STEPD.match(found.group(2)):
            others.append(line)
            continue
        whole.append(found.group(2))
        ranks[int(found.group(1))].append(found.group(2))
    return "".join(whole), "".join(others), tuple("".join(lines) for lines in ranks)


#: What counts as trouble. What could not be judged is none here: ``unknown`` reports it.
BAD = frozenset({Severity.CRITICAL})


class Vetting:
    """The verdict on a test's nodes: ``vetting.good``, ``vetting.unfit``, ``vetting.trouble("kernel_log")``."""

    def __init__(self, verdict: VetVerdict) -> None:
        self.verdict = verdict

    @property
    def good(self) -> tuple[str, ...]:
        """The nodes that may be used, in order."""
        return self.verdict.good

    @property
    def unfit(self) -> dict[str, str]:
        """Nodes that may not be used, each with the worst that was found."""
        return {node.host: node.reason for node in self.verdict.nodes if node.fitness is Fitness.UNFIT}

    def trouble(self, check: str) -> list[str]:
        """Return what *check* found that makes nodes unfit, as ``node: device: reason``."""
        return self._of(check, BAD)

    def unknown(self, check: str) -> list[str]:
        """Return what *check* could not judge."""
        return self._of(check, frozenset({Severity.UNKNOWN}))

    def ran(self, check: str) -> bool:
        """Return whether *check* said anything at all: nodes have not what it checks, or it is too slow for the level."""
        return any(found.check == check for node in self.verdict.nodes for found in node.findings)

    def _of(self, check: str, severities: frozenset[Severity]) -> list[str]:
        return [
            ": ".join(word for word in (node.host, found.device, found.reason) if word)
            for node in self.verdict.nodes
            for found in node.findings
            if found.check == check and found.severity in severities
        ]

    def __repr__(self) -> str:
        return f"<vetting: {len(self.good)} of {len(self.verdict.nodes)} nodes are fit>"
