"""The tiny workload, with base models that can be told to die; a rank imports it by MLHPC_WORKLOAD_MODULE."""

import dataclasses
import os
import signal

import tiny_workload


def task(parameters):
    base = tiny_workload.task(parameters)
    mine = os.environ.get("MLHPC_BASE_MODEL") == str(parameters.get("victim"))
    seen = []

    def loss(output, target):
        seen.append(1)
        if mine and len(seen) == int(parameters.get("dies_at") or 3):
            die(parameters["death"])
        return base.loss(output, target)

    return dataclasses.replace(base, loss=loss)


def die(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits":
        os._exit(3)
    raise RuntimeError("the device caught fire")
