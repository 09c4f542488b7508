"""Which InfluxDB, and by what right: from the environment, the token also from a file that nobody else can read.

========================  ==========================================================================================
``MLHPC_INFLUX_URL``      ``https://influx.example.org:8086``; without it nothing is sent
``MLHPC_INFLUX_BUCKET``   bucket of 2.x, database of 3 and (``database`` or ``database/policy``) of 1.8; default ``mlhpc``
``MLHPC_INFLUX_ORG``      organisation, needed by 2.x only
``MLHPC_INFLUX_TOKEN``    token; of 1.8 ``user:password``
``MLHPC_INFLUX_TOKEN_FILE``  file that holds it: a regular file of the user's own, closed to group and others
``MLHPC_INFLUX_CA``       file with the certificates of a private authority
``MLHPC_INFLUX_PUSH``     ``no``: a session sends nothing, and `mlhpc records push` sends its records from elsewhere
========================  ==========================================================================================

A token is in no message: errors name its variable or file, and what servers say is searched for it (:meth:`InfluxServer.hide`).
"""

from __future__ import annotations

import base64
import os
import stat
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.locations import page

URL, BUCKET, ORG, CA, PUSH = (f"MLHPC_INFLUX_{name}" for name in ("URL", "BUCKET", "ORG", "CA", "PUSH"))
TOKEN, TOKEN_FILE = "MLHPC_INFLUX_TOKEN", "MLHPC_INFLUX_TOKEN_FILE"
DEFAULT_BUCKET = "mlhpc"
#: A longer token file is another file.
_MAX_TOKEN_BYTES = 16384
#: Shorter texts are no secrets, and hiding them would leave nothing readable: a token ``e`` stands in every sentence.
_SHORTEST_SECRET = 4


@dataclass(frozen=True)
class InfluxServer:
    """One InfluxDB and what we may do there."""

    url: str
    bucket: str = DEFAULT_BUCKET
    org: str = ""
    token: str = field(default="", repr=False)
    ca: str = ""

    @property
    def authorization(self) -> str:
        """The header of a query: basic for ``user:password``, which 1.x and 2.x know, else the token."""
        if ":" in self.token:
            return f"Basic {base64.b64encode(self.token.encode()).decode('ascii')}"
        return f"Token {self.token}" if self.token else ""

    def hide(self, text: str) -> str:
        """Return *text* without the token, whoever put it there; tokens of three letters and fewer hide nothing."""
        secrets = {self.token, self.token.partition(":")[2], self.authorization.partition(" ")[2]}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "(token)")
        return text


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether there is an InfluxDB to write for."""
    return bool(environ.get(URL, "").strip())


def pushes(environ: Mapping[str, str]) -> bool:
    """Return whether a session sends what it wrote at its end."""
    return environ.get(PUSH, "").strip().lower() not in {"no", "0", "false", "off"}


def server_of(environ: Mapping[str, str]) -> InfluxServer:
    """Return the server that the environment names.

    Raises:
        UsageError: there is none, or what is said of it cannot be; the text holds no secret.
    """
    url = environ.get(URL, "").strip().rstrip("/")
    if not url:
        raise UsageError(f"no InfluxDB is configured: set {URL} (https://HOST:8086), see {page('influxdb')}")
    ca = environ.get(CA, "").strip()
    if ca and not Path(ca).is_file():
        raise UsageError(f"{CA}: there is no file {ca}")
    token = _token(environ)
    _check_url(url)
    _check(token, TOKEN_FILE if environ.get(TOKEN_FILE) else TOKEN)
    names = {BUCKET: environ.get(BUCKET, "").strip() or DEFAULT_BUCKET, ORG: environ.get(ORG, "").strip()}
    for variable, name in names.items():
        _check(name, variable)
    return InfluxServer(url, names[BUCKET], names[ORG], token, ca)


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{URL} is not an address: its host or port cannot be read") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{URL} holds a user or password; put `user:password` into {TOKEN} instead")
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise UsageError(f"{URL} is {url!r}; it must be http://HOST:PORT or https://HOST:PORT")
    if parts.query or parts.fragment:
        raise UsageError(f"{URL} has a `?` or `#` after the address; set the bucket by {BUCKET}")
    _check(url, URL)


def _check(text: str, variable: str) -> None:
    """Refuse what would become another header or request: the text itself is not shown, it may be the token."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise UsageError(f"{variable} contains a line end or another control character")
    if variable in {URL, TOKEN, TOKEN_FILE} and (" " in text or not text.isascii()):
        raise UsageError(f"{variable} contains a blank or a character that is not ASCII")


def _token(environ: Mapping[str, str]) -> str:
    """Return the token without the line end that editors and secret stores put behind it."""
    name = environ.get(TOKEN_FILE, "").strip()
    if not name:
        return environ.get(TOKEN, "").strip()
    if environ.get(TOKEN, "").strip():
        raise UsageError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one")
    path = Path(name).expanduser()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, so that what was checked is what is read
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{TOKEN_FILE}: {path} is not a regular file")
            if found.st_mode & 0o077:
                raise UsageError(f"{TOKEN_FILE}: others can read {path}; `chmod 600 {path}` closes it")
            if found.st_uid not in {os.geteuid(), 0}:
                raise UsageError(f"{TOKEN_FILE}: {path} belongs to another user")
            content = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{TOKEN_FILE}: {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_TOKEN_BYTES or not content.strip():
        raise UsageError(f"{TOKEN_FILE}: {path} contains no token")
    return content.decode("latin-1").strip()


def store_text(name: str, state_dir: Path) -> str:
    """Return as text where the source of that name has its history, without secrets."""
    if name == "local":
        return str(state_dir)
    server = server_of(os.environ)
    return server.hide(f"{server.url}, bucket {server.bucket}")
