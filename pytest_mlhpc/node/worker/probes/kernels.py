"""A training step by classes of kernels: time from torch profiler, operations, bytes moved by a model and as the processor counts them.

Two counters are known, both of whole sockets, so that other programs' traffic counts too:

- memory bandwidth monitoring of Linux's resctrl (Documentation/filesystems/resctrl.rst): ``mbm_total_bytes`` of each L3,
  where ``/sys/fs/resctrl`` is mounted and may be read. Each group of tasks has its own, without those of other groups, and a
  scheduler may have put this process into any, so all are added up;
- CAS commands of Intel's integrated memory controllers (``uncore_imc_*``, events ``cas_count_read`` and
  ``cas_count_write``), by perf_event_open(2), where ``kernel.perf_event_paranoid`` lets this user count a whole processor.

GPUs have such counters for administrators alone (DCGM, profilers); there is none here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
import statistics
import struct
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_mlhpc.node.agents.nodes import number_list
from pytest_mlhpc.node.protocol.schema import Figure, Rate, TimedOperation
from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.base import Accelerator, Task
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import autocast
from pytest_mlhpc.node.worker.probes import measure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.characters import CLASSES

RESCTRL = Path("/sys/fs/resctrl")
EVENTS = Path("/sys/bus/event_source/devices")

#: A cache line, which one CAS command moves.
LINE = 64

#: perf_event_open(2) by machine, and the size of the first version of its attributes (perf_event.h, PERF_ATTR_SIZE_VER0).
_SYSCALL = {"x86_64": 298, "aarch64": 241}
_ATTR_SIZE = 64


class ByteCounter:
    """Something that counts bytes up. ``name`` says what; ``read`` returns None once it cannot be read any more."""

    def __init__(self, name: str, read: Callable[[], Optional[int]], close: Callable[[], None]) -> None:
        self.name, self.read, self.close = name, read, close


def find(resctrl: Path = RESCTRL, events: Path = EVENTS) -> Tuple[Optional[ByteCounter], str]:
    """Return a counter that can be read, or None and why there is none."""
    found, why = _resctrl(resctrl)
    if found is not None:
        return found, ""
    other, also = _controllers(events)
    return other, "" if other is not None else f"{why}; {also}"


def _resctrl(root: Path) -> Tuple[Optional[ByteCounter], str]:
    of_group = "mon_data/mon_L3_*/mbm_total_bytes"
    files = sorted([*root.glob(of_group), *root.glob(f"*/{of_group}")])
    if not files:
        return None, f"no mbm_total_bytes below {root}"

    def read() -> Optional[int]:
        try:
            return sum(int(file.read_text()) for file in files)
        except (
            OSError,
            ValueError,
        ):  # "Unavailable" and "Error" are what the kernel writes instead of a number
            return None

    if read() is None:
        return None, f"{files[0]} cannot be read"
    return ByteCounter("resctrl mbm_total_bytes", read, lambda: None), ""


def _controllers(root: Path) -> Tuple[Optional[ByteCounter], str]:
    opened: List[int] = []
    try:
        for device in sorted(root.glob("uncore_imc*")):
            events = [device / "events" / name for name in ("cas_count_read", "cas_count_write")]
            if not any(event.exists() for event in events):
                continue  # since Ice Lake there are free-running counters besides, which count the same once more
            for event in events:
                config = _config(event.read_text())
                kind = int((device / "type").read_text())
                processors = number_list((device / "cpumask").read_text().strip())
                opened.extend(perf_open(kind, config, processor) for processor in processors)
    except (OSError, ValueError) as error:
        _close(opened)
        return None, f"memory controllers cannot be counted: {error}"
    if not opened:
        return None, f"no uncore_imc with CAS counters below {root}"

    def read() -> Optional[int]:
        try:
            return LINE * sum(int.from_bytes(os.read(one, 8), sys.byteorder) for one in opened)
        except OSError:
            return None

    return ByteCounter("uncore_imc cas_count", read, lambda: _close(opened)), ""


def _close(opened: List[int]) -> None:
    for one in opened:
        with contextlib.suppress(OSError):
            os.close(one)
    opened.clear()


def _config(text: str) -> int:
    """Return ``event=0x04,umask=0x03`` as perf's number: the event in the low byte, the mask in the next."""
    values: Dict[str, int] = {}
    for part in text.strip().split(","):
        name, _, value = part.partition("=")
        values[name] = int(value or "1", 0)
    if set(values) - {"event", "umask"} or not values:
        raise ValueError(f"event {text.strip()!r} is not spelt by event and umask")
    return values.get("event", 0) | values.get("umask", 0) << 8


