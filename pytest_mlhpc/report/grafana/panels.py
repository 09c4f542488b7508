"""Panels of Grafana as plain JSON types, their queries, and what every dashboard has around them.

InfluxQL is what InfluxDB 1.8, 2.x and 3 Core all understand. Grafana replaces ``$timeFilter`` by the time range and
``${name:regex}`` by what is chosen of a variable, escaped for a regular expression, several values as ``(a|b)``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.influx.schema import RUN, MeasurementDefinition

#: Longest table that a panel asks for.
MOST_ROWS: Final = 500
#: What aggregates are used here; all are InfluxQL's own (docs.influxdata.com, "InfluxQL functions").
_AGGREGATES: Final = ("count", "sum", "median", "max", "last")


@dataclass(frozen=True)
class ChosenValue:
    """A tag has one of the values that are chosen of the variable *name*; with *or_none* it may also be empty, as ``-``."""

    name: str
    or_none: bool = False

    @property
    def text(self) -> str:
        """The right half of a condition."""
        chosen = f"${{{self.name}:regex}}"
        return f"=~ /^(-|{chosen})$/" if self.or_none else f"=~ /^{chosen}$/"


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
class IsFalse:
    """A boolean field is false in the points that are asked for."""

    @property
    def text(self) -> str:
        """The right half of a condition."""
        return "= false"


@dataclass(frozen=True)
class QueryColumn:
    """One column of an answer: a field, or a tag where nothing is aggregated. ``per``: a figure is divided by it."""

    field: str
    aggregate: str = ""
    name: str = ""
    per: int = 1


Conditions = Mapping[str, ChosenValue | OneOf | IsFalse]


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
        where: tag -> condition, or boolean field -> :class:`IsFalse`; the time range is always one.
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
    flags = {field.name for field in of.fields if field.kind == "boolean"}
    asked_false = {name for name, one in where.items() if isinstance(one, IsFalse)}
    _check(of, (asked_false - flags) | ({*where, *by} - asked_false - set(of.tag_names)))
    if not any(column.field in fields for column in columns):
        raise KeyError(f"{of.name}: no field among {', '.join(column.field for column in columns)}")
    conditions = " AND ".join(["$timeFilter", *(f"{_name(tag)} {one.text}" for tag, one in where.items())])
    groups = [*([f"time({every})"] if every else []), *map(_name, by)]
    text = f"SELECT {', '.join(map(_column, columns))} FROM {_name(of.name)} WHERE {conditions}"  # noqa: S608 - constants of this module
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
    text += f" / {column.per}" if column.per != 1 else ""
    return f"{text} AS {_name(column.name)}" if column.name else text


#: The source of data is a variable of every dashboard, so that none names a server.
SOURCE: Final = {"type": "influxdb", "uid": "${datasource}"}
#: A row of a dashboard has so many columns.
COLUMNS: Final = 24
#: Colours of verdicts, by regular expressions over the names of series; the first that holds.
_VERDICTS: Final = {
    "passed|improved|new": "green",
    "inconclusive|unjudged": "blue",
    "below_reference|regressed|drifted": "red",
}

Panel = dict[str, Any]


@dataclass(frozen=True)
class DataLink:
    """Where a value of the column *column* of a table leads; ``url`` is in Grafana's words."""

    column: str
    title: str
    url: str


@dataclass(frozen=True)
class Threshold:
    """From ``value`` on, figures of a diagram are in ``colour``; below the first one they are green."""

    value: float
    colour: str


def _link_to(template: str, name: str) -> str:
    """Return the address of *template*, which has ``{name}`` for a value, in Grafana's words for a cell."""
    return template.replace(f"{{{name}}}", "${__value.raw:percentencode}")


#: What a site may link to, by name: column, title.
_LINKED: Final = {
    "commit": ("commit", "commit"),
    "job": ("job_id", "job"),
    "pipeline": ("pipeline", "pipeline"),
}
#: From a test to the dashboard of it, on the same system and in the same time.
_TO_BENCHMARK: Final = (
    "/d/mlhpc-benchmark?var-benchmark=${__value.raw:percentencode}&var-system=${__data.fields.system:percentencode}"
    "&${datasource:queryparam}&${__url_time_range}"
)


def cell_links(templates: Mapping[str, str]) -> list[DataLink]:
    """Return where cells of tables lead: tests to their dashboard and to the report, and what the site says where it is."""
    found = [DataLink("benchmark", "over time", _TO_BENCHMARK)]
    if report := templates.get("report"):
        address = f"{report}#view=benchmarks&q={{benchmark}}"
        found.append(DataLink("benchmark", "report", _link_to(address, "benchmark")))
    return found + [
        DataLink(column, title, _link_to(templates[name], name))
        for name, (column, title) in _LINKED.items()
        if name in templates
    ]


