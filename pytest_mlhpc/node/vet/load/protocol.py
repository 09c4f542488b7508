"""No torch. How the child is told what to do, and how it answers: JSON lines on two descriptors.

Standard output is no channel: torch, BLAS and communication libraries print there.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Mapping, Optional

from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import CheckOutcome

#: Longest line that is read, in bytes: an order has a dozen short fields.
LONGEST_LINE = 1 << 20

#: Said before anything that may hang; the words name it to the user.
Begun = Callable[[str], None]


class ArgumentError(ValueError):
    """An argument of an order is missing or odd: ``str(error)`` names it."""


class ReaderLost(BaseException):
    """Nobody reads the answers any more."""


class Failed(RuntimeError):  # noqa: N818 - an answer to an order, not a defect
    """An order could not be carried out. ``why`` is one word for programs, ``str(error)`` a sentence for users."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


@dataclass(frozen=True)
class Order:
    """One line of standard input, or what was wrong with it."""

    id: Any
    do: str
    args: Mapping[str, Any]
    problem: str = ""


class Arguments:
    """The arguments of one order, read with bounds."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.round = self.whole("round", 0, 0, 1_000_000)
        self.level = self.text("level", "quick")
        if self.level not in ("quick", "deep"):
            raise ArgumentError(f"level is {self.level!r}, not quick or deep")

    def whole(self, name: str, default: Optional[int], least: int, most: int) -> int:
        """Return a whole number between *least* and *most*; a *default* of None says that it must be given."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArgumentError(f"{name} is {value!r}, not a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: Optional[float], least: float, most: float) -> float:
        """Return a number between *least* and *most*."""
        value = self._values.get(name, default)
        odd = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
        if odd or not least <= value <= most:
            raise ArgumentError(f"{name} is {value!r}, not a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str, default: Optional[str]) -> str:
        """Return a text without control characters."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or len(value) > 4096 or any(ord(letter) < 32 for letter in value):
            raise ArgumentError(f"{name} is {value!r:.80}, not a text")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; it must be given."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} is {value!r:.80}, not true or false")
        return value

    def seconds(self, quick: float, deep: float) -> float:
        """Return how long to measure: ``seconds`` if given, else what the level takes."""
        return self.number("seconds", quick if self.level == "quick" else deep, 0.01, 3600.0)


def parse(line: bytes) -> Order:
    """Return the order in one line; its ``problem`` says what is wrong with anything else."""
    text = line.decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Order(None, "", {}, f"{text[:60]!r} is no JSON: {error}")
    if not isinstance(data, dict):
        return Order(None, "", {}, f"{text[:60]!r} is no JSON object")
    name, args = data.get("do"), data.get("args", {})
    identity = data.get("id")
    if not isinstance(name, str):
        return Order(identity, "", {}, f"do is {name!r:.60}, not a text")
    if not isinstance(args, dict):
        return Order(identity, name, {}, f"args is {args!r:.60}, not an object")
    return Order(identity, name, args)


class Orders:
    """Standard input, read by a thread of its own: its end must be noticed while a command hangs."""

    def __init__(self, descriptor: int, ended: Callable[[], None]) -> None:
        self._descriptor, self._ended = descriptor, ended
        self._queue: queue.Queue[Order] = queue.Queue()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def next(self) -> Order:
        """Wait for the next order."""
        return self._queue.get()

    def _read(self) -> None:
        """Read lines until the end; one that is too long is given up, and its rest skipped."""
        held, skipping = b"", False
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                data = b""
            if not data:
                self._ended()
                return
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if not skipping and line.strip():
                    self._queue.put(parse(line))
                skipping = False
            if len(held) > LONGEST_LINE:
                if not skipping:
                    self._queue.put(Order(None, "", {}, f"a line has more than {LONGEST_LINE} bytes"))
                held, skipping = b"", True


class Answers:
    """The private descriptor. Lines of several threads never mix."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # nothing that a library starts may hold it open
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, answer: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            ReaderLost: nothing reads them any more.
        """
        text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
        view = memoryview(text.encode("utf-8") + b"\n")
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                raise ReaderLost(str(error)) from error

    def outcome(self, identity: Any, outcome: CheckOutcome) -> None:
        """Answer an order with what was found."""
        self.send({"id": identity, "outcome": to_json(outcome)})

    def error(self, identity: Any, text: str, why: str = "") -> None:
        """Answer an order that could not be carried out."""
        answer: Dict[str, Any] = {"id": identity, "error": text}
        self.send({**answer, "why": why} if why else answer)

    def begun(self, identity: Any) -> Begun:
        """Return what says that something of an order has begun, and with its argument what."""
        return lambda what: self.send({"id": identity, "begun": what})
