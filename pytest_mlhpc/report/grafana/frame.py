"""What every dashboard has around its panels: variables, links, annotations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pytest_mlhpc.influx.schema import MeasurementDefinition
from pytest_mlhpc.report.grafana.panels import SOURCE, Panel, placed
from pytest_mlhpc.report.grafana.query import Conditions, Query, values_of

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


def annotation(name: str, query: Query, *, text: str, tags: str, colour: str) -> dict[str, Any]:
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
