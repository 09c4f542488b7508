"""Vetting before the first run: which of the allocation's nodes are fit, and what the runs receive of it.

Vetting is itself a run, of the program ``python -m pytest_mlhpc.node.batch.vetting``, once on each node: so its processes are
started, watched and ended as all others are, and the launcher is the runs' own. It is in no plan; both ends of a group of pods
make it out of the plan.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.agents.wire import key_of, proof
from pytest_mlhpc.node.batch.output import ControllerLost, Lines
from pytest_mlhpc.node.batch.ranks import LAUNCHER, RankBook
from pytest_mlhpc.node.batch.runs import DiscardedRelay, EndSignals, Site, build_run, execute
from pytest_mlhpc.node.batch.supervise import Supervisor
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.launch import KEEP_GOING
from pytest_mlhpc.node.protocol.plan import BUDGET_S, VETTED, Plan, RunPlan, VetSettings
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.vet.finding import Exit, NodeVerdict, Severity, VetVerdict
from pytest_mlhpc.node.vet.verdict_files import FilesError, WrittenVerdict, node_name, read, verdict_to_json

#: What starting a step on all nodes and importing there may take besides the budget of vetting itself, in seconds.
START_S = 60.0

#: Outcomes of vetting's own processes that are passed on as they are: there the launcher knows what happened to whom.
TOLD = frozenset({"node_failure", "out_of_memory"})

#: What only processes of this allocation know, for the proof of who they are (``node/vet/place.py``).
KEY = "MLHPC_VET_KEY"

#: The variable with the names of all nodes, and the file of what was measured (``node/vet/verdict_files.py``).
HOSTS, REPORT = "MLHPC_VET_HOSTS", "report.json"


@dataclass(frozen=True)
class FitNodes:
    """What becomes of the allocation: its good nodes in order, or why it cannot be used."""

    nodes: Tuple[str, ...]
    trouble: str = ""
    outcome: str = "unfit_nodes"
    unfit: Tuple[str, ...] = ()


def vet_run(plan: Plan) -> Optional[RunPlan]:
    """Return the run that vets the nodes of *plan*; None if that is not wanted.

    Its number of nodes is that of the plan with its spares; the batch knows how many there really are.
    """
    if plan.vetting is None:
        return None
    first, nodes = plan.runs[0], plan.nodes + plan.spares
    key, each = key_of(plan), max(1, first.ranks // max(1, first.nodes))
    direct = nodes == 1 and first.launcher in ("plain", "torchrun")
    return replace(
        first,
        run_id=f"{plan.allocation_id}-vet",
        nonce=proof(key, VETTED),
        workload="command",
        parameters={},
        metrics={},
        nodes=nodes,
        ranks=nodes,
        cores_per_rank=first.cores_per_rank * each,
        launcher="plain" if direct else first.launcher if first.launcher == "podrun" else "srun",
        time_limit_s=limit_of(plan.vetting) + START_S,
        variables={**first.variables, KEY: key.hex()},
        argv=(first.python, "-m", "pytest_mlhpc.node.batch.vetting"),
        device_ids=(),
        cwd=None,
        # A node that dies is to be reported by the others, which srun would end with it.
        launcher_options=() if direct else (*first.launcher_options, "--kill-on-bad-exit=0"),
    )


def all_runs(plan: Plan) -> Dict[str, RunPlan]:
    """Return the runs of *plan* by their ids, with those of vetting and of builds, which are in no plan."""
    vetting = vet_run(plan)
    builds = [build_run(run, build) for run in plan.runs for build in run.builds]
    return {run.run_id: run for run in (*plan.runs, *builds, *((vetting,) if vetting else ()))}


def limit_of(settings: VetSettings) -> float:
    """Return the deadline of vetting, in seconds."""
    return settings.budget_s or BUDGET_S[settings.level]


def vet(plan: Plan, path: Path, relay: Lines, signals: EndSignals, *, site: Site) -> FitNodes:
    """Vet the nodes and tell the runs; where too few are fit, tell their end too.

    Raises:
        ControllerLost: nobody listens any more, or a signal said to end.
    """
    run = vet_run(plan)
    if run is None:
        return FitNodes(site.nodes)
    nodes = len(site.nodes)
    run = replace(run, nodes=nodes, ranks=nodes)
    if site.hub:
        run = replace(run, launcher="podrun", launcher_options=(KEEP_GOING,))
    elif nodes == 1 and not site.slurm:
        run = replace(run, launcher="plain", launcher_options=())
    directory = Path(plan.directory) / run.run_id
    run = replace(run, variables={**run.variables, HOSTS: json.dumps(site.nodes)})
    book = RankBook(run, ())
    book.started = True
    supervisor = Supervisor(
        book, directory, DiscardedRelay(), signals.wakeup, signals.stop, lifeline=site.lifeline
    )
    execute(supervisor, run, path, site)
    if signals.stop():
        raise ControllerLost
    written, why = _read(directory)
    if written is None:
        last, trouble = supervisor.logs.last_lines(LAUNCHER), book.trouble
        text = f"the nodes could not be vetted: {trouble.text if trouble else why}"
        outcome = trouble.outcome if trouble and trouble.outcome in TOLD else "launch_failed"
        found = FitNodes((), text + (f"; its last lines:\n{last}" if last else ""), outcome)
    else:
        found = result_of(written.verdict, site.nodes, pods=bool(site.hub))
    _tell(plan, relay, written, _report(directory), found)
    return found


def _read(out: Path) -> Tuple[Optional[WrittenVerdict], str]:
    """Return the verdict in a folder, or why there is none."""
    try:
        return read(out), ""
    except FilesError as error:
        return None, str(error)


def _report(out: Path) -> Any:
    """Return what was measured, as JSON; None where that was not written: then figures of these nodes teach nothing."""
    try:
        return read_json((out / REPORT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def result_of(verdict: VetVerdict, nodes: Sequence[str], *, pods: bool) -> FitNodes:
    """Return what *verdict* means for an allocation of *nodes*; *pods* cannot be left out of a group one by one."""
    unfit = tuple(host for host in nodes if host in verdict.exclude)
    good = tuple(host for host in nodes if host in verdict.good)
    if verdict.exit in (Exit.READY, Exit.NOT_COMPARED) and not (pods and unfit):
        return FitNodes(good, unfit=unfit)
    reasons = "; ".join(f"{host}: {reason}" for host, reason in _reasons(verdict, unfit).items())
    text = verdict.text or f"{len(good)} of {len(nodes)} nodes are fit, {verdict.need} are needed"
    outcome = "launch_failed" if verdict.exit in (Exit.INTERNAL, Exit.USAGE) else "unfit_nodes"
    return FitNodes((), f"{text}; {reasons}" if reasons else text, outcome, unfit)


def _reasons(verdict: VetVerdict, hosts: Sequence[str]) -> Dict[str, str]:
    return {node.host: node.reason or node.fitness.value for node in verdict.nodes if node.host in hosts}


def _warning(node: NodeVerdict) -> str:
    """Return what is to be known of a node that is used all the same."""
    worth = (Severity.WARNING, Severity.UNKNOWN)
    return next((one.reason for severity in worth for one in node.findings if one.severity is severity), "")


def _summary(verdict: VetVerdict) -> Dict[str, Any]:
    """Return what a record keeps. Nodes have their own names, not their pods', as later allocations know only these."""
    unfit = {node_name(host): reason for host, reason in _reasons(verdict, verdict.exclude).items()}
    good = [node for node in verdict.nodes if node.host in verdict.good and node_name(node.host) not in unfit]
    return {
        "level": verdict.level,
        "seconds": verdict.seconds,
        "fit": list(dict.fromkeys(node_name(node.host) for node in good)),
        "unfit": unfit,
        "warnings": {node_name(node.host): _warning(node) for node in good if _warning(node)},
    }


