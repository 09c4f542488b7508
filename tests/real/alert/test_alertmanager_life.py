"""Incidents in a real Alertmanager: told once, kept open over nights and restarts, resolved when they are."""

import time
from dataclasses import replace
from datetime import datetime

import pytest
from alert_messages import HOSTILE, message
from alertmanager_service import Alertmanager

from pytest_mlhpc.alert.channels import alertmanager as module
from pytest_mlhpc.alert.channels.base import AlertMessage, Channel, DeliveryError, IncidentState

pytestmark = pytest.mark.servers

_S = 1_000_000_000


def open_alertmanager(url: str, **more: object) -> Channel:
    (channel,) = module.open_channels("alerts", module.Settings(url, **{"limit_s": 600.0, **more}))
    return channel


def incident(name: str = "night-1") -> tuple[AlertMessage, AlertMessage]:
    """Return a message of an incident that began a while ago, and its end."""
    now = time.time_ns()
    new = message(id=f"{name}-new", incident=name, started_ns=now - 3600 * _S, created_ns=now)
    return new, replace(new, id=f"{name}-resolved", state=IncidentState.RESOLVED, ended_ns=now - _S)


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_an_incident_is_reported_once_however_often_it_is_posted_and_again_when_it_ends(
    alertmanager: Alertmanager,
) -> None:
    channel = open_alertmanager(alertmanager.url)
    new, resolved = incident()

    channel.send(new)
    alertmanager.wait_notified("night-1", ["firing"])
    channel.send(new)
    channel.resend_open([new])
    channel.send(resolved)
    alertmanager.wait_notified("night-1", ["firing", "resolved"])
    channel.send(resolved)

    other, _end = incident("night-2")
    channel.send(other)
    alertmanager.wait_notified("night-2", ["firing"])  # by now it would have told of the first one again
    assert alertmanager.notified("night-1") == ["firing", "resolved"]


def test_an_open_incident_keeps_its_start_and_gets_a_later_end_each_night(alertmanager: Alertmanager) -> None:
    new, _resolved = incident()
    open_alertmanager(alertmanager.url, hold_h=1).send(new)
    (first,) = alertmanager.alerts("night-1")

    open_alertmanager(alertmanager.url).resend_open([replace(new, state=IncidentState.ACKNOWLEDGED)])

    (second,) = alertmanager.alerts("night-1")
    assert (
        seconds(second["startsAt"])
        == seconds(first["startsAt"])
        == pytest.approx(new.started_ns / _S, abs=1e-3)
    )
    assert seconds(second["endsAt"]) - seconds(first["endsAt"]) == pytest.approx(29 * 3600, abs=600)
    assert second["annotations"]["state"] == "acknowledged"


def test_a_crash_forgets_all_alerts_and_the_next_night_brings_them_back(alertmanager: Alertmanager) -> None:
    channel = open_alertmanager(alertmanager.url)
    news = [incident(f"night-{number}")[0] for number in range(3)]
    for new in news:
        channel.send(new)
    alertmanager.service.kill("alertmanager")
    with pytest.raises(DeliveryError, match=r"^alerts: http://127.0.0.1:[0-9]+: no answer") as caught:
        channel.resend_open(news)
    assert caught.value.retry
    alertmanager.service.start()
    assert alertmanager.alerts() == []

    channel.resend_open(news)

    assert {alert["labels"]["incident"] for alert in alertmanager.alerts()} == {
        "night-0",
        "night-1",
        "night-2",
    }


def test_after_a_restart_it_tells_nothing_twice_and_still_tells_the_end(alertmanager: Alertmanager) -> None:
    channel = open_alertmanager(alertmanager.url)
    new, resolved = incident()
    channel.send(new)
    alertmanager.wait_notified("night-1", ["firing"])
    alertmanager.service.stop()
    alertmanager.service.start()

    channel.resend_open([new])
    other, _end = incident("night-2")
    channel.send(other)
    alertmanager.wait_notified("night-2", ["firing"])
    assert alertmanager.notified("night-1") == ["firing"]
    channel.send(resolved)

    alertmanager.wait_notified("night-1", ["firing", "resolved"])


def test_takes_hundreds_of_open_incidents_and_hostile_labels(alertmanager: Alertmanager) -> None:
    many = [incident(f"night-{number}")[0] for number in range(230)]
    many[7] = replace(many[7], labels=HOSTILE.labels, text=HOSTILE.text, title=HOSTILE.title)

    open_alertmanager(alertmanager.url, labels={"data-centre": "b", "empty": ""}).resend_open(many)

    assert len(alertmanager.alerts()) == 230
    (odd,) = alertmanager.alerts("night-7")
    assert odd["labels"]["system"] == 'a"b\n=,{}é?'
    assert odd["labels"]["data_centre"] == "b"


def test_an_incident_that_began_in_the_future_can_be_reported_and_resolved(
    alertmanager: Alertmanager,
) -> None:
    channel = open_alertmanager(alertmanager.url)
    new, resolved = incident()
    late = time.time_ns() + 86_400 * _S  # the clock was set back a day since

    channel.send(replace(new, started_ns=late))
    channel.send(replace(resolved, started_ns=late))

    assert len(alertmanager.alerts("night-1")) == 1


def test_what_went_to_a_wrong_address_waits_until_it_is_corrected(alertmanager: Alertmanager) -> None:
    with pytest.raises(DeliveryError, match="answered 404") as caught:
        open_alertmanager(f"{alertmanager.url}/prefix").send(incident()[0])

    assert caught.value.retry


def test_a_refusal_has_the_message_of_alertmanager(
    alertmanager: Alertmanager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "label_name", lambda name: f"{name}-")

    with pytest.raises(DeliveryError, match=r"answered 400: .*invalid label") as caught:
        open_alertmanager(alertmanager.url).send(incident()[0])

    assert not caught.value.retry
