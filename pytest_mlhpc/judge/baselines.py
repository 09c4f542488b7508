"""The baseline files of all systems and the provisional ones of this machine, as one book to look up and write in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.entry import Entry, series_of
from pytest_mlhpc.results.record import SeriesKey


class BaselineBook:
    """Baselines: ``directory/<system>.yaml`` (in git), and ``state_dir/provisional/<fingerprint>.yaml``.

    Files are read when a system is first asked for; a reviewed entry wins over a provisional one.
    """

    def __init__(self, directory: Path, state_dir: Path) -> None:
        raise NotImplementedError

    def lookup(self, key: SeriesKey) -> Entry | None:
        """Return the entry of one series and remember that it was used.

        Raises:
            ConfigError: the file is damaged; every problem with file and line.
            StoreError: the file cannot be read.
        """
        raise NotImplementedError

    def for_spec(self, spec: JobSpec, device_model: str) -> dict[str, Entry]:
        """Return metric -> entry for the judged metrics of *spec* that have one."""
        return {
            metric: entry
            for metric in spec.judged
            if (entry := self.lookup(series_of(spec, device_model, metric))) is not None
        }

    def put(self, key: SeriesKey, entry: Entry, *, provisional: bool = False) -> None:
        """Note an entry to be written by :meth:`save`; :meth:`lookup` finds it at once."""
        raise NotImplementedError

    def save(self) -> tuple[Path, ...]:
        """Write what was put, and return the files that changed. Each is read again first, then replaced whole.

        Raises:
            ConfigError: a file was damaged meanwhile; it is left as it is.
            StoreError: a file cannot be written; names it.
        """
        raise NotImplementedError

    def unused(self) -> tuple[SeriesKey, ...]:
        """Return entries that nobody asked for, on those machines (partition, environment, device) that were used."""
        raise NotImplementedError

    def problems(self, systems: Iterable[str]) -> None:
        """Read the files of *systems* now, so that damage is found before anything is started.

        Raises:
            ConfigError: as :meth:`lookup`.
        """
        raise NotImplementedError
