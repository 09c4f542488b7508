"""The four trainings of this package: fields, defaults, presets, and values that are fine alone but not together, read by controller and worker alike. No torch."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field, Workload
from pytest_mlhpc.node.worker.workloads.fields import REPORTED, Wrong, expected, training, wrong

_HERE = "pytest_mlhpc.node.worker.workloads"

#: Fields of every training that mean nothing for a model without batch normalisation.
_NOT_NORMALISED = ("batch_norm_group",)

#: DeepCAM's encoder divides height and width by this.
DEEPCAM_STRIDE = 16


def require(check: Callable[[Mapping[str, Any]], Wrong], values: Mapping[str, Any]) -> None:
    """Raise what *check* finds.

    Raises:
        ValueError: the first thing that is wrong.
    """
    for _, text in check(values):
        raise ValueError(text)


def training_conflicts(values: Mapping[str, Any]) -> Wrong:
    """Check what every training workload has."""
    return wrong(values)


def cosmoflow_conflicts(values: Mapping[str, Any]) -> Wrong:
    """Something must be left of the volume behind the last layer, each of which halves it."""
    size, layers = values["input_size"], values["layers"]
    if size >> layers:
        return training_conflicts(values)
    least = (
        f"at least 2 to the power {layers} is needed" if layers > 20 else f"at least {2**layers} is needed"
    )
    return (
        *training_conflicts(values),
        ("input_size", f"input_size={size} leaves nothing after {layers} layers: {least}"),
    )


def deepcam_conflicts(values: Mapping[str, Any]) -> Wrong:
    """Height and width must survive four halvings and come back as they were."""
    uneven = [name for name in ("height", "width") if values[name] % DEEPCAM_STRIDE]
    texts = [(name, f"{name}={values[name]} is not a multiple of {DEEPCAM_STRIDE}") for name in uneven]
    return (*training_conflicts(values), *texts)


def language_model_conflicts(values: Mapping[str, Any]) -> Wrong:
    """Heads must divide the stream evenly, and each other."""
    found = list(training_conflicts(values))
    llama, hidden, heads = values["architecture"] == "llama", values["hidden"], values["heads"]
    kv_heads = values["kv_heads"] or heads
    if hidden % heads:
        found.append(("heads", f"hidden={hidden} is not divisible by heads={heads}"))
    if heads % kv_heads:
        found.append(("kv_heads", f"heads={heads} is not divisible by kv_heads={kv_heads}"))
    if not llama and kv_heads != heads:
        text = f"kv_heads={kv_heads}: only architecture=llama shares keys and values between heads"
        found.append(("kv_heads", text))
    if llama and hidden // heads % 2:
        found.append(("heads", f"hidden={hidden} over heads={heads} is odd: RoPE turns pairs of channels"))
    return tuple(found)


COSMOFLOW = Workload(
    name="cosmoflow",
    summary="3-D convolutions that predict four cosmological parameters (MLPerf HPC)",
    module=f"{_HERE}.cosmoflow",
    fields={
        "kernel_size": Field(
            3, "3 as in MLPerf HPC v1.0 and later, 2 as its v0.7 round ran it", choices=(3, 2)
        ),
        "input_size": Field(128, "voxels along each edge of a sample", minimum=2),
        "layers": Field(5, "convolution layers, each halves the edge", minimum=1),
        "base_channels": Field(32, "filters of the first layer, doubled by each next one", minimum=1),
        "dropout": Field(
            0.5, "probability of dropping a unit behind the two wide dense layers", "float", minimum=0.0
        ),
        **training("sgd", 1e-3),
    },
    presets={
        "smoke": {"input_size": 32, "layers": 5, "base_channels": 8, "steps": 40, "warmup": 16},
        "small": {"input_size": 64, "layers": 5, "base_channels": 32, "steps": 60, "warmup": 16},
        "reference": {"input_size": 128, "layers": 5, "base_channels": 32, "steps": 200, "warmup": 32},
    },
    device_batch=8,  # global batch 32 on four devices, as in the HPDC'24 paper
    sample="volume of 4 redshifts",
    without=_NOT_NORMALISED,
    contradictions=cosmoflow_conflicts,
    expected_of=expected,
    reported=REPORTED,
)

DEEPCAM = Workload(
    name="deepcam",
    summary="segmentation of extreme weather in 16-channel climate images (MLPerf HPC)",
    module=f"{_HERE}.deepcam",
    fields={
        "height": Field(768, "pixels, divisible by 16", minimum=16),
        "width": Field(1152, "pixels, divisible by 16", minimum=16),
        "width_multiplier": Field(1.0, "scales the channels of every layer", "float", minimum=1 / 32),
        "middle_blocks": Field(16, "residual blocks of the middle flow", minimum=0),
        **training("adamw", 1e-3),
    },
    presets={
        "smoke": {
            "height": 96,
            "width": 144,
            "width_multiplier": 0.25,
            "middle_blocks": 4,
            "steps": 40,
            "warmup": 16,
        },
        "small": {
            "height": 96,
            "width": 144,
            "width_multiplier": 1.0,
            "middle_blocks": 16,
            "steps": 60,
            "warmup": 16,
        },
        "reference": {
            "height": 768,
            "width": 1152,
            "width_multiplier": 1.0,
            "middle_blocks": 16,
            "steps": 200,
            "warmup": 32,
        },
    },
    device_batch=2,  # the local batch of the MLPerf HPC reference
    sample="image of 16 channels",
    contradictions=deepcam_conflicts,
    expected_of=expected,
    reported=REPORTED,
)

RESNET50 = Workload(
    name="resnet50",
    summary="image classification, ResNet-50 v1.5 (MLPerf Training)",
    module=f"{_HERE}.resnet50",
    fields={
        "stem": Field(
            "v1.5",
            "epcc: first convolution 3x3 with stride 1, 3.9 times the operations",
            "str",
            ("v1.5", "epcc"),
        ),
        "image_size": Field(224, "pixels along each edge", minimum=32),
        "classes": Field(1000, "number of classes", minimum=2),
        "label_smoothing": Field(0.1, "share of the target spread over all classes", "float", minimum=0.0),
        **training("sgd", 0.003),  # 0.1 for each 256 samples, for the eight of one device
    },
    presets={
        "smoke": {"image_size": 64, "steps": 40, "warmup": 16},
        "small": {"image_size": 128, "steps": 60, "warmup": 16},
        "reference": {"image_size": 224, "steps": 200, "warmup": 32},
    },
    device_batch=8,  # global batch 32 on four devices, as in the HPDC'24 paper
    sample="image",
    contradictions=training_conflicts,
    expected_of=expected,
    reported=REPORTED,
)


def _shape(layers: int, hidden: int, heads: int, context: int, vocabulary: int) -> Dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "context": context, "vocabulary": vocabulary}


LANGUAGE_MODEL = Workload(
    name="language_model",
    summary="decoder-only transformer on text, GPT-2 or Llama 3 blocks",
    module=f"{_HERE}.language_model",
    fields={
        "architecture": Field(
            "gpt2",
            "gpt2: learned positions, LayerNorm, GELU; llama: RoPE, RMSNorm, SwiGLU",
            "str",
            ("gpt2", "llama"),
        ),
        "layers": Field(12, "transformer blocks", minimum=1),
        "hidden": Field(768, "width of the residual stream", minimum=1),
        "heads": Field(12, "attention heads", minimum=1),
        "kv_heads": Field(None, "heads of keys and values (llama only); unset: as many as heads", minimum=1),
        "context": Field(1024, "tokens of one sample", minimum=1),
        "vocabulary": Field(
            50257, "different tokens; text is read byte by byte, so at least 256", minimum=256
        ),
        "ffn": Field(
            None, "width of the feed-forward layer; unset: 4 x hidden (gpt2), 3.5 x hidden (llama)", minimum=1
        ),
        "text_path": Field(
            "", "folder whose files are the text; empty: the interpreter's own sources", "str", identity=False
        ),
        **training("adamw", 3e-4),
    },
    presets={
        "smoke": {**_shape(4, 128, 4, 128, 256), "steps": 40, "warmup": 16},
        "small": {**_shape(12, 768, 12, 256, 50257), "steps": 60, "warmup": 16},
        "reference": {**_shape(12, 768, 12, 1024, 50257), "steps": 200, "warmup": 32},
        "nano": {**_shape(6, 384, 6, 256, 256), "steps": 60, "warmup": 16},
        "llama_8b": {
            "architecture": "llama",
            **_shape(32, 4096, 32, 8192, 128256),
            "kv_heads": 8,
            "ffn": 14336,
            "steps": 60,
            "warmup": 16,
        },
    },
    device_batch=8,
    sample="sequence of tokens",
    without=_NOT_NORMALISED,
    contradictions=language_model_conflicts,
    expected_of=expected,
    reported=REPORTED,
)

#: Every training that comes with the package.
OWN_TRAININGS: Tuple[Workload, ...] = (COSMOFLOW, DEEPCAM, RESNET50, LANGUAGE_MODEL)


def parameters_of(workload: Workload, preset: str, **changes: Any) -> Dict[str, Any]:
    """Return all fields of *workload* as *preset* and *changes* leave them, without ``steps`` and ``warmup``.

    Raises:
        KeyError: the workload has no such preset or field.
    """
    unknown = sorted(set(changes) - set(workload.fields))
    if unknown:
        raise KeyError(f"{workload.name} has no field {', '.join(unknown)}")
    values = {name: field.default for name, field in workload.fields.items()}
    values.update(
        {name: value for name, value in workload.presets[preset].items() if name in workload.fields}
    )
    values.update(changes)
    return values
