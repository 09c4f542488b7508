"""What a finished program's output says: metrics by named patterns or JSON lines, or the failure that it was."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.batch.plan import MetricPattern, RunPlan
from pytest_mlhpc.batch.processes import describe_exit
from pytest_mlhpc.jobs.patterns import choices
from pytest_mlhpc.provision.search import search
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.schema import Measurement, Metric, SchemaError

#: Most bytes of output that are kept and searched.
OUTPUT_CAP = 16 * 1024 * 1024

#: Choices in a pattern (jobs/patterns.py) -> most bytes that are searched for it in this process, which nothing can
#: interrupt meanwhile: time is quadratic with one choice and cubic with two, some tens of milliseconds. Anything else is
#: searched in a process that can be ended.
IN_PROCESS_BYTES = {0: 8192, 1: 8192, 2: 512}

#: How long a search may take there, in seconds.
SEARCH_LIMIT_S = 10.0

#: Most samples that one metric keeps (results/schema.py).
MAX_SAMPLES = 4096

#: Units of things that may be zero, or (a plain number) negative as well. All others are positive or wrong.
MAY_BE_ZERO = frozenset({"1", "B", "samples", "items", "tokens", "K"})


@dataclass(frozen=True)
class Finished:
    """A program that has ended. ``output`` is what was kept of it, whole if ``dropped`` is zero; ``log`` holds the same."""

    exit: int  #: exit code, or minus the number of the signal that killed it
    output: bytes
    dropped: int
    log: Path
    host: str
    started_ns: int
    ended_ns: int


def measure(run: RunPlan, finished: Finished) -> Measurement | Failure:
    """Return what a `command` run measured, or why it measured nothing."""
    trouble = _how_it_ended(finished) or _too_much(run, finished)
    if trouble:
        return Failure(*trouble, log=str(finished.log))
    samples = _samples(run.metrics, finished)
    if isinstance(samples, str):
        return Failure("metric_invalid", samples, log=str(finished.log))
    metrics = []
    for name, wanted in run.metrics.items():
        metric = _metric(name, wanted, samples.get(name, []))
        if isinstance(metric, Failure):
            return Failure(metric.outcome, metric.text, log=str(finished.log))
        metrics.append(metric)
    return Measurement(
        run_id=run.run_id,
        nonce=run.nonce,
        attempt=run.attempt,
        workload=run.workload,
        device_type="none",
        device_model="",
        nodes=(finished.host,),
        ranks=1,
        devices=0,
        steps=0,
        samples=0,
        started_ns=finished.started_ns,
        ended_ns=finished.ended_ns,
        metrics=tuple(metrics),
    )


def last_lines(output: bytes, lines: int = 5, characters: int = 600) -> str:
    """Return the end of a program's output as text that is safe to print."""
    text = output[-4096:].decode("utf-8", "replace")
    clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "\n".join(clean.strip().splitlines()[-lines:])[-characters:]


def _how_it_ended(finished: Finished) -> tuple[str, str] | None:
    if finished.exit == 0:
        return None
    words = last_lines(finished.output)
    text = f"the program {describe_exit(finished.exit)}" + (f"; its last lines:\n{words}" if words else "")
    return ("worker_killed" if finished.exit < 0 else "worker_exit"), text


def _too_much(run: RunPlan, finished: Finished) -> tuple[str, str] | None:
    if not finished.dropped or not run.metrics:
        return None
    printed = len(finished.output) + finished.dropped
    return (
        "output_limit",
        f"the program printed {printed} bytes; metrics are searched within {len(finished.output)}",
    )


def _samples(metrics: Mapping[str, MetricPattern], finished: Finished) -> dict[str, list[object]] | str:
    """Return all observations by metric, or why they could not be found."""
    patterns = {name: metric.pattern for name, metric in metrics.items() if metric.pattern is not None}
    found: dict[str, list[object]] = {}
    if patterns:
        texts = _search(patterns, finished)
        if isinstance(texts, str):
            return texts
        found.update({name: list(values) for name, values in texts.items()})
    if len(patterns) < len(metrics):
        printed = _json_samples(finished.output)
        found.update({name: printed.get(name, []) for name in metrics if name not in patterns})
    return found


def _search(patterns: Mapping[str, str], finished: Finished) -> dict[str, list[str]] | str:
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
    texts: dict[str, list[str]] = json.loads(answer.stdout)
    return texts


def _json_samples(output: bytes) -> dict[str, list[object]]:
    """Return what lines like ``{"metric": name, "value": x}`` say; other lines are the program's own business."""
    found: dict[str, list[object]] = {}
    for line in output.splitlines():
        stripped = line.strip()
        if not stripped.startswith(b"{"):
            continue
        try:
            data = json.loads(stripped)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(data.get("metric"), str) and "value" in data:
            found.setdefault(data["metric"], []).append(data["value"])
    return found


def _metric(name: str, wanted: MetricPattern, observed: list[object]) -> Metric | Failure:
    if not observed:
        line = json.dumps({"metric": name, "value": 1.0})
        how = f"nothing matches {wanted.pattern!r}" if wanted.pattern else f"no line is like {line}"
        return Failure("metric_missing", f"metric {name} is not in the output: {how}")
    values = []
    for item in observed:
        value = _number(item)
        if value is None or not math.isfinite(value):
            return Failure(
                "metric_invalid", f"metric {name} is {str(item)[:80]!r}, which is no finite number"
            )
        if wanted.unit != "1" and (value < 0 or (value == 0 and wanted.unit not in MAY_BE_ZERO)):
            return Failure("metric_invalid", f"metric {name} is {value:g} {wanted.unit}, which cannot be")
        values.append(value)
    step = -(-len(values) // MAX_SAMPLES)
    try:
        return Metric(
            name,
            statistics.median(values),
            wanted.unit,
            wanted.better,
            tuple(values[::step]),
            values[0],
            values[-1],
        )
    except (SchemaError, OverflowError) as error:
        return Failure("metric_invalid", str(error))


def _number(item: object) -> float | None:
    if isinstance(item, bool) or not isinstance(item, (int, float, str)):
        return None
    try:
        return float(item)
    except (ValueError, OverflowError):
        return None