def diagram(
    title: str,
    queries: Sequence[PanelQuery],
    *,
    unit: str = "short",
    bars: bool = False,
    by_verdict: bool = False,
    text: str = "",
    size: tuple[int, int] = (12, 8),
    repeat: str = "",
    thresholds: Sequence[Threshold] = (),
    series: Mapping[str, Mapping[str, Any]] | None = None,
) -> Panel:
    """Return figures over time; ``bars`` are stacked. ``repeat``: a variable of which each value has a panel.

    ``thresholds`` are lines and colours of the axis, lowest first; ``series`` is how single ones are drawn, by name.
    """
    overrides = [
        _override("byRegexp", f"/^({names})$/", {"color": {"mode": "fixed", "fixedColor": colour}})
        for names, colour in _VERDICTS.items()
    ]
    panel = _panel(
        "timeseries",
        title,
        queries,
        size,
        text,
        unit=unit,
        custom=_drawn(bars=bars),
        overrides=overrides if by_verdict else [],
    )
    if thresholds:
        _add_thresholds(panel, thresholds)
    panel["fieldConfig"]["overrides"] += [
        _override("byName", name, values) for name, values in (series or {}).items()
    ]
    panel["options"] = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if repeat:
        panel |= {"repeat": repeat, "repeatDirection": "h", "maxPerRow": 2}
    return panel


def _drawn(*, bars: bool) -> dict[str, Any]:
    """Return how figures over time are drawn."""
    return {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 1,
        "fillOpacity": 70 if bars else 0,
        "pointSize": 5,
        "showPoints": "never" if bars else "always",
        # A night without a figure is a gap of a day and more; a line across it would invent one.
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if bars else "none"},
    }


