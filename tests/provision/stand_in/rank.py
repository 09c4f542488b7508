"""What every stand-in for a rank begins with; scripts of tests import all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from pytest_mlhpc.node.protocol.channel import RankChannel
from pytest_mlhpc.node.protocol.schema import RankReport

__all__ = ["a_report", "channel", "os", "signal", "subprocess", "sys", "time"]

channel = RankChannel.from_environment()
channel.started({"torch": "none"})


def a_report(**changes):
    fields = {
        "rank": channel.rank, "local_rank": channel.rank, "host": "here", "device_type": "cpu", "device_index": channel.rank,
        "device_model": "made up", "steps": 3, "samples": 6, "started_ns": 1, "ended_ns": 2, "epoch_s": 3.0, "wait_s": 0.1,
        "copy_s": 0.0, "warmup_s": 0.5, "step_times_s": (1.0, 1.0, 1.0), "losses": (2.0, 1.5, 1.0),
    }  # fmt: skip
    return RankReport(**{**fields, **changes})
