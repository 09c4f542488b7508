"""A drill: a copy of a site's suites and state in a folder of its own, later nights drawn from its history, and who was told.

The folder lies in ``drills/`` of the state directory, where nodes see it as they see the state. Its lock is held by the drill and
by the session that it runs: a folder whose lock is free was left by a drill that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.alert.channels.base import AlertMessage
from pytest_mlhpc.alert.model import DAY_NS
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.judge_inputs import rejudged
from pytest_mlhpc.history.level_changes import watched_part
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA
from pytest_mlhpc.judge.sensitivity import (
    FEWEST,
    correlation_of_neighbours,
    deviations,
    rerun_deviations,
)
from pytest_mlhpc.node.files import make_private, read_json
from pytest_mlhpc.node.protocol.plan import PlantedFault
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.locations import make_directories
from pytest_mlhpc.store.record import FAILURES, Record, SeriesKey, without_samples
from pytest_mlhpc.store.store import DRILL, Drill, Store, json_line, read_lines, record_files
from pytest_mlhpc.store.text import tell

if TYPE_CHECKING:
    import numpy as np

    from pytest_mlhpc.history.series import Source
    from pytest_mlhpc.judge.arrays import Floats

#: Folder of all drills in a state directory.
FOLDER = "drills"
#: Records that are copied, in bytes without samples, newest first: a site of 600 benchmarks writes that in some months.
MOST_RECORDS = 256 << 20
#: A suite is text: what is larger, in bytes and files, is a folder of something else.
MOST_SUITE, MOST_FILES = 256 << 20, 20_000
#: Folders of a state directory that the nightly chain reads, beside the records.
_COPIED = ("alerts", "events", "provisional", "vetting")
#: No part of a suite, where git does not say what is.
_NO_SUITE = frozenset({"__pycache__", "node_modules", "venv"})
#: Where the runs of partitions lie that have a folder of their own for them; beside the lock.
_ROOTS = "roots.json"


@dataclass(frozen=True)
class DrillFolder:
    """The folder of one drill; *lock* is the descriptor that holds it."""

    path: Path
    lock: int

    @property
    def id(self) -> str:
        """The drill's id."""
        return self.path.name

    @property
    def suites(self) -> Path:
        """Where the copy of the suites lies."""
        return self.path / "project"

    @property
    def template(self) -> Path:
        """The copy of the state directory, from which each fault gets its own."""
        return self.path / "copy"

    def state(self, name: str, fault: PlantedFault | None, of: Path | None = None) -> Path:
        """Make the state directory in which one fault is planted, from the copy *of* the site's state (or the template's).

        Raises:
            StoreError: there is no room for it.
        """
        target = self.path / name / "state"
        with _named_errors(target):
            target.mkdir(parents=True)
            for folder in (*_COPIED, "records"):
                copy_folder((of or self.template) / folder, target / folder, copy_function=_linked)
            (target / DRILL).write_bytes(json_line(to_json(Drill(self.id, fault))))
        return target


def _linked(source: str, target: str) -> str:
    """Link a file of records, to which nothing is appended; copy all others."""
    if "/records/" in target:
        os.link(source, target)
        return target
    return str(shutil.copy2(source, target))


