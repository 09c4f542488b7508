"""The alert rules as they are written: in Grafana's form, alike in both query languages, of names that are there."""

import re
from importlib import resources

import pytest
import yaml

from pytest_mlhpc.influx.schema import MEASUREMENTS
from pytest_mlhpc.report.grafana import ALERT_RULES, all_dashboards
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, WORSE

FILES = {
    name: yaml.safe_load((resources.files("pytest_mlhpc.report") / "dashboards" / name).read_text("utf-8"))
    for name in ALERT_RULES
}
(RUN,) = [one for one in MEASUREMENTS if one.name == "mlhpc_run"]
#: After pkg/services/provisioning/alerting/rules_types.go of Grafana 12, which ignores what it does not know.
GROUP = {"orgId", "name", "folder", "interval", "rules"}
RULE = {"uid", "title", "condition", "data", "dashboardUid", "panelId", "noDataState", "execErrState", "for", "annotations", "labels"}  # fmt: skip
QUERY = {"refId", "relativeTimeRange", "datasourceUid", "model"}


def rules(name):
    (group,) = FILES[name]["groups"]
    assert group.keys() == GROUP
    return group["rules"]


RULES = [pytest.param(rule, id=f"{name}: {rule['uid']}") for name in FILES for rule in rules(name)]
EACH = pytest.mark.parametrize("rule", RULES)


def query(rule):
    return rule["data"][0]["model"]["query"]


def tags(rule):
    """Return the tags that the answer is grouped by."""
    grouped = re.search(r"(?:GROUP BY|group\(columns:) (.*)", query(rule))
    return re.findall(r'"(\w+)"', grouped[1]) if grouped else []


@EACH
def test_a_rule_has_the_fields_of_grafana_and_no_others(rule):
    assert rule.keys() == RULE
    assert all(one.keys() == QUERY for one in rule["data"])
    assert rule["noDataState"] in {"OK", "Alerting"}
    assert re.fullmatch(r"[a-z-]{1,40}", rule["uid"])


@EACH
def test_a_rule_fires_by_its_last_expression_and_each_takes_the_one_before(rule):
    first, last, fires = rule["data"]
    assert [first["datasourceUid"], last["datasourceUid"], fires["datasourceUid"]] == [
        "mlhpc",
        "__expr__",
        "__expr__",
    ]
    assert [last["model"]["expression"], fires["model"]["expression"]] == [first["refId"], last["refId"]]
    assert rule["condition"] == fires["refId"]
    assert all(one["model"]["refId"] == one["refId"] for one in rule["data"])


@EACH
def test_a_rule_leads_to_a_panel_that_is_there(rule):
    dashboards = {one["uid"]: one for one in all_dashboards().values()}
    assert rule["panelId"] in {panel["id"] for panel in dashboards[rule["dashboardUid"]]["panels"]}


@EACH
def test_what_a_message_names_is_a_tag_that_the_answer_is_grouped_by(rule):
    named = set(re.findall(r"\.Labels\.(\w+)", rule["annotations"]["summary"]))
    assert named == set(tags(rule))


@EACH
def test_no_text_of_a_message_has_a_sign_that_some_versions_of_grafana_take_for_a_variable(rule):
    assert "$" not in rule["annotations"]["summary"]


def test_both_languages_have_the_same_rules():
    def without_query(rule):
        data = [{**one, "model": {}} if one["refId"] == "runs" else one for one in rule["data"]]
        return {**rule, "data": data}

    one, other = (list(map(without_query, rules(name))) for name in ALERT_RULES)
    assert one == other


def test_both_languages_ask_for_the_same_verdicts_fields_and_tags():
    def asked(rule):
        verdicts = re.search(r"\^\(([a-z_]+(?:\|[a-z_]+)+)\)\$", query(rule))
        fields = re.search(r'_field == "(\w+)"|\("(\w+)"\)', query(rule))
        return rule["uid"], verdicts and verdicts[1], next(filter(None, fields.groups())), tags(rule)

    one, other = (list(map(asked, rules(name))) for name in ALERT_RULES)
    assert one == other
    assert {field for _, _, field, _ in one} <= {field.name for field in RUN.fields if field.always}
    assert {tag for *_, grouped in one for tag in grouped} <= set(RUN.tag_names)


def test_rules_name_the_verdicts_and_failures_of_the_code():
    slower = {one.value for one in WORSE}
    listed = {
        rule["uid"]: set(found[1].split("|"))
        for rule in rules("mlhpc-alerts-influxql.yaml")
        if (found := re.search(r'"verdict" =~ /\^\(([\w|]*)\)\$', query(rule)))
    }
    assert listed == {
        "mlhpc-slower": slower,
        "mlhpc-broken": FAILURES.keys() - slower - {"cancelled", "detached", "cannot_lower"},
        "mlhpc-prevented": INFRASTRUCTURE.keys(),
    }
