"""The messages of one allocation, decoded and checked; and the result of a finished `command` run: metrics of its output, its files or a test's functions, or the failure that it was.

Messages that the controller makes itself are here too, in the same form.
"""

from __future__ import annotations

import json
import math
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import RunFailure
from pytest_mlhpc.jobs.metrics import base_unit, choices
from pytest_mlhpc.node.processes import describe_exit, last_lines
from pytest_mlhpc.node.protocol.lines import Decoder, Fault, Message
from pytest_mlhpc.node.protocol.plan import PROTOCOL, MetricPattern, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, SchemaError, to_json
from pytest_mlhpc.provision.output_search import RunFiles, search, values_of
from pytest_mlhpc.store.record import Failure

#: Most bytes of output that are logged and searched.
OUTPUT_CAP = 16 * 1024 * 1024

#: Choices in a pattern (jobs/metrics.py) -> most bytes that are searched for it in this process, which cannot be
#: interrupted meanwhile: time is quadratic with one choice and cubic with two, some tens of milliseconds. All other searches
#: run in a process that can be ended.
IN_PROCESS_BYTES = {0: 8192, 1: 8192, 2: 512}

#: Time limit of a search there, and of the functions of one test, in seconds.
SEARCH_LIMIT_S, FUNCTIONS_LIMIT_S = 10.0, 60.0

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
    """A program that has ended. ``output`` is its logged output, whole if ``dropped`` is zero; ``log`` is its file.

    ``folder`` is that of the run, in which its files are.
    """

    exit: int  #: exit code, or minus the number of the signal that killed it
    output: bytes
    dropped: int
    log: Path
    host: str
    started_ns: int
    ended_ns: int
    folder: Path = Path()

    @property
    def last_lines(self) -> str:
        """The end of its output, as text that is safe to print."""
        return last_lines(self.output)


def measure(run: RunPlan, finished: FinishedProgram) -> Measurement | Failure:
    """Return the measurement of a `command` run, or its failure."""
    trouble = _exit_failure(finished) or _output_failure(run, finished)
    if trouble:
        return Failure(*trouble, log=str(finished.log))
    try:
        metrics = _metrics(run, finished)
    except RunFailure as failure:
        text = str(failure).removeprefix(f"{failure.outcome}: ")
        return Failure(failure.outcome, text, log=str(finished.log))
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
        metrics=metrics,
    )


def _metrics(run: RunPlan, finished: FinishedProgram) -> tuple[MetricValue, ...]:
    """Return the metrics of a program that ended well.

    Raises:
        RunFailure: it is not sound, or one of them cannot be had.
    """
    called = _call(run, finished) if run.functions else {}
    _check_sanity(run.sanity, finished, called.get("unsound", ""))
    try:
        extracted = {
            name: [(value, "") for value in found] for name, found in called.get("samples", {}).items()
        }
        samples = {**_samples(run, finished), **extracted}
        failed = called.get("errors", {})
        return tuple(
            _metric(name, wanted, samples.get(name, []), failed.get(name, ""))
            for name, wanted in run.metrics.items()
        )
    except RunFailure as failure:
        text = str(failure).removeprefix(f"{failure.outcome}: ")
        if text.startswith(_SEARCHING):
            raise
        raise RunFailure(failure.outcome, _with_last_lines(text, finished)) from None


#: How a text begins that tells of a search and not of the program.
_SEARCHING = "searching "


def _exit_failure(finished: FinishedProgram) -> tuple[str, str] | None:
    if finished.exit == 0:
        return None
    return ("worker_killed" if finished.exit < 0 else "worker_exit"), _with_last_lines(
        f"the program {describe_exit(finished.exit)}", finished
    )


def _with_last_lines(reason: str, finished: FinishedProgram) -> str:
    """Return *reason*, and below it the last lines of the program's output."""
    lines = finished.last_lines
    return f"{reason}; its last lines:\n{lines}" if lines else f"{reason}; it printed nothing"