def copy_folder(source: Path, target: Path, **options: Any) -> None:
    """Copy a folder if it is there.

    Raises:
        StoreError: something cannot be read, or there is no room.
    """
    with _named_errors(target):
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock"), **options)


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into our own, which name the path and what would help."""
    try:
        yield
    except (OSError, shutil.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:300]
        raise StoreError(
            f"{path}: the copy for the drill cannot be made: {why}; nothing else was changed"
        ) from error


@contextlib.contextmanager
def drill_folder(state_dir: Path, roots: Sequence[Path]) -> Iterator[DrillFolder]:
    """Make the folder of a drill, and remove it. *roots* are folders for runs that partitions name.

    Raises:
        StoreError: it cannot be made.
    """
    there = state_dir.exists(), (state_dir / FOLDER).exists()
    path = state_dir / FOLDER / secrets.token_hex(4)
    with _named_errors(path):
        make_directories(path.parent, state_dir)
        make_private(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        with _named_errors(path):
            (path / _ROOTS).write_text(json.dumps([str(one) for one in roots]))
        yield DrillFolder(path, lock)
    finally:
        if any(path.glob("*/state/ledger/*.*")):
            tell(f"{path}: jobs of the drill may still be running; `mlhpc reap` ends them and removes it")
        elif why := remove(path):
            tell(f"{path}: cannot be removed: {why}")
        os.close(lock)
        with contextlib.suppress(OSError):  # another drill has its folder there
            if not there[1]:
                (state_dir / FOLDER).rmdir()
            if not there[0]:
                state_dir.rmdir()


def states(path: Path) -> list[Path]:
    """Return the state directories of the drill whose folder *path* is."""
    return sorted(path.glob("*/state"))


def left(state_dir: Path) -> list[Path]:
    """Return the folders of this user's drills that were killed, and whose sessions have ended."""
    found = []
    for path in sorted((state_dir / FOLDER).glob("*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            found.append(path)  # it was killed before it had a lock, or while it was removed
            continue
        except OSError:
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        os.close(lock)
    return found


def remove(path: Path) -> str:
    """Remove the folder of a drill, and its sessions' runs elsewhere; return why something stays, or an empty text."""
    try:
        roots = [Path(one) for one in read_json((path / _ROOTS).read_bytes())]
    except (OSError, ValueError, TypeError):
        roots = []
    sessions = {one for state in states(path) for one in _sessions(state, path.name)} if roots else set()
    why: list[str] = []

    def note(_function: object, name: str, error: tuple[object, BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            why.append(f"{name}: {error[1]}")

    for folder in (*(root / "runs" / name for root in roots for name in sorted(sessions)), path):
        shutil.rmtree(folder, onerror=note)
    return "; ".join(why[:3])


def _sessions(state: Path, drill: str) -> Iterator[str]:
    """Yield the ids of a drill's own sessions: the records that were copied carry no mark."""
    yield from (one.name for one in (state / "runs").glob("*"))
    for path in (state / "records").glob("*/*.jsonl"):
        with contextlib.suppress(ValueError, RecursionError, StoreError):
            first: dict[str, Any] = next((read_json(line) for _, line in read_lines(path)), {})
            if str(first.get("drill", "")).partition(" ")[0] == drill:
                yield path.stem


def copy_state(state_dir: Path, target: Path, system: str, branch: str) -> int:
    """Copy what the nightly chain reads of *state_dir*; of records those of *system*, newest months first, up to a limit.

    Returns the number of records.

    Raises:
        StoreError: something cannot be read, or there is no room.
    """
    number = size = 0
    with _named_errors(target):
        target.mkdir(parents=True)
        for name in _COPIED:
            copy_folder(state_dir / name, target / name)
        for path in reversed(record_files(state_dir)):
            lines = []
            for _, line in read_lines(path):
                with contextlib.suppress(ValueError, RecursionError):  # a damaged line is nobody's history
                    data = read_json(line)
                    if data.get("system") == system and not data.get("drill") and _is_night(data, branch):
                        lines.append(json_line(without_samples(data)))
            size += sum(map(len, lines))
            if size > MOST_RECORDS:
                break
            if lines:
                copied = target / path.relative_to(state_dir)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(b"".join(lines))
            number += len(lines)
    return number


def _is_night(data: Mapping[str, object], branch: str) -> bool:
    """Whether a record is of the history that judge and alert read, re-runs included."""
    if data.get("purpose") == "nightly":
        return data.get("branch") == branch
    return bool(data.get("fingerprint")) and data.get("purpose") == "manual"


def copy_suites(root: Path, listed: Sequence[str] | None, target: Path, state_dir: Path) -> None:
    """Copy the project in *root*: the files that git *listed*, or all but hidden folders where there is no git.

    Raises:
        StoreError: there is no room.
        UsageError: it is no folder of suites, but of something much larger.
    """
    names = listed if listed is not None else list(_files(root, state_dir))
    size = 0
    with _named_errors(target):
        target.mkdir()
        for number, name in enumerate(names):
            source = root / name
            if not source.is_file():
                continue  # a submodule, or a file that was removed and is still in git's index
            size += source.stat().st_size
            if size > MOST_SUITE or number > MOST_FILES:
                raise UsageError(
                    f"{root}: more than {MOST_SUITE >> 20} MiB or {MOST_FILES:,} files would be copied; call it in the folder of"
                    " the suites, and keep data out of git"
                )
            copied = target / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)
        if listed is not None:
            (target / ".git").mkdir(exist_ok=True)  # marks the root of the suites; git itself takes no notice


def _files(root: Path, state_dir: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            one for one in folders
            if one not in _NO_SUITE and not one.startswith(".") and here / one != state_dir
            and not (here / one / "pyvenv.cfg").exists()
        )  # fmt: skip
        yield from (str((here / name).relative_to(root)) for name in sorted(names))


@dataclass
class RecordingChannel:
    """Stands for a channel: it takes each message, and opens nothing."""

    name: str
    taken: list[AlertMessage] = field(default_factory=list)

    def send(self, message: AlertMessage) -> None:
        """Take it."""
        self.taken.append(message)

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Do nothing: what is open was taken before."""


class LaterNights:
    """The nights after one that was measured: a run's figures, as far from their level as the nights of its series were.

    Nights are drawn in the order in which they were, as ``judge/sensitivity.py`` draws them; the level is that of the measured
    run and its re-runs. The same seed draws the same nights.
    """

    def __init__(self, source: Source, branch: str, seed: int = 0) -> None:
        import numpy as np

        self._draw = np.random.default_rng(seed)
        self._own: dict[SeriesKey, Floats] = {}
        self._starts: dict[str, int] = {}
        #: How many nights each series has, and its figures, oldest first.
        self.figures: dict[SeriesKey, list[float]] = {}
        for one in source.series():
            if one.judged:
                values = [point.value for point in watched_part(one, branch).series.points]
                self.figures[one.key] = values
                if len(values) >= FEWEST and min(values) > 0:
                    self._own[one.key] = np.array(deviations(values))

    def can(self, record: Record) -> bool:
        """Whether later nights of a run can be made: it broke, and does so again, or its series are old enough."""
        return record.measurement is None or all(record.series(name) in self._own for name in record.judged)

    def make(self, records: Sequence[Record], number: int, state: Path, source: Source) -> list[Record]:
        """Store night *number* (2 is the first after that of *records*), judged with the re-runs that the judge asks for.

        Raises:
            StoreError: they cannot be stored, or the history cannot be read.
        """
        session, later_ns = uuid7(), (number - 1) * DAY_NS
        made: list[Record] = []
        for first in records:
            if first.attempt or not self.can(first):
                continue
            base = replace(first, id=uuid7(), session=session, created_ns=first.created_ns + later_ns)
            if first.measurement is None or first.judged_by is None:
                made.append(base)
                continue
            again = [
                one for one in records if one.attempt and one.node_id == first.node_id and one.measurement
            ]
            made += self._judged(base, _levels([first, *again]), number, source)
        with contextlib.closing(Store(state, session)) as store:
            for one in made:
                store.append(one)
        return made

    def _judged(
        self, base: Record, levels: Mapping[str, float], number: int, source: Source
    ) -> Iterator[Record]:
        start = self._starts.setdefault(base.benchmark, int(self._draw.integers(0, 1 << 30)))
        night = {name: self._night(base.series(name), start + number) for name in levels}
        attempts = [_with_figures(base, {name: levels[name] * one.first for name, one in night.items()})]
        while True:
            (judged,) = rejudged(attempts, source)
            if not judged.reruns_wanted:
                break
            for _ in range(judged.reruns_wanted):
                figures = {name: levels[name] * one.rerun(self._draw) for name, one in night.items()}
                again = replace(base, id=uuid7(), attempt=len(attempts), judged_by=None, fences={})
                attempts.append(_with_figures(again, figures))
        failure = judged.verdict if judged.verdict in FAILURES else ""
        yield replace(attempts[0], verdict=judged.verdict, failure=failure, explanation=judged.differs)
        yield from attempts[1:]

    def _night(self, key: SeriesKey, at: int) -> DrawnNight:
        own = self._own[key]
        return DrawnNight(float(own[at % len(own)]), own)


@dataclass(frozen=True)
class DrawnNight:
    """A night of one series: its deviation from the level, and those of all its nights, as logarithms."""

    deviation: float
    own: Floats

    @property
    def first(self) -> float:
        """Return the figure of a planted night's first run, as a share of the level."""
        import numpy as np

        return float(np.exp(self.deviation))

    def rerun(self, draw: np.random.Generator) -> float:
        """Return a re-run's figure, as a share of the level."""
        import numpy as np

        sigma = MAD_TO_SIGMA * float(np.median(np.abs(self.own)))
        around = draw.choice(self.own, (1, 1))
        drawn = rerun_deviations(
            np.array([self.deviation]), around, correlation_of_neighbours(self.own), sigma
        )
        return float(np.exp(drawn[0, 0]))


def _levels(attempts: Sequence[Record]) -> dict[str, float]:
    """Return the median of each judged figure over the attempts of a run."""
    found: dict[str, list[float]] = {name: [] for name in attempts[0].judged}
    for metric in itertools.chain.from_iterable(
        one.measurement.metrics for one in attempts if one.measurement
    ):
        if metric.name in found:
            found[metric.name].append(metric.value)
    return {name: statistics.median(values) for name, values in found.items() if values}


def _with_figures(record: Record, figures: Mapping[str, float]) -> Record:
    """Return *record* with other figures, and without the observations behind the old ones."""
    assert record.measurement is not None  # noqa: S101 - of a run that was measured
    metrics = tuple(
        replace(one, value=figures[one.name], samples=()) if one.name in figures else one
        for one in record.measurement.metrics
    )
    return replace(record, measurement=replace(record.measurement, metrics=metrics))
