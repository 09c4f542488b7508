"""What is refused before anything is submitted: budgets that do not suffice, models that do not fit into device memory."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.config.quantities import format_size
from pytest_mlhpc.errors import MlhpcError, Problem, ProvisionError, StoreError, UsageError
from pytest_mlhpc.history.events import Event, planned, record_planned
from pytest_mlhpc.jobs.budget import (
    Budget,
    BudgetLimit,
    budget_refusal,
    cost_text,
    is_charged,
    max_hours,
    parse_limit,
    upper_bound,
    used_hours,
)
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.plan import builds_of, plan_of
from pytest_mlhpc.jobs.provisioner import AllocationEnded, LineArrived
from pytest_mlhpc.jobs.spec import JobSpec, allocation_time_s, run_root
from pytest_mlhpc.node.batch.runs import COMPLETE
from pytest_mlhpc.node.protocol.plan import BuildPlan, RunPlan
from pytest_mlhpc.node.worker.workloads.fields.parallel import layout
from pytest_mlhpc.options import Settings
from pytest_mlhpc.store.locations import unusable
from pytest_mlhpc.store.record import Failure, purpose_of
from pytest_mlhpc.store.text import minutes, tell

if TYPE_CHECKING:
    from pytest_mlhpc.provision.scheduler.client import SlurmClient


class Spending:
    """Asked before each re-run, updated after each attempt. ``announcement`` is printed before anything is submitted.

    ``reruns_left`` is how many more re-runs the session may make.

    Args:
        specs: all jobs of the session.

    Raises:
        UsageError: the first attempts alone are beyond a budget.
    """

    def __init__(self, specs: Sequence[JobSpec], settings: Settings) -> None:
        self.announcement: list[str] = []
        self.reruns_left = settings.reruns
        #: account -> node-hours, worst-case re-runs included
        self.bounds = upper_bound(specs, settings.reruns)
        if text := cost_text(specs, settings.reruns):
            self.announcement.append(text)
        self._session = _budget(specs, parse_limit(settings.budget) if settings.budget else None)
        self._partitions: dict[str, Budget] = {}
        self._reruns: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)  # node id -> keys of budgets
        for spec in specs:
            partition = spec.target.partition
            if partition.id not in self._partitions:
                source = f"systems.yaml: {partition.id}: budget"
                limit = parse_limit(partition.budget, source) if partition.budget else None
                mine = [one for one in specs if one.target.partition.id == partition.id]
                self._partitions[partition.id] = _budget(mine, limit)

    def refused(self, spec: JobSpec, numbers: Iterable[int]) -> str:
        """Take the re-runs *numbers* of *spec*, with their node-hours, or return why that is beyond a budget."""
        keys = [(spec.node_id, number) for number in numbers]
        asked: list[Budget] = []
        for budget in self._budgets(spec) if is_charged(spec) else ():
            if not budget.allows(keys, _hours(spec, budget)):
                for earlier in asked:
                    earlier.give_back(keys)
                return budget.refused_text(_hours(spec, budget) * len(keys))
            asked.append(budget)
        if is_charged(spec):
            self._reruns[spec.node_id].update(keys)
        self.reruns_left -= len(keys)
        return ""

    def settle(self, spec: JobSpec, key: int | str, node_hours: float) -> None:
        """Book once what an attempt of *spec* has used; *key* is its number, or its run id if another was made instead."""
        if is_charged(spec):
            for budget in self._budgets(spec):
                per_node = _hours(spec, budget) / max_hours(spec)
                budget.settle((spec.node_id, key), node_hours * per_node)

    def ended(self, job: Job) -> None:
        """Book once what *job* has used, judged or not, and give back the rest of what was promised to it. From any thread."""
        keys: list[int | str] = [attempt.run.run_id for attempt in job.lost]  # made again under their numbers
        keys += [attempt.number for attempt in job.attempts]
        for key, attempt in zip(keys, (*job.lost, *job.attempts), strict=True):
            self.settle(job.spec, key, used_hours(job.spec, attempt.run_s))
        self.over(job.spec)

    def over(self, spec: JobSpec) -> None:
        """Give back what is still promised to attempts of *spec*: none of them will be made any more. Idempotent."""
        for budget in self._budgets(spec):
            budget.give_back([(spec.node_id, 0), *self._reruns[spec.node_id]])

    def _budgets(self, spec: JobSpec) -> tuple[Budget, Budget]:
        return self._session, self._partitions[spec.target.partition.id]


def _budget(specs: Sequence[JobSpec], limit: BudgetLimit | None) -> Budget:
    if text := budget_refusal(specs, limit):
        raise UsageError(text)
    budget = Budget(limit)
    for spec in filter(is_charged, specs):
        budget.promise((spec.node_id, 0), _hours(spec, budget))
    return budget


def _hours(spec: JobSpec, budget: Budget) -> float:
    return max_hours(spec, budget.limit.unit if budget.limit else "node")


def check(specs: Sequence[JobSpec], settings: Settings) -> Spending:
    """Return what *specs* may cost.

    Raises:
        UsageError: they cannot be detached, or are beyond a budget; or Slurm cannot be asked from here.
        pytest.exit.Exception: a maintenance would only hold them up.
    """
    _refuse_state_dir(settings)
    _refuse_detaching(specs, settings)
    _refuse_missing_commands(specs)
    unused = _refuse_unusable_slurm(specs, settings)
    if specs and not settings.here and settings.resume is None:
        _refuse_maintenance(specs, settings)
    spending = Spending(specs, settings)
    spending.announcement += unused
    return spending


def build_before(
    specs: Sequence[JobSpec], state_dir: Path, session_id: str, payload: Callable[[Path], str]
) -> tuple[dict[str, Failure], list[str]]:
    """Make the builds that are to be made on this machine; return node id -> why one that it needs failed, and lines that tell.

    Each is made once, by a batch of its own, which ends with this session. *payload* makes the payload for a root.
    """
    made: dict[tuple[Path, str], Failure | None] = {}
    failures: dict[str, Failure] = {}
    lines: list[str] = []
    for spec in specs:
        root = run_root(spec.target.partition, state_dir)
        for build in (one for one in builds_of(spec) if one.before):
            place = (root, build.key)
            if place not in made and not (root / "builds" / build.key / COMPLETE).exists():
                began = time.monotonic()
                made[place] = _build_here(spec, build, root, session_id, payload)
                how = "failed" if made[place] else "is made"
                lines.append(f"build {build.name} {how}, {time.monotonic() - began:.0f} s on this machine")
            if failure := made.get(place):
                failures.setdefault(spec.node_id, failure)
    return failures, lines


def _build_here(
    spec: JobSpec, build: BuildPlan, root: Path, session_id: str, payload: Callable[[Path], str]
) -> Failure | None:
    """Make one build; return why it failed."""
    from pytest_mlhpc.provision.local import LocalProvisioner
    from pytest_mlhpc.provision.scheduler.script import with_software

    argv = tuple(with_software(build.argv, spec.target.environment))
    provisioner = LocalProvisioner(state_dir=root, session_id=session_id)
    failed: Failure | None = None
    try:
        plan = plan_of([(spec, 0)], root / "runs" / session_id, payload(root))
        handle = provisioner.submit(
            replace(plan, runs=(_only_builds(plan.runs[0], build, argv),), nodes=1, spares=0)
        )
        while True:
            for event in provisioner.events([handle], 1.0):
                if isinstance(event, LineArrived) and event.message.kind == "failed":
                    body = event.message.body
                    shown, own = " ".join(argv)[:200], " ".join(build.argv)[:200]
                    failed = Failure(
                        body["outcome"], body["text"].replace(shown, own), str(body.get("log", ""))
                    )
                elif isinstance(event, AllocationEnded):
                    return failed or _failure(event.error)
    except ProvisionError as error:
        return _failure(error)
    finally:
        provisioner.close()


def _only_builds(run: RunPlan, build: BuildPlan, argv: tuple[str, ...]) -> RunPlan:
    """Return a run in the place of *run* that makes one build by *argv*, and then does nothing."""
    return replace(
        run, workload="command", argv=("true",), metrics={}, sanity=(), functions="", checks=False, files={}, artifacts=(),
        builds=(replace(build, argv=argv, before=False),), nodes=1, ranks=1, processes=1, launcher="plain",
        python=sys.executable, exclusive=False, cwd=None, device_ids=(), wrapper=(), launcher_options=(),
    )  # fmt: skip


def _failure(error: MlhpcError | None) -> Failure | None:
    outcome = getattr(error, "outcome", "build_failed")
    return Failure(outcome, str(error).removeprefix(f"{outcome}: ")) if error is not None else None


def _refuse_state_dir(settings: Settings) -> None:
    if why := unusable(settings.state_dir):
        raise UsageError(
            f"the state directory {settings.state_dir} cannot be used: {why}; choose another one by --mlhpc-state or MLHPC_STATE"
        )


def _refuse_detaching(specs: Sequence[JobSpec], settings: Settings) -> None:
    asked = settings.wait_s is not None
    local = next((one for one in specs if one.target.partition.scheduler == "local"), None)
    if asked and local is not None:
        raise UsageError(
            f"--mlhpc-wait: nothing outlives pytest on {local.target.partition.id}, which is this machine"
        )


def _refuse_missing_commands(specs: Sequence[JobSpec]) -> None:
    """Refuse to submit by commands that are not on this machine."""
    for partition in {one.id: one for one in map(_partition, specs) if one.scheduler == "commands"}.values():
        from pytest_mlhpc.provision.scheduler.commands import definition_of, missing_commands

        if missing := missing_commands(partition, os.environ):
            title = definition_of(partition).title
            text = f"the definition of {title} runs {', '.join(missing)}, not found on PATH"
            raise UsageError(
                f"{partition.id}: {text}; start pytest where {title}'s commands are; nothing was submitted"
            )


def _refuse_unusable_slurm(specs: Sequence[JobSpec], settings: Settings) -> list[str]:
    """Ask Slurm whether jobs would end well; return what to say of the user's environment."""
    slurm = [spec for spec in specs if spec.target.partition.scheduler == "slurm"]
    if not slurm:
        return []
    from pytest_mlhpc.provision.scheduler.client import SchedulerUnreachable, SchedulerUnusable
    from pytest_mlhpc.provision.slurm.preflight import (
        CONNECTION_PAUSES_S,
        refuse_unreachable,
        refuse_unusable,
        unused_variables,
    )
    from pytest_mlhpc.session.each_node import client_of

    by_ssh = {} if settings.here else {one.id: one for one in map(_partition, slurm) if one.ssh}
    here = next((one.id for one in map(_partition, slurm) if one.id not in by_ssh), "")
    for name in [here] * bool(here) + list(by_ssh):
        try:
            if name == here:
                refuse_unusable(os.environ)
            else:
                refuse_unreachable(client_of(by_ssh[name]))
        except SchedulerUnusable as error:
            raise UsageError(f"{name}: {error}; nothing was submitted") from error
        except SchedulerUnreachable as error:
            attempts = len(CONNECTION_PAUSES_S) + 1
            pytest.exit(
                f"infra: {name}: no connection in {attempts} attempts: {error}; nothing was submitted",
                returncode=settings.infra_exit_code,
            )
    return unused_variables(os.environ) if here and not settings.here else []


