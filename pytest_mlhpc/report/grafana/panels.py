"""Panels of Grafana as plain JSON types, and what every dashboard has around them."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_mlhpc.influx.schema import RUN, MeasurementDefinition
from pytest_mlhpc.report.grafana.query import ChosenValue, Conditions, OneOf, PanelQuery, values_of

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
) -> Panel:
    """Return figures over time; ``bars`` are stacked. ``repeat``: a variable of which each value has a panel."""
    custom = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 1,
        "fillOpacity": 70 if bars else 0,
        "pointSize": 5,
        "showPoints": "never" if bars else "always",
        # A night without a figure is a gap of a day and more; a line across it would invent one.
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if bars else "none"},
    }
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
        custom=custom,
        overrides=overrides if by_verdict else [],
    )
    panel["options"] = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if repeat:
        panel |= {"repeat": repeat, "repeatDirection": "h", "maxPerRow": 2}
    return panel


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
) -> Panel:
    """Return a table; *units* of its columns."""
    custom = {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": True, "filterable": True}
    overrides = [_override("byName", name, {"unit": unit}) for name, unit in (units or {}).items()]
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


def annotation(name: str, query: PanelQuery, *, text: str, tags: str, colour: str) -> dict[str, Any]:
    """Return marks in all diagrams; *text* and *tags* are columns of the answer."""
    target = {
        "refId": "Anno",
        "query": query.text,
        "queryType": "tags",
        "fromAnnotations": True,
        "textColumn": text,
        "tagsColumn": tags,
    }
    return {"name": name, "datasource": SOURCE, "enable": True, "iconColor": colour, "target": target}


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
