"""Apprise in its own process, delivering to servers of ours."""

import sys
from collections.abc import Iterator

import pytest
from alert_messages import HOSTILE, NEW, RESOLVED
from http_sink import HANG, HttpSink, Reply

from pytest_mlhpc.alert.channels import apprise
from pytest_mlhpc.alert.channels.base import Channel, DeliveryError
from pytest_mlhpc.errors import UsageError

pytestmark = pytest.mark.servers


@pytest.fixture
def sink() -> Iterator[HttpSink]:
    with HttpSink() as server:
        yield server


def open_apprise(url: str, limit_s: float = 600.0) -> Channel:
    (channel,) = apprise.open_channels("chat", apprise.Settings(url, limit_s))
    return channel


def test_delivers_title_text_and_kind(sink: HttpSink) -> None:
    channel = open_apprise(f"json://127.0.0.1:{sink.port}/hook/T0K3N")

    channel.send(NEW)
    channel.send(RESOLVED)

    new, resolved = (request.json for request in sink.requests)
    assert new["title"] == NEW.title
    assert "102.0 samples/s" in new["message"]
    assert (new["type"], resolved["type"]) == ("failure", "success")


def test_delivers_hostile_text_as_text(sink: HttpSink) -> None:
    open_apprise(f"json://127.0.0.1:{sink.port}/").send(HOSTILE)

    assert "/assign @all" in sink.requests[0].json["message"]


def test_says_why_a_service_did_not_take_it_without_the_token_of_its_address(sink: HttpSink) -> None:
    sink.answer = lambda _request: Reply(500, b"no")

    with pytest.raises(DeliveryError, match=r"^chat: json://: Failed to send JSON.*500") as caught:
        open_apprise(f"json://me:s3cr3t-word@127.0.0.1:{sink.port}/T0K3N-4711").send(NEW)

    assert caught.value.retry
    assert "T0K3N" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_ends_a_service_that_hangs(sink: HttpSink) -> None:
    sink.answer = lambda _request: Reply(fault=HANG)

    with pytest.raises(DeliveryError, match=r"^chat: json://: ") as caught:
        open_apprise(f"json://127.0.0.1:{sink.port}/?rto=600&cto=600", limit_s=1.0).send(NEW)

    assert caught.value.retry


def test_says_so_when_apprise_knows_no_such_service() -> None:
    with pytest.raises(DeliveryError, match=r"^chat: nosuch://: ") as caught:
        open_apprise("nosuch://s3cr3t-token/x").send(NEW)

    assert caught.value.retry
    assert "s3cr3t" not in str(caught.value)


def test_names_the_extra_to_install_where_apprise_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)

    with pytest.raises(UsageError, match=r"needs apprise: pip install 'pytest-mlhpc\[notify\]'"):
        open_apprise("json://127.0.0.1/")


@pytest.mark.parametrize("url", ["", "json", "://x", "json://", "js on://x", "json://a\nb"])
def test_refuses_what_is_no_address_of_apprise_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url must be a URL of apprise, such as mmost://HOST/TOKEN$"):
        apprise.Settings(url)