def perf_open(kind: int, config: int, processor: int, pid: int = -1) -> int:
    """Return the descriptor of a running counter: perf_event_open(2), of all processes on *processor* or of process *pid*.

    Raises:
        OSError: the kernel refuses, or this machine's number of the call is not known.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"perf_event_open is not known on {platform.machine()}")
    attributes = struct.pack("<IIQ", kind, _ATTR_SIZE, config).ljust(_ATTR_SIZE, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(pid), ctypes.c_int(processor), ctypes.c_int(-1), ctypes.c_ulong(0))
    descriptor = int(libc.syscall(ctypes.c_long(number), ctypes.c_char_p(attributes), *arguments))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"perf_event_open: {os.strerror(code)}")
    return descriptor


#: Steps under the profiler: enough to average, few enough to hold their events in memory.
STEPS = 3


def kernel_times(
    accelerator: Accelerator, gradients: Callable[[], object], update: Callable[[], object]
) -> Tuple[Mapping[str, float], float]:
    """Return (seconds of one step by class, wall seconds of one step under the profiler).

    On a device they are those of its kernels, on a CPU of its operators, each less those it called. All of *update* is
    the optimizer's; rows that only launch or surround others are "other". *update* uses the last gradients that
    *gradients* has left.
    """
    found: Dict[str, float] = {}
    wall = 0.0
    for part, kind in ((gradients, ""), (update, "optimizer")):
        profiler = _profiler(accelerator)
        with profiler:
            start = time.perf_counter()
            for _ in range(STEPS):
                part()
            accelerator.synchronize()
            wall += time.perf_counter() - start
        for name, seconds in _rows(profiler, on_host=not accelerator.asynchronous):
            belongs = kind or ("other" if marks_only(name) else class_of(name))
            found[belongs] = found.get(belongs, 0.0) + seconds / STEPS
    return found, wall / STEPS


def _profiler(accelerator: Accelerator) -> Any:
    known = torch.profiler.ProfilerActivity
    # ROCm's devices are torch's "cuda" too; a type that this torch cannot profile leaves what the host did.
    device = getattr(known, accelerator.device.type.upper(), known.CPU)
    return torch.profiler.profile(activities=list(dict.fromkeys((known.CPU, device))))


def _rows(profiler: Any, *, on_host: bool) -> Iterator[Tuple[str, float]]:
    """Yield (name, seconds) of operators on the host, or of kernels on the device.

    A device's rows are kernels alone: rows of operators tell the time of the kernels that they launched once more.
    """
    for row in profiler.key_averages():
        host = str(getattr(row, "device_type", "CPU")).endswith("CPU")
        if host != on_host:
            continue
        if on_host:
            micros = row.self_cpu_time_total
        else:  # renamed in torch 2.4
            micros = getattr(row, "self_device_time_total", None) or getattr(row, "self_cuda_time_total", 0.0)
        yield str(row.key), float(micros) / 1e6


#: Operators that make memory without writing it, or that only look.
_NOTHING = ("aten::empty", "aten::new_empty", "aten::lift", "aten::_local_scalar", "profiler::", "prim::")
#: Operators that write their first tensor without reading it.
_OVERWRITE = ("aten::fill_", "aten::zero_", "aten::copy_")

Count = Tuple[int, int]  #: operations, bytes


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves this class without types
    """Adds up what each operator does while it is active; ``optimizer`` says that all of it belongs to the update."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self.found: Dict[str, Count] = {}
        self.optimizer = False

    # The signature is torch's.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        name = str(func._schema.name)  # noqa: SLF001 - torch has no other way to tell whether an operator only makes a view
        if not _is_view(func) and not name.startswith(_NOTHING):
            kind = "optimizer" if self.optimizer else class_of(name)
            done, moved = self.found.get(kind, (0, 0))
            self.found[kind] = (
                done + operations(name, args, result),
                moved + _moved(name, args, given, result),
            )
        return result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001 - see above
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _size(tensor: Tensor) -> int:
    """Return the bytes of *tensor*; of one that repeats itself (stride 0) only what lies there."""
    lying = math.prod(edge for edge, stride in zip(tensor.shape, tensor.stride()) if stride or edge <= 1)
    return int(lying * tensor.element_size())


def _moved(name: str, args: Any, kwargs: Any, result: Any) -> int:
    read: List[Tensor] = list(_tensors([args, kwargs]))
    written: List[Tensor] = list(_tensors(result))
    if not written and name.endswith(
        "_"
    ):  # operators on lists of tensors write into the first list and return nothing
        written = list(_tensors(args[0]))
    if name.startswith(_OVERWRITE):
        read = read[1:]
    return sum(map(_size, read)) + sum(map(_size, written))


