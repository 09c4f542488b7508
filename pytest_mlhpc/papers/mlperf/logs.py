"""Logs of recorded runs as mlperf-logging writes them, and their check by its compliance checker."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import MlhpcError, StoreError, UsageError
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.papers.mlperf import results, trained
from pytest_mlhpc.papers.mlperf.results import Departure, ResultScore, RunGroup
from pytest_mlhpc.papers.mlperf.trained import CLOSED, QUALITY, RULESET, USAGE, TrainedRun
from pytest_mlhpc.store.locations import replace_file
from pytest_mlhpc.store.text import table

INTERVAL_START: Final = "INTERVAL_START"
INTERVAL_END: Final = "INTERVAL_END"
POINT: Final = "POINT_IN_TIME"
DIVISIONS: Final = ("closed", "open")
#: What the checker takes (hpc_3.0.0/common.yaml).
STATUSES: Final = ("onprem", "cloud", "preview", "research")
#: Keys of ours, which the checker does not know and lets pass.
DEPARTURE, RECORD = "mlhpc_departure", "mlhpc_record"
_OPTIMIZERS: Final = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "LAMB", "lars": "LARS"}
_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}\Z")
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True)
class LogEntry:
    """One line. ``time_ms`` is UTC."""

    key: str
    value: Any
    time_ms: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The line's event type."""
        if self.key.endswith(trained.START):
            return INTERVAL_START
        return INTERVAL_END if self.key.endswith(trained.STOP) else POINT


@dataclass(frozen=True)
class Submission:
    """What no run knows: who submits which system, and in which division."""

    org: str
    platform: str
    division: str
    status: str = "research"