def _partition(spec: JobSpec) -> Partition:
    return spec.target.partition


def _refuse_maintenance(specs: Sequence[JobSpec], settings: Settings) -> None:
    """End the session where jobs would run into a maintenance; record all that are announced, for the morning page."""
    from pytest_mlhpc.session.each_node import client_of

    now_ns = time.time_ns()
    delay, announced = maintenance_delay(specs, client_of, now_ns)
    try:
        record_planned(settings.state_dir, announced, now_ns)
    except StoreError as error:
        tell(f"{error}; the morning page will not know of this maintenance")
    if delay:
        pytest.exit(f"infra: {delay}; nothing was submitted", returncode=settings.infra_exit_code)


def maintenance_delay(
    specs: Sequence[JobSpec], client_of: Callable[[Partition], SlurmClient], now_ns: int
) -> tuple[str, list[Event]]:
    """Return ``maintenance until T (REASON)`` of the first partition whose jobs would wait, or an empty text, and all that are announced.

    Raises:
        UsageError: Slurm cannot be asked from here.
    """
    by_partition: dict[str, list[JobSpec]] = {}
    for spec in specs:
        by_partition.setdefault(spec.target.partition.id, []).append(spec)
    delay, announced = "", list[Event]()
    for own in by_partition.values():
        until_ns = now_ns + int(max(allocation_time_s([spec]) for spec in own) * 1e9)
        found = _announced(own, client_of, now_ns, until_ns)
        announced += found
        near = [one for one in found if one.at_ns < until_ns]
        if near and not delay:
            last = max(near, key=lambda one: one.until_ns)
            begins = "begins" if last.at_ns > now_ns else "began"
            delay = (
                f"maintenance until {minutes(last.until_ns)} ({last.text}): it {begins} at {minutes(last.at_ns)}, "
                f"before the longest job on {own[0].target.partition.id} would have ended"
            )
    return delay, announced