def operations(name: str, args: Sequence[Any], result: Any) -> int:
    """Return the operations of one call of an operator with these arguments; zero for what is never counted."""
    if name == "aten::convolution":
        return _convolution(args[1], args[0], result, transposed=bool(args[6]))
    if name == "aten::convolution_backward":
        gradient, inputs, weight, mask = args[0], args[1], args[2], args[10]
        return _convolution(weight, inputs, gradient, transposed=bool(args[7])) * (
            bool(mask[0]) + bool(mask[1])
        )
    if name in ("aten::mm", "aten::bmm"):
        return 2 * int(result.numel()) * int(args[0].shape[-1])
    if name in ("aten::addmm", "aten::baddbmm"):
        return 2 * int(result.numel()) * int(args[1].shape[-1])
    if "scaled_dot_product" in name:
        return _attention(name, args)
    return 0


def _convolution(weight: Tensor, inputs: Tensor, output: Tensor, *, transposed: bool) -> int:
    """Each element of the output (transposed: of the input) meets the weights of its group."""
    met = inputs if transposed else output
    return 2 * int(met.numel()) * int(math.prod(weight.shape[1:]))


def _attention(name: str, args: Sequence[Any]) -> int:
    """Scores and their product with the values, of the whole square; backward twice as many."""
    shift = 1 if "backward" in name else 0
    query, key = args[shift], args[shift + 1]
    rows = int(math.prod(query.shape[:-1]))
    forward = 4 * rows * int(key.shape[-2]) * int(query.shape[-1])
    return 2 * forward if shift else forward


def count(task: Task, inputs: Tensor, targets: Tensor, precision: str) -> Dict[str, Count]:
    """Return (operations, bytes) of one step by class. A model is built for it, eager and on the batch's device, and left.

    Raises:
        WorkerFailure: what the step itself raises.
    """
    model = task.model().to(inputs.device).train()
    optimizer = task.optimizer(model)

    def step(counter: Optional[OperatorCounter]) -> None:
        optimizer.zero_grad(set_to_none=True)
        with counter if counter is not None else nullcontext():
            with autocast(inputs.device.type, precision):
                ready, wanted = task.prepare(inputs, targets)
                loss = task.loss(model(ready), wanted)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
            if counter is not None:
                counter.optimizer = True
            optimizer.step()

    step(None)  # the optimizer makes its states in the first one
    counter = OperatorCounter()
    step(counter)
    return counter.found


#: How far equal runs differ where cores are shared.
TOLERANCE = 0.10


class Kernels:
    """One training on this rank alone; ranks exchange nothing, but step at the same time."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        self._inside = measure.build(place)
        self._flop = float(reporting.count(self._inside.task).train * self._inside.batch)
        self._counter, self._why = find()
        self._seconds: List[float] = []
        self._counted: List[float] = []
        rates = (Rate("achieved_flops", "FLOP/s", self._flop, tolerance=TOLERANCE),)
        self.operations: Tuple[TimedOperation, ...] = (
            TimedOperation("step", (), rates, ("step_time",), (), TOLERANCE),
        )

    def verify(self) -> None:
        """Look at the loss.

        Raises:
            WorkerFailure: ``loss_nan``.
        """
        with torch.no_grad():
            loss = float(self._inside.trainer.loss(self._inside.inputs, self._inside.targets))
        if not math.isfinite(loss):
            raise WorkerFailure(
                "loss_nan", f"the loss is {loss}; look at precision, learning rate and fields"
            )

    def repeat(self) -> Mapping[str, float]:
        """Do one training step. A counter sees all ranks of the node: it is read once they are done with the step before."""
        self._place.barrier()
        before = self._counter.read() if self._counter is not None else None
        took = self._place.timed(1, self._inside.step)
        after = self._counter.read() if self._counter is not None else None
        self._seconds.append(took)
        if before is not None and after is not None and after > before:
            self._counted.append((after - before) / took)
        return {"step": took}

    def figures(self) -> Tuple[Figure, ...]:
        """Profile a few more steps, and count one."""
        one = self._inside
        times, wall = kernel_times(self._place.accelerator, one.gradients, one.trainer.update)
        found = count(one.task, one.inputs, one.targets, one.trainer.precision)
        moved = {name: size for name, (_, size) in found.items()}
        # Warm-up's repetitions are not those that count.
        usual = statistics.median(self._seconds[-self._place.run.steps :])
        figures = [
            Figure("step_flop", self._flop, "FLOP", "none", "first"),
            Figure("step_bytes_modelled", float(sum(moved.values())), "B", "none", "first"),
            Figure("memory_bandwidth_modelled", sum(moved.values()) / usual, "B/s", "none", "sum"),
            Figure("profiled_step_time", wall, "s", "none", "max"),
        ]
        if self._counted and self._place.group.local_rank == 0:  # a socket's counter is every rank's
            counted = statistics.median(self._counted[-self._place.run.steps :])
            figures.append(Figure("memory_bandwidth_counted", counted, "B/s", "none", "sum"))
        return (*figures, *_by_class(times, moved))

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the samples of a step, and what counted memory traffic."""
        counter = self._counter.name if self._counter is not None else f"none: {self._why}"
        return {"samples_of_a_step": str(self._inside.batch), "memory_counter": counter[:300]}

    def close(self) -> None:
        """Leave the memory to the end of the process."""
        if self._counter is not None:
            self._counter.close()


