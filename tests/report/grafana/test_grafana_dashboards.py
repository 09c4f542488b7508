"""The dashboards as they are written: whole, of one schema, and safe to import again."""

import itertools
import json
import re

import pytest

from pytest_mlhpc.influx.schema import MEASUREMENTS, METRIC, RUN
from pytest_mlhpc.report.grafana.dashboards import all_dashboards
from pytest_mlhpc.report.grafana.panels import ChosenValue, OneOf, QueryColumn, select, values_of

DASHBOARDS = all_dashboards()
ONE = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


def queries(dashboard):
    """Every text of InfluxQL in a dashboard."""
    yield from (target["query"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query")
    yield from (one["target"]["query"] for one in dashboard["annotations"]["list"])


@ONE
def test_every_name_in_a_query_is_one_of_the_schema(dashboard):
    known = {definition.name for definition in MEASUREMENTS}
    for definition in MEASUREMENTS:
        known |= {*definition.tag_names, *(field.name for field in definition.fields)}
    for query in queries(dashboard):
        assert set(re.findall(r'"([^"]*)"', re.sub(r'AS "\w+"', "", query))) <= known


@ONE
def test_every_variable_of_a_query_is_defined_and_before_those_that_use_it(dashboard):
    defined = {one["name"] for one in dashboard["templating"]["list"]}
    for query in queries(dashboard):
        assert set(re.findall(r"\$\{(\w+):regex\}", query)) <= defined
    seen = set()
    for one in dashboard["templating"]["list"]:
        if one["type"] == "query":
            assert set(re.findall(r"\$\{(\w+):regex\}", one["query"])) <= seen
        seen.add(one["name"])


@ONE
def test_panels_have_ids_of_their_own_and_no_two_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@ONE
def test_no_dashboard_names_a_server_and_each_links_to_the_others(dashboard):
    sources = [panel["datasource"] for panel in dashboard["panels"]]
    sources += [target["datasource"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(source == {"type": "influxdb", "uid": "${datasource}"} for source in sources)
    assert [link["tags"] for link in dashboard["links"]] == [dashboard["tags"]]


def test_the_file_is_called_as_the_dashboard_which_an_import_replaces():
    names = {"mlhpc-nights", "mlhpc-benchmark", "mlhpc-systems", "mlhpc-nodes"}
    assert {name: one["uid"] for name, one in DASHBOARDS.items()} == {f"{uid}.json": uid for uid in names}


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: select(RUN, [QueryColumn("verdikt")], {}), "mlhpc_run has no verdikt"),
        (
            lambda: select(METRIC, [QueryColumn("value")], {"colour": ChosenValue("x")}),
            "mlhpc_metric has no colour",
        ),
        (lambda: select(METRIC, [QueryColumn("value")], {"id": ChosenValue("x")}), "mlhpc_metric has no id"),
        (lambda: select(METRIC, [QueryColumn("value")], {}, by=("commit",)), "mlhpc_metric has no commit"),
        (lambda: select(METRIC, [QueryColumn("system")], {}), "no field among system"),
        (lambda: select(METRIC, [QueryColumn("value", "drop")], {}), "drop is none of"),
        (lambda: values_of(RUN, "failure", {}), "mlhpc_run has no failure"),
    ],
)
def test_a_query_for_what_is_not_there_cannot_be_made(ask, said):
    with pytest.raises(KeyError, match=said):
        ask()


def test_a_query_reads_as_influxql():
    chosen = {"system": ChosenValue("system"), "metric": OneOf(("io_time", "compute_time"))}
    found = select(METRIC, [QueryColumn("value", "median", "m")], chosen, by=("system",), every="1d")
    assert found.text == (
        'SELECT median("value") AS "m" FROM "mlhpc_metric" WHERE $timeFilter AND "system" =~ /^${system:regex}$/ AND'
        ' "metric" =~ /^(io_time|compute_time)$/ GROUP BY time(1d), "system" fill(none)'
    )


def test_the_command_writes_every_dashboard_and_replaces_older_ones(tmp_path, mlhpc):
    folder = tmp_path / "new" / "dashboards"
    mlhpc("report", "grafana", "--output", folder)
    (folder / "mlhpc-nodes.json").write_text("of an earlier version", encoding="utf-8")
    printed = mlhpc("report", "grafana", "--output", folder)
    assert {path.name: json.loads(path.read_text()) for path in folder.iterdir()} == DASHBOARDS
    assert printed.out.splitlines()[-1] == str(folder / "mlhpc-nodes.json")
    assert "docs/grafana.md" in printed.err


def test_a_folder_that_is_a_file_is_a_usage_error(tmp_path, mlhpc):
    (tmp_path / "file").touch()
    err = mlhpc("report", "grafana", "--output", tmp_path / "file", code=2).err
    assert f"--output {tmp_path}/file: File exists" in err
