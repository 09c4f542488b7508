"""The dashboards as they are written: whole, of one schema, and safe to import again."""

import itertools
import json
import re

import pytest

from pytest_mlhpc.influx.schema import MEASUREMENTS
from pytest_mlhpc.report.grafana import ALERT_RULES, all_dashboards
from pytest_mlhpc.store.record import FAILURES, GOOD, INFRASTRUCTURE, WORSE, Verdict

DASHBOARDS = all_dashboards()
ONE = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


def queries(dashboard):
    """Every text of InfluxQL in a dashboard."""
    yield from (target["query"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query")
    yield from (one["target"]["query"] for one in dashboard["annotations"]["list"])


def quoted(text):
    return set(re.findall(r'"([^"]*)"', text))


@ONE
def test_a_query_asks_one_measurement_for_its_own_fields_and_tags(dashboard):
    """InfluxQL answers nothing, and reports no error, for a name that a measurement has not or for tags alone."""
    known = {definition.name: definition for definition in MEASUREMENTS}
    for query in queries(dashboard):
        columns, measurement, rest = re.fullmatch(r'(.*?) FROM "(\w+)"(.*)', query).groups()
        where, _, by = rest.partition(" GROUP BY ")
        tags = set(known[measurement].tag_names)
        fields = {field.name: field.kind for field in known[measurement].fields}
        asked = quoted(re.sub(r'AS "\w+"', "", columns))
        assert asked <= tags | fields.keys()
        assert asked & fields.keys() or columns == "SHOW TAG VALUES"
        flags = set(re.findall(r'"(\w+)" = false', where))
        assert {fields[name] for name in flags} <= {"boolean"}
        assert (quoted(where) - flags) | quoted(by) <= tags


def test_queries_name_the_verdicts_and_failures_of_the_code():
    """The lists stand in the files; a verdict that is added to the code is missing in them until this test says so."""
    slower = {one.value for one in WORSE}
    fine = {*GOOD, Verdict.SUSPECT, Verdict.UNJUDGED}
    expected = {
        "Slower than they were": slower,
        "Broken": FAILURES.keys() - slower - {"cancelled", "detached", "cannot_lower"},
        "Prevented by the system": INFRASTRUCTURE.keys(),
        "What was not fine": {one.value for one in fine},
    }
    found = {}
    for panel in DASHBOARDS["mlhpc-nights.json"]["panels"]:
        listed = re.search(r'"verdict" [=!]~ /\^\(([\w|]*)\)\$/', panel["targets"][0]["query"])
        if listed:
            found[panel["title"]] = set(listed[1].split("|"))
    assert found == expected


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
    names = {"mlhpc-nights", "mlhpc-benchmark", "mlhpc-series", "mlhpc-systems", "mlhpc-nodes"}
    assert {name: one["uid"] for name, one in DASHBOARDS.items()} == {f"{uid}.json": uid for uid in names}


def test_the_command_writes_every_dashboard_and_alert_rule_and_replaces_older_ones(tmp_path, mlhpc):
    folder = tmp_path / "new" / "dashboards"
    mlhpc("report", "grafana", "--output", folder)
    (folder / "mlhpc-nodes.json").write_text("of an earlier version", encoding="utf-8")
    printed = mlhpc("report", "grafana", "--output", folder)
    assert {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")} == DASHBOARDS
    assert {path.name for path in folder.glob("*.yaml")} == set(ALERT_RULES)
    assert sorted(printed.out.splitlines()) == sorted(map(str, folder.iterdir()))
    assert "docs/grafana.md" in printed.err


def test_a_folder_that_is_a_file_is_a_usage_error(tmp_path, mlhpc):
    (tmp_path / "file").touch()
    err = mlhpc("report", "grafana", "--output", tmp_path / "file", code=2).err
    assert f"--output {tmp_path}/file: File exists" in err


# --- links, fences, thresholds

LINKS = {
    "commit": "https://git.example.org/-/commit/{commit}",
    "job": "https://jobs.example.org/?j={job}",
    "pipeline": "https://git.example.org/-/pipelines/{pipeline}",
    "report": "https://pages.example.org/report.html",
}
CELL = "${__value.raw:percentencode}"


def links_of(dashboards):
    """Return dashboard, panel, column, title and address of each link of a cell."""
    return {
        (name, panel["title"], override["matcher"]["options"], link["title"], link["url"])
        for name, dashboard in dashboards.items()
        for panel in dashboard["panels"]
        for override in panel["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "links"
        for link in one["value"]
    }


def test_cells_lead_where_the_templates_of_the_report_lead():
    found = links_of(all_dashboards(LINKS))
    place = "mlhpc-nights.json", "What was not fine"
    assert {
        (*place, "commit", "commit", f"https://git.example.org/-/commit/{CELL}"),
        (*place, "job_id", "job", f"https://jobs.example.org/?j={CELL}"),
        (*place, "pipeline", "pipeline", f"https://git.example.org/-/pipelines/{CELL}"),
        (*place, "benchmark", "report", f"https://pages.example.org/report.html#view=benchmarks&q={CELL}"),
    } < found
    assert {name for name, *_ in found} == {
        "mlhpc-nights.json", "mlhpc-benchmark.json", "mlhpc-series.json", "mlhpc-nodes.json",
    }  # fmt: skip


def test_without_templates_cells_lead_to_other_dashboards_alone():
    found = links_of(DASHBOARDS)
    assert {column for _, _, column, _, _ in found} == {"benchmark"}
    uids = {one["uid"] for one in DASHBOARDS.values()}
    assert {url.removeprefix("/d/").partition("?")[0] for *_, url in found} <= uids


@ONE
def test_each_column_that_has_a_link_is_asked_for(dashboard):
    for panel in dashboard["panels"]:
        for override in panel["fieldConfig"]["overrides"]:
            if any(one["id"] == "links" for one in override["properties"]):
                (target,) = panel["targets"]
                assert f'"{override["matcher"]["options"]}"' in target["query"]


def test_the_band_of_the_fence_lies_between_series_that_the_panel_draws():
    (panel,) = [one for one in DASHBOARDS["mlhpc-series.json"]["panels"] if one["title"] == "$metric"]
    (target,) = panel["targets"]
    assert target["alias"] == "$col"
    drawn = {
        one["matcher"]["options"]: {prop["id"]: prop["value"] for prop in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }
    assert drawn["fence_high"]["custom.fillBelowTo"] == "fence_low"
    assert all(f'"{name}"' in target["query"] for name in drawn)
    assert {"accepted", "fence_low", "fence_high", "reference"} < drawn.keys()


def test_the_edge_of_the_fence_is_a_threshold():
    for name in ("benchmark", "series"):
        (panel,) = [
            one
            for one in DASHBOARDS[f"mlhpc-{name}.json"]["panels"]
            if one["title"] == "Loss as a share of the fence"
        ]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert [(step["value"], step["color"]) for step in steps] == [(None, "green"), (1.0, "red")]


@ONE
def test_marks_of_events_leave_out_what_was_removed_and_commits_are_shown_on_demand(dashboard):
    events = [one for one in dashboard["annotations"]["list"] if "mlhpc_event" in one["target"]["query"]]
    assert all('"removed" = false' in one["target"]["query"] for one in events)
    assert {one["name"] for one in events if not one["enable"]} == {"acknowledgements", "software", "commits"}


def test_the_command_writes_links_and_takes_those_of_the_ci(tmp_path, mlhpc, monkeypatch):
    monkeypatch.setenv("CI_PROJECT_URL", "https://git.example.org/hpc")
    mlhpc("report", "grafana", "--output", tmp_path, "--link", "report=https://pages.example.org/r.html")
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    urls = {url for *_, url in links_of(written)}
    assert {
        f"https://git.example.org/hpc/-/commit/{CELL}",
        f"https://pages.example.org/r.html#view=benchmarks&q={CELL}",
    } < urls


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("report=javascript:alert(1)", "should be an address"),
        ("commit=https://x", "should be an address that holds {commit}"),
        ("node=https://x/{node}", "write commit=URL, job=URL, pipeline=URL or report=URL"),
    ],
)
def test_a_link_that_is_none_is_a_usage_error(tmp_path, mlhpc, link, said):
    assert said in mlhpc("report", "grafana", "--output", tmp_path / "d", "--link", link, code=2).err
    assert not (tmp_path / "d").exists()
