"""What tests ask of Cerebras' package, in its own interpreter with the payload's zip: ``python cerebras_programs.py NAME ...``."""

# Programs print.
# ruff: noqa: T201

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path


def classes() -> None:
    """Print what the package has of the classes that ``wse.py`` names, and what becomes of one of each."""
    from pytest_mlhpc.node.worker.accelerators import wse

    found = {}
    for group in (wse.UNREACHABLE, wse.FROM_CLUSTER, wse.FROM_COMPILER):
        for name, module in group.items():
            kind = getattr(importlib.import_module(module), name)
            error = kind.__new__(kind)
            Exception.__init__(error, "why")
            found[name] = [kind.__module__, issubclass(kind, Exception), wse.before_any_step(error)[0]]
    print(json.dumps(found))


def systems(folder: str) -> None:
    """Print the cluster's configuration of a run on four systems as the package takes it, and what it says of -1."""
    from pytest_mlhpc.node.worker.accelerators import wse

    module = importlib.import_module("cerebras.appliance.cluster_config")
    config = wse.backend_options(4, Path(folder), 90.5, module)["cluster_config"]
    try:
        module.ClusterConfig(num_csx=-1)
    except ValueError as error:
        refused = str(error)
    names = ("num_csx", "job_time_sec", "num_workers_per_csx", "python_paths")
    found = {name: getattr(config, name) for name in names}
    print(json.dumps({**found, "mounts": [str(one.path) for one in config.mount_dirs], "refused": refused}))


def limited(run: str, folder: str) -> None:
    """Lower this run within half a second, and print how that fails."""
    from pytest_mlhpc.node.protocol.plan import RunPlan
    from pytest_mlhpc.node.protocol.schema import from_json
    from pytest_mlhpc.node.worker.distributed import Group
    from pytest_mlhpc.node.worker.environment import WorkerFailure
    from pytest_mlhpc.node.worker.probes.lowering import probe
    from pytest_mlhpc.node.worker.probes.measure import ProbePlace

    found = probe(ProbePlace(from_json(RunPlan, json.loads(run), "run"), Group(), None, Path(folder)))
    found._limit_s = 0.5
    try:
        found.repeat()
    except WorkerFailure as failure:
        print(failure.outcome, failure.text)
    finally:
        found.close()


def compiler(stdin: str) -> None:
    """Start a compiler that reads from this descriptor, print its process id, and stay."""
    argv = [sys.executable, "-m", "pytest_mlhpc.node.worker.probes.lowering"]
    print(subprocess.Popen(argv, stdin=int(stdin)).pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
