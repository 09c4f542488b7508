"""Messages as JSON to a server of HTTP."""

import hashlib
import hmac
import json
from dataclasses import replace

import pytest
from alert_messages import HOSTILE, NEW, RESOLVED
from http_sink import Reply
from refusals import refusal

from pytest_mlhpc.alert.channels import webhook
from pytest_mlhpc.alert.channels.base import as_json

pytestmark = pytest.mark.servers


def open_webhook(sink, **more):
    (channel,) = webhook.open_channels("hook", webhook.Settings(f"{sink.url}/T0K3N", limit_s=300.0, **more))
    return channel


def test_posts_all_fields_of_a_message_with_a_key_that_is_the_same_each_time(sink):
    channel = open_webhook(sink)

    channel.send(RESOLVED)
    channel.send(RESOLVED)

    first, second = sink.requests
    assert (first.method, first.path, first.headers["content-type"]) == ("POST", "/T0K3N", "application/json")
    assert first.json == json.loads(json.dumps(as_json(RESOLVED)))
    assert (first.json["schema"], first.headers["idempotency-key"]) == (2, RESOLVED.id)
    assert (second.body, second.headers) == (first.body, first.headers)


def test_signs_the_body_and_sends_a_token(sink):
    key, token = "key of both sides", "t0k3n\n"

    open_webhook(sink, secret=key, token=token).send(NEW)

    (request,) = sink.requests
    wanted = hmac.new(key.encode(), request.body, hashlib.sha256).hexdigest()
    assert request.headers["x-mlhpc-signature"] == f"sha256={wanted}"
    assert request.headers["authorization"] == "Bearer t0k3n"


def test_sends_a_chat_one_text_in_which_nobody_is_named_and_nothing_is_marked_up(sink):
    open_webhook(sink, style="chat").send(HOSTILE)

    ((key, text),) = sink.requests[0].json.items()
    first, *lines, last = text.splitlines()
    assert (key, first, last) == ("text", "````text", "````")
    assert any("@channel" in line for line in lines)


def test_cuts_what_a_chat_would_refuse(sink):
    open_webhook(sink, style="chat").send(replace(NEW, text="x" * 100_000))

    assert len(sink.requests[0].json["text"]) < 13_000


def test_tells_hostile_text_to_programs_as_it_is(sink):
    open_webhook(sink).send(HOSTILE)

    assert sink.requests[0].json["text"] == HOSTILE.text.replace("\ud800", "?")


def test_an_error_names_neither_path_nor_token(sink):
    sink.then(Reply(403, b"no access for t0k3n-4711 to /T0K3N"))
    send = open_webhook(sink, token="t0k3n-4711").send
    error = refusal(send, NEW, match=r"^hook: http://127.0.0.1:\d+: answered 403: no access")
    assert (error.retry, "t0k3n" in str(error).lower()) == (True, False)


def test_tells_nothing_again(sink):
    open_webhook(sink).resend_open([NEW])

    assert sink.requests == []
