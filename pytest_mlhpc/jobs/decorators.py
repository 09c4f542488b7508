"""What a test declares: decorators over the one mark ``mlhpc``, the declaration that they store in it, and the types of its fields for editors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict

import pytest

if TYPE_CHECKING:
    from typing import Unpack

    from pytest_mlhpc.jobs.metrics import Metric


#: The one mark, as ``pytest --markers`` shows it.
MARK = "mlhpc"
MARKER = (
    f"{MARK}: what a test runs and measures; set by the decorators train, program, nodes, storage, collective, roofline "
    "and workload of pytest_mlhpc, not by hand."
)
DECORATORS = ("train", "program", "nodes", "storage", "collective", "roofline", "workload")

P = ParamSpec("P")


@dataclass(frozen=True)
class Declared:
    """What one decorator was given; ``mistake`` says why it could not be understood."""

    decorator: str
    workload: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    mistake: str = ""
    #: A field as its decorator calls it -> as the workload does.
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What the test calls its workload."""
        return self.decorator if self.decorator == "program" else self.workload


def declared_of(node: pytest.Item | pytest.Collector) -> Declared | None:
    """Return what the mark that is closest to *node* declares, None where there is none."""
    mark = node.get_closest_marker(MARK)
    if mark is None:
        return None
    if len(mark.args) == 1 and isinstance(mark.args[0], Declared):
        own = [one for one in node.own_markers if one.name == MARK]
        if len(own) > 1:
            names = " and ".join(f"@{one.args[0].decorator}" for one in reversed(own) if one.args)
            return Declared(MARK, mistake=f"the test is decorated by {names}; it may declare one run")
        return mark.args[0]
    names = ", ".join(f"@{name}" for name in DECORATORS)
    return Declared(MARK, mistake=f"the mark is set by decorators of pytest_mlhpc: {names}")


def skip_declared(items: Sequence[pytest.Item]) -> None:
    """Skip benchmarks in an invocation that selects no system."""
    for item in items:
        if declared_of(item) is not None:
            item.add_marker(pytest.mark.skip(reason="a benchmark; to run it, pass --system NAME"))


def _mark(declared: Declared) -> pytest.MarkDecorator:
    return getattr(pytest.mark, MARK).with_args(declared)  # type: ignore[no-any-return]  # marks are made by name


def _decorator(make: Callable[P, Declared]) -> Callable[P, pytest.MarkDecorator]:
    """Return the decorator that marks a test with what *make* returns, or with why it could not be called so."""
    name = make.__name__

    @functools.wraps(make)
    def decorator(*args: P.args, **fields: P.kwargs) -> pytest.MarkDecorator:
        if len(args) == 1 and not fields and isinstance(args[0], (types.FunctionType, type)):
            mistake = f"@{name} is written without brackets; write {EXAMPLES[name]}"
            return _mark(Declared(name, mistake=mistake))(args[0])  # type: ignore[return-value]  # the test, marked
        try:
            return _mark(make(*args, **fields))
        except TypeError as error:
            from pytest_mlhpc.jobs.metrics import mistake_of

            return _mark(Declared(name, mistake=f"{mistake_of(error, name, ())}; write {EXAMPLES[name]}"))

    return decorator


#: How each decorator is written.
EXAMPLES: Mapping[str, str] = {
    "train": "@train('cosmoflow', global_batch=32)",
    "program": "@program('./bench -n 4', Metric('rate', r'rate: (\\S+)', 'items/s'))",
    "nodes": "@nodes(count=2, time_limit='10m')",
    "storage": "@storage(path='$SCRATCH')",
    "collective": "@collective(operation='all_reduce', devices_per_node=4)",
    "roofline": "@roofline('peaks')",
    "workload": "@workload('nbody', devices_per_node=2)",
}


@_decorator
def train(
    workload: Literal["cosmoflow", "deepcam", "resnet50", "language_model"], **fields: Unpack[TrainFields]
) -> Declared:
    """Train *workload* on the selected system, and judge what was measured.

    Fields of every test: ``nodes``, ``devices_per_node``, ``time_limit`` (seconds, or a text such as ``"30m"``),
    ``judge`` (False, or names of metrics), ``name``, ``owner`` (who is asked about it), ``requires``,
    ``exclusive``, and of its software ``env``, ``environment``, ``modules``, ``image``; ``slurm`` and ``kubernetes`` are options of the scheduler. Fields of
    trainings: ``preset``, ``steps`` and ``warmup`` (counts), ``data``, ``cache``, ``global_batch`` (samples), ``precision``, and what
    ``mlhpc data workloads NAME`` lists. A parameter of the test that is named like a field sets that field.
    """
    return Declared("train", workload, dict(fields))