def entries(run: TrainedRun, submission: Submission, found: Sequence[Departure]) -> list[LogEntry]:
    """Return the lines of the log of *run*.

    Raises:
        UsageError: it is of no benchmark of MLPerf HPC, reported no events, or its events contradict its record.
    """
    if run.workload not in CLOSED:
        raise UsageError(f"{run.workload} is no benchmark of MLPerf HPC; those are {', '.join(CLOSED)}")
    if not run.events:
        raise UsageError(f"record {run.record} has no events: it ended before it recorded them")
    begun = run.events[0].time_ns // _NS_PER_MS
    lines = [LogEntry(key, value, begun) for key, value in _heading(run, submission)]
    lines += [LogEntry(key, value, begun) for key, value in _facts(run)]
    lines += [
        LogEntry(DEPARTURE, one.text, begun, {"rule": one.rule.name, "section": str(one.rule)})
        for one in found
    ]
    for event in run.events:
        _checked(run, event.key, event.value, event.metadata)
        lines.append(LogEntry(event.key, event.value, event.time_ns // _NS_PER_MS, dict(event.metadata)))
    return lines


def _heading(run: TrainedRun, submission: Submission) -> Iterator[tuple[str, Any]]:
    logged = {event.key for event in run.events}
    for key, value in (
        ("submission_benchmark", run.workload),
        ("submission_org", submission.org),
        ("submission_division", submission.division),
        ("submission_status", submission.status),
        ("submission_platform", submission.platform),
    ):
        if key in logged:
            raise UsageError(f"record {run.record}: its events hold {key}, which is not the run's to say")
        yield key, value
    yield RECORD, run.record


def _facts(run: TrainedRun) -> Iterator[tuple[str, Any]]:
    """Yield what the record knows and no event tells.

    Raises:
        UsageError: an event tells otherwise.
    """
    parameters = run.parameters
    facts: dict[str, Any] = {
        "cache_clear": run.cache == "cold",
        "number_of_nodes": run.nodes,
        "accelerators_per_node": accelerators_per_node(run),
        "number_of_ranks": run.ranks,
        "global_batch_size": run.global_batch,
        "seed": parameters.get("seed"),
        "opt_name": _OPTIMIZERS.get(str(parameters.get("optimizer"))),
        "dropout": parameters.get("dropout"),
        "gradient_accumulation_frequency": parameters.get("gradient_accumulation"),
    }
    for key, value in facts.items():
        logged = trained.values(run.events, key)
        if not logged:
            if value is not None:
                yield key, value
            continue
        if value is not None and any(_differ(one, value) for one in logged):
            raise UsageError(
                f"record {run.record} contradicts itself: its event {key} says {logged[0]}, the record {value}"
            )


def accelerators_per_node(run: TrainedRun) -> int:
    """Return the accelerators of a node; a CPU has none (closed_common.yaml takes zero)."""
    return 0 if run.device_type == "cpu" else math.ceil(run.devices / max(1, run.nodes))


def _differ(logged: Any, known: Any) -> bool:
    if isinstance(logged, str) and isinstance(known, str):
        return logged.casefold() != known.casefold()
    return bool(logged != known)


def _checked(run: TrainedRun, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse what would make a line that is none."""
    if not _KEY.match(key):
        raise UsageError(f"record {run.record}: an event is called {key!r:.80}, which is no key of a log")
    if not (_finite(value) and all(_finite(one) for one in metadata.values())):
        raise UsageError(f"record {run.record}: event {key} holds a figure that is not finite")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return True


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


def log_text(entries: Sequence[LogEntry]) -> str:
    """Return the log's text, as the library writes it.

    Raises:
        UsageError: mlperf-logging is not installed.
        StoreError: the library could not write an entry; it logs that instead of raising.
    """
    logger, lines = _logger()
    for entry in entries:
        write = {INTERVAL_START: logger.start, INTERVAL_END: logger.end}.get(entry.kind, logger.event)
        write(key=entry.key, value=entry.value, metadata=dict(entry.metadata), time_ms=entry.time_ms)
    for line, entry in zip(lines.lines, entries, strict=False):
        _check(line, entry)
    if len(lines.lines) != len(entries):
        raise StoreError(
            f"mlperf-logging made {len(lines.lines)} lines of {len(entries)} entries, such as {lines.lines[-1]!r:.200}"
        )
    return "".join(f"{line}\n" for line in lines.lines)


def _logger() -> tuple[Any, _Lines]:
    try:
        from mlperf_logging import mllog
    except ImportError as error:
        raise UsageError(f"logs are written by mlperf-logging, which is not installed: {INSTALL}") from error
    lines = _Lines()
    # Known to nobody else: the library's own logger would print, and would keep handlers of earlier logs.
    own = logging.Logger("mlhpc.mlperf", logging.INFO)  # noqa: LOG001 - see above
    own.addHandler(lines)
    # Lines name the file that wrote them, without where it is installed.
    root = re.escape(str(Path(__file__).parents[3]))
    return mllog.mllog.MLLogger(logger=own, root_dir=root), lines


def _check(line: str, entry: LogEntry) -> None:
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


Written = Sequence[tuple[Path, TrainedRun]]


def write(
    folder: Path, group: RunGroup, submission: Submission, *, replace: bool
) -> tuple[Written, tuple[str, ...]]:
    """Write the logs of *group*, and return each with its run; and which runs have none, and why.

    Raises:
        UsageError: mlperf-logging is not installed, *folder* holds results, or the workload is none of MLPerf HPC.
        StoreError: a log cannot be written.
    """
    logged = [run for run in group.runs if run.events]
    texts = [log_text(entries(run, submission, results.departures(run))) for run in logged]
    without = tuple(
        f"record {run.record} ({run.verdict}) ended before it recorded any event"
        for run in group.runs
        if not run.events
    )
    return list(
        zip(write_logs(folder, texts, replace=replace) if texts else [], logged, strict=True)
    ), without


def of(given: Path) -> list[Path]:
    """Return the log at *given*, or the logs in that folder and below it.

    Raises:
        UsageError: the folder holds none, or cannot be read.
    """
    try:
        if not given.is_dir():
            return [given]
        named = (path for path in given.rglob("result_*.txt") if RESULT.match(path.name))
        found = sorted((path for path in named if path.is_file()), key=_order)
    except OSError as error:
        raise UsageError(f"{given}: cannot be read: {error.strerror}") from error
    if not found:
        raise UsageError(f"{given} holds no logs (result_0.txt ...); `mlhpc papers mlperf log` writes them")
    return found


def _order(path: Path) -> tuple[str, int, str]:
    return str(path.parent), len(path.name), path.name


def text_of(group: RunGroup, written: Written, division: str) -> str:
    """Return what people should know of logs that name *division*."""
    rows = [("log", "run", "quality", "training epochs", "time to train")]
    for path, run in written:
        state = "reached its target" if run.reached else "did not converge"
        rows.append((str(path), state, _figure(run.quality), _figure(run.epochs), _seconds(run.time_s)))
    quality = QUALITY[group.workload]
    asked = {quality.target if run.target is None else run.target for run in group.runs}
    targets = " and ".join(f"{one:g}" for one in sorted(asked))
    head = f"{group.name} on {group.machine}: {quality.name}, target {targets}\n"
    return head + table(rows) + f"{score_text(group.score)}\n" + _rules(group, division)


def _rules(group: RunGroup, division: str) -> str:
    found = group.departures
    lines = [f"  {rule.name}: {'; '.join(texts)} ({rule})" for rule, texts in results.by_rule(found).items()]
    if lines:
        lines.insert(0, "departures from the rules, which the logs name too (mlhpc_departure):")
    lines.append(
        f"by the rules these runs belong in {division_text(group.division)}; their logs say {division}"
    )
    return "".join(f"{line}\n" for line in lines)


def division_text(division: str) -> str:
    """Return what *division*, as :func:`rules.division` names it, is for people."""
    return "no division of MLPerf" if division == results.NEITHER else f"the {division} division"


def score_text(score: ResultScore) -> str:
    """Return a result for people."""
    if score.seconds is None:
        return f"no result: {score.why}"
    spread = f" \N{PLUS-MINUS SIGN} {100 * score.spread:.1f} %" if score.spread is not None else ""
    slowest = "the one that did not converge" if score.lost else "the slowest"
    return f"olympic mean of {score.runs} runs: {score.seconds:.4g} s{spread} (without the fastest and {slowest})"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


#: Seconds for one log, which takes less than one on a machine with nothing else to do.
LIMIT_S: Final = 600.0
#: More than any log: 65,536 lines of 1,000 bytes.
LARGEST: Final = 64 << 20
_MODULE: Final = "mlperf_logging.compliance_checker"
#: How it ends, and what it says then, where it does not know a set of rules (argparse's).
_USAGE_ERROR: Final = 2
_OPTION: Final = re.compile(r"error: argument (?:--)?(usage|ruleset): (.+)")
_SEPARATOR: Final = re.compile(r"\n-{30}\n")
_CONTEXT: Final = re.compile(r"\ncurrent (?:context\[s\]|line\[v\])=", re.MULTILINE)


@dataclass(frozen=True)
class CheckedLog:
    """The checker's verdict on one file; ``complaints`` are its own text."""

    path: Path
    accepted: bool
    complaints: tuple[str, ...] = ()


def check_file(
    path: Path, *, usage: str = USAGE, ruleset: str = RULESET, limit_s: float = LIMIT_S
) -> CheckedLog:
    """Return the compliance checker's verdict on the log at *path*.

    Raises:
        UsageError: the file cannot be read, there are no such rules, or mlperf-logging is not installed.
        MlhpcError: the checker came to no verdict.
    """
    _readable(path)
    arguments = [str(path.resolve()), "--usage", usage, "--ruleset", ruleset, "--log_output", os.devnull]
    code, logged = run_checker(_MODULE, path, arguments, limit_s)
    if code == 0 and "SUCCESS" in logged:
        return CheckedLog(path, accepted=True)
    return CheckedLog(path, accepted=False, complaints=complaints(logged))


def run_checker(module: str, path: Path, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a checker of mlperf-logging on *path*, and return how it ended, 0 or 1, and what it logged.

    It runs by itself: its rules are code that it evaluates, a log that it does not expect ends it with a traceback, and it
    keeps state from one log to the next.

    Raises:
        UsageError: there are no such rules, or mlperf-logging is not installed.
        MlhpcError: the checker came to no verdict.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        raise UsageError(f"logs are checked by mlperf-logging, which is not installed: {INSTALL}")
    name = module.rpartition(".")[2].replace("_", " ")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MlhpcError(f"{path}: the {name} came to no verdict within {limit_s:.0f} s") from error
    logged = ended.stderr.decode(errors="replace")
    refused = _OPTION.search(logged) if ended.returncode == _USAGE_ERROR else None
    if refused:
        raise UsageError(f"the {name} has no such --{refused[1]}: {refused[2]}")
    if ended.returncode not in (0, 1):
        raise MlhpcError(f"{path}: the {name} ended with {ended.returncode}: {logged.strip()[-300:]}")
    return ended.returncode, logged


def _readable(path: Path) -> None:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{path} is no file")
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if size > LARGEST:
        raise UsageError(f"{path} has {size >> 20} MiB, more than any log ({LARGEST >> 20} MiB)")


SILENT: Final = "the checker did not say why"


def complaints(logged: str) -> tuple[str, ...]:
    """Return what the checker had against a log, each without the context that it prints, which is most of it."""
    if "Traceback (most recent call last)" in logged:
        last = logged.strip().splitlines()[-1]
        return (f"the checker cannot read it and ended with {last}",)
    lines = [
        line
        for line in logged.splitlines()
        if not re.match(r"(INFO|ERROR) - ", line) and "** Logging output" not in line
    ]
    text = re.sub(r"^WARNING -\s*", "", "\n".join(lines), flags=re.MULTILINE)
    found = (" ".join(_CONTEXT.split(part)[0].split()) for part in _SEPARATOR.split(text))
    return tuple(one for one in found if one) or (SILENT,)
