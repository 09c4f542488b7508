"""The result of a finished `command` run: metrics by named patterns or JSON lines, or the failure that it was."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from pytest_mlhpc.jobs.metrics import base_unit, choices
from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.plan import MetricPattern, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, SchemaError
from pytest_mlhpc.provision.search import search
from pytest_mlhpc.store.record import Failure

#: Most bytes of output that are logged and searched.
OUTPUT_CAP = 16 * 1024 * 1024

#: Choices in a pattern (jobs/metrics.py) -> most bytes that are searched for it in this process, which cannot be
#: interrupted meanwhile: time is quadratic with one choice and cubic with two, some tens of milliseconds. All other searches
#: run in a process that can be ended.
IN_PROCESS_BYTES = {0: 8192, 1: 8192, 2: 512}

#: Time limit of a search there, in seconds.
SEARCH_LIMIT_S = 10.0

#: Most samples of one metric (node/protocol/schema.py).
MAX_SAMPLES = 4096

#: Units whose values may be zero; a plain number may be negative, too. Values of all others are positive.
MAY_BE_ZERO = frozenset({"1", "B", "samples", "items", "tokens", "K"})

_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median, "min": min, "max": max, "sum": math.fsum, "mean": statistics.fmean,
    "first": itemgetter(0), "last": itemgetter(-1),
}  # fmt: skip


@dataclass(frozen=True)
class FinishedProgram:
    """A program that has ended. ``output`` is its logged output, whole if ``dropped`` is zero; ``log`` is its file."""

    exit: int  #: exit code, or minus the number of the signal that killed it
    output: bytes
    dropped: int
    log: Path
    host: str
    started_ns: int
    ended_ns: int


def measure(run: RunPlan, finished: FinishedProgram) -> Measurement | Failure:
    """Return the measurement of a `command` run, or its failure."""
    trouble = _exit_failure(finished) or _output_failure(run, finished)
    if trouble:
        return Failure(*trouble, log=str(finished.log))
    if isinstance(wrong := _sanity(run.sanity, finished), Failure):
        return wrong
    samples = _samples(run.metrics, finished)
    if isinstance(samples, str):
        return Failure("metric_invalid", samples, log=str(finished.log))
    metrics = []
    for name, wanted in run.metrics.items():
        metric = _metric(name, wanted, samples.get(name, []))
        if isinstance(metric, Failure):
            return Failure(metric.outcome, _with_last_lines(metric.text, finished), log=str(finished.log))
        metrics.append(metric)
    return Measurement(
        run_id=run.run_id,
        nonce=run.nonce,
        attempt=run.attempt,
        workload=run.workload,
        device_type="none",
        device_model="",
        nodes=(finished.host,),
        ranks=run.started,
        devices=0,
        steps=0,
        samples=0,
        started_ns=finished.started_ns,
        ended_ns=finished.ended_ns,
        metrics=tuple(metrics),
    )


def last_lines(output: bytes, lines: int = 20, characters: int = 2000) -> str:
    """Return the end of a program's output as text that is safe to print."""
    text = output[-4096:].decode("utf-8", "replace")
    clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "\n".join(clean.strip().splitlines()[-lines:])[-characters:]


def _exit_failure(finished: FinishedProgram) -> tuple[str, str] | None:
    if finished.exit == 0:
        return None
    return ("worker_killed" if finished.exit < 0 else "worker_exit"), _with_last_lines(
        f"the program {describe_exit(finished.exit)}", finished
    )


def _with_last_lines(reason: str, finished: FinishedProgram) -> str:
    """Return *reason*, and below it the last lines of the program's output."""
    lines = last_lines(finished.output)
    return f"{reason}; its last lines:\n{lines}" if lines else f"{reason}; it printed nothing"


def _output_failure(run: RunPlan, finished: FinishedProgram) -> tuple[str, str] | None:
    if not finished.dropped or not (run.metrics or run.sanity):
        return None
    printed = len(finished.output) + finished.dropped
    return (
        "output_limit",
        f"the program printed {printed} bytes; metrics are searched within {len(finished.output)}",
    )


def _sanity(patterns: Sequence[str], finished: FinishedProgram) -> Failure | None:
    """Return the failure of a program that ended well and did not print what its test wants to see."""
    found = _search({pattern: f"({pattern})" for pattern in patterns}, finished) if patterns else {}
    if isinstance(found, str):
        return Failure("sanity_failed", found, log=str(finished.log))
    missing = [pattern for pattern in patterns if not found[pattern]]
    if not missing:
        return None
    text = f"nothing in the program's output matches {' nor '.join(map(repr, missing))} (sanity)"
    return Failure("sanity_failed", _with_last_lines(text, finished), log=str(finished.log))


def _samples(
    metrics: Mapping[str, MetricPattern], finished: FinishedProgram
) -> dict[str, list[_Observation]] | str:
    """Return all observations by metric, or why they could not be found."""
    patterns = {name: metric.pattern for name, metric in metrics.items() if metric.pattern is not None}
    found: dict[str, list[_Observation]] = {}
    if patterns:
        texts = _search(patterns, finished)
        if isinstance(texts, str):
            return texts
        found.update({name: [(text, after) for text, after in matches] for name, matches in texts.items()})
    if len(patterns) < len(metrics):
        printed = _json_samples(finished.output)
        found.update({name: printed.get(name, []) for name in metrics if name not in patterns})
    return found


