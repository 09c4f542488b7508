"""The tiny workload with one rank that goes wrong in the way that the run's parameters say."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import tiny_workload


def task(parameters):
    made = tiny_workload.task(parameters)
    if parameters.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if int(os.environ["RANK"]) != parameters["rank"]:
        return made
    how = parameters["how"]

    def prepare(inputs, targets):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(7)
        elif how == "raise":
            raise RuntimeError("the device caught fire")
        elif how == "hang":
            time.sleep(600)
        elif how == "memory":
            kept = [bytearray(os.urandom(1 << 20) * 64) for _ in range(100)]
            time.sleep(len(kept))
        return inputs.float(), targets.float()

    return dataclasses.replace(made, prepare=prepare)
