"""What an incident is as an alert of Alertmanager: labels and times that stay, an end that moves."""

import re
from dataclasses import replace

import pytest
from alert_messages import DAY_NS, HOSTILE, NEW, RESOLVED, STARTED_NS, WORSE, message

from pytest_mlhpc.alert.channels.alertmanager import Settings, alert_of, label_name, labels_of
from pytest_mlhpc.alert.channels.base import Kind

_SETTINGS = Settings("http://alerts.example.org:9093/")
_NOW_NS, BEFORE_NS = STARTED_NS + 3_600_000_000_000, STARTED_NS - 9 * DAY_NS


def test_an_open_incident_ends_by_itself_thirty_hours_from_now():
    alert = alert_of(NEW, _SETTINGS, _NOW_NS)
    times = alert["startsAt"], alert["endsAt"]
    assert times == ("2026-11-21T06:30:00.000000000Z", "2026-11-22T13:30:00.000000000Z")


def test_labels_and_start_stay_the_same_from_the_first_message_to_the_last():
    first, *others = (alert_of(sent, _SETTINGS, sent.created_ns) for sent in (NEW, WORSE, RESOLVED))
    assert all((one["labels"], one["startsAt"]) == (first["labels"], first["startsAt"]) for one in others)
    assert [one["annotations"]["state"] for one in (first, *others)] == ["new", "worse", "resolved"]


def test_a_resolved_incident_ends_when_it_ended():
    ends = alert_of(RESOLVED, _SETTINGS, STARTED_NS + 9 * DAY_NS)["endsAt"]
    assert ends == "2026-11-23T06:30:00.000000000Z"


@pytest.mark.parametrize(
    "sent",
    [
        NEW,
        *(replace(RESOLVED, ended_ns=ended_ns) for ended_ns in (STARTED_NS, STARTED_NS + 1, BEFORE_NS, None)),
    ],
)
def test_no_alert_ends_before_it_starts_though_clocks_were_set_back(sent):
    assert alert_of(sent, _SETTINGS, BEFORE_NS)["endsAt"] == "2026-11-21T06:30:01.000000000Z"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_name_for_the_routes_of_a_site(kind):
    assert labels_of(message(kind=kind), {})["alertname"] == f"Mlhpc{kind.value.capitalize()}"


def test_a_site_adds_labels_but_cannot_change_what_tells_incidents_apart():
    added = {"severity": "critical", "team": "hpc"}
    ours = {
        "alertname": "MlhpcRegression",
        "incident": "cirrus-4f2a",
        "kind": "regression",
        "system": "cirrus",
    }
    assert labels_of(NEW, {**added, "incident": "x", "alertname": "y"}) == {**ours, **added}


@pytest.mark.parametrize(
    ("given", "taken"),
    [("device-model", "device_model"), ("9lives", "_9lives"), ("", "_"), ("é", "_"), ("a", "a")],
)
def test_makes_names_of_labels_that_it_takes(given, taken):
    assert label_name(given) == taken
    assert re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", taken)


def test_leaves_empty_labels_away_and_keeps_odd_ones_whole():
    labels = labels_of(replace(HOSTILE, labels={"system": 'a"b\n=,{}é\ud800', "empty": ""}), {})
    assert (labels["system"], "empty" in labels) == ('a"b\n=,{}é?', False)


def test_links_to_the_report_if_there_is_one():
    link = "https://bench.example.org/report.html"
    assert "generatorURL" not in alert_of(NEW, _SETTINGS, _NOW_NS)
    assert alert_of(NEW, replace(_SETTINGS, link=link), _NOW_NS)["generatorURL"] == link


def test_cuts_a_text_that_would_stand_in_every_notification():
    alert = alert_of(message(text="x" * 99_999), _SETTINGS, _NOW_NS)
    assert len(alert["annotations"]["description"]) == 8_000
