"""What `mlhpc vet` prints: what is wrong, the checks and figures, then the last line; or all of it as one JSON object."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Dict, List, Sequence, TextIO, Tuple

from pytest_mlhpc.node.vet.finding import OWN_HISTORY, UNCOMPARED, Finding, Severity, VetVerdict
from pytest_mlhpc.node.vet.statistics import spell
from pytest_mlhpc.node.vet.text import (
    BUDGET,
    MOST_ROWS,
    UNJUDGED,
    aligned,
    cut,
    last_line,
    left_out,
    not_compared,
    table,
)
from pytest_mlhpc.node.vet.verdict_files import WrittenVerdict, verdict_to_json

#: Rules that judge a figure; the reasons of all others say what was read.
_OF_FIGURES = frozenset({"peers", "floor", "history", "pairs", OWN_HISTORY, *UNJUDGED})

#: Longest text of a check in the table, in characters.
MOST_SEEN = 100

Row = Tuple[str, str, str, str]  #: check, metric, value, verdict


def show(verdict: VetVerdict, stream: TextIO) -> None:
    """Print all for people, in characters that *stream* can carry (a C locale may have ASCII alone)."""
    parts = (table, checked, left_out, not_compared, last_line)
    _write("".join(part(verdict) for part in parts) + "\n", stream)


def show_json(written: WrittenVerdict, stream: TextIO) -> None:
    """Print verdict.json as one object with the command's own schema."""
    data = {**verdict_to_json(written), "schema": f"mlhpc/vet-{written.verdict.level}/1"}
    _write(f"{json.dumps(data, indent=1, allow_nan=False)}\n", stream)


def checked(verdict: VetVerdict, most: int = MOST_ROWS) -> str:
    """Return a table of what was measured, over all nodes; of one node alone also what other checks saw and did not object to."""
    findings = [finding for node in verdict.nodes for finding in node.findings]
    rows = _figures(findings) + (_property_rows(findings) if len(verdict.nodes) == 1 else [])
    if not rows:
        return ""
    more = f"... and {len(rows) - most} more: --json has all of them\n" if len(rows) > most else ""
    return aligned([("check", "metric", "value", "verdict"), *rows[:most]]) + more


def _figures(findings: Sequence[Finding]) -> List[Row]:
    """Return a row for each metric, with the range over all devices and how many of them have which verdict."""
    groups: Dict[Tuple[str, str, str], List[Finding]] = {}
    for one in findings:
        if one.rule in _OF_FIGURES and one.value is not None:
            groups.setdefault((one.check, one.metric, one.unit), []).append(one)
    return [
        (check, metric, _range([one.value or 0.0 for one in group], unit), _verdicts(group))
        for (check, metric, unit), group in groups.items()
    ]


def _range(values: Sequence[float], unit: str) -> str:
    if len(values) == 1:
        return spell(values[0], unit)
    low, middle, high = (spell(one, unit) for one in (min(values), statistics.median(values), max(values)))
    return f"{low} to {high}, median {middle}"


def _verdicts(group: Sequence[Finding]) -> str:
    if len(group) == 1:
        (one,) = group
        compared = one.reason.partition("; ")[2] if one.severity is Severity.PASS else ""
        return f"pass: {compared}" if compared else _word(one)
    return ", ".join(f"{count} {word}" for word, count in Counter(map(_word, group)).items())


def _word(one: Finding) -> str:
    if one.rule == UNCOMPARED:
        return "not compared"
    return f"{one.severity.value.lower()} by {one.rule.replace('_', ' ')}"


def _property_rows(findings: Sequence[Finding]) -> List[Row]:
    """Return a row for what a check found in order; of a lone node, that a property has no peers is not said."""
    fine = (Severity.PASS, Severity.INFO)
    written = [
        (one.check, one.device, cut(one.reason, MOST_SEEN), one.severity.value.lower())
        for one in findings
        if one.severity in fine and one.rule not in {*_OF_FIGURES, BUDGET}
        if (one.rule, one.severity) != ("vote", Severity.INFO)
    ]
    return list(dict.fromkeys(written))


def _write(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
