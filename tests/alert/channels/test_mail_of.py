"""What a message is as a mail, and settings that no mail could be sent with."""

from dataclasses import replace

from alert_messages import HOSTILE, NEW, RESOLVED, WORSE

from pytest_mlhpc.alert.channels import smtp
from pytest_mlhpc.alert.channels.smtp import Settings, mail_of

_SETTINGS = Settings("mail.example.org", "bench@example.org", ("a@example.org", "b@example.org"))


def test_a_mail_is_the_same_whenever_it_is_made():
    one, other = (mail_of(WORSE, _SETTINGS) for _ in range(2))
    identity = one["Message-ID"], one["Date"]
    assert identity == ("<cirrus-4f2a-worse-2@example.org>", "Sun, 22 Nov 2026 06:30:00 +0000")
    assert list(one.items()) == list(other.items())


def test_all_mails_of_an_incident_are_one_thread():
    references = {mail_of(sent, _SETTINGS)["References"] for sent in (NEW, WORSE, RESOLVED)}
    assert references == {"<incident-cirrus-4f2a@example.org>"}


def test_holds_text_and_html_and_asks_for_no_automatic_answer():
    mail = mail_of(NEW, _SETTINGS)
    assert mail.get_body(("plain",)).get_content() == NEW.text
    assert mail.get_body(("html",)).get_content().strip() == NEW.html
    headers = [mail[name] for name in ("Auto-Submitted", "X-MLHPC-Kind", "X-MLHPC-State", "To")]
    assert headers == ["auto-generated", "regression", "new", "a@example.org, b@example.org"]


def test_text_from_outside_adds_no_header_and_can_be_sent():
    mail = mail_of(replace(HOSTILE, title="a\r\nBcc: x@example.org\r\n\r\nb"), _SETTINGS)
    assert (mail["Subject"], mail["Bcc"]) == ("a Bcc: x@example.org b", None)
    assert "/close\n/assign @all\n" in mail.get_body(("plain",)).get_content()


def test_sends_no_half_of_a_page():
    mail = mail_of(replace(NEW, html="<p>" + "x" * 600_000, text="x" * 600_000), _SETTINGS)

    assert mail.get_body(("html",)) is None
    assert len(mail.get_body(("plain",)).get_content()) < 510_000


def test_each_receiver_is_a_channel_with_an_account_of_its_own():
    names = [channel.name for channel in smtp.open_channels("mail", _SETTINGS)]

    assert names == ["mail:a@example.org", "mail:b@example.org"]