def _output_failure(run: RunPlan, finished: FinishedProgram) -> tuple[str, str] | None:
    if not finished.dropped or not (run.sanity or any(not one.file for one in run.metrics.values())):
        return None
    printed = len(finished.output) + finished.dropped
    return (
        "output_limit",
        f"the program printed {printed} bytes; metrics are searched within {len(finished.output)}",
    )


def _check_sanity(patterns: Sequence[str], finished: FinishedProgram, unsound: str) -> None:
    """Check that a program which ended well printed what its test wants to see.

    Raises:
        RunFailure: it did not, or a function of the test says why it is *unsound*.
    """
    found = _search({pattern: f"({pattern})" for pattern in patterns}, finished) if patterns else {}
    missing = [pattern for pattern in patterns if not found[pattern]]
    if missing:
        unsound = f"nothing in the program's output matches {' nor '.join(map(repr, missing))} (sanity)"
    if unsound:
        raise RunFailure("sanity_failed", _with_last_lines(unsound, finished))


def _samples(run: RunPlan, finished: FinishedProgram) -> dict[str, list[_Observation]]:
    """Return all observations by metric, but those that functions make.

    Raises:
        RunFailure: they could not be found.
    """
    found: dict[str, list[_Observation]] = {}
    for file in dict.fromkeys(metric.file for metric in run.metrics.values() if not metric.extract):
        here = {name: one for name, one in run.metrics.items() if one.file == file and not one.extract}
        source = _file_of_run(run, finished, file) if file else finished
        patterns = {name: one.pattern for name, one in here.items() if one.pattern is not None}
        texts = _search(patterns, source, file or "the output") if patterns else {}
        found.update({name: [(text, after) for text, after in matches] for name, matches in texts.items()})
        printed = _json_samples(source.output) if not file and len(patterns) < len(here) else {}
        for name in here.keys() - patterns.keys():
            found[name] = _values_of_file(name, here[name], source) if file else printed.get(name, [])
    return found


def _file_of_run(run: RunPlan, finished: FinishedProgram, name: str) -> FinishedProgram:
    """Return *finished* with the content of a file of the run in place of its output.

    Raises:
        RunFailure: the program has not written it, or it is too large.
    """
    try:
        path = RunFiles(finished.folder, finished.log, run.artifacts).path(name)
    except RunFailure as failure:
        raise RunFailure("metric_missing", str(failure).removeprefix(f"{failure.outcome}: ")) from None
    if (size := path.stat().st_size) > OUTPUT_CAP:
        text = f"{name} has {size} bytes; metrics are searched within {OUTPUT_CAP}"
        raise RunFailure("output_limit", text)
    return replace(finished, output=path.read_bytes(), log=path)


def _values_of_file(name: str, metric: MetricPattern, source: FinishedProgram) -> list[_Observation]:
    try:
        values = values_of(metric.file, source.output.decode("utf-8", "replace"), metric.key)
        return [(value, "") for value in values]
    except KeyError as error:
        raise RunFailure("metric_missing", f"metric {name}: in {metric.file} {error.args[0]}") from None
    except ValueError as error:
        raise RunFailure("metric_invalid", f"metric {name}: {metric.file} cannot be read: {error}") from None


def _search(
    patterns: Mapping[str, str], finished: FinishedProgram, what: str = "the output"
) -> dict[str, list[list[str]]]:
    """Return the matches of each pattern, each with what stands behind it.

    Raises:
        RunFailure: the search took too long.
    """
    size = len(finished.output)
    if all(size <= IN_PROCESS_BYTES.get(choices(pattern), -1) for pattern in patterns.values()):
        return search(patterns, finished.output.decode("utf-8", "replace"))
    request = {"path": str(finished.log), "patterns": patterns}
    doing = f"{_SEARCHING}{what} for {', '.join(patterns)}"
    answer: dict[str, list[list[str]]] = _ask(
        ["-I", "-S"], request, SEARCH_LIMIT_S, doing, "; simplify the patterns"
    )
    return answer


