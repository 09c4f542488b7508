"""Time, as provisioners see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Time, as tests and benchmarks may make it up."""

    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = lambda event, seconds: event.wait(seconds)
