"""Logs written by the library mlperf-logging, one file for each run."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.papers.mlperf.entries import INTERVAL_END, INTERVAL_START, Entry
from pytest_mlhpc.store.files import replace_file

#: How each line begins (mlperf-logging, mllog.LOG_TEMPLATE).
TOKEN: Final = ":::MLLOG "  # noqa: S105 - a mark of lines, no secret
INSTALL: Final = "pip install 'pytest-mlhpc[mlperf]'"
#: Names of logs, which MLPerf's rules for submissions demand.
RESULT: Final = re.compile(r"result_\d+\.txt\Z")


class _Lines(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def text_of(entries: Sequence[Entry]) -> str:
    """Return the log's text, as the library writes it.

    Raises:
        UsageError: mlperf-logging is not installed.
        StoreError: the library could not write an entry; it logs that instead of raising.
    """
    logger, kept = _logger()
    for entry in entries:
        write = {INTERVAL_START: logger.start, INTERVAL_END: logger.end}.get(entry.kind, logger.event)
        write(key=entry.key, value=entry.value, metadata=dict(entry.metadata), time_ms=entry.time_ms)
    for line, entry in zip(kept.lines, entries, strict=False):
        _check(line, entry)
    if len(kept.lines) != len(entries):
        raise StoreError(
            f"mlperf-logging made {len(kept.lines)} lines of {len(entries)} entries, such as {kept.lines[-1]!r:.200}"
        )
    return "".join(f"{line}\n" for line in kept.lines)


def _logger() -> tuple[Any, _Lines]:
    try:
        from mlperf_logging import mllog
    except ImportError as error:
        raise UsageError(f"logs are written by mlperf-logging, which is not installed: {INSTALL}") from error
    kept = _Lines()
    # Known to nobody else: the library's own logger would print, and would keep handlers of earlier logs.
    own = logging.Logger("mlhpc.mlperf", logging.INFO)  # noqa: LOG001 - see above
    own.addHandler(kept)
    # Lines name the file that wrote them, without where it is installed.
    root = re.escape(str(Path(__file__).parents[3]))
    return mllog.mllog.MLLogger(logger=own, root_dir=root), kept


def _check(line: str, entry: Entry) -> None:
    """Refuse a line that does not say what it should, or is two."""
    try:
        said = read_json(line.removeprefix(TOKEN)) if line.startswith(TOKEN) and "\n" not in line else {}
    except ValueError:
        said = {}
    if said.get("key") != entry.key or said.get("time_ms") != entry.time_ms:
        raise StoreError(f"mlperf-logging could not write {entry.key}: {line!r:.200}")


def write_logs(folder: Path, texts: Sequence[str], *, replace: bool = False) -> list[Path]:
    """Write ``result_0.txt`` and so on into *folder*, and return their paths. Each file is there whole or not at all.

    Logs that are replaced go once all new ones are on the disk, and before the first of them has its name: whatever dies, the
    folder never holds a set of some of these and some of those.

    Raises:
        UsageError: results are there already, and they are not to be replaced.
        StoreError: a file cannot be written.
    """
    there = sorted(path for path in folder.glob("result_*.txt") if RESULT.match(path.name))
    if there and not replace:
        raise UsageError(
            f"{folder} holds {there[0].name} already; --replace writes these runs in place of all in it"
        )
    paths = [folder / f"result_{number}.txt" for number in range(len(texts))]
    new = [path.with_name(f"{path.name}.new") for path in paths]
    try:
        for path, text in zip(new, texts, strict=True):
            replace_file(path, text)
        for path in reversed(there):
            path.unlink()
        for path, name in zip(new, paths, strict=True):
            path.rename(name)
    except StoreError as error:  # people know the name that the log was to have
        raise StoreError(str(error).replace(".txt.new: ", ".txt: ")) from error
    except OSError as error:
        raise StoreError(f"{folder}: its logs cannot be replaced: {error.strerror}") from error
    finally:
        for path in new:
            with contextlib.suppress(OSError):
                path.unlink()
    return paths
