"""Texts between us and others: what peers say made fit to be shown, what we say made fit to be sent, secrets kept out."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_mlhpc.alert.channels.base import Message

#: Of what a peer said, in characters: a sentence or two.
MOST_SAID = 300
#: Shorter words are no secrets, and hiding them would leave nothing readable.
_SHORTEST_SECRET = 4
_HIDDEN = "***"


def said(answer: bytes | str, secrets: Iterable[str] = ()) -> str:
    """Return what a peer answered as one line without control characters and without our secrets, which it may repeat."""
    text = answer.decode("utf-8", errors="replace") if isinstance(answer, bytes) else answer
    text = hidden(text, secrets)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= MOST_SAID else text[: MOST_SAID - 3] + "..."


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with each secret replaced, also in the form in which it stands in an address."""
    forms = {form for secret in secrets for form in (secret, urllib.parse.quote(secret, safe=""))}
    for form in sorted(forms, key=len, reverse=True):  # one may be a part of another
        if len(form) >= _SHORTEST_SECRET:
            text = text.replace(form, _HIDDEN)
    return text


def secrets_of(url: str) -> tuple[str, ...]:
    """Return what is secret in an address: user and password, and all behind the host: hooks have their token in the path."""
    parts = urllib.parse.urlsplit(url)
    values = [value for _name, value in urllib.parse.parse_qsl(parts.query)]
    words = [
        *parts.path.split("/"),
        parts.path,
        parts.query,
        *values,
        parts.username or "",
        parts.password or "",
    ]
    return tuple({form for word in words for form in (word, urllib.parse.unquote(word)) if form})


def secret(value: str, what: str) -> str:
    """Return a secret without white space around it, as files and variables often end with a newline.

    Raises:
        ValueError: It cannot stand in a header; the text does not show it.
    """
    value = value.strip()
    if not all(" " <= char <= "~" for char in value):
        raise ValueError(f"{what} contains a character that a header cannot contain, such as a line break")
    return value


def plain(value: Any) -> Any:
    """Return JSON data that every receiver can read: no NaN, no infinity, no half of a character."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


def cut(text: str, most: int) -> str:
    """Return at most *most* characters of *text*, saying so where something was left out."""
    note = "\n[cut: too long for this channel]"
    return text if len(text) <= most else text[: most - len(note)] + note


def whole(message: Message) -> str:
    """Return a message's text under its title, which the text often begins with."""
    text = message.text
    return text if text.startswith(message.title) else f"{message.title}\n\n{text}"


def fenced(text: str) -> str:
    """Return *text* as a block of code in Markdown: nothing in it is a command, a link, or the name of somebody to notify."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
