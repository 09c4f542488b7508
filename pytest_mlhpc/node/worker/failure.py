"""PAYLOAD, no torch. How a rank says that its run is broken: a name from the closed list, and a sentence."""

from __future__ import annotations


class WorkerFailure(Exception):  # noqa: N818 - the closed list's word
    """The run cannot go on. ``outcome`` is a name of ``store/record.py``, the text says what, where, what to do."""

    def __init__(self, outcome: str, text: str) -> None:
        self.outcome = outcome
        self.text = text
        super().__init__(f"{outcome}: {text}")
