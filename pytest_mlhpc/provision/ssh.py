"""A login node that is reached by ssh: one program there (``node/login_node.py``), requests on its standard input, answers from its standard output.

The system's OpenSSH does all that is secret, by the user's own configuration and agent. What is run there is one constant line:
the program, commands and paths are JSON, which no shell reads. Read here what is asked of ssh, how a connection that breaks is
told from one that is refused, and what bounds an answer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.node import login_node
from pytest_mlhpc.node.files import make_private, read_json
from pytest_mlhpc.node.processes import copy_of, start_in_new_session

#: What the login shell runs: it reads the program, whose length is the first line, and carries it out.
COMMAND: Final = (
    "exec python3 -I -c 'import sys; b = sys.stdin.buffer; "
    'exec(compile(b.read(int(b.readline())), "mlhpc", "exec"))\''
)

#: Options of ssh(1). Nobody is asked for a password. A peer that is silent for a minute is given up.
_OPTIONS: Final = (
    "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes", "-o", "RequestTTY=no",
)  # fmt: skip

#: How long the shared connection stays open after its last use, in seconds: from one use to the next within a session.
PERSIST_S: Final = 20

#: How long a connection may take to be made, with the start of Python there, in seconds.
CONNECT_LIMIT_S: Final = 60.0

#: How long an answer may take, and the way there and back beyond what the request itself may take, in seconds.
ANSWER_LIMIT_S, MARGIN_S = 30.0, 15.0

#: Most bytes that login scripts may print before the program answers.
BANNER_BYTES: Final = 1 << 16

#: Longest line of an answer, in bytes; as many as a listing of ``login_node.MOST_FILES`` has are in its body.
LINE_BYTES: Final = 1 << 20

#: Pause after a failed connection, first and longest, in seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0

#: Longest path of a socket (unix(7), sun_path), with what ssh adds to it while it makes one.
_SOCKET_BYTES: Final = 108 - 18

#: Most of ssh's own messages that an error quotes, in characters.
_MESSAGE: Final = 500


class RemoteError(MlhpcError):
    """A login node cannot be used as asked. The text says which, and why."""


class RemoteUnavailable(RemoteError):  # noqa: N818 - named for what happened
    """The connection cannot be made at present, or broke. What was under way may have been carried out."""


class RemoteUnusable(RemoteUnavailable):
    """The connection is refused, and will be until somebody changes something. Nothing was carried out."""


class RemoteRefused(RemoteError):  # noqa: N818 - as above
    """The program there answered that it could not. ``number`` is the errno, 0: none; ``path`` is what it was about."""

    def __init__(self, text: str, number: int = 0, path: str = "") -> None:
        super().__init__(text)
        self.number = number
        self.path = path

    @property
    def os_error(self) -> OSError:
        """It as an error of a file, as one of this machine would be."""
        return OSError(self.number, os.strerror(self.number) if self.number else str(self), self.path)


@dataclass(frozen=True)
class RemoteAccount:
    """The account of a connection: uid, name, host name, and the version of Python there."""

    uid: int
    user: str
    host: str
    python: str


class RemoteHost:
    """One login node. Connects when it is first asked, and again after a connection broke. Safe to call from several threads.

    Args:
        destination: as for ssh(1): ``user@login``, a name of ``~/.ssh/config``, or ``ssh://user@login:2222``.
        environ: of ssh: PATH, and the agent.
        monotonic: the clock, in seconds.
    """

    def __init__(
        self,
        destination: str,
        environ: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.destination = destination
        self._environ = copy_of(os.environ if environ is None else environ)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._channel: _Channel | None = None
        self._login: RemoteAccount | None = None
        self._failures = 0
        self._again_at = 0.0
        self._trouble: RemoteUnavailable | None = None

    def login(self) -> RemoteAccount:
        """Return whose login it is.

        Raises:
            RemoteUnavailable: there is no connection.
        """
        with self._lock:
            self._connected()
            assert self._login is not None  # noqa: S101 - set with the connection
            return self._login

    def ask(
        self, do: str, body: bytes = b"", *, limit_s: float = ANSWER_LIMIT_S, **fields: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to one request of ``node/login_node.py``, and what followed it.

        Raises:
            RemoteRefused: it could not be carried out.
            RemoteUnavailable: there is no connection, or it broke: perhaps it was carried out.
        """
        with self._lock:
            channel = self._connected()
            try:
                return self._exchange(channel, do, body, limit_s, fields)
            except RemoteRefused:
                raise
            except BaseException:  # Ctrl-C too: half an answer may be on its way
                self._drop()
                raise

    def close(self) -> None:
        """End the connection; others of this user to the same login go on."""
        with self._lock:
            if self._channel is not None:
                self._drop()
                _control(self._environ, self.destination, "stop")

    def _connected(self) -> _Channel:
        if self._channel is not None:
            return self._channel
        if self._trouble is not None and self._monotonic() < self._again_at:
            raise self._trouble
        try:
            self._channel = self._connect()
        except RemoteUnavailable as error:
            self._trouble = error
            pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 10), MAX_PAUSE_S)
            self._failures, self._again_at = self._failures + 1, self._monotonic() + pause
            raise
        self._failures, self._trouble = 0, None
        return self._channel

    def _connect(self) -> _Channel:
        try:
            channel = _Channel(self.destination, self._environ)
        except OSError as error:
            text = f"ssh cannot be started: {error}; install OpenSSH's client (Debian: openssh-client)"
            raise RemoteUnusable(text) from error
        mark = f"\n{secrets.token_hex(16)}\n"
        try:
            program = Path(login_node.__file__).read_bytes()
            channel.send(b"%d\n" % len(program) + program, CONNECT_LIMIT_S)
            about, _ = self._exchange(channel, "hello", b"", CONNECT_LIMIT_S, {"mark": mark})
            self._login = _login_of(about, self.destination)
        except BaseException:
            self._end(channel)
            raise
        return channel

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._end(channel)

    def _end(self, channel: _Channel) -> None:
        if channel.end():
            _control(self._environ, self.destination, "exit")  # one that hangs would hang the next as well

    def _exchange(
        self, channel: _Channel, do: str, body: bytes, limit_s: float, fields: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], bytes]:
        channel.requests += 1
        sha256 = hashlib.sha256(body).hexdigest()
        request = {
            **fields,
            "do": do,
            "limit_s": limit_s,
            "id": channel.requests,
            "size": len(body),
            "sha256": sha256,
        }
        limit_s += MARGIN_S
        channel.send(json.dumps(request).encode("ascii") + b"\n" + body, limit_s)
        if mark := fields.get("mark"):
            channel.skip_to(mark.encode("ascii"), limit_s)
        answer = _parsed(channel.line(limit_s), channel.requests, self.destination)
        found = channel.read(answer["size"], limit_s)
        if hashlib.sha256(found).hexdigest() != answer.get("sha256"):
            raise RemoteUnavailable(f"{self.destination}: an answer came damaged")
        if isinstance(error := answer.get("error"), str):
            raise _refusal(self.destination, error, answer)
        return answer, found