def _tell(plan: Plan, relay: Lines, written: Optional[WrittenVerdict], report: Any, found: FitNodes) -> None:
    """Tell all runs what was found, everything to the first and to those that are about nothing else.

    Where there are too few nodes, tell the others' end too.
    """
    for run in plan.runs:
        if written is not None:
            body = _summary(written.verdict)
            if run is plan.runs[0] or run.workload == VETTED:
                body["verdict"] = verdict_to_json(written)
            if run is plan.runs[0]:
                body["report"] = report
            relay.send(run, "vetted", body)
        if found.trouble and (written is None or run.workload != VETTED):
            away = [node_name(host) for host in found.unfit]
            relay.send(
                run, "failed", {"outcome": found.outcome, "text": found.trouble, "log": "", "nodes": away}
            )
            relay.send(run, "end", {"exit": []})


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Be one node's part of vetting; return the exit code, which is `mlhpc vet`'s.

    With ``--alone SETTINGS OUT`` this node is looked at by itself, without load, wherever it is.
    """
    from pytest_mlhpc.node.protocol.plan import read_plan
    from pytest_mlhpc.node.vet.main import run

    if arguments[:1] == ["--alone"]:
        wanted = from_json(VetSettings, read_json(arguments[1]), "settings")
        alone = replace(wanted, out=arguments[2], need=1, single=True, no_load=True)
        return int(run(alone, environ))
    plan = read_plan(Path(environ["MLHPC_PLAN"]), own_disk="MLHPC_OWN_DISK" in environ)
    if plan.vetting is None:
        raise ValueError(f"the plan {environ['MLHPC_PLAN']} wants no vetting")
    hosts = tuple(read_json(environ.get(HOSTS, "[]")))
    out = Path(plan.directory) / environ["MLHPC_RUN"]
    return int(run(replace(plan.vetting, out=str(out), hosts=hosts), environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
