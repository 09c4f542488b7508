"""The text of one baseline file: what it holds, and how it is written: sorted, stable, with the user's comments.

::

    schema: 2
    system: cirrus
    series:
    - benchmark: suites/training/test_cosmoflow.py::test_cosmoflow[4]
      partition: standard
      environment: default
      metrics:
        effective_throughput:
          value: 812.4
          ...

Comments of the user survive: whole-line ones stay above the series, metric or end they stood above; those behind a value
or inside a metric move above it. Everything else is rendered anew, so that a diff shows what changed and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.node.protocol.schema import SCHEMA
from pytest_mlhpc.store.record import SeriesKey

#: What comments at the head and the end of a file belong to.
HEAD, END = ("head",), ("end",)
#: Keys of a series, in the order in which they are sorted and written; the last one on `local` only.
IDENTITY = ("benchmark", "partition", "environment", "fingerprint")
#: Fields of an entry, in the order in which they are written.
FIELDS = tuple(one.name for one in dataclasses.fields(Entry))

HEADER = (
    "# Accepted values, one entry for each series. Reviewed in git, written by `mlhpc baseline accept` and\n"
    "# `pytest --mlhpc-baseline=update`; comments of yours above a series or a metric are kept.\n"
)


@dataclass(frozen=True)
class BaselineFile:
    """What one file holds. ``comments`` maps a series (identity, '') or a metric (identity, name) to its lines."""

    system: str
    entries: Mapping[SeriesKey, Entry]
    comments: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)


def render(content: BaselineFile) -> str:
    """Return the text of a file: sorted, one field a line."""
    head = content.comments.get(HEAD, ())
    lines = [
        *HEADER.splitlines(),
        *head,
        f"schema: {SCHEMA}",
        f"system: {_scalar(content.system)}",
        "series:",
    ]
    grouped: dict[tuple[str, ...], dict[str, Entry]] = {}
    for key, entry in content.entries.items():
        identity = tuple(getattr(key, name) for name in IDENTITY)
        grouped.setdefault(identity, {})[key.metric] = entry
    if not grouped:
        lines[-1] += " []"
    for identity in sorted(grouped):
        lines += content.comments.get((*identity, ""), ())
        pairs = [
            f"{name}: {_scalar(text)}"
            for name, text in zip(IDENTITY, identity, strict=True)
            if text or name != "fingerprint"
        ]
        lines += [f"- {pairs[0]}", *(f"  {pair}" for pair in pairs[1:]), "  metrics:"]
        for metric in sorted(grouped[identity]):
            lines += [f"    {comment}" for comment in content.comments.get((*identity, metric), ())]
            lines.append(f"    {_scalar(metric)}:")
            lines += [f"      {pair}" for pair in _fields(grouped[identity][metric])]
    lines += content.comments.get(END, ())
    return "\n".join(lines) + "\n"


def _fields(entry: Entry) -> list[str]:
    values = {name: getattr(entry, name) for name in FIELDS}
    return [
        f"{name}: {_scalar(value)}" for name, value in values.items() if value is not None and value != ""
    ]


#: Words that YAML readers take as they are: no number, date, boolean or syntax among them.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def _scalar(value: object) -> str:
    """Return *value* as one YAML scalar; texts that are no plain word are quoted (JSON strings are YAML)."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, int):
        return str(value)
    text = str(value).encode("utf-8", "replace").decode()
    if _PLAIN.match(text) and text.lower() not in _RESERVED:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)