def host_of(destination: str, environ: Mapping[str, str]) -> RemoteHost:
    """Return the one connection of this process to *destination*; it ends with the process at the latest."""
    ours = {name: value for name, value in copy_of(environ).items() if not name.startswith("PYTEST_")}
    return _host(destination, tuple(sorted(ours.items())))


@functools.lru_cache(maxsize=32)
def _host(destination: str, environ: tuple[tuple[str, str], ...]) -> RemoteHost:
    host = RemoteHost(destination, dict(environ))
    atexit.register(host.close)
    return host


def _parsed(line: bytes, number: int, destination: str) -> dict[str, Any]:
    """Return an answer's line.

    Raises:
        RemoteUnavailable: it is none, or another request's.
    """
    with contextlib.suppress(ValueError, RecursionError):
        answer: dict[str, Any] = read_json(line)
        size = answer.get("size") if isinstance(answer, dict) else None
        if isinstance(size, int) and 0 <= size <= login_node.BODY_BYTES and answer.get("id") == number:
            return answer
    raise RemoteUnavailable(
        f"{destination} sent what is no answer: {_printable(line[:80].decode('utf-8', 'replace'))!r}"
    )


def _refusal(destination: str, error: str, answer: Mapping[str, Any]) -> RemoteRefused:
    number, path = answer.get("errno"), answer.get("path")
    where = f"{_printable(path)}: " if isinstance(path, str) and path else ""
    return RemoteRefused(
        f"{destination}: {where}{_printable(error)}", number if isinstance(number, int) else 0, where[:-2]
    )


