"""InfluxQL as Grafana sends it, made of the schema: a name that is not in InfluxDB cannot be asked for. Pure.

InfluxQL is what InfluxDB 1.8, 2.x and 3 Core all understand. Grafana replaces ``$timeFilter`` by the time range and
``${name:regex}`` by what is chosen of a variable, escaped for a regular expression, several values as ``(a|b)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.influx.schema import MeasurementDefinition

#: Longest table that a panel asks for.
MOST_ROWS: Final = 500
#: What aggregates are used here; all are InfluxQL's own (docs.influxdata.com, "InfluxQL functions").
_AGGREGATES: Final = ("count", "sum", "median", "max", "last")


@dataclass(frozen=True)
class ChosenValue:
    """A tag has one of the values that are chosen of the variable *name*."""

    name: str

    @property
    def text(self) -> str:
        """The right half of a condition."""
        return f"=~ /^${{{self.name}:regex}}$/"


@dataclass(frozen=True)
class OneOf:
    """A tag has one of *values*, or with ``negated`` none of them. Words of ours, never of a record."""

    values: tuple[str, ...]
    negated: bool = False

    @property
    def text(self) -> str:
        """The right half of a condition."""
        return f"{'!~' if self.negated else '=~'} /^({'|'.join(map(re.escape, self.values))})$/"


@dataclass(frozen=True)
class QueryColumn:
    """One column of an answer: a field, or a tag where nothing is aggregated."""

    field: str
    aggregate: str = ""
    name: str = ""


Conditions = Mapping[str, ChosenValue | OneOf]


@dataclass(frozen=True)
class PanelQuery:
    """What a panel asks. ``alias`` names the series of a diagram: Grafana puts tags where it says ``$tag_x``."""

    text: str
    alias: str = ""
    table: bool = False


def select(
    of: MeasurementDefinition,
    columns: Sequence[QueryColumn],
    where: Conditions,
    *,
    by: Sequence[str] = (),
    every: str = "",
    alias: str = "",
    table: bool = False,
    newest: int = 0,
) -> PanelQuery:
    """Return a query.

    Args:
        of: the measurement.
        columns: what is asked for; of fields at least one, as InfluxQL answers nothing for tags alone.
        where: tag -> condition; the time range is always one.
        by: tags to group by.
        every: length of the steps in time, such as ``1d``; empty: each point.
        alias: how series are called.
        table: one table, instead of a series for each group.
        newest: only so many points, newest first.

    Raises:
        KeyError: a name that the measurement has not.
    """
    fields = {field.name for field in of.fields}
    known = fields | set(of.tag_names)
    _check(of, {*(column.field for column in columns)} - known)
    _check(of, {*where, *by} - set(of.tag_names))
    if not any(column.field in fields for column in columns):
        raise KeyError(f"{of.name}: no field among {', '.join(column.field for column in columns)}")
    conditions = " AND ".join(["$timeFilter", *(f"{_name(tag)} {one.text}" for tag, one in where.items())])
    groups = [*([f"time({every})"] if every else []), *map(_name, by)]
    text = f"SELECT {', '.join(map(_column, columns))} FROM {_name(of.name)} WHERE {conditions}"  # noqa: S608 - our own words
    text += f" GROUP BY {', '.join(groups)}" if groups else ""
    # Nights without a run are gaps, not zeros.
    text += " fill(none)" if every else ""
    text += f" ORDER BY time DESC LIMIT {newest}" if newest else ""
    return PanelQuery(text, alias, table)


def values_of(of: MeasurementDefinition, tag: str, where: Conditions) -> str:
    """Return the query for the values of a tag, for a variable.

    Raises:
        KeyError: the measurement has no such tag.
    """
    _check(of, {tag, *where} - set(of.tag_names))
    conditions = " AND ".join(f"{_name(name)} {one.text}" for name, one in where.items())
    return f"SHOW TAG VALUES FROM {_name(of.name)} WITH KEY = {_name(tag)}" + (
        f" WHERE {conditions}" if conditions else ""
    )


def _check(of: MeasurementDefinition, unknown: set[str]) -> None:
    if unknown:
        raise KeyError(f"{of.name} has no {', '.join(sorted(unknown))}")


def _name(name: str) -> str:
    return f'"{name}"'


def _column(column: QueryColumn) -> str:
    if column.aggregate and column.aggregate not in _AGGREGATES:
        raise KeyError(f"{column.aggregate} is none of {', '.join(_AGGREGATES)}")
    text = f"{column.aggregate}({_name(column.field)})" if column.aggregate else _name(column.field)
    return f"{text} AS {_name(column.name)}" if column.name else text
