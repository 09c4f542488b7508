"""PAYLOAD. ``dcgmi diag -r 1`` where it is installed and its host engine runs: a second opinion on software and settings.

A pass proves little: it passes nodes whose NVLinks are all down, and reports errors of allocation as passes (NVIDIA/DCGM
issues 198 and 284). So a pass is told as information, and a failure counts. Its JSON has no stable schema; what releases 3
and 4 print is understood, and that we do not understand something is said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.checks.nvidia_library import Notes, usable
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable

#: Longest run of level 1, in seconds, less than what kills this check; some releases hang (NVIDIA/DCGM issue 247).
LIMIT_S = 45.0

#: DCGM_ERROR_ISOLATE and DCGM_ERROR_RESET (DCGM, Diagnostic Errors).
GRAVE = frozenset({2, 6})

#: Tests of release 3, which gives no severity, that speak of settings (DCGM, dcgmi diag).
SETTINGS = frozenset(
    {"persistence mode", "environment variables", "graphics processes", "page retirement/row remap"}
)


@dataclass(frozen=True)
class Result:
    """One test's result on one device (empty: on all): status in lower case, its warnings, their worst severity."""

    test: str
    status: str
    device: str = ""
    warnings: Tuple[str, ...] = ()
    severities: Tuple[int, ...] = ()


class Dcgm:
    """Runs level 1 of NVIDIA's own diagnostics."""

    name = "nvidia_dcgm"
    level = "deep"
    cost_s = 15.0
    reads = ("dcgmi diag -r 1 -j",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Judge what it says; without it nothing is said."""
        if usable(machine, context) is None:
            return Outcome()
        notes = Notes(self.name, context)
        try:
            done = machine.command(["dcgmi", "diag", "-r", "1", "-j"], LIMIT_S)
        except Absent:
            return Outcome()
        except Unreadable as error:
            notes.judge(
                "dcgm_no_proof",
                1,
                f"dcgmi diag shows nothing: {error}; do without, or look at its host engine",
            )
            return Outcome(tuple(notes.findings))
        if "unable to establish a connection" in (done.output + done.errors).lower():
            notes.info("dcgmi is installed, but its host engine does not run; not used")
            return Outcome(tuple(notes.findings))
        results = list(read(done.output))
        for result in results:
            _judge(notes, result)
        if not any(result.status in ("pass", "fail", "warn") for result in results):
            text = f"dcgmi diag shows nothing: it ended with {done.code} and no result; do without, or look at its host engine"
            notes.judge("dcgm_no_proof", 1, text)
        if not notes.findings:
            notes.info(f"dcgmi diag passed {len(results)} tests of level 1, which proves little")
        return Outcome(tuple(notes.findings))


def read(text: str) -> Iterator[Result]:
    """Yield all results in what ``dcgmi diag -j`` printed, of release 3 or 4; nothing where there are none."""
    start = text.find("{")
    try:
        data, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except ValueError:
        return
    root = next(
        (data[key] for key in ("DCGM Diagnostic", "DCGM GPU Diagnostic") if key in _table(data)), None
    )
    for category in _list(_table(root).get("test_categories")):
        for test in _list(_table(category).get("tests")):
            for result in _list(_table(test).get("results")):
                yield _result(str(_table(test).get("name", "?")), _table(result))


def _table(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def _result(test: str, result: Dict[str, Any]) -> Result:
    entity: Optional[Any] = result.get("entity_id") if result.get("entity_group") == "GPU" else None
    found = _list(result.get("warnings"))
    words = [str(_table(one).get("warning", "")) if isinstance(one, dict) else str(one) for one in found]
    grades = [_table(one).get("error_severity") for one in found]
    return Result(
        test,
        str(result.get("status", "")).strip().lower(),
        "" if entity is None else f"GPU {entity}",
        tuple(words),
        tuple(grade for grade in grades if isinstance(grade, int)),
    )


def _judge(notes: Notes, result: Result) -> None:
    words = " ".join(result.warnings) or "without a reason"
    what = f"dcgmi diag: {result.test}" + (f" on {result.device}" if result.device else "")
    failed = result.status == "fail"
    grave = bool(GRAVE.intersection(result.severities))
    if not result.severities:
        grave = result.test.lower() not in SETTINGS
    text = f"{what} failed: {words}; leave the node out and have it looked at"
    notes.judge("dcgm_failed", int(failed and grave), text, result.device)
    text = f"{what} failed: {words}; look at that setting"
    notes.judge("dcgm_setting", int(failed and not grave), text, result.device)
    empty = result.status == "pass" and "alloc" in words.lower()
    text = f"{what} passed without having run: {words}; free the device, and run it again"
    notes.judge("dcgm_no_proof", int(empty), text, result.device)
    if result.status == "warn":
        notes.info(f"{what} warns: {words}", result.device)


CHECKS = (Dcgm(),)
