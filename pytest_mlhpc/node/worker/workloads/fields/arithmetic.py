"""No torch. How a device computes: compilation, graphs, fused optimizers, scaling of fp16, threads.

All fields are unset by default. Those in :data:`MANNER` change how something is computed and not what; ``tuning="fast"``
fills in what the test leaves open (:func:`tuned`). ``values`` may hold ``accelerator``, the type of device, where the
controller asks; a task that is built again on the node is not asked for it.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field
from pytest_mlhpc.node.worker.workloads.fields import parallel

#: ``mode`` of torch.compile (its documentation). The two middle ones make CUDA graphs of their own, on CUDA and ROCm.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OWN_GRAPHS = ("reduce-overhead", "max-autotune")

#: Steps before the one that is captured: a library may choose kernels in its first steps, and DDP rebuilds its buckets and
#: collects its statistics in the first 11 (PyTorch, "CUDA semantics", "Usage with DistributedDataParallel").
EAGER_STEPS, EAGER_STEPS_DDP = 3, 11

#: Optimizers of torch itself, which have a fused kernel; LARS and LAMB are this project's own.
FUSED = ("sgd", "adam", "adamw")

#: Values of ``MIOPEN_FIND_MODE``, in lower case (MIOpen documentation, "Find modes").
FIND_MODES = ("normal", "fast", "hybrid", "dynamic_hybrid")

FIELDS: Mapping[str, Field] = {
    "tuning": Field(
        None, "fast: fields that are not set get the values that suit workload and device; unset: nothing", "str", ("fast",)
    ),
    "compile": Field(None, "mode of torch.compile; unset: not compiled", "str", MODES),
    "cuda_graphs": Field(None, "whether a whole step is captured once and replayed (cuda, rocm)", "bool"),
    "fused_optimizer": Field(None, "whether one kernel updates all weights; unset: as torch chooses", "bool"),
    "loss_scale": Field(
        None, "fp16 only: factor with which dynamic scaling of the loss begins; unset: 65536 on GPUs, none on CPUs",
        "float", minimum=1.0,
    ),
    "threads": Field(None, "cpu only: threads of one rank; unset: OMP_NUM_THREADS, else its cores", minimum=1),
    "binding": Field(
        None, "cpu only: cores keeps each rank on cores of its own; unset: as the launcher left it", "str", ("cores",)
    ),
    "miopen_find": Field(
        None, "rocm only: how MIOpen looks for kernels; unset: as the environment says", "str", FIND_MODES
    ),
}  # fmt: skip

#: Fields that change how a result is computed, and not which. Where ``tuning`` has set them, keys do not name them.
MANNER = ("compile", "cuda_graphs", "fused_optimizer", "threads", "binding", "miopen_find")

_IMAGES: Mapping[str, Any] = {"precision": "bf16", "channels_last": True, "fused_optimizer": True}
_TEXT: Mapping[str, Any] = {"precision": "bf16", "fused_optimizer": True, "compile": "default"}
_OTHER: Mapping[str, Any] = {"precision": "bf16", "fused_optimizer": True}

#: Device -> workload ("": any other) -> what ``tuning="fast"`` sets. docs/accelerators.md says why. CPUs stay in fp32, as
#: before submission nobody knows whether they have instructions for bf16, without which it is many times slower.
FAST: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cpu": {
        "cosmoflow": {"channels_last": True, "fused_optimizer": True},
        "deepcam": {"channels_last": True, "fused_optimizer": True},
        "resnet50": {"channels_last": True, "fused_optimizer": True},
        "": {"fused_optimizer": True},
    },
    "cuda": {"cosmoflow": _IMAGES, "deepcam": _IMAGES, "resnet50": _IMAGES, "language_model": _TEXT, "": _OTHER},
    "rocm": {"language_model": _TEXT, "": _OTHER},
    "xpu": {"cosmoflow": _IMAGES, "deepcam": _IMAGES, "resnet50": _IMAGES, "": _OTHER},
}  # fmt: skip

Wrong = Tuple[Tuple[str, str], ...]
Found = List[Tuple[str, str]]


def tuned(
    values: Mapping[str, Any], asked: Mapping[str, Any], accelerator: str, workload: str
) -> Dict[str, Any]:
    """Return *values* with what ``tuning`` adds to them on this type of device.

    What the test has *asked* for stays, None included. What would contradict that, such as a fused kernel of an optimizer
    that has none, or a layout that cannot be sharded, is left out.
    """
    if values.get("tuning") is None:
        return dict(values)
    table = FAST.get(accelerator, {})
    found = {**values, "accelerator": accelerator}
    for name, value in table.get(workload, table.get("", {})).items():
        if name in values and name not in asked:
            before = found[name]
            found[name] = value
            if any(field == name for field, _ in (*wrong(found), *parallel.wrong(found))):
                found[name] = before
    del found["accelerator"]
    return found


def wrong(values: Mapping[str, Any]) -> Wrong:
    """Refuse what the device, the optimizer or another field cannot go with."""
    return (*_wrong_device(values), *_wrong_graphs(values), *_wrong_rest(values))


def _wrong_device(values: Mapping[str, Any]) -> Found:
    """Refuse fields that mean nothing on this type of device."""
    accelerator = values.get("accelerator")
    if accelerator is None:
        return []
    found: Found = []
    for name in ("threads", "binding"):
        if values.get(name) is not None and accelerator != "cpu":
            found.append(
                (name, f"{name} is for ranks that compute on cores; {accelerator} computes on its own")
            )
    if values.get("cuda_graphs") and accelerator not in ("cuda", "rocm"):
        found.append(("cuda_graphs", f"{accelerator} has no CUDA graphs; only cuda and rocm have"))
    if values.get("miopen_find") is not None and accelerator != "rocm":
        found.append(("miopen_find", f"MIOpen is the library of AMD's GPUs; {accelerator} does not use it"))
    if accelerator in ("ipu", "wse"):
        text = f"{accelerator} compiles every model in a way of its own"
        names = ("compile", "fused_optimizer")
        found += [(name, text) for name in names if values.get(name) is not None]
    return found


def _wrong_graphs(values: Mapping[str, Any]) -> Found:
    """Refuse what a captured step cannot hold: it repeats the same kernels with the same numbers."""
    if not values.get("cuda_graphs"):
        return []
    texts = []
    if values.get("gradient_accumulation", 1) > 1:
        texts.append("a graph holds one whole step, so gradient_accumulation must be 1")
    if values.get("compile") in OWN_GRAPHS:
        texts.append(f"compile={values['compile']!r} makes graphs of its own; use 'default' with cuda_graphs")
    if values.get("optimizer") == "lamb":
        texts.append(
            "LAMB's count of steps is a number of the host, which a graph would repeat; use another optimizer"
        )
    if values.get("until") is not None:
        texts.append(
            "the learning rate changes in training to a quality, and a graph would repeat the first one"
        )
    if values.get("bagging"):
        texts.append("the models of an ensemble are not captured")
    if values.get("parallel"):
        texts.append("parallel: only plain data parallelism has been written for graphs")
    ranks, warmup = values.get("devices", 1), values.get("warmup")
    least = 1 + (EAGER_STEPS if ranks == 1 else EAGER_STEPS_DDP)
    if warmup is not None and warmup < least:
        texts.append(
            f"needs warmup={least} or more on {ranks} devices: {least - 1} plain steps, then the capture"
        )
    return [("cuda_graphs", text) for text in texts]


def _wrong_rest(values: Mapping[str, Any]) -> Found:
    found: Found = []
    if values.get("fused_optimizer") and values.get("optimizer", FUSED[0]) not in FUSED:
        text = f"{values['optimizer']} has no fused kernel; {', '.join(FUSED)} have"
        found.append(("fused_optimizer", text))
    if values.get("loss_scale") is not None and values.get("precision") != "fp16":
        text = f"gradients of {values.get('precision')} need no scaling; only those of precision='fp16' do"
        found.append(("loss_scale", text))
    return found


def expected(_values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Expect nothing more."""
    return ()