def _by_class(times: Mapping[str, float], moved: Mapping[str, int]) -> List[Figure]:
    """Return the share of each class in a step's time, and for those that are there their time and bytes."""
    total = sum(times.values())
    found = []
    for name in CLASSES:
        seconds, size = times.get(name, 0.0), float(moved.get(name, 0))
        share = seconds / total if total > 0 else 0.0
        found.append(Figure(f"kernel_share_{name}", share, "1", "none", "mean"))
        if seconds > 0:
            found.append(Figure(f"kernel_time_{name}", seconds, "s", "none", "mean"))
        if size > 0:
            found.append(Figure(f"bytes_modelled_{name}", size, "B", "none", "first"))
    return found


#: A rank's part, by its ProbePlace.
probe = Kernels


# Names of operators are torch's own (``aten::...``, also ``c10d::...``); names of kernels are those of cuDNN, cuBLAS, MIOpen,
# NCCL, oneDNN and of generated code, as profilers show them. What no rule knows is "other", and its share is reported.

#: The first rule that matches decides. All names are lower case by then.
_RULES: Tuple[Tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|xccl"),
    ("attention", r"scaled_dot_product|flash|fmha|efficient_attention|attention"),
    ("optimizer", r"_fused_(adam|sgd|adagrad)|optimizer\.step"),
    ("normalisation", r"batch_norm|batchnorm|layer_norm|layernorm|rms_norm|group_norm|bn_(fw|bw)|instance_norm"),
    ("pooling", r"max_pool|avg_pool|pooling|adaptive_.*pool|maxpool|avgpool"),
    ("convolution", r"conv|wgrad|dgrad|fprop|winograd|implicit_gemm|igemm"),
    ("matrix", r"aten::(mm|bmm|addmm|baddbmm|addmv|mv|dot|linear)\b|gemm|cutlass|cublas|matmul|_mm_kernel|nvjet"),
    ("memory", (
        r"copy|clone|memcpy|memset|fill|zero|aten::(cat|stack|contiguous|_to_copy|pad)\b|constant_pad"
        r"|embedding|index|gather|scatter|permute|transpose|nchwto|nhwcto|concat"
    )),
    ("reduction", (
        r"aten::(sum|mean|norm|max|min|argmax|any|all|amax|amin|linalg_vector_norm|_foreach_norm)\b"
        r"|reduce|loss|softmax"
    )),
    ("elementwise", (
        r"aten::(add|sub|mul|div|addc|lerp|sqrt|rsqrt|pow|exp|log|tanh|sigmoid|relu|leaky_relu|gelu|silu"
        r"|threshold|clamp|bernoulli|native_dropout|where|neg|sin|cos|_foreach|rand|eq|ne|gt|lt|abs|hardtanh"
        r"|maximum|minimum|square|reciprocal|isfinite|logical|bitwise|masked)"
        r"|elementwise|vectorized|triton_poi|dropout"
    )),
)  # fmt: skip
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _RULES)

#: Rows of a profile that only mark a span of other rows.
_SPANS = re.compile(
    r"profilerstep|autograd::|torch::|backward\d+$|\#|enumerate\(|cuda[a-z]|hip[a-z]", re.IGNORECASE
)


def class_of(name: str) -> str:
    """Return the class of the operator or kernel *name*."""
    lower = name.lower()
    return next((found for found, pattern in _COMPILED if pattern.search(lower)), "other")


def marks_only(name: str) -> bool:
    """Return whether a row called *name* computes nothing itself, but surrounds, launches or dispatches."""
    return _SPANS.search(name) is not None
