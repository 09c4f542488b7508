"""Identifiers that are chosen before anything is submitted."""

from __future__ import annotations

import os
import time
import uuid


def uuid7() -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then random bits; sorts by time."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | (random >> 64 & 0xFFF) << 64
    value |= 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=value))
