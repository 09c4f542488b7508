"""One patience with a Slurm that does not answer, for all calls of a client: each may take its whole time limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pytest_mlhpc.provision.slurm.rhythm import pause_after


class Backoff:
    """Says when to leave Slurm alone. One for each client, so that no two kinds of calls wait in vain one after the other.

    Args:
        monotonic: the clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.trouble = ""  #: the words of the last call without answer
        self._monotonic = monotonic
        self._failures: Counter[str] = Counter()  #: kind of call -> how often in a row it got no answer
        self._until = float("-inf")

    def waits(self) -> bool:
        """Return whether Slurm is to be left alone now."""
        return self._monotonic() < self._until

    def failed(self, kind: str, error: Exception) -> None:
        """Note that a call got no answer."""
        self._failures[kind] += 1
        self._until = self._monotonic() + pause_after(self._failures[kind])
        self.trouble = str(error)

    def answered(self, kind: str) -> None:
        """Note that a call was answered. Other kinds keep their pauses: Slurm may serve queries and refuse submissions."""
        del self._failures[kind]
