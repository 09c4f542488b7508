"""No torch. Values that are fine alone but not together, as (field, what is wrong).

The controller asks at collection, so that nothing is submitted which cannot train; a task asks again when it is built.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads import fields

#: What is wrong: the field to look at, and a sentence.
Wrong = Tuple[Tuple[str, str], ...]

#: DeepCAM's encoder divides height and width by this.
DEEPCAM_STRIDE = 16


def require(check: Callable[[Mapping[str, Any]], Wrong], values: Mapping[str, Any]) -> None:
    """Raise what *check* finds.

    Raises:
        ValueError: the first thing that is wrong.
    """
    for _, text in check(values):
        raise ValueError(text)


def training(values: Mapping[str, Any]) -> Wrong:
    """Check what every training workload has."""
    return fields.wrong(values)


def cosmoflow(values: Mapping[str, Any]) -> Wrong:
    """Something must be left of the volume behind the last layer, each of which halves it."""
    size, layers = values["input_size"], values["layers"]
    if size >> layers:
        return training(values)
    least = (
        f"at least 2 to the power {layers} is needed" if layers > 20 else f"at least {2**layers} is needed"
    )
    return (
        *training(values),
        ("input_size", f"input_size={size} leaves nothing after {layers} layers: {least}"),
    )


def deepcam(values: Mapping[str, Any]) -> Wrong:
    """Height and width must survive four halvings and come back as they were."""
    uneven = [name for name in ("height", "width") if values[name] % DEEPCAM_STRIDE]
    texts = [(name, f"{name}={values[name]} is not a multiple of {DEEPCAM_STRIDE}") for name in uneven]
    return (*training(values), *texts)


def language_model(values: Mapping[str, Any]) -> Wrong:
    """Heads must divide the stream evenly, and each other."""
    found = list(training(values))
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