@_decorator
def program(command: str | Sequence[Any], *metrics: Metric, **fields: Unpack[ProgramFields]) -> Declared:
    """Run a program and judge the *metrics* that it prints.

    Args:
        command: a list of arguments, or a text that is split as a POSIX shell splits it. No shell is involved.
        metrics: what is taken from its output.
        fields: ``ranks_per_node`` is how many processes the launcher starts on each node; unset: one, on the first node, by no
            launcher. ``files`` are files, folders and globs relative to the test's file that the run finds in its folder,
            ``artifacts`` names or globs of files there that the test reads, ``sanity`` regular expressions that must match in
            the output, or functions of the run that must return something true. ``cwd`` is the folder to start in, relative to the test's file; unset: a new one of the run.
            ``reference`` is what the metric promises on a system, in its unit, such as ``{"cirrus": 180_000}`` or
            ``{"cirrus:gpu": (180_000, -0.05, None)}``; of several metrics ``{"triad": {"cirrus": 180_000}}``.
            Otherwise those of every test, see :func:`train`.
    """
    return Declared("program", "command", {"command": command, "metrics": metrics, **fields})


@_decorator
def nodes(
    count: int = 1, vet: Literal["quick", "deep"] | None = None, **fields: Unpack[NodesFields]
) -> Declared:
    """Hold nodes for programs of the test's own (fixture ``allocation``), or vet them (fixture ``vetting``).

    Args:
        count: how many nodes.
        vet: how thoroughly they are vetted; None: they are only reserved. ``quick`` takes a minute, ``deep`` ten.
        fields: with ``vet``: ``need``, how many must be fit (0: all), ``unknown``, what becomes of a node that cannot be
            judged (``fail``, ``warn``; unset: as the partition says), and ``require_comparison``: whether figures without
            anything to be compared with make a node unknown. Otherwise those of every test, see :func:`train`.
    """
    from pytest_mlhpc.node.protocol.plan import HELD, VETTED

    given = {"nodes": count, **fields}
    renamed = {"count": "nodes", "vet": "level"}
    if vet is None:
        return Declared("nodes", HELD, given, renamed=renamed)
    return Declared("nodes", VETTED, {"level": vet, **given}, renamed=renamed)


@_decorator
def storage(**fields: Unpack[StorageFields]) -> Declared:
    """Measure a volume: bandwidth of one large file and rates of many small ones for each rank.

    Args:
        fields: ``path`` (folder on the nodes, may hold ``~`` and ``$NAMES``; unset: the run's own), ``file_size``,
            ``block_size``, ``small_file_size`` (bytes, or texts such as ``"4GiB"``), ``files`` (count), ``io``, ``cache``;
            otherwise those of every test, see :func:`train`.
    """
    return Declared("storage", "storage", dict(fields))


@_decorator
def collective(**fields: Unpack[CollectiveFields]) -> Declared:
    """Measure communication between ranks by message size.

    Args:
        fields: ``operation``, ``sizes`` (bytes, or texts such as ``"64MiB"``), ``inner`` (operations of one repetition),
            ``peers``; otherwise those of every test, see :func:`train`.
    """
    return Declared("collective", "collective", dict(fields))


@_decorator
def roofline(
    part: Literal["peaks", "kernels", "gradients", "reading"], **fields: Unpack[RooflineFields]
) -> Declared:
    """Measure what a training's speed is bounded by.

    Args:
        part: ``peaks`` of a device, or of a training (``of``) its ``kernels``, the exchange of its ``gradients``, the
            ``reading`` of its samples.
        fields: ``of``, ``size``, ``fields``, ``batch`` (samples), ``precision`` and others of the part; otherwise those of
            every test, see :func:`train`.
    """
    return Declared("roofline", part, dict(fields))


@_decorator
def workload(name: str, **fields: Any) -> Declared:
    """Run any other workload: ``nbody``, ``agreement``, ``lowering``, ``compilation``, or one of a plug-in."""
    return Declared("workload", name, fields)


#: Bytes, or a text such as ``64MiB``.
Size = int | str


