"""The fields of tests and their types, as editors and type checkers see them; ``node/worker/workloads`` says what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

#: Bytes, or a text such as ``64MiB``.
Size = int | str


class Fields(TypedDict, total=False):
    """Fields of every test."""

    devices_per_node: int
    exclusive: bool | None
    judge: bool | Sequence[str]
    name: str
    time_limit: str | float | None
    requires: str | Sequence[str]
    kubernetes: Mapping[str, Any] | None


class NodesFields(Fields, total=False):
    """Fields of tests that hold nodes, or look at them."""

    need: int
    unknown: Literal["", "fail", "warn"]
    require_comparison: bool


class MeasuredFields(Fields, total=False):
    """Fields of all that is measured."""

    nodes: int
    launcher: str


class ProgramFields(MeasuredFields, total=False):
    """Fields of programs."""

    cwd: str | None


class RepeatedFields(MeasuredFields, total=False):
    """Fields of all that is repeated."""

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
