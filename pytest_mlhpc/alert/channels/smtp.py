"""A message as a mail, text and HTML, to each receiver on his own: one whom the server refuses costs the others nothing.

All mails of a message have the same Message-ID, also when it is sent again because nobody knows whether it went out: mailboxes
that look for duplicates (Cyrus, Dovecot's sieve, Gmail, Exchange) then keep one. All of an incident are one thread.
"""

from __future__ import annotations

import contextlib
import email.errors
import email.policy
import smtplib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from functools import partial
from typing import Literal

from pytest_mlhpc.alert.channels.base import (
    AlertMessage,
    Channel,
    DeliveryError,
    check_limits,
    cut,
    plain,
    quoted,
    secret,
)
from pytest_mlhpc.config.http import CancellableConnection, within
from pytest_mlhpc.node.agents.nodes import is_loopback

#: Port of each kind of security: RFC 6409 submission, RFC 8314 implicit TLS, RFC 5321.
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
#: Of a mail's text, in characters: servers refuse mails beyond some ten megabytes.
_MOST_TEXT = 500_000


@dataclass(frozen=True)
class Settings:
    """Which server, from whom, to whom. ``security``: ``none`` is for a relay on this machine or in a closed network."""

    host: str
    sender: str
    to: tuple[str, ...]
    port: int = 0  #: 0: 587, with ``tls`` 465, with ``none`` 25
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    limit_s: float = 30.0

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        if not self.host or not all("!" <= char <= "~" for char in self.host):
            raise ValueError("host must be the name or the address of a mail server")
        if not 0 <= self.port <= 65_535:
            raise ValueError("port must be between 1 and 65535")
        if not self.to:
            raise ValueError("to is empty; name at least one address")
        for address in (self.sender, *self.to):
            _domain(address)
        if len(set(self.to)) < len(self.to):
            raise ValueError("to names an address twice")
        object.__setattr__(self, "password", secret(self.password, "password"))
        if self.user and self.security == "none" and not is_loopback(self.host):
            raise ValueError("security: none would send the password unencrypted; use starttls or tls")
        check_limits(self.limit_s, self.ca_file)


def open_channels(name: str, settings: Settings) -> Sequence[Channel]:
    """Return one channel for each receiver."""
    return tuple(Mailbox(f"{name}:{receiver}", settings, receiver) for receiver in settings.to)


class Mailbox:
    """One receiver of mails."""

    def __init__(self, name: str, settings: Settings, receiver: str) -> None:
        self.name = name  #: of the channel in alerts.yaml, and the receiver
        self._settings = settings
        self._receiver = receiver

    def send(self, message: AlertMessage) -> None:
        """Hand the mail to the server.

        Raises:
            ChannelError: It did not take it, or nobody knows. It will never take this mail for this receiver
                after a 5yz answer (RFC 5321) to either of them.
        """
        mail = mail_of(message, self._settings)
        limit_s = self._settings.limit_s
        try:
            within(limit_s, lambda line: _deliver(self._settings, self._receiver, mail, line))
        except TimeoutError:
            raise self._error(f"no answer within {limit_s:g} s", retry=True) from None
        except ssl.SSLCertVerificationError as error:
            text = f"its certificate is not trusted: {error.verify_message}; set ca_file to the certificate authority of the site"
            raise self._error(text, retry=True) from None
        except (smtplib.SMTPException, OSError) as error:
            raise self._of(error) from None

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Do nothing: a mailbox keeps its messages."""

    def _of(self, error: Exception) -> DeliveryError:
        if isinstance(error, smtplib.SMTPRecipientsRefused):
            code, reply = next(iter(error.recipients.values()))
            return self._refused(f"refuses the receiver {self._receiver}", code, reply, mendable=False)
        if isinstance(error, smtplib.SMTPResponseException):
            whole_mail = isinstance(error, smtplib.SMTPDataError)
            what = self._what(error)
            return self._refused(what, error.smtp_code, error.smtp_error, mendable=not whole_mail)
        text = quoted(str(error), self._secrets) or type(error).__name__
        if isinstance(error, smtplib.SMTPNotSupportedError):
            return self._error(f"cannot do what the settings ask for: {text}", retry=True)
        return self._error(f"no answer: {text}", retry=True)

    def _what(self, error: smtplib.SMTPResponseException) -> str:
        if isinstance(error, smtplib.SMTPDataError):
            return "refuses the mail"
        if isinstance(error, smtplib.SMTPSenderRefused):
            return f"refuses the sender {self._settings.sender}"
        return "refuses user or password" if isinstance(error, smtplib.SMTPAuthenticationError) else "refuses"

    def _refused(self, what: str, code: int, reply: bytes | str, *, mendable: bool = True) -> DeliveryError:
        """Return a refusal. ``mendable``: the same mail may go through when somebody has mended the settings."""
        text = quoted(reply, self._secrets)
        return self._error(
            f"{what}: {code}{' ' if text else ''}{text}", retry=mendable or not 500 <= code < 600
        )

    def _error(self, text: str, *, retry: bool) -> DeliveryError:
        settings = self._settings
        port = settings.port or _PORTS[settings.security]
        return DeliveryError(f"{self.name}: {settings.host}:{port}: {text}", retry=retry)

    @property
    def _secrets(self) -> tuple[str, ...]:
        return (self._settings.password,)


def mail_of(message: AlertMessage, settings: Settings) -> EmailMessage:
    """Return the mail, the same whenever it is made."""
    domain = _domain(settings.sender)
    mail = EmailMessage(policy=email.policy.SMTP)
    mail["From"] = settings.sender
    mail["To"] = ", ".join(settings.to)
    mail["Subject"] = " ".join(plain(message.title).split())
    mail["Date"] = format_datetime(datetime.fromtimestamp(message.created_ns // 1_000_000_000, UTC))
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    # No mail has this id; that all of an incident name it is what makes a thread of them.
    mail["References"] = f"<incident-{message.incident}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: nobody's holiday notice answers
    mail["X-MLHPC-Kind"] = message.kind.value
    mail["X-MLHPC-State"] = message.state.value
    mail.set_content(plain(cut(message.text, _MOST_TEXT)))
    if len(message.html) <= _MOST_TEXT:  # a piece of HTML is none
        mail.add_alternative(plain(message.html), subtype="html")
    return mail


def _domain(address: str) -> str:
    """Return what is behind the @ of ``NAME@DOMAIN``.

    Raises:
        ValueError: It is no address.
    """
    try:
        domain = Address(addr_spec=address).domain
    except (ValueError, IndexError, AttributeError, email.errors.MessageError):  # by the kind of nonsense
        domain = ""
    if not domain or not address.isprintable() or "," in address:
        raise ValueError(f"{address!r} is not an address of the form NAME@DOMAIN")
    return domain


def _deliver(settings: Settings, receiver: str, mail: EmailMessage, line: CancellableConnection) -> None:
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    port = settings.port or _PORTS[settings.security]
    make: Callable[..., smtplib.SMTP] = smtplib.SMTP
    if settings.security == "tls":
        make = partial(smtplib.SMTP_SSL, context=context)
    client = make(settings.host, port, timeout=settings.limit_s)
    try:
        if client.sock is not None:
            line.hold(client.sock)
        if settings.security == "starttls":
            client.starttls(context=context)
        if settings.user:
            client.login(settings.user, settings.password)
        client.send_message(mail, settings.sender, [receiver])
        with contextlib.suppress(smtplib.SMTPException, OSError):  # it has taken the mail
            client.quit()
    finally:
        client.close()