def _call(run: RunPlan, finished: FinishedProgram) -> dict[str, Any]:
    """Return what the functions of the run's test find.

    Raises:
        RunFailure: they cannot be called, or took too long.
    """
    request = {
        "functions": run.functions,
        "metrics": [name for name, metric in run.metrics.items() if metric.extract],
        "checks": run.checks,
        "folder": str(finished.folder),
        "log": str(finished.log),
        "artifacts": run.artifacts,
        "sys_path": sys.path,
    }
    answer: dict[str, Any] = _ask([], request, FUNCTIONS_LIMIT_S, "calling the functions of the test")
    if broken := answer.get("broken"):
        raise RunFailure("metric_invalid", broken)
    return answer


def _ask(
    options: Sequence[str], request: Mapping[str, object], limit_s: float, doing: str, advice: str = ""
) -> Any:
    """Return the answer of the process that searches.

    Raises:
        RunFailure: there is none.
    """
    from pytest_mlhpc.provision import output_search as program

    try:
        answer = subprocess.run(
            [sys.executable, *options, program.__file__],
            input=json.dumps({**request, "limit_s": limit_s}),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
        )
        return json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        text = f"{doing} took more than {limit_s:g} s{advice}"
    except subprocess.CalledProcessError as error:
        text = f"{doing} failed: {last_lines(error.stderr.encode())}"
    except ValueError:
        text = f"{doing} ended without an answer"
    raise RunFailure("metric_invalid", text)


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


def _metric(name: str, wanted: MetricPattern, observed: list[_Observation], failed: str) -> MetricValue:
    if failed:
        raise RunFailure("metric_invalid", f"metric {name}: its function failed: {failed}")
    if not observed:
        raise RunFailure("metric_missing", _nothing_found(name, wanted))
    values = []
    for item, after in observed:
        value = _number(_plain_figure(item, wanted))
        text = str(item) if value is None else f"{item} {after.strip()}"
        if isinstance(item, (str, int, float)) and (unit := _other_unit(text, wanted)):
            raise RunFailure("metric_invalid", f"metric {name} is {text[:80]!r}: {unit}")
        if value is None or not math.isfinite(value):
            raise RunFailure(
                "metric_invalid", f"metric {name} is {str(item)[:80]!r}, which is no finite number"
            )
        value *= wanted.scale
        if wanted.unit != "1" and (value < 0 or (value == 0 and wanted.unit not in MAY_BE_ZERO)):
            raise RunFailure("metric_invalid", f"metric {name} is {value:g} {wanted.unit}, which cannot be")
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
        raise RunFailure("metric_invalid", str(error)) from None


def _nothing_found(name: str, wanted: MetricPattern) -> str:
    if wanted.extract:
        return f"the function of metric {name} found nothing"
    if wanted.key:
        return f"{wanted.file} has no metric {name}: {wanted.key} has no values"
    where = f"the file {wanted.file}" if wanted.file else "the program's output"
    line = json.dumps({"metric": name, "value": 1.0})
    how = f"nothing matches {wanted.pattern}" if wanted.pattern else f"no line is like {line}"
    return f"{where} has no metric {name}: {how}"


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


