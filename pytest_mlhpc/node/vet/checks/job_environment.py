"""PAYLOAD. Variables of communication: equal on all nodes, and none left from debugging. Secrets are only hashed."""

from __future__ import annotations

import hashlib
from typing import List, Mapping

from pytest_mlhpc.node.secret_names import may_be_secret
from pytest_mlhpc.node.vet.finding import Fact, Origin, Outcome
from pytest_mlhpc.node.vet.job_findings import judged, outcome
from pytest_mlhpc.node.vet.machine import Context, Machine

#: What is compared, by the beginning of its name; nothing else of the environment leaves the node.
PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "UCX_", "GLOO_", "MASTER_")

#: Set to another value than these, they slow down. Sources: NCCL user guide, Environment Variables, Debugging; CUDA programming
#: guide, CUDA_LAUNCH_BLOCKING; HIP, HIP_LAUNCH_BLOCKING and AMD_SERIALIZE_KERNEL; torch.distributed, TORCH_DISTRIBUTED_DEBUG.
DEBUGGING: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_CHECKS_DISABLE": "0", "NCCL_CHECK_POINTERS": "0",
    "CUDA_LAUNCH_BLOCKING": "0", "HIP_LAUNCH_BLOCKING": "0", "AMD_SERIALIZE_KERNEL": "0", "AMD_SERIALIZE_COPY": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF INFO",
}  # fmt: skip


def safe(name: str, value: str) -> str:
    """Return ``NAME=value``, with a hash in the place of what may be a secret."""
    if may_be_secret(name):
        value = "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}={value}"


class Environment:
    """Variables of communication libraries."""

    name = "job_environment"
    level = "quick"
    cost_s = 0.01
    reads = tuple(f"{prefix}*" for prefix in PREFIXES)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Give one fact for each prefix, empty ones too, so that a variable missing on one node is seen."""
        facts = [
            Fact(self.name, f"environment.{prefix}", _all(machine.environ, prefix), origin=Origin.USER)
            for prefix in PREFIXES
        ]
        left: List[str] = [
            f"{name}={machine.environ[name]}"
            for name, normal in DEBUGGING.items()
            if machine.environ.get(name, "").upper() not in {"", *normal.split()}
        ]
        text = f"{', '.join(left)}: for debugging, and slow; unset for a real run"
        said = judged(self.name, context.policy, "job.debug_variables", len(left), text)
        found = outcome(self.name, said, "no variables are left from debugging")
        return Outcome(found.findings, facts=tuple(facts))


def _all(environ: Mapping[str, str], prefix: str) -> str:
    return " ".join(safe(name, environ[name]) for name in sorted(environ) if name.startswith(prefix))


CHECKS = (Environment(),)
