"""PAYLOAD. Worker lines: numbered JSON lines of at most 4,000 bytes by which a run reports to the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

#: Kinds of line in the order in which a run sends them; progress at most once a second.
KINDS = ("started", "progress", "measurement", "failed", "end")

#: Longest line, newline included: one write of this size is atomic to a pipe (POSIX PIPE_BUF is 4,096 on Linux).
MAX_LINE = 4000


@dataclass(frozen=True)
class Message:
    """One whole message of one run, joined from its lines and checked.

    ``body`` by kind: started = protocol, payload_sha256, python, torch, host; progress = step, steps,
    samples_per_s; measurement = a Measurement as JSON; failed = outcome, text, log; end = exit (list of exit codes).
    """

    run_id: str
    nonce: str
    kind: str
    body: Mapping[str, Any]