def _announced(
    specs: Sequence[JobSpec], client_of: Callable[[Partition], SlurmClient], now_ns: int, until_ns: int
) -> list[Event]:
    """Return the maintenances of the partition of *specs* that are not over: of systems.yaml for nights, and Slurm's."""
    partition = specs[0].target.partition
    place = partition.system, partition.name
    found = []
    if purpose_of(os.environ) == "nightly":  # who asks for a run by hand may be the one who maintains it
        found = [
            planned(*place, one.reason, one.start_ns, one.end_ns, by="systems.yaml")
            for one in partition.maintenance
            if one.end_ns > now_ns
        ]
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.scheduler.client import SchedulerUnusable
        from pytest_mlhpc.provision.slurm.preflight import maintenances

        try:
            reservations = maintenances(specs, client_of, now_ns, until_ns)
        except SchedulerUnusable as error:
            raise UsageError(f"{partition.id}: {error}; nothing was submitted") from error
        found += [
            planned(*place, f"reservation {one.name}", one.start_ns, one.end_ns, by="Slurm")
            for one in reservations
        ]
    return found


#: Channels and outputs of CosmoFlow (node/worker/workloads/cosmoflow.py) and DeepCAM (node/worker/workloads/deepcam.py).
_COSMOFLOW, _DEEPCAM_IN, _DEEPCAM_OUT = 4, 16, 3
_BOTTLENECKS, _EXPANSION = (3, 4, 6, 3), 4  #: of ResNet-50

