"""Mail through a real server that refuses, hangs, breaks off or wants TLS and a password."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alert_messages import HOSTILE, NEW, RESOLVED
from certificates import certificate
from mail_sink import MailSink

from pytest_mlhpc.alert.channels import smtp
from pytest_mlhpc.alert.channels.base import Channel, DeliveryError

pytestmark = pytest.mark.servers

_ANNE, _BOB = "anne@example.org", "bob@example.org"


@pytest.fixture
def server() -> Iterator[MailSink]:
    with MailSink() as sink:
        yield sink


def open_mail(server: MailSink, **more: object) -> tuple[Channel, ...]:
    given = {"security": "none", "limit_s": 600.0, **more}
    settings = smtp.Settings("127.0.0.1", "bench@example.org", (_ANNE, _BOB), server.port, **given)
    return tuple(smtp.open_channels("mail", settings))


def test_delivers_to_each_receiver_a_mail_that_names_both(server: MailSink) -> None:
    for channel in open_mail(server):
        channel.send(NEW)

    assert [mail.receivers for mail in server.mails] == [(_ANNE,), (_BOB,)]
    assert {mail.id for mail in server.mails} == {f"<{NEW.id}@example.org>"}
    assert server.mails[0].content["To"] == f"{_ANNE}, {_BOB}"
    assert server.mails[0].content["Subject"] == NEW.title


def test_one_receiver_whom_the_server_refuses_costs_the_other_nothing(server: MailSink) -> None:
    server.behaviour.receivers[_ANNE] = "550 5.1.1 no such user here"
    anne, bob = open_mail(server)

    with pytest.raises(DeliveryError) as caught:
        anne.send(NEW)
    bob.send(NEW)

    place = f"mail:{_ANNE}: 127.0.0.1:{server.port}"
    assert str(caught.value) == f"{place}: refuses the receiver {_ANNE}: 550 5.1.1 no such user here"
    assert not caught.value.retry
    assert len(server.of(_BOB)) == 1
    assert server.of(_ANNE) == []


def test_a_receiver_who_is_to_wait_is_tried_again(server: MailSink) -> None:
    server.behaviour.receivers[_ANNE] = "450 4.2.0 greylisted, come back later"
    anne, _bob = open_mail(server)

    with pytest.raises(DeliveryError, match=r"450 4.2.0 greylisted") as caught:
        anne.send(NEW)
    assert caught.value.retry
    del server.behaviour.receivers[_ANNE]
    anne.send(NEW)

    assert len(server.of(_ANNE)) == 1


@pytest.mark.parametrize(
    ("field", "answer", "words", "retry"),
    [
        ("sender", "553 5.7.1 not allowed", "refuses the sender bench@example.org: 553", True),
        ("sender", "451 4.3.0 busy", "refuses the sender bench@example.org: 451", True),
        ("data", "552 5.2.2 mailbox full", "refuses the mail: 552 5.2.2 mailbox full", False),
        ("data", "452 4.3.1 no space", "refuses the mail: 452 4.3.1 no space", True),
    ],
)
def test_a_refusal_has_the_message_of_the_mail_server(
    field: str, answer: str, words: str, retry: bool, server: MailSink
) -> None:
    setattr(server.behaviour, field, answer)

    with pytest.raises(DeliveryError, match=words) as caught:
        open_mail(server)[0].send(NEW)

    assert caught.value.retry is retry
    assert server.mails == []


@pytest.mark.parametrize("step", ["RCPT", "DATA"])
def test_waits_no_longer_than_its_limit_for_a_server_that_hangs(step: str, server: MailSink) -> None:
    server.behaviour.hang_at = step

    with pytest.raises(DeliveryError, match=r"no answer within 1 s$") as caught:
        open_mail(server, limit_s=1.0)[0].send(NEW)

    assert caught.value.retry
    assert server.mails == []


def test_a_server_that_is_down_may_come_back(server: MailSink) -> None:
    channel = open_mail(server)[0]
    server.close()

    with pytest.raises(DeliveryError, match=r"no answer: .*refused") as caught:
        channel.send(NEW)

    assert caught.value.retry


def test_a_mail_whose_receipt_was_lost_has_the_same_id_when_it_comes_again(server: MailSink) -> None:
    server.behaviour.lost = True
    channel = open_mail(server)[0]
    with pytest.raises(DeliveryError, match="no answer") as caught:
        channel.send(NEW)
    assert caught.value.retry
    server.behaviour.lost = False

    channel.send(NEW)

    assert len(server.mails) == 2
    assert len({mail.id for mail in server.mails}) == 1


def test_hostile_text_arrives_as_text(server: MailSink) -> None:
    open_mail(server)[0].send(HOSTILE)

    (mail,) = server.mails
    text = mail.content.get_body(("plain",)).get_content()
    assert text.splitlines() == HOSTILE.text.replace("\ud800", "?").splitlines()
    assert mail.receivers == (_ANNE,)


def test_encrypts_and_logs_in_before_it_says_anything(tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path)
    with MailSink(starttls=context, login=("bench", "s3cr3t")) as server:
        more = {"security": "starttls", "user": "bench", "ca_file": str(trusted)}
        open_mail(server, password="s3cr3t", **more)[0].send(NEW)
        with pytest.raises(DeliveryError, match="refuses user or password: 535") as caught:
            open_mail(server, password="s3cr3t-but-wrong", **more)[0].send(NEW)

    assert len(server.mails) == 1
    assert caught.value.retry
    assert "s3cr3t" not in str(caught.value)


def test_encrypts_from_the_first_byte(tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path)
    with MailSink(tls=context) as server:
        open_mail(server, security="tls", ca_file=str(trusted))[0].send(NEW)
        with pytest.raises(DeliveryError, match="certificate is not trusted") as caught:
            open_mail(server, security="tls")[0].send(NEW)

    assert len(server.mails) == 1
    assert caught.value.retry


def test_sends_nothing_to_a_server_that_cannot_encrypt(server: MailSink) -> None:
    with pytest.raises(DeliveryError, match="cannot do what the settings ask for: STARTTLS") as caught:
        open_mail(server, security="starttls")[0].send(NEW)

    assert caught.value.retry
    assert server.mails == []


def test_a_mailbox_gets_nothing_twice(server: MailSink) -> None:
    open_mail(server)[0].resend_open([NEW, RESOLVED])

    assert server.sessions == 0
