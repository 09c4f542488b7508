"""`mlhpc vet drain` and `mlhpc vet undo`: taking nodes with a problem of their own out of service, and giving them back.

Nothing is done unless asked for. Only ``[node_problem]`` counts, and of one vetting at most a third of its nodes (at
least one) are taken out: when more are bad at once, it is rarely the nodes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.vet.files import FilesError, read
from pytest_mlhpc.node.vet.finding import Verdict
from pytest_mlhpc.vetting.keeper import Action, Keeper, left
from pytest_mlhpc.vetting.reasons import node_problems, only_silent, sealed

#: Oldest verdict by which nodes are taken out, in seconds.
MAX_AGE_S = 86400.0

#: Why a node that did not say all is left in service.
SILENT = "no check has found anything wrong with it, and that may be its user's own doing"


def apply(verdict: Verdict, keeper: Keeper, most: int | None = None) -> list[Action]:
    """Take the nodes with a problem of their own out of service, each looked at right before. Never raises for a node.

    Args:
        verdict: what vetting found.
        keeper: whose nodes they are.
        most: do nothing if there are more; None: a third of the nodes vetted, at least one.
    """
    problems = node_problems(verdict)
    silent = left_silent(verdict)
    limit = max(1, len(verdict.nodes) // 3) if most is None else most
    if len(problems) > limit:
        why = f"{len(problems)} of {len(verdict.nodes)} nodes have a problem, more than {limit}: nothing was changed; see --most"
        return [*(left(host, why) for host in problems), *silent]
    return [*(keeper.take_out(host, sealed(host, text)) for host, text in problems.items()), *silent]


def left_silent(verdict: Verdict) -> list[Action]:
    """Return that unfit nodes which only did not say all are left in service, and why."""
    return [left(host, f"{SILENT}: {text}") for host, text in only_silent(verdict).items()]


def undo(hosts: Iterable[str], keeper: Keeper) -> list[Action]:
    """Give nodes back to service that we took out; without *hosts* all of them.

    Raises:
        MlhpcError: the scheduler does not answer when asked for all.
    """
    return [keeper.give_back(host) for host in dict.fromkeys(hosts) or keeper.ours()]


def keeper_of(scheduler: str, environ: Mapping[str, str]) -> Keeper:
    """Return who keeps this machine's nodes: *scheduler* is auto, slurm or kubernetes.

    Raises:
        UsageError: there is neither Slurm nor Kubernetes here, or it cannot be reached.
    """
    if scheduler == "auto":
        if shutil.which("scontrol", path=environ.get("PATH", os.defpath)):
            scheduler = "slurm"
        elif environ.get("KUBERNETES_SERVICE_HOST") or environ.get("KUBECONFIG"):
            scheduler = "kubernetes"
        else:
            raise UsageError(
                "neither Slurm (scontrol on PATH) nor Kubernetes (a pod, KUBECONFIG) is here: nobody can take nodes out of service"
            )
    if scheduler == "slurm":
        from pytest_mlhpc.provision.slurm.commands import CliClient
        from pytest_mlhpc.vetting.slurm_nodes import SlurmNodes

        return SlurmNodes(CliClient(environ))
    from pytest_mlhpc.provision.kubernetes.connect import connect
    from pytest_mlhpc.vetting.kubernetes_nodes import KubernetesNodes

    return KubernetesNodes(connect(environ=environ))


def tell(actions: Sequence[Action]) -> bool:
    """Print what became of each node, failures to standard error; return whether all went well."""
    for action in actions:
        stream = sys.stderr if action.word == "failed" else sys.stdout
        stream.write(f"{action}\n")
    return not any(action.word == "failed" for action in actions)


def fresh(out: Path) -> Verdict:
    """Return the verdict in a folder; one of yesterday says nothing of today's nodes.

    Raises:
        UsageError: there is none, or it is too old.
    """
    try:
        kept = read(out)
    except FilesError as error:
        raise UsageError(str(error)) from error
    age_s = (time.time_ns() - kept.created_ns) / 1e9
    if age_s > MAX_AGE_S:
        raise UsageError(
            f"{out}: this verdict is {age_s / 3600:.0f} hours old: vet again before nodes are taken out of service by it"
        )
    return kept.verdict