def _login_of(about: Mapping[str, Any], destination: str) -> RemoteAccount:
    uid, texts = about.get("uid"), [about.get(name) for name in ("user", "host", "python")]
    if not isinstance(uid, int) or not all(isinstance(word, str) for word in texts):
        raise RemoteUnavailable(f"{destination} does not say whose login it is")
    user, host, python = map(str, texts)
    return RemoteAccount(uid, user, host, python)


class _Channel:
    """One ssh process with pipes. Every call has a time limit.

    Raises:
        OSError: ssh cannot be started.
    """

    def __init__(self, destination: str, environ: Mapping[str, str]) -> None:
        self._destination = destination
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it; a pipe could fill up
        self._data = bytearray()
        self._late = False
        self.requests = 0  #: sent so far
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._messages,
        }
        try:
            argv = [_ssh(environ), *_OPTIONS, *_sharing(environ, destination), "--", destination, COMMAND]
            self._process = start_in_new_session(argv, env=dict(environ), bufsize=0, **pipes)
        except BaseException:
            self._messages.close()
            raise
        assert self._process.stdin is not None  # noqa: S101 - pipes
        assert self._process.stdout is not None  # noqa: S101 - pipes
        self._source, self._target = self._process.stdout.fileno(), self._process.stdin.fileno()
        os.set_blocking(self._target, False)

    def send(self, data: bytes, limit_s: float) -> None:
        """Write all of *data*."""
        rest, until = memoryview(data), time.monotonic() + limit_s
        while rest:
            self._wait(self._target, select.POLLOUT, until, limit_s)
            try:
                rest = rest[os.write(self._target, rest[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._broken() from None

    def skip_to(self, mark: bytes, limit_s: float) -> None:
        """Read up to the end of *mark*."""
        until = time.monotonic() + limit_s
        while (found := self._data.find(mark)) < 0:
            if len(self._data) > BANNER_BYTES:
                raise RemoteUnusable(
                    f"{self._destination}: its login scripts print more than {BANNER_BYTES} bytes; let them print only "
                    "where the shell is interactive"
                )
            self._more(until, limit_s)
        del self._data[: found + len(mark)]

    def line(self, limit_s: float) -> bytes:
        """Return one line of an answer."""
        until = time.monotonic() + limit_s
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > LINE_BYTES:
                raise RemoteUnavailable(f"{self._destination} sent a line of more than {LINE_BYTES} bytes")
            self._more(until, limit_s)
        found = bytes(self._data[:end])
        del self._data[: end + 1]
        return found

    def read(self, size: int, limit_s: float) -> bytes:
        """Return the next *size* bytes."""
        until = time.monotonic() + limit_s
        while len(self._data) < size:
            self._more(until, limit_s)
        found = bytes(self._data[:size])
        del self._data[:size]
        return found

    def end(self) -> bool:
        """End ssh; return whether it hung."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._end_process(0.0 if self._late else 2.0)
        self._messages.close()
        return self._late

    def _end_process(self, patience_s: float) -> None:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _more(self, until: float, limit_s: float) -> None:
        self._wait(self._source, select.POLLIN, until, limit_s)
        data = os.read(self._source, 1 << 18)
        if not data:
            raise self._broken()
        self._data += data

    def _wait(self, descriptor: int, event: int, until: float, limit_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            self._late = True
            raise RemoteUnavailable(f"no answer from {self._destination} within {limit_s:g} s")

    def _broken(self) -> RemoteUnavailable:
        """Return why there is no connection any more, by ssh's exit code and its own messages."""
        self._end_process(2.0)
        self._messages.seek(0)
        text = self._messages.read(1 << 16).decode("utf-8", "replace")
        return connection_error(self._destination, self._process.returncode, text)


#: Phrases, in lower case, of ssh's messages -> what to do about it. Source: OpenSSH 9.2, sshconnect.c and readconf.c.
_REFUSALS: Final = {
    "remote host identification has changed": "its host key is not the one in known_hosts: ask the site; if it was replaced, run "
    "`{forget}` and `{accept}`",
    "host key verification failed": "its host key is not known, so nothing was sent: compare it with what the site publishes, and "
    "accept it once by `{accept}`",
    "permission denied": "it does not let you in: add the key to the agent (ssh-add), or name user and key in ~/.ssh/config; no "
    "password is asked for. Try `{accept}`",
    "could not resolve hostname": "there is no host of this name: correct `transport: {{ssh: ...}}` in systems.yaml",
    "bad configuration option": "ssh cannot read its configuration: correct ~/.ssh/config",
    "bad owner or permissions": "ssh does not obey its configuration: chmod 600 ~/.ssh/config",
}

#: Exit code of a shell that does not find a program (POSIX, 2.8.2), and of ssh where it failed itself (ssh(1)).
_NOT_FOUND, _SSH_FAILED = 127, 255


def connection_error(destination: str, code: int | None, messages: str) -> RemoteUnavailable:
    """Return the error of an ssh that ended with *code* and printed *messages*."""
    lines = [_printable(line.strip()) for line in messages.splitlines() if line.strip()]
    quoted = "; ".join(lines[-3:])[-_MESSAGE:]
    if code == _NOT_FOUND:
        return RemoteUnusable(
            f"{destination} has no python3 on the PATH of a shell that is not interactive; add it there ({quoted})"
        )
    if code == _SSH_FAILED:
        accept, forget = f"ssh {destination} true", f"ssh-keygen -R {_name_of(destination)}"
        for phrase, advice in _REFUSALS.items():
            if phrase in messages.lower():
                return RemoteUnusable(
                    f"{destination}: {advice.format(accept=accept, forget=forget)} ({quoted})"
                )
    what = f"ssh ended with exit code {code}" if code else "the connection was closed"
    return RemoteUnavailable(f"{destination}: {what}{f' ({quoted})' if quoted else ''}")


def _name_of(destination: str) -> str:
    host = destination.removeprefix("ssh://").rpartition("@")[2]
    name, _, port = host.partition(":")
    return f"'[{name}]:{port}'" if port else name


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:_MESSAGE]


def _ssh(environ: Mapping[str, str]) -> str:
    """Return the path of ssh.

    Raises:
        FileNotFoundError: there is none on PATH.
    """
    found = shutil.which("ssh", path=environ.get("PATH", os.defpath))
    if found is None:
        raise FileNotFoundError(f"the command 'ssh' is not on PATH ({environ.get('PATH', os.defpath)})")
    return found


def _sharing(environ: Mapping[str, str], destination: str) -> Iterator[str]:
    """Yield the options by which all connections of this user to one login are one, unless the user's configuration does so."""
    if (folder := _socket_folder(environ)) is None or _shares_already(environ, destination):
        return
    yield from (
        "-o",
        "ControlMaster=auto",
        "-o",
        f"ControlPath={folder}/%C",
        "-o",
        f"ControlPersist={PERSIST_S}",
    )


def _shares_already(environ: Mapping[str, str], destination: str) -> bool:
    """Return whether the user's own configuration says where the shared connection's socket is (ssh -G)."""
    argv = [_ssh(environ), "-G", "--", destination]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
        return bool(re.search(rb"(?m)^controlpath (?!none$)", done.stdout))
    return False


def _socket_folder(environ: Mapping[str, str]) -> Path | None:
    """Return this user's folder of sockets, which nobody else can enter; None where there can be none, so that nothing is shared."""
    for parent in (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        folder = Path(parent) / f"mlhpc-ssh-{os.geteuid()}"
        if not parent or "%" in parent or len(os.fsencode(folder)) + 1 + 40 > _SOCKET_BYTES:
            continue
        with contextlib.suppress(OSError):
            make_private(folder)
            return folder
    return None


def _control(environ: Mapping[str, str], destination: str, command: str) -> None:
    """Tell the shared connection to end: ``stop`` once it is not used any more, ``exit`` at once."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        sharing = list(_sharing(environ, destination))
        if sharing:
            subprocess.run(
                [_ssh(environ), *sharing, "-O", command, "--", destination], env=dict(environ),
                stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False,
            )  # fmt: skip
