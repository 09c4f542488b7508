"""What ended a run for Cerebras' systems before its first step, told by the class of the error. No Cerebras needed.

Classes go by their names, as their modules cannot be imported where the package is not.
"""

from __future__ import annotations

from typing import Mapping, Tuple

#: Errors that say that no cluster takes the job, and the modules that define them (cerebras-pytorch 2.10.0).
UNREACHABLE: Mapping[str, str] = {
    "ClusterConfigError": "cerebras.appliance.cluster.config",
    "ClusterJobScheduleError": "cerebras.appliance.errors",
    "ClusterJobInitError": "cerebras.appliance.errors",
    "ApplianceVersionError": "cerebras.appliance.errors",
    "RpcError": "grpc",
}

#: The base of all that a cluster ends a job by, and the one of them by which its compiler refuses a model.
FROM_CLUSTER: Mapping[str, str] = {"ApplianceClientException": "cerebras.appliance.errors"}
FROM_COMPILER: Mapping[str, str] = {"ApplianceCompilationError": "cerebras.appliance.errors"}


def reason(error: BaseException, most: int = 600) -> str:
    """Return what an error of Cerebras' tools says, in one line of at most *most* characters."""
    text = " ".join(str(error).split())
    found = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return found if len(found) <= most else f"{found[: most - 3]}..."


def before_any_step(error: Exception) -> Tuple[str, str]:
    """Return outcome and text of *error*: no cluster, one that ended the job, or a model that cannot be compiled.

    Only the last is no fault of anything here, and skips the test.
    """
    names = {one.__name__ for one in type(error).__mro__}
    if names & UNREACHABLE.keys():
        text = (
            f"no Cerebras cluster can be used from this host: {reason(error)}. Run on the cluster's user node; without one, "
            "cerebras='cpu' trains on the CPU back-end and the workload `lowering` lowers for the wafer"
        )
        return "wrong_device", text
    if names & FROM_CLUSTER.keys() and not names & FROM_COMPILER.keys():
        return "worker_exit", f"Cerebras' cluster ended the run before its first step: {reason(error)}"
    return "cannot_lower", f"cerebras.pytorch cannot compile this workload: {reason(error)}"
