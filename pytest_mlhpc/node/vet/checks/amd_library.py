"""PAYLOAD. The one door to AMD's Python module ``amdsmi``, whose releases differ in functions, keys, and how they say "not supported".

Read, and run against a stand-in for its C library, in releases 6.0.2, 6.1.2, 6.2.4, 6.3.3 and 7.0.2 of the package (github.com/ROCm/amdsmi, ``py-interface/``).
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, List, Mapping, Optional

from pytest_mlhpc.node.vet.machine import Machine, Unreadable

#: amdsmi_status_t: NOT_SUPPORTED, NOT_YET_IMPLEMENTED; and UNEXPECTED_DATA, which the library's own tests let pass on devices that
#: are newer than it is.
NEVER_TOLD = (2, 3, 43)


class Untold(Unreadable):
    """This device or this release of the library never tells that: asking again does not help."""


#: Watches run in threads of one process, of which the library knows nothing: its shutting down in one takes another's handles away.
#: It is one for the process, as this lock therefore has to be.
_TURN = threading.Lock()

#: Who has to wait longer for it, in seconds, waits for a call that hangs.
TURN_S = 6.0


class Library:
    """``amdsmi``, initialised, for one thread at a time; to be closed.

    Raises:
        Unreadable: it is not installed, does not find its driver or devices, or another check does not let it go.
    """

    def __init__(self, machine: Machine) -> None:
        self._module = machine.module("amdsmi")
        self.release = str(getattr(self._module, "__version__", "of unknown release"))
        if not _TURN.acquire(timeout=TURN_S):
            raise Unreadable(f"amdsmi {self.release} hangs in another check")
        try:
            self._call("amdsmi_init")
        except Unreadable:
            _TURN.release()
            raise

    def close(self) -> None:
        """Let the library go; what it says to that does not matter any more."""
        with contextlib.suppress(Exception):  # nothing depends on it, and the library raises anything
            self._module.amdsmi_shut_down()
        _TURN.release()

    def handles(self) -> List[Any]:
        """Return a handle for each device.

        Raises:
            Unreadable: the library fails.
        """
        return list(self._call("amdsmi_get_processor_handles"))

    def ask(self, name: str, handle: Any) -> Any:
        """Return what ``amdsmi_get_<name>`` says of a device.

        Raises:
            Untold: this release or device does not tell that.
            Unreadable: the library fails.
        """
        return self._call(f"amdsmi_get_{name}", handle)

    def maybe(self, name: str, handle: Any) -> Any:
        """Return the same, or None for whatever reason."""
        try:
            return self.ask(name, handle)
        except Unreadable:
            return None

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._module, name, None)
        if function is None:
            raise Untold(f"amdsmi {self.release} has no {name}")
        try:
            return function(*arguments)
        except Exception as error:  # its own exceptions, ctypes', OSError: all mean that there is no answer
            code = getattr(error, "err_code", None)
            kind = Untold if code in NEVER_TOLD else Unreadable
            words = " ".join(str(error).split()) or type(error).__name__
            raise kind(f"{name} of amdsmi {self.release} fails: {words}") from error


def number(value: Any, bits: int = 64) -> Optional[int]:
    """Return an integer, or None where the library says that there is none: 'N/A', or all *bits* set."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    whole = int(value)
    return None if whole < 0 or whole >> 64 or whole in ((1 << bits) - 1, (1 << 64) - 1) else whole


def text(value: Any) -> str:
    """Return a text, or "" where the library says that there is none."""
    words = str(value).strip() if value is not None else ""
    return "" if words.upper() in ("N/A", "NONE") else words


def entry(answer: Any, *keys: str) -> Any:
    """Return what stands under the first of *keys* that there is: releases renamed some."""
    if isinstance(answer, Mapping):
        for key in keys:
            if key in answer:
                return answer[key]
    return None