def _add_thresholds(panel: Panel, thresholds: Sequence[Threshold]) -> None:
    """Draw *thresholds* as lines, and what lies above them on their colour."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": one.colour, "value": one.value} for one in thresholds]
    defaults = panel["fieldConfig"]["defaults"]
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    defaults["custom"]["thresholdsStyle"] = {"mode": "dashed+area"}


def number(
    title: str, query: PanelQuery, *, unit: str = "short", text: str = "", size: tuple[int, int] = (6, 4)
) -> Panel:
    """Return the sum over the time range as one large number for each series."""
    panel = _panel("stat", title, [query], size, text, unit=unit)
    panel["fieldConfig"]["defaults"]["noValue"] = "0"
    panel["options"] = {
        "colorMode": "none",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["sum"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    }
    return panel


def rows(
    title: str,
    query: PanelQuery,
    *,
    units: Mapping[str, str] | None = None,
    text: str = "",
    size: tuple[int, int] = (COLUMNS, 9),
    links: Sequence[DataLink] = (),
) -> Panel:
    """Return a table; *units* of its columns, and the *links* of those that are there."""
    custom = {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": True, "filterable": True}
    overrides = [_override("byName", name, {"unit": unit}) for name, unit in (units or {}).items()]
    for column in dict.fromkeys(one.column for one in links if f'"{one.column}"' in query.text):
        leads = [
            {"title": one.title, "url": one.url, "targetBlank": not one.url.startswith("/d/")}
            for one in links
            if one.column == column
        ]
        overrides.append(_override("byName", column, {"links": leads}))
    panel = _panel("table", title, [query], size, text, custom=custom, overrides=overrides)
    panel["options"] = {"frameIndex": 0, "showHeader": True, "cellHeight": "sm"}
    return panel


def _override(matcher: str, names: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "matcher": {"id": matcher, "options": names},
        "properties": [{"id": name, "value": value} for name, value in values.items()],
    }


def _panel(
    kind: str,
    title: str,
    queries: Sequence[PanelQuery],
    size: tuple[int, int],
    text: str,
    *,
    unit: str = "short",
    custom: Mapping[str, Any] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
) -> Panel:
    defaults: dict[str, Any] = (
        {"unit": unit, "custom": dict(custom)} if custom is not None else {"unit": unit}
    )
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": {"x": 0, "y": 0, "w": size[0], "h": size[1]},
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "targets": [_target(string.ascii_uppercase[at], query) for at, query in enumerate(queries)],
    }


def _target(ref: str, query: PanelQuery) -> dict[str, Any]:
    target = {
        "refId": ref,
        "datasource": SOURCE,
        "query": query.text,
        "rawQuery": True,
        "resultFormat": "table" if query.table else "time_series",
    }
    return target | ({"alias": query.alias} if query.alias else {})


def placed(panels: Sequence[Panel]) -> list[Panel]:
    """Return *panels* with their ids, set beside each other while they fit, then below."""
    made: list[Panel] = []
    x = y = height = 0
    for number_, panel in enumerate(panels, 1):
        grid = panel["gridPos"]
        if x + grid["w"] > COLUMNS:
            x, y, height = 0, y + height, 0
        made.append({**panel, "id": number_, "gridPos": {**grid, "x": x, "y": y}})
        x, height = x + grid["w"], max(height, grid["h"])
    return made


#: All dashboards have it, and link to those that have it.
TAG: Final = "pytest-mlhpc"
#: Version of Grafana's dashboard model, which newer ones migrate: that of Grafana 10 to 13, in which all that is used here is
#: (grafana.com/docs, "Dashboard JSON model").
_MODEL: Final = 39
_ALL: Final = {"text": ["All"], "value": ["$__all"]}

Dashboard = dict[str, Any]


def source_variable() -> dict[str, Any]:
    """Return the variable that chooses among the InfluxDB sources of a Grafana."""
    return {"name": "datasource", "label": "InfluxDB", "type": "datasource", "query": "influxdb", "hide": 0, "multi": False, "includeAll": False}  # fmt: skip


def variable(
    name: str,
    of: MeasurementDefinition,
    *,
    where: Conditions,
    label: str = "",
    chosen: Sequence[str] = (),
    one: bool = False,
) -> dict[str, Any]:
    """Return a variable that chooses values of the tag *name*: several, or just one; at first *chosen*, or all."""
    query = values_of(of, name, where)
    made: dict[str, Any] = {
        "name": name,
        "label": label or name.replace("_", " "),
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,  # whenever the time range changes
        "sort": 7,  # 4 before 16
        "hide": 0,
        "multi": not one,
        "includeAll": not one,
    }
    if one:
        return made
    return {
        **made,
        "allValue": ".*",
        "current": {"text": list(chosen), "value": list(chosen)} if chosen else _ALL,
    }


def annotation(
    name: str, query: PanelQuery, *, text: str, tags: str, colour: str, until: str = "", shown: bool = True
) -> dict[str, Any]:
    """Return marks in all diagrams; *text*, *tags* and *until* (ms since 1970) are columns of the answer.

    Marks that are not *shown* at first can be switched on above the dashboard.
    """
    target = {
        "refId": "Anno",
        "query": query.text,
        "queryType": "tags",
        "fromAnnotations": True,
        "textColumn": text,
        "tagsColumn": tags,
        **({"timeEndColumn": until} if until else {}),
    }
    return {"name": name, "datasource": SOURCE, "enable": shown, "iconColor": colour, "target": target}


def dashboard(
    uid: str,
    title: str,
    *,
    text: str,
    variables: Sequence[dict[str, Any]],
    panels: Sequence[Panel],
    annotations: Sequence[dict[str, Any]] = (),
    since: str = "now-90d",
) -> Dashboard:
    """Return a whole dashboard. Its *uid* never changes: an import replaces the one that is there."""
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": [TAG],
        "schemaVersion": _MODEL,
        "editable": True,
        "graphTooltip": 1,  # a cross hair in all panels at once
        "timezone": "browser",
        "time": {"from": since, "to": "now"},
        "refresh": "",
        "links": [
            {
                "type": "dashboards", "title": "benchmarks", "tags": [TAG], "asDropdown": True, "icon": "external link",
                "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "",
            }
        ],
        "annotations": {"list": list(annotations)},
        "templating": {"list": [source_variable(), *variables]},
        "panels": placed(panels),
    }  # fmt: skip


#: What is chosen of the variables that every dashboard has.
CHOSEN: Final[Conditions] = {"system": ChosenValue("system"), "purpose": ChosenValue("purpose")}
#: The same of first attempts: re-runs are asked for where something was odd, and would count twice.
FIRST: Final[Conditions] = {**CHOSEN, "attempt": OneOf(("0",))}
#: How series are called.
PARTITION: Final = "$tag_system:$tag_partition"


def common_variables() -> list[dict[str, Any]]:
    """Return the variables that every dashboard has."""
    return [
        variable("system", RUN, where={}),
        variable("purpose", RUN, where={"system": ChosenValue("system")}, chosen=("nightly",)),
    ]