class Conversation:
    """The worker lines of one allocation. ``heard``: whether any came; ``mismatch``: a difference of protocol or payload.

    Args:
        plan: the plan of the batch.
        log: the batch's own output, for the texts of failures.
        there: the plan's directory as nodes see it, empty where that is the same: paths in messages become those here.
    """

    def __init__(self, plan: Plan, log: Path, there: str = "") -> None:
        self._there = there
        self.heard = False
        self.mismatch = ""
        self._plan = plan
        self._log = log
        self._decoder = Decoder({run.run_id: run.nonce for run in plan.runs})
        self._runs = {run.run_id: run for run in plan.runs}
        self._failed: set[str] = set()
        self._ended: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every run has ended."""
        return self._ended >= set(self._runs)

    @property
    def failing(self) -> bool:
        """Whether a run has failed and its end has not come."""
        return bool(self._failed - self._ended)

    def take(self, data: bytes) -> list[Message]:
        """Decode worker lines; an invalid line is a failure of its run."""
        self.heard = True
        return [message for item in self._decoder.feed(data) for message in self._check(item)]

    def finish(self) -> list[Message]:
        """End the conversation; return failures for unfinished lines."""
        return [message for fault in self._decoder.finish() for message in self._check(fault)]

    def damaged(self, text: str) -> list[Message]:
        """Return the failure of the run that was active when the channel was damaged."""
        return self._check(Fault("truncated_result", text))

    def _check(self, item: Message | Fault) -> list[Message]:
        if isinstance(item, Fault):
            unfinished = [run_id for run_id in self._runs if run_id not in self._ended]
            run = self._runs.get(item.run_id) or self._runs[(unfinished or list(self._runs))[0]]
            return self._fail(run, item.outcome, f"worker lines: {item.text}")
        run = self._runs[item.run_id]
        if self._there:
            item = replace(item, body=self._with_paths_here(item.body))
        if item.kind == "started" and (mismatch := self._mismatch(item)):
            self.mismatch = mismatch
            return [item, *self._fail(run, "protocol_mismatch", mismatch)]
        if item.kind == "failed":
            self._failed.add(item.run_id)
        if item.kind == "end":
            self._ended.add(item.run_id)
            if run.workload == "command" and item.run_id not in self._failed:
                return [self._command(run, item), item]
        return [item]

    def _with_paths_here(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return *body* with the paths of files that were copied from there."""
        return {
            name: f"{self._plan.directory}{value[len(self._there) :]}"
            if isinstance(value, str) and value.startswith(f"{self._there}/")
            else value
            for name, value in body.items()
        }

    def _fail(self, run: RunPlan, outcome: str, text: str) -> list[Message]:
        """Return one failed message for the first fault of a run; others are its consequences."""
        if run.run_id in self._failed:
            return []
        self._failed.add(run.run_id)
        return [run_message(run, "failed", {"outcome": outcome, "text": text, "log": str(self._log)})]

    def _mismatch(self, started: Message) -> str:
        worker = (started.body["protocol"], started.body["payload_sha256"])
        own = (PROTOCOL, self._plan.payload_sha256)
        if worker == own:
            return ""
        return f"the worker has protocol {worker[0]} and payload {worker[1]}, we have {own[0]} and {own[1]}"

    def _command(self, run: RunPlan, end: Message) -> Message:
        folder = Path(self._plan.directory) / run.run_id
        names = ("container.log", "rank0.log" if run.launcher == "plain" else "launcher.log")
        log = next((folder / name for name in names if (folder / name).exists()), folder / names[1])
        times = [end.body.get(name) for name in ("started_ns", "ended_ns")]
        began, ended = (time if isinstance(time, int) else 0 for time in times)
        host = str(end.body.get("host") or socket.gethostname())
        try:
            size = log.stat().st_size
            with log.open("rb") as file:
                output = file.read(OUTPUT_CAP)
        except OSError as error:
            return result_message(run, Failure("no_result", f"cannot read {log}: {error.strerror}"))
        code = next((code for code in end.body["exit"] if code), 0)
        finished = FinishedProgram(code, output, max(0, size - OUTPUT_CAP), log, host, began, ended, folder)
        return result_message(run, measure(run, finished))


def result_message(run: RunPlan, found: Measurement | Failure) -> Message:
    """Return the measurement or failed message of a run's result."""
    if isinstance(found, Failure):
        return run_message(run, "failed", {"outcome": found.outcome, "text": found.text, "log": found.log})
    return run_message(run, "measurement", to_json(found))


def run_message(run: RunPlan, kind: str, body: Mapping[str, object]) -> Message:
    """Return one message of *run*."""
    return Message(run.run_id, run.nonce, kind, body)
