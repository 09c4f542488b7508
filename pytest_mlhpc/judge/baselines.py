"""The baseline files of all systems and the provisional ones of this machine, as one book to look up and write in."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_mlhpc.errors import ConfigError, Problem, StoreError
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge import baseline_files
from pytest_mlhpc.judge.baseline_files import BaselineFile, Entry, render, series_of
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.locations import make_directories, replace_file
from pytest_mlhpc.store.record import Epoch, SeriesKey

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")


class BaselineBook:
    """Baselines: ``directory/<system>.yaml`` (in git), and ``state_dir/provisional/<system>-<fingerprint>.yaml``.

    Files are read when a system is first asked for; a reviewed entry wins over a provisional one.
    """

    def __init__(self, directory: Path, state_dir: Path) -> None:
        self._directory = directory
        self._provisional = state_dir / "provisional"
        self._read: dict[Path, dict[SeriesKey, Entry]] = {}
        self._changes: dict[Path, dict[SeriesKey, Entry | None]] = {}
        self._used: set[SeriesKey] = set()
        self._asked: set[SeriesKey] = set()  #: with neither benchmark nor metric: machines that were used

    def path(self, key: SeriesKey, *, provisional: bool = False) -> Path:
        """Return the file that the entry of *key* lies in.

        Raises:
            ConfigError: the system's name cannot be a file name.
        """
        if provisional:
            return self._provisional / f"{_file_name(key.system, key.fingerprint)}.yaml"
        return self.system_path(key.system)

    def system_path(self, system: str) -> Path:
        """Return the reviewed file of *system*.

        Raises:
            ConfigError: the name cannot be a file name.
        """
        if not _FILE_NAME.match(system):
            raise ConfigError([Problem(str(self._directory), "", f"system {system!r} cannot be a file name")])
        return self._directory / f"{system}.yaml"

    def lookup(self, key: SeriesKey, epoch: Epoch | None = None, *, provisional: bool = True) -> Entry | None:
        """Return the entry of one series, a *provisional* one only if wanted, and remember that it was used.

        A provisional entry of *epoch* wins over an accepted one of another epoch, which it cannot be judged by.

        Raises:
            ConfigError: the file is damaged; every problem with file and line.
            StoreError: the file cannot be read.
        """
        self._used.add(key)
        self._asked.add(_machine(key))
        return self._find(key, epoch, provisional=provisional)

    def usual_s(self, spec: JobSpec) -> float | None:
        """Return how long the timed steps of *spec* take at its baseline's throughput, in seconds; None where that is not known.

        Only of trainings for so many steps: in one to a quality they are as many as it takes. Safe beside other calls.
        """
        batch, metric = spec.parameters.get("global_batch"), "effective_throughput"
        steps = spec.steps if spec.parameters.get("until") != "quality" else 0
        if not batch or not steps or metric not in spec.judged or spec.parameters.get("bagging"):
            return None
        epoch = Epoch(spec.definition, "")
        entry = self._find(series_of(spec, metric), epoch, provisional=True)
        return None if entry is None or changed(entry.epoch, epoch) else steps * batch / entry.value

    def _find(self, key: SeriesKey, epoch: Epoch | None, *, provisional: bool) -> Entry | None:
        found = [self._entries(self.path(key), key.system).get(key)]
        if key.fingerprint and provisional:
            found.append(self._entries(self.path(key, provisional=True), key.system).get(key))
        entries = [entry for entry in found if entry is not None]
        same = (entry for entry in entries if epoch is None or not changed(entry.epoch, epoch))
        return next(same, entries[0] if entries else None)

    def for_spec(self, spec: JobSpec, device_model: str, *, provisional: bool = True) -> dict[str, Entry]:
        """Return metric -> entry for the judged metrics of *spec* that have one; ``device_model`` is what the run reported."""
        epoch = Epoch(spec.definition, device_model)
        found = ((m, self.lookup(series_of(spec, m), epoch, provisional=provisional)) for m in spec.judged)
        return {metric: entry for metric, entry in found if entry is not None}

    def entries(self, system: str) -> Mapping[SeriesKey, Entry]:
        """Return the reviewed entries of *system*.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return dict(self._entries(self.system_path(system), system))

    def provisional_entries(self, system: str) -> Mapping[SeriesKey, Entry]:
        """Return all provisional entries of *system* in this state directory.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        found: dict[SeriesKey, Entry] = {}
        for path in self._provisional_files():
            found.update(self._entries(path, ""))
        return {key: entry for key, entry in found.items() if key.system == system}

    def provisional_systems(self) -> frozenset[str]:
        """Return the systems that have provisional entries in this state directory.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return frozenset(key.system for path in self._provisional_files() for key in self._entries(path, ""))

    def systems(self) -> tuple[str, ...]:
        """Return the systems that have a reviewed file."""
        return tuple(sorted(path.stem for path in self._directory.glob("*.yaml")))

    def count(self) -> int:
        """Return how many series have a reviewed entry, on all systems together.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return sum(len(self._entries(self.system_path(system), system)) for system in self.systems())

    def put(self, key: SeriesKey, entry: Entry, *, provisional: bool = False) -> None:
        """Note an entry to be written by :meth:`save`; :meth:`lookup` finds it at once."""
        path = self.path(key, provisional=provisional)
        self._entries(path, key.system)[key] = entry
        self._changes.setdefault(path, {})[key] = entry

    def remove(self, key: SeriesKey, *, provisional: bool = False) -> None:
        """Note an entry to be removed by :meth:`save`."""
        path = self.path(key, provisional=provisional)
        self._entries(path, key.system).pop(key, None)
        self._changes.setdefault(path, {})[key] = None

    def save(self) -> tuple[Path, ...]:
        """Write what was put, and return the files that changed. Each is read again first, then replaced whole.

        Two processes that write one file at the same moment do not tear it; between reading and replacing there is a
        moment in which one's entries can be lost to the other, because the files must work without locks.

        Raises:
            ConfigError: a file was damaged meanwhile; it is left as it is.
            StoreError: a file cannot be written; names it.
        """
        changed = []
        for path, changes in sorted(self._changes.items()):
            system = next(iter(changes)).system
            content = baseline_files.read(path, system, comments=True) or BaselineFile(system, {})
            merged = {
                key: entry for key, entry in {**content.entries, **changes}.items() if entry is not None
            }
            text = render(dataclasses.replace(content, entries=merged))
            if merged != content.entries or not path.exists():
                self._make_folder(path)
                replace_file(path, text)
                changed.append(path)
        self._changes.clear()
        return tuple(changed)

    def unused(self) -> tuple[SeriesKey, ...]:
        """Return entries that nobody asked for, on those machines (partition, environment) that were used."""
        entries = {key for found in self._read.values() for key in found}
        unused = {key for key in entries - self._used if _machine(key) in self._asked}
        return tuple(sorted(unused, key=lambda key: (key.system, key.partition, key.benchmark, key.metric)))

    def problems(self, systems: Iterable[str]) -> None:
        """Read the files of *systems*, and all provisional ones, so that damage is found before anything is started.

        Raises:
            ConfigError: as :meth:`lookup`, of all files at once.
            StoreError: as :meth:`lookup`.
        """
        found: list[Problem] = []
        paths = [(self.system_path(system), system) for system in sorted(set(systems))]
        for path, system in [*paths, *((path, "") for path in self._provisional_files())]:
            try:
                self._entries(path, system)
            except ConfigError as error:
                found += error.problems
        if found:
            raise ConfigError(found)

    def _make_folder(self, path: Path) -> None:
        """Make the folder of provisional files so that others of a group can write beside us, where they share it."""
        if path.parent != self._provisional:
            return
        try:
            make_directories(path.parent, path.parent.parent)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def _provisional_files(self) -> list[Path]:
        return sorted(self._provisional.glob("*.yaml"))

    def _entries(self, path: Path, system: str) -> dict[SeriesKey, Entry]:
        if path not in self._read:
            content = baseline_files.read(path, system)
            self._read.setdefault(path, dict(content.entries) if content else {})
        return self._read[path]


def _machine(key: SeriesKey) -> SeriesKey:
    return dataclasses.replace(key, benchmark="", metric="")


def _file_name(system: str, fingerprint: str) -> str:
    """Return a file name for both: their readable letters, and a digest that no other two share.

    The system is part of it because two systems of one machine have one fingerprint, and a file is of one system.
    """
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{system}-{fingerprint}").strip("-")[:80]
    digest = hashlib.sha256(f"{system}\0{fingerprint}".encode("utf-8", "replace")).hexdigest()[:12]
    return f"{readable}-{digest}".lstrip("-")
