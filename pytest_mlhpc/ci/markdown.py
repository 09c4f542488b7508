"""A comparison as Markdown for a comment or a summary. Whatever names and texts hold, they stay names and texts.

GitLab obeys lines that begin with a slash, notifies names after an @, follows references such as !12 and shows HTML: none of
that happens in code, so every text of unknown origin is code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_mlhpc.ci.comparison import Comparison, Row
from pytest_mlhpc.store.text import clean, one_line
from pytest_mlhpc.store.verdict import FINE, NOTABLE, WORSE, Verdict

#: Rows and troubles that are shown, worst first; the rest is counted.
_MOST_ROWS, _MOST_TROUBLES = 100, 20
_ORDER = (*WORSE, "no_baseline", *NOTABLE)
_FINE = frozenset({*FINE, Verdict.IMPROVED, Verdict.SUSPECT})


def marker(system: str) -> str:
    """Return what a comment is found again by: invisible where Markdown is shown."""
    return f"<!-- mlhpc comparison {re.sub('[^A-Za-z0-9_]', '-', system)} -->"


def render(comparison: Comparison) -> str:
    """Return the whole comment."""
    parts = [marker(comparison.system), f"### Benchmarks on {code(comparison.system)}: {_counts(comparison)}"]
    if comparison.commit:
        parts.append(
            f"Commit {code(comparison.commit[:12])}. Better is positive, whatever the metric's direction."
        )
    rows = sorted(comparison.rows, key=_urgency)
    if rows:
        parts.append(_table(rows[:_MOST_ROWS]))
    if len(rows) > _MOST_ROWS:
        parts.append(f"{len(rows) - _MOST_ROWS} more are in the job's artefacts.")
    shown = sorted(comparison.troubles, key=lambda one: one.verdict in _FINE)
    for trouble in shown[:_MOST_TROUBLES]:
        parts.append(f"**{_word(trouble.verdict)}** {code(trouble.test)}")
        if trouble.lines:
            parts.append(fenced("\n".join(trouble.lines)))
    if len(shown) > _MOST_TROUBLES:
        parts.append(f"{len(shown) - _MOST_TROUBLES} more did not pass.")
    if any(one.verdict in {*WORSE, Verdict.IMPROVED, "no_baseline"} for one in comparison.troubles):
        parts.append(
            "A change that is meant to be so is accepted by a pipeline with `MLHPC_ACCEPT` (the test) and `MLHPC_REASON`, "
            "which makes a merge request of the new value."
        )
    return "\n\n".join(parts) + "\n"


def code(text: str) -> str:
    """Return *text* as code within a line or a cell of a table."""
    shown = one_line(text, 200).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else "`-`"


def fenced(text: str) -> str:
    """Return *text* as a block of code."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{clean(text)}\n{fence}"


def _counts(comparison: Comparison) -> str:
    ordered = sorted(comparison.verdicts.items(), key=lambda item: (_rank(item[0]), item[0]))
    return ", ".join(f"{int(count)} {_word(verdict)}" for verdict, count in ordered) or "nothing was measured"


def _table(rows: Sequence[Row]) -> str:
    head = ("test", "metric", "now", "accepted", "better by", "last nights", "better by", "verdict")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        now, accepted = _figure(row.value, row.unit), _figure(row.accepted, "")
        nightly = "" if row.nightly is None else f"{_figure(row.nightly, '')} (of {int(row.nights)})"
        verdict = _word(row.verdict) if row.verdict in _FINE else f"**{_word(row.verdict)}**"
        line = code(row.test), code(row.metric), now, accepted, _share(row.change), nightly
        lines.append((*line, _share(row.nightly_change), verdict))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.5g} {_plain(unit)}".strip()


def _share(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"


def _word(verdict: str) -> str:
    return re.sub("[^a-z_]", "", verdict)[:40].replace("_", " ")


def _plain(unit: str) -> str:
    return re.sub("[^A-Za-z0-9/]", "", unit)[:20]


def _urgency(row: Row) -> tuple[int, float]:
    return _rank(row.verdict), row.change if row.change is not None else 0.0


def _rank(verdict: str) -> int:
    if verdict in _ORDER:
        return _ORDER.index(verdict)
    return len(_ORDER) if verdict not in _FINE else len(_ORDER) + 1
