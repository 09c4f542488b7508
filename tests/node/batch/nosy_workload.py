"""A probe that writes down what it finds in its process, and then does what its parameters say; a rank imports it by MLHPC_WORKLOAD_MODULE."""

import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch

OF_RUN = (
    "MLHPC_RUN", "MLHPC_SECRET", "MLHPC_CHANNEL", "MLHPC_PLAN", "MLHPC_FORKED", "MLHPC_SESSION", "PWD", "OLDPWD", "_",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def probe(place):
    """Write the facts, do the acts, and fail: nothing is measured here."""
    facts = {**found(), "drawn": [random.getrandbits(64), torch.initial_seed(), *drawn_by_numpy()]}
    file = Path.cwd() / f"facts{os.environ.get('RANK', '')}.json"
    whole = [file.with_name(f"facts{rank}.json") for rank in range(int(os.environ.get("WORLD_SIZE", "0")))]
    part = file.with_suffix(".part")
    part.write_text(json.dumps({**facts, "warm": os.environ.get("MLHPC_FORKED")}))
    part.rename(file)
    while not all(one.exists() for one in whole):  # the first rank that fails ends the others
        time.sleep(0.01)
    for act in place.run.parameters.get("acts", ()):
        globals()[act]()
    raise RuntimeError("nothing is measured here")


def drawn_by_numpy():
    with contextlib.suppress(ImportError):
        import numpy as np

        return [float(np.random.random())]  # noqa: NPY002 - its state is what may leak
    return []


def found():
    """What an interpreter that was just started has; the same each time."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "folder": Path.cwd() == Path(os.environ["MLHPC_PLAN"]).parent / os.environ["MLHPC_RUN"],
        "path": sys.path[0] == str(Path.cwd()),
        "main": sys.modules["__main__"].__spec__.name,
        "variables": {name: text for name, text in os.environ.items() if name not in OF_RUN},
        "files": sorted(kind(path) for path in Path("/proc/self/fd").iterdir()),
        "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
        "parent": os.getppid() == int(os.environ["BATCH"]) if "BATCH" in os.environ else None,
        "limits": [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")],
        "umask": umask(),
        "cores": sorted(os.sched_getaffinity(0)),
        "torch": [torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype().itemsize],
        "cuda": torch.cuda.is_initialized(),
        "patched": [torch.nn.Linear.forward.__qualname__, json.dumps.__qualname__],
        "dynamo": type(sys.modules.get("torch._dynamo")).__name__,
    }  # fmt: skip


def kind(link):
    with contextlib.suppress(OSError):
        found = str(link.readlink()).partition(":")[0]
        return f"{link.name} {found}" if int(link.name) < 3 else found
    return ""


def umask():
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def mess():
    """Change all that a process can change for itself."""
    os.chdir("/")
    os.umask(0)
    os.environ["MESS"] = "1"
    os.environ.pop("PATH", None)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    os.open("/etc/hostname", os.O_RDONLY)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    random.seed(1)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.nn.Linear.forward = torch.nn.Module.__call__
    json.dumps = lambda *_, **__: "{}"
    torch.ones(1 << 20).sum()


def say():
    sys.stdout.write("on standard output\n")
    sys.stderr.write("on standard error\n")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def abort():
    os.abort()


def leave():
    os._exit(3)


def end_the_warm_process():
    os.kill(int(os.environ["MLHPC_FORKED"]), signal.SIGKILL)


def second_dies():
    """Kill rank 1; the other one stays."""
    if os.environ["RANK"] == "1":
        die()
    time.sleep(600)


def stay():
    Path("staying").write_text(str(os.getpid()))
    time.sleep(600)


def start_a_daemon():
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
