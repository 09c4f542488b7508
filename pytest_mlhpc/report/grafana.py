"""Grafana dashboards and alert rules: ``dashboards/*.json`` as Grafana exports them, with a site's links in the cells of tables.

Edit a dashboard there. Queries are InfluxQL that InfluxDB 1.8, 2.x and 3 Core all understand. Grafana replaces ``$timeFilter`` by
the time range and ``${name:regex}`` by what is chosen of a variable, escaped for a regular expression, several values as
``(a|b)``. A ``uid`` never changes: an import replaces the dashboard that is there. ``dashboards/*.yaml`` are the same alert rules
in InfluxQL and in Flux, in the form of Grafana's file provisioning; a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

NAMES: Final = ("nights", "benchmark", "series", "systems", "nodes")
#: What a site may link to, by name: the column of the tables, and how the link is called.
_LINKED: Final = {"report": ("benchmark", "report"), "commit": ("commit", "commit"), "job": ("job_id", "job"), "pipeline": ("pipeline", "pipeline")}  # fmt: skip

#: The files of alert rules, one for each query language of a data source.
ALERT_RULES: Final = ("mlhpc-alerts-flux.yaml", "mlhpc-alerts-influxql.yaml")

Dashboard = dict[str, Any]


def all_files(templates: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the text of every dashboard and of both files of alert rules, by the name of its file.

    *templates* are as of :func:`all_dashboards`.
    """
    folder = resources.files(__package__) / "dashboards"
    dashboards = {
        name: json.dumps(dashboard, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        for name, dashboard in all_dashboards(templates).items()
    }
    return {**dashboards, **{name: (folder / name).read_text(encoding="utf-8") for name in ALERT_RULES}}


def cell_links(templates: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a column of the tables, and where its cells lead, in Grafana's words, for each of *templates*."""
    for name, (column, title) in _LINKED.items():
        if template := templates.get(name):
            address = f"{template}#view=benchmarks&q={{report}}" if name == "report" else template
            url = address.replace(f"{{{name}}}", "${__value.raw:percentencode}")
            yield column, {"title": title, "url": url, "targetBlank": True}


def all_dashboards(templates: Mapping[str, str] | None = None) -> dict[str, Dashboard]:
    """Return every dashboard by the name of its file.

    *templates* are addresses with ``{commit}``, ``{job}`` or ``{pipeline}`` in them, by that name, and that of the HTML report as
    ``report``.
    """
    folder = resources.files(__package__) / "dashboards"
    found = {}
    for file in (f"mlhpc-{name}.json" for name in NAMES):
        found[file] = json.loads((folder / file).read_text(encoding="utf-8"))
        for panel in found[file]["panels"]:
            _add_links(panel, templates or {})
    return found


def _add_links(panel: Mapping[str, Any], templates: Mapping[str, str]) -> None:
    """Add links to the cells of a table whose tests lead to their own dashboard."""
    overrides = panel["fieldConfig"]["overrides"]
    linked = {
        one["matcher"]["options"]: value["value"]
        for one in overrides
        for value in one["properties"]
        if value["id"] == "links"
    }
    for column, link in cell_links(templates) if linked else ():
        if column in linked:
            linked[column].append(link)
        elif f'"{column}"' in panel["targets"][0]["query"]:
            linked[column] = [link]
            overrides.append(
                {
                    "matcher": {"id": "byName", "options": column},
                    "properties": [{"id": "links", "value": linked[column]}],
                }
            )
