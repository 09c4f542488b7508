"""`mlhpc vet apply` and `mlhpc vet undo`: taking nodes with a problem of their own out of service, and giving them back.

Nothing is done unless asked for. Only ``[node_problem]`` counts, and of one vetting at most a third of its nodes (at
least one) are taken out: when more are bad at once, it is rarely the nodes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.vet.command.keeper import Action, Keeper, left
from pytest_mlhpc.vet.command.reasons import node_problems, only_silent, sealed
from pytest_mlhpc.vet.files import FilesError, read
from pytest_mlhpc.vet.verdict import Verdict

#: Oldest verdict by which nodes are taken out, in seconds.
MAX_AGE_S = 86400.0

#: Why a node that did not say all is left in service.
SILENT = "no check has found anything wrong with it, and that may be its user's own doing"

SCHEDULERS = ("auto", "slurm", "kubernetes")


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
    """Return who keeps this machine's nodes: *scheduler* is one of :data:`SCHEDULERS`.

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
        from pytest_mlhpc.provision.slurm.cli import CliClient
        from pytest_mlhpc.vet.command.slurm_nodes import SlurmNodes

        return SlurmNodes(CliClient(environ))
    from pytest_mlhpc.provision.kubernetes.connect import connect
    from pytest_mlhpc.vet.command.kubernetes_nodes import KubernetesNodes

    return KubernetesNodes(connect(environ=environ))


def tell(actions: Sequence[Action]) -> bool:
    """Print what became of each node, failures to standard error; return whether all went well."""
    for action in actions:
        stream = sys.stderr if action.word == "failed" else sys.stdout
        stream.write(f"{action}\n")
    return not any(action.word == "failed" for action in actions)


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add ``--scheduler``."""
    parser.add_argument(
        "--scheduler", choices=SCHEDULERS, default="auto", help="whose nodes they are (default: what is here)"
    )


def add_apply_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `mlhpc vet apply` takes."""
    parser.add_argument(
        "out", type=Path, metavar="DIR", help="folder with the verdict.json of a vetting (its --out)"
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="N",
        help="do nothing if more nodes are bad (default: a third of those vetted)",
    )
    add_scheduler(parser)


def run_apply(args: argparse.Namespace) -> int:
    """Do it. Returns 1 where a node could not be taken out."""
    if args.most is not None and args.most < 0:
        raise UsageError(f"--most {args.most} is below 0")
    verdict = _fresh(args.out)
    if not node_problems(verdict):
        tell(left_silent(verdict))
        sys.stdout.write("no node has a problem of its own: nothing to do\n")
        return 0
    return 0 if tell(apply(verdict, keeper_of(args.scheduler, os.environ), args.most)) else 1


def _fresh(out: Path) -> Verdict:
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


def add_undo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `mlhpc vet undo` takes."""
    parser.add_argument(
        "nodes", nargs="*", metavar="NODE", help="give these back to service (default: all that we took out)"
    )
    add_scheduler(parser)


def run_undo(args: argparse.Namespace) -> int:
    """Do it. Returns 1 where a node could not be given back."""
    actions = undo(args.nodes, keeper_of(args.scheduler, os.environ))
    if not actions:
        sys.stdout.write("no node is out of service by us: nothing to do\n")
    return 0 if tell(actions) else 1