Values = Mapping[str, Any]


def parameter_count(workload: str, values: Values) -> int | None:
    """Return the number of parameters of *workload* with these effective fields, None where it is not known."""
    count = _COUNTS.get(workload)
    return None if count is None else count(values)


def _language_model(values: Values) -> int:
    llama, hidden, heads = values["architecture"] == "llama", values["hidden"], values["heads"]
    shared = (values["kv_heads"] or heads) * (hidden // heads)
    ffn = values["ffn"] or (hidden * 7 // 2 if llama else hidden * 4)
    table = values["vocabulary"] * hidden
    attention = hidden * (hidden + 2 * shared) + hidden * hidden
    if llama:
        block = 2 * hidden + attention + 3 * hidden * ffn
        return int(2 * table + values["layers"] * block + hidden)
    biases = hidden + 2 * shared + hidden + ffn + hidden
    block = 4 * hidden + attention + 2 * hidden * ffn + biases
    return int(table + values["context"] * hidden + values["layers"] * block + 2 * hidden)


def _cosmoflow(values: Values) -> int:
    channels, total = _COSMOFLOW, 0
    for layer in range(values["layers"]):
        filters = values["base_channels"] * 2**layer
        total += (channels * values["kernel_size"] ** 3 + 1) * filters
        channels = filters
    volume = channels * (values["input_size"] >> values["layers"]) ** 3
    return int(total + (volume + 1) * 128 + 129 * 64 + 65 * _COSMOFLOW)


def _normalised(inner: int, outer: int, kernel: int = 1) -> int:
    """Count a convolution without bias and the batch normalisation behind it."""
    return inner * outer * kernel**2 + 2 * outer


def _resnet50(values: Values) -> int:
    channels = 64
    total = _normalised(3, channels, 7 if values["stem"] == "v1.5" else 3)
    for stage, repeats in enumerate(_BOTTLENECKS):
        inner = 64 * 2**stage
        outer = inner * _EXPANSION
        for _ in range(repeats):
            total += _normalised(channels, inner) + _normalised(inner, inner, 3) + _normalised(inner, outer)
            total += _normalised(channels, outer) if channels != outer else 0
            channels = outer
    return int(total + (channels + 1) * values["classes"])


def _separable(inner: int, outer: int) -> int:
    return 9 * inner + inner * outer


def _xblock(*widths: int, last: bool = True, shortcut: bool = True) -> int:
    """Count the separable convolutions between *widths*, the one behind them (*last*), and the shortcut's."""
    body = sum(_separable(inner, outer) + 2 * outer for inner, outer in pairwise(widths))
    end = widths[-1]
    return body + (_separable(end, end) if last else 0) + (_normalised(widths[0], end) if shortcut else 0)


def _deepcam(values: Values) -> int:
    def wide(channels: int) -> int:
        return max(1, round(channels * float(values["width_multiplier"])))

    c32, c48, c64, c128, c256, c728, c1024, c1536, c2048 = map(
        wide, (32, 48, 64, 128, 256, 728, 1024, 1536, 2048)
    )
    entry = _normalised(_DEEPCAM_IN, c32, 3) + _normalised(c32, c64, 3) + _xblock(c64, c128, c128)
    flow = _xblock(c128, c256, c256) + _xblock(c256, c728, c728)
    flow += values["middle_blocks"] * _xblock(c728, c728, c728, c728, last=False, shortcut=False)
    flow += _xblock(c728, c728, c1024, shortcut=c728 != c1024)
    for inner, outer in ((c1024, c1536), (c1536, c1536), (c1536, c2048)):
        flow += _separable(inner, outer) + 2 * outer
    pyramid = _normalised(c2048, c256) + 3 * _normalised(c2048, c256, 3)
    pyramid += c2048 * c256 + 2 * c256 + _normalised(5 * c256, c256)
    decoder = _normalised(c128, c48) + 2 * _normalised(c256, c256, 3)
    decoder += _normalised(c256 + c48, c256, 3) + _normalised(c256, c256, 3) + c256 * c256 + c256
    decoder += _normalised(c256, c256, 3) + 9 * c256 * _DEEPCAM_OUT
    return int(entry + flow + pyramid + decoder)


_COUNTS: Mapping[str, Callable[[Values], int]] = {
    "language_model": _language_model,
    "cosmoflow": _cosmoflow,
    "resnet50": _resnet50,
    "deepcam": _deepcam,
}


_FP32 = 4
_GIB = 2**30

#: Optimizer -> numbers that it keeps for each parameter (node/worker/workloads/optimizers.py): momentum, or Adam's two moments.
STATES = {"sgd": 1, "lars": 1, "adam": 2, "adamw": 2, "lamb": 2}

#: Name as the driver spells it -> GiB. Makers' data sheets: they write GB for what the driver shows as GiB less a reserve,
#: so that this is never too little. What a name says itself (A100-SXM4-40GB) is read from it; a GH200's name says the
#: memory of its CPU.
_MODELS: tuple[tuple[str, float], ...] = (
    (r"GH200.*144G", 144), (r"GH200", 96), (r"GB200|\bB200\b", 192), (r"\bH200\b", 141), (r"H100 NVL", 94),
    (r"MI355X", 288), (r"MI325X", 256), (r"MI300X", 192), (r"MI300A", 128), (r"MI250X?\b", 64), (r"MI210", 64),
    (r"MI100", 32), (r"Data Center GPU Max 1550", 128), (r"Data Center GPU Max 1100", 48),
)  # fmt: skip
_SAID = re.compile(r"(?<![0-9])([1-9][0-9]{0,2}) ?GB?\b")


@dataclass(frozen=True)
class Need:
    """Bytes that stay on one device between steps if it has the whole model, and how many parameters that are."""

    parameters: int
    unsharded: int

    def on_one_of(self, shards: int) -> int:
        """Return the bytes of one shard."""
        return -(-self.unsharded // shards)


def need_of(spec: JobSpec) -> Need | None:
    """Return what *spec*'s training needs, None where its number of parameters or its optimizer is not known."""
    states = STATES.get(str(spec.parameters.get("optimizer")))
    count = parameter_count(spec.workload, spec.parameters)
    if states is None or count is None:
        return None
    numbers = 2 + states
    if spec.parameters.get("gradient_compression") == "powersgd":
        numbers += 1  # what it did not send yet (error feedback)
    return Need(count, numbers * _FP32 * count)


def device_bytes(partition: Partition, ranks_of_node: int, node_memory: int) -> int | None:
    """Return the memory of one rank's device in bytes, None where nothing says it.

    On CPUs the share of *node_memory* that one of the node's ranks has; else what the partition says, or its model's.
    """
    if partition.accelerator == "cpu":
        return node_memory // max(1, ranks_of_node)
    if partition.nodes.device_memory:
        return partition.nodes.device_memory
    return model_bytes(partition.nodes.device_model)


def model_bytes(model: str) -> int | None:
    """Return the memory of a device by its name; None for an unknown one, and for a slice of a device (MIG)."""
    if re.search(r"\bMIG\b", model):
        return None
    for pattern, size in _MODELS:
        if re.search(pattern, model):
            return int(size * _GIB)
    said = _SAID.search(model)
    return int(said[1]) * _GIB if said else None


def too_large(specs: Sequence[JobSpec]) -> list[Problem]:
    """Return a problem for each training that cannot fit into the memory of its devices."""
    found = []
    for spec in specs:
        need = need_of(spec)
        if need is None:
            continue
        each = spec.ranks // spec.nodes
        has = device_bytes(spec.target.partition, each, spec.node_memory)
        how = layout(spec.parameters)
        shards = how.shard if how else 1
        if has and need.on_one_of(shards) > has:
            found.append(Problem(spec.node_id, "parallel", _sentence(spec, need, has, shards)))
    return found


def _sentence(spec: JobSpec, need: Need, has: int, shards: int) -> str:
    partition = spec.target.partition
    what = partition.nodes.device_model or (
        "rank's share of a node" if partition.accelerator == "cpu" else "device"
    )
    part = "" if shards == 1 else f", {format_size(need.on_one_of(shards))} on each of {shards} shards"
    least = -(-need.unsharded // has)
    return (
        f"needs {format_size(need.unsharded)} unsharded{part} ({need.parameters:,} parameters, their gradients and "
        f"{spec.parameters['optimizer']}'s states in fp32; activations come on top), but a {what} of {partition.id} has "
        f"{format_size(has)}: shard over at least {least}{_advice(spec.ranks, least)}"
    )


def _advice(ranks: int, least: int) -> str:
    """Return the smallest layout of *ranks* that would do, or that there are too few."""
    fitting = next((shard for shard in range(least, ranks + 1) if ranks % shard == 0), None)
    if fitting is None:
        return f" devices; this test has {ranks}"
    return f', such as parallel={{"replicate": {ranks // fitting}, "shard": {fitting}}}'