class Fields(TypedDict, total=False):
    """Fields of every test."""

    devices_per_node: int
    exclusive: bool | None
    judge: bool | Sequence[str]
    name: str
    owner: str
    time_limit: str | float | None
    requires: str | Sequence[str]
    env: Mapping[str, str | int | float] | None
    environment: str
    modules: str | Sequence[str]
    image: str
    slurm: Mapping[str, Any] | None
    kubernetes: Mapping[str, Any] | None


class NodesFields(Fields, total=False):
    """Fields of tests that hold nodes, or look at them."""

    need: int
    unknown: Literal["", "fail", "warn"]
    require_comparison: bool


class MeasuredFields(Fields, total=False):
    """Fields of all that is measured."""

    nodes: int


class ProgramFields(MeasuredFields, total=False):
    """Fields of programs."""

    ranks_per_node: int | None
    files: str | Sequence[str]
    artifacts: str | Sequence[str]
    sanity: str | Callable[[Any], Any] | Sequence[str | Callable[[Any], Any]]
    cwd: str | None
    reference: Mapping[str, Any] | None


class RepeatedFields(MeasuredFields, total=False):
    """Fields of all that is repeated."""

    preset: str
    steps: int
    warmup: int


class TrainFields(RepeatedFields, total=False):
    """Fields of trainings."""

    data: str
    cache: Literal["unknown", "cold", "warm"]
    kernel_size: Literal[3, 2]
    input_size: int
    layers: int
    base_channels: int
    dropout: float
    height: int
    width: int
    width_multiplier: float
    middle_blocks: int
    stem: Literal["v1.5", "epcc"]
    image_size: int
    classes: int
    label_smoothing: float
    architecture: Literal["gpt2", "llama"]
    hidden: int
    heads: int
    kv_heads: int | None
    context: int
    vocabulary: int
    ffn: int | None
    text_path: str
    global_batch: int | None
    precision: Literal["fp32", "bf16", "fp16", "tf32"]
    optimizer: Literal["sgd", "adam", "adamw", "lamb", "lars"]
    learning_rate: float
    seed: int
    loader_workers: int | None
    channels_last: bool
    gradient_accumulation: int
    tuning: Literal["fast"] | None
    compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    cuda_graphs: bool | None
    fused_optimizer: bool | None
    loss_scale: float | None
    threads: int | None
    binding: Literal["cores"] | None
    miopen_find: Literal["normal", "fast", "hybrid", "dynamic_hybrid"] | None
    device_iterations: int | None
    ipus_per_replica: Literal[1, 2, 4, 8, 16, 32, 64] | None
    ipu_replicas: Literal[1, 2, 4, 8, 16, 32, 64] | None
    ipu_execution: Literal["pipelined", "sharded"] | None
    ipu_partials: Literal["float", "half"] | None
    ipu_io_tiles: int | None
    csx: int | None
    cerebras: Literal["cpu"] | None
    parallel: Mapping[str, Any] | None
    gradient_compression: Literal["none", "bf16", "fp16", "powersgd"] | None
    backend: Literal["gloo", "mpi"] | None
    bucket_mb: float | None
    batch_norm_group: int | Literal["all"] | None
    until: Literal["quality"] | None
    target: float | None
    max_epochs: int | None
    max_seconds: float | None
    evaluate_every: int | None
    train_samples: int | None
    eval_samples: int | None
    schedule: Mapping[str, Any] | None
    staging: Literal["files", "archives"] | None
    staging_path: str | None
    staging_share: Literal["all", "node"] | None
    staging_workers: int | None
    bagging: tuple[int, int] | None
    telemetry: bool | None


class StorageFields(RepeatedFields, total=False):
    """Fields of ``storage``."""

    path: str
    file_size: Size
    block_size: Size
    files: int
    small_file_size: Size
    io: Literal["buffered", "direct"]
    cache: Literal["cold", "warm", "unknown"]


class CollectiveFields(RepeatedFields, total=False):
    """Fields of ``collective``."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "point_to_point"]
    sizes: Sequence[Size]
    inner: int
    peers: Literal["last", "each"]


class RooflineFields(RepeatedFields, total=False):
    """Fields of ``roofline``."""

    precisions: Sequence[str]
    matrix: int
    vector: Size
    of: Literal["cosmoflow", "deepcam", "resnet50", "language_model"]
    size: str
    fields: Mapping[str, Any]
    batch: int | None
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    bucket: Size
    path: str
    format: Literal["", "tfrecord-gzip", "tfrecord", "hdf5", "images"]
    samples: int
    loader_workers: int | None
    cache: Literal["cold", "warm", "unknown"]
