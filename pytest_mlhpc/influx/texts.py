"""Texts as tags and fields of InfluxDB and back. What line protocol cannot hold is coded; nothing is lost on the way.

Line protocol has no way to write a line end in a tag, and none to write a backslash before a separator: such characters become
``%0A`` and the like, and a ``%`` that would read as one of these becomes ``%25``.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

#: InfluxDB takes no longer text as a field (docs.influxdata.com, "Line protocol", data type string: 64 KB); the rest is cut.
MAX_TEXT_BYTES = 60_000
#: JSON that would be longer is packed, behind this word.
_PACKED = "zlib:"

#: Control characters, half a surrogate pair, and the backslash, with which line protocol escapes but which it cannot escape.
_HARD = r"\x00-\x1f\x7f\u0085\u2028\u2029\\\ud800-\udfff"
_HARD_IN_TAG = re.compile(rf"[{_HARD}]|%(?=[0-9A-F]{{2}}|u[0-9A-F]{{4}})")
_HARD_IN_FIELD = re.compile(rf"[{_HARD}\u240a]|%(?=[0-9A-F]{{2}}|u[0-9A-F]{{4}})")
_CODED = re.compile("%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
_DASHES = re.compile("-+")


def tag_of(text: str) -> str:
    """Return how a text is a tag value: ``-`` if empty, one more ``-`` where it is nothing but those, hard characters as ``%0A``."""
    if not text or _DASHES.fullmatch(text):
        return f"{text}-"
    return _HARD_IN_TAG.sub(_code, text)


def from_tag(value: str) -> str:
    """Return the text that a tag value stands for."""
    if _DASHES.fullmatch(value):
        return value[1:]
    return _CODED.sub(_decode, value) if "%" in value else value


def field_of(text: str) -> str:
    """Return how a text is a field: line ends as ``␊`` (U+240A), so that a point is one line; other hard characters as ``%00``.

    What is beyond :data:`MAX_TEXT_BYTES` is cut.
    """
    if _HARD_IN_FIELD.search(text):
        text = _HARD_IN_FIELD.sub(lambda found: "␊" if found[0] == "\n" else _code(found), text)
    if len(text) * 4 > MAX_TEXT_BYTES and len(encoded := text.encode()) > MAX_TEXT_BYTES:
        text = encoded[:MAX_TEXT_BYTES].decode("utf-8", "ignore") + "… (cut)"
    return text


def from_field(value: str) -> str:
    """Return the text that a field stands for."""
    value = value.replace("␊", "\n")
    return _CODED.sub(_decode, value) if "%" in value else value


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"%{number:02X}" if number < 256 else f"%u{number:04X}"


def _decode(found: re.Match[str]) -> str:
    return chr(int(found[1] or found[2], 16))


def json_of(value: Mapping[str, str] | Sequence[str]) -> str:
    """Return names as a field that holds JSON; packed where that would be too long, such as the nodes of a whole machine."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if _HARD_IN_FIELD.search(text):
        text = _HARD_IN_FIELD.sub(_code, text)
    if len(text) * 4 > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        text = _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")
    return text


def from_json(value: str) -> Any:
    """Return what a field of :func:`json_of` holds.

    Raises:
        ValueError: it is damaged.
    """
    if value.startswith(_PACKED):
        try:
            value = zlib.decompress(base64.b64decode(value[len(_PACKED) :], validate=True)).decode()
        except zlib.error as error:
            raise ValueError(str(error)) from error
    return json.loads(_CODED.sub(_decode, value))
