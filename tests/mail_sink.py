"""A real mail server for tests, aiosmtpd, that keeps what it is given and refuses whom it is told to.

As a program, `python mail_sink.py PORT FILE`: it appends each mail to FILE as a line of JSON.
"""

import asyncio
import email
import email.policy
import json
import ssl
import sys
import threading
from dataclasses import dataclass, field
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Self

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword

OK = "250 OK"


@dataclass(frozen=True)
class Mail:
    sender: str
    receivers: tuple[str, ...]
    content: EmailMessage

    @property
    def id(self) -> str:
        return str(self.content["Message-ID"])


@dataclass
class Behaviour:
    """What the server answers. ``receivers``: address -> answer. ``lost``: takes the mail and breaks off."""

    receivers: dict[str, str] = field(default_factory=dict)
    sender: str = OK
    data: str = OK
    hang_at: str = ""  #: RCPT or DATA
    lost: bool = False


class MailSink:
    """Runs in a thread for a block, on a port of 127.0.0.1. ``login``: the one user and password that it takes."""

    def __init__(
        self, *, port: int = 0, tls: ssl.SSLContext | None = None, starttls: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None, keep: Path | None = None,
    ) -> None:  # fmt: skip
        self.mails: list[Mail] = []
        self.sessions = 0
        self.behaviour = Behaviour()
        self._asked_port, self._tls, self._starttls, self._login = port, tls, starttls, login
        self._keep = keep
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._closing = asyncio.Event()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; a second time does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def of(self, receiver: str) -> list[Mail]:
        return [mail for mail in self.mails if receiver in mail.receivers]

    async def _open(self) -> None:
        place = ("127.0.0.1", self._asked_port)
        self._server = await self._loop.create_server(self._protocol, *place, ssl=self._tls)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        self._closing.set()
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _protocol(self) -> SMTP:
        self.sessions += 1
        options = {
            "hostname": "mail.example.org",
            "loop": self._loop,
            "enable_SMTPUTF8": True,
            "auth_require_tls": True,
        }
        if self._starttls is not None:
            options |= {"tls_context": self._starttls, "require_starttls": True}
        if self._login is not None:
            options |= {"authenticator": self._check, "auth_required": True}
        return SMTP(self, **options)

    def _check(self, _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> AuthResult:
        assert self._login is not None
        user, password = self._login
        wanted = LoginPassword(user.encode(), password.encode())
        return AuthResult(success=data == wanted, handled=False)

    async def handle_MAIL(self, _server, _session, envelope, address, options):  # noqa: N802 - aiosmtpd's name
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return self.behaviour.sender

    async def handle_RCPT(self, _server, _session, envelope, address, _options):  # noqa: N802
        if self.behaviour.hang_at == "RCPT":
            await self._closing.wait()
        answer = self.behaviour.receivers.get(address, OK)
        if answer == OK:
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server, _session, envelope):  # noqa: N802
        if self.behaviour.hang_at == "DATA":
            await self._closing.wait()
        if self.behaviour.data == OK:
            self._take(envelope)
        if self.behaviour.lost and server.transport is not None:
            server.transport.abort()
        return self.behaviour.data

    def _take(self, envelope: Envelope) -> None:
        content = envelope.original_content or b""
        parsed = email.message_from_bytes(content, policy=email.policy.default)
        assert isinstance(parsed, EmailMessage)
        self.mails.append(Mail(str(envelope.mail_from), tuple(map(str, envelope.rcpt_tos)), parsed))
        if self._keep is not None:
            line = {"from": str(envelope.mail_from), "to": list(map(str, envelope.rcpt_tos))}
            with self._keep.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**line, "mail": content.decode(errors="replace")}) + "\n")


def main(port: int, kept: Path) -> None:
    with MailSink(port=port, keep=kept):
        threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
