"""Text in the options of schedulers, as pydantic checks it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

#: C0 and C1 control characters, line breaks among them, and lone surrogates, which no file can hold.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _text(value: object) -> str:
    """A number is a text here: an account may be called 1234."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} should be text")  # noqa: TRY004 - pydantic turns only ValueError into a finding
    if bad := _CONTROL.search(value):
        raise ValueError(f"{value!r:.80} holds the control character {bad.group()!r}")
    return value


def _word(value: str) -> str:
    if not value.strip():
        raise ValueError(f"{value!r} is empty")
    return value


#: One line of text that is not empty.
Text = Annotated[str, BeforeValidator(_text), AfterValidator(_word), Field(max_length=4096)]
