"""From a plan to the objects that are created for it: the plan as pods see it, the payload, the manifests."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.submitted import user_name
from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.kinds import Kind
from pytest_mlhpc.provision.kubernetes.labels import Identity
from pytest_mlhpc.provision.kubernetes.render import render
from pytest_mlhpc.provision.kubernetes.where import FILE, to_text, where_of
from pytest_mlhpc.provision.local_process import no_room
from pytest_mlhpc.provision.plans import environment_of, write_private
from pytest_mlhpc.results.foreign import read_json
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.store import make_directories
from pytest_mlhpc.system.model import Partition


@dataclass(frozen=True)
class Placed:
    """Manifests in the order of their creation, each with its role: config, service or workload."""

    kind: Kind
    manifests: tuple[tuple[str, Mapping[str, Any]], ...]


class Placer:
    """Makes the manifests of allocations.

    Args:
        partition: what systems.yaml says of it.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
    """

    def __init__(self, partition: Partition, payload: Callable[[str], Path], session_id: str) -> None:
        self._partition = partition
        self._payload = payload
        self._identity = Identity(session=session_id, owner=user_name())

    def place(self, allocation: Allocation) -> Placed:
        """Write down what is to be created for *allocation*, and return it.

        Raises:
            ProvisionError: ``disk_full``, or ``rejected``: the payload is gone, or a manifest cannot be made.
        """
        settings, plan = allocation.settings, allocation.plan
        try:
            zipped = self._payload(plan.payload_sha256).read_bytes()
        except OSError as error:
            raise ProvisionError(
                "rejected", f"cannot read the payload {error.filename}: {error.strerror}"
            ) from error
        excluded = tuple(dict.fromkeys((*plan.excluded_nodes, *allocation.excluded)))
        environment = environment_of(plan, self._partition)
        try:
            rendered = render(
                settings,
                self._partition,
                environment,
                replace(plan, excluded_nodes=excluded),
                zipped,
                self._identity,
                allocation.round,
            )
        except UsageError as error:
            raise ProvisionError("rejected", str(error)) from error
        manifests = [("config", rendered.config_map)]
        manifests += [("service", rendered.service)] if rendered.service is not None else []
        manifests += [("workload", manifest) for manifest in rendered.workloads]
        placed = Placed(rendered.kind, tuple(manifests))
        where = where_of(settings, allocation.namespace, allocation.api, rendered.kind)
        _write(plan, placed, to_text(where))
        return placed


def note_unfit(allocation: Allocation) -> None:
    """Add a line to ``unfit.jsonl`` beside the plan for each node that the probe has found unfit in this round.

    Raises:
        ProvisionError: ``disk_full``.
    """
    path = Path(allocation.plan.directory) / "unfit.jsonl"
    lines = [
        json.dumps({"round": allocation.round, "node": pod.node, "text": pod.unfit})
        for pod in allocation.views
        if pod.unfit
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ProvisionError("disk_full", no_room(error, path)) from error


def noted_unfit(plan: Plan) -> dict[str, str]:
    """Return the nodes that :func:`note_unfit` has written down, each with what was said; a damaged line is left out."""
    unfit: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (Path(plan.directory) / "unfit.jsonl").read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                found = read_json(line)
                unfit[str(found["node"])] = str(found["text"])
    return unfit


def unfit_messages(plan: Plan) -> list[Message]:
    """Return what each run is told of the nodes that were found unfit; none where there were none.

    The first one is also told that probes found it, for the history of the nodes: once is enough.
    """
    unfit = noted_unfit(plan)
    level = plan.vetting.level if plan.vetting else "off"
    body = {"level": level, "seconds": 0.0, "fit": [], "unfit": unfit, "warnings": {}}
    first = {**body, "probed": unfit}
    return [
        Message(run.run_id, run.nonce, "vetted", first if run is plan.runs[0] else body)
        for run in plan.runs
        if unfit
    ]


def _write(plan: Plan, placed: Placed, where: str) -> None:
    """Keep plan and manifests beside the logs: a later session needs the one, a person the others."""
    directory = Path(plan.directory)
    shown: list[Any] = []
    for _, manifest in placed.manifests:
        shown.append({key: value for key, value in manifest.items() if key != "binaryData"})
    try:
        make_directories(directory.parent, directory.parent.parent.parent)
        (directory / "pods").mkdir(parents=True, exist_ok=True)
        for run in plan.runs:
            (directory / run.run_id).mkdir(exist_ok=True)
        if not (directory / "plan.json").exists():
            (directory / FILE).unlink(missing_ok=True)
            write_private(
                directory / FILE, where
            )  # before the plan: who finds that one finds where its pods are
            write_private(directory / "plan.json", json.dumps(to_json(plan)))
        (directory / "manifests.json").unlink(missing_ok=True)
        listed = {"apiVersion": "v1", "kind": "List", "items": shown}
        write_private(directory / "manifests.json", json.dumps(listed, indent=1) + os.linesep)
    except OSError as error:
        raise ProvisionError("disk_full", no_room(error, directory)) from error