def _search(patterns: Mapping[str, str], finished: FinishedProgram) -> dict[str, list[list[str]]] | str:
    size = len(finished.output)
    if all(size <= IN_PROCESS_BYTES.get(choices(pattern), -1) for pattern in patterns.values()):
        return search(patterns, finished.output.decode("utf-8", "replace"))
    from pytest_mlhpc.provision import search as program

    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", program.__file__],
            input=json.dumps({"path": str(finished.log), "patterns": patterns}),
            capture_output=True,
            text=True,
            timeout=SEARCH_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        names = ", ".join(patterns)
        return f"searching the output for {names} took more than {SEARCH_LIMIT_S:g} s; simplify the patterns"
    except subprocess.CalledProcessError as error:
        return f"searching the output failed: {last_lines(error.stderr.encode())}"
    texts: dict[str, list[list[str]]] = json.loads(answer.stdout)
    return texts


def _json_samples(output: bytes) -> dict[str, list[_Observation]]:
    """Return the values of lines like ``{"metric": name, "value": x}`` by metric, with their ``unit``; other lines are ignored."""
    found: dict[str, list[_Observation]] = {}
    for line in output.splitlines():
        stripped = line.strip()
        if not stripped.startswith(b"{"):
            continue
        try:
            data = json.loads(stripped)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(data.get("metric"), str) and "value" in data:
            found.setdefault(data["metric"], []).append((data["value"], str(data.get("unit", ""))))
    return found


def _metric(name: str, wanted: MetricPattern, observed: list[_Observation]) -> MetricValue | Failure:
    if not observed:
        line = json.dumps({"metric": name, "value": 1.0})
        how = f"nothing matches {wanted.pattern}" if wanted.pattern else f"no line is like {line}"
        return Failure("metric_missing", f"the program's output has no metric {name}: {how}")
    values = []
    for item, after in observed:
        value = _number(_plain_figure(item, wanted))
        text = str(item) if value is None else f"{item} {after.strip()}"
        if isinstance(item, (str, int, float)) and (unit := _other_unit(text, wanted)):
            return Failure("metric_invalid", f"metric {name} is {text[:80]!r}: {unit}")
        if value is None or not math.isfinite(value):
            return Failure(
                "metric_invalid", f"metric {name} is {str(item)[:80]!r}, which is no finite number"
            )
        value *= wanted.scale
        if wanted.unit != "1" and (value < 0 or (value == 0 and wanted.unit not in MAY_BE_ZERO)):
            return Failure("metric_invalid", f"metric {name} is {value:g} {wanted.unit}, which cannot be")
        values.append(value)
    step = -(-len(values) // MAX_SAMPLES)
    try:
        return MetricValue(
            name,
            _REDUCE[wanted.reduce](values),
            wanted.unit,
            wanted.better,
            tuple(values[::step]),
            values[0],
            values[-1],
            wanted.tolerance,
        )
    except (SchemaError, OverflowError) as error:
        return Failure("metric_invalid", str(error))


#: What was observed of a metric, and what stood behind it, which may be its unit.
_Observation = tuple[object, str]

#: A figure with its unit behind it, as programs print it; the unit may be in brackets.
_WITH_UNIT = re.compile(
    r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*[\[(]?\s*([A-Za-z%\u00b5\u03bc][\w/%\u00b5\u03bc]*)"
)
#: Other spellings of units that programs print.
_SPELLED = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"), "msec": "ms", "usec": "us", "nsec": "ns",
    **dict.fromkeys(("mins", "minute", "minutes"), "min"), **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("byte", "bytes"), "B"),
}  # fmt: skip
_PER_SECOND = re.compile(r"([KMGT]?)([bB])ps\Z")


def _unit_of(text: str) -> tuple[str, float] | None:
    """Return base unit and factor of a word behind a figure, None if it is no unit."""
    rate = _PER_SECOND.match(text)
    parts = [rate[1] + rate[2], "s"] if rate else text.split("/")
    try:
        return base_unit("/".join(_SPELLED.get(part, part) for part in parts))
    except ValueError:
        return None


def _plain_figure(item: object, wanted: MetricPattern) -> object:
    """Return *item* without the declared unit, where it carries that."""
    found = _WITH_UNIT.fullmatch(item.rstrip()) if isinstance(item, str) else None
    return found[1] if found and _unit_of(found[2]) == (wanted.unit, wanted.scale) else item


def _other_unit(item: str, wanted: MetricPattern) -> str:
    """Return what *item* carries in place of the declared unit, or an empty string."""
    found = _WITH_UNIT.match(item)
    unit = _unit_of(found[2]) if found else None
    if not found or unit is None or unit == (wanted.unit, wanted.scale):
        return ""
    return f"it is in {found[2]}, and the metric is declared in {wanted.declared or wanted.unit}"


def _number(item: object) -> float | None:
    if isinstance(item, bool) or not isinstance(item, (int, float, str)):
        return None
    try:
        return float(item)
    except (ValueError, OverflowError):
        return None
