"""GPUs of NVIDIA, AMD and Intel: streams, events, steps captured as graphs, energy counters, and how each make is opened.

torch's HIP build calls AMD's GPUs ``cuda`` and its RCCL ``nccl``. Intel's need torch's own XPU build, 2.5 and newer, with XCCL
between ranks.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, MutableMapping, Optional, Tuple, TypeVar

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.base import Accelerator, Copied, Mark
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import EAGER_STEPS, EAGER_STEPS_DDP

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.loop import Trainer


class NvmlCounter:
    """The counter of one GPU. Every method returns None when NVML, its Python module or the board cannot answer."""

    def __init__(self, uuid: Optional[str], pci_address: Optional[str] = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            if uuid is not None:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            elif pci_address is not None:
                self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_address)
        except pynvml.NVMLError:
            self._handle = None

    def joules(self) -> Optional[float]:
        """Return the counter in joules."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else float(millijoules) / 1e3

    def index(self) -> Optional[int]:
        """Return the GPU's number on its node in NVML's order, which is that of the bus."""
        found = self._ask("nvmlDeviceGetIndex")
        return None if found is None else int(found)

    def driver(self) -> Optional[str]:
        """Return the driver's version."""
        if self._nvml is None:
            return None
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, function: str) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:  # MIG slices and old boards have no counter
            return None


#: Keys of the count, by release.
KEYS = ("energy_accumulator", "power")


class AmdCounter:
    """The counter of one GPU. Every method returns None when amdsmi, its driver or the board cannot answer."""

    def __init__(self, pci_address: Optional[str]) -> None:
        self._library: Any = None
        self._handle: Any = None
        self._index: Optional[int] = None
        if pci_address is None:
            return
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            self._library = amdsmi
            self._find(pci_address)
        # The package raises its own classes, ctypes' and OSError, also while it is imported.
        except Exception:  # noqa: BLE001
            self._handle = None

    def _find(self, pci_address: str) -> None:
        for index, handle in enumerate(self._library.amdsmi_get_processor_handles()):
            if str(self._library.amdsmi_get_gpu_device_bdf(handle)).lower() == pci_address.lower():
                self._handle, self._index = handle, index
                return

    def index(self) -> Optional[int]:
        """Return the GPU's number on its node in amdsmi's order."""
        return self._index

    def joules(self) -> Optional[float]:
        """Return the counter in joules."""
        if self._handle is None:
            return None
        try:
            counts = self._library.amdsmi_get_energy_count(self._handle)
            count = next(counts[key] for key in KEYS if key in counts)
            joules = float(count) * float(counts["counter_resolution"]) / 1e6
        except Exception:  # noqa: BLE001 - as above; guests and old boards have no counter, others say 'N/A'
            return None
        return joules if math.isfinite(joules) and joules > 0 else None


T = TypeVar("T")


class Queued:
    """One GPU of one rank. Nothing here waits for the device but ``synchronize`` and ``wait``.

    Args:
        api: ``torch.cuda`` or ``torch.xpu``.
        device: where tensors of this rank lie; it becomes the current device.
    """

    asynchronous = True

    def __init__(self, api: Any, device: torch.device) -> None:
        self.device = device
        self._api = api
        api.set_device(device)
        self._copies = api.Stream(device)

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""
        self._api.synchronize(self.device)

    def mark(self) -> Mark:
        """Record a timing event on the compute stream."""
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        """Block until the device has passed *mark*."""
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two events; both must have been passed. Events count milliseconds."""
        return float(start.elapsed_time(end)) / 1e3

    def copy(self, tensors: Tuple[Tensor, ...]) -> Copied:
        """Copy pinned host tensors on the copy stream. Tensors already on the device are returned as they are."""
        if all(tensor.device == self.device for tensor in tensors):
            return Copied(tensors)
        start, end = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        with self._api.stream(self._copies):
            start.record(self._copies)
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            end.record(self._copies)
        return Copied(moved, start, end)

    def await_copy(self, copied: Copied) -> None:
        """Let the compute stream wait for the copy, and keep the memory until the compute stream is done with it."""
        if copied.end is None:
            return
        compute = self._api.current_stream(self.device)
        compute.wait_event(copied.end)
        for tensor in copied.tensors:
            tensor.record_stream(compute)

    def reset_peak_memory(self) -> None:
        """Let the allocator forget its peak."""
        self._api.reset_peak_memory_stats(self.device)

    def peak_memory_bytes(self) -> Optional[int]:
        """Return the most bytes that tensors held at one time since the reset."""
        return int(self._api.max_memory_allocated(self.device))

    def aside(self, work: Callable[[], T]) -> T:
        """Do *work* on a side stream, between all that is queued before and after it."""
        compute = self._api.current_stream(self.device)
        side = self._api.Stream(self.device)
        side.wait_stream(compute)
        with self._api.stream(side):
            done = work()
        compute.wait_stream(side)
        if isinstance(done, Tensor):
            done.record_stream(compute)
        return done


class Capturing(Queued):
    """A GPU that can repeat what was queued once: CUDA graphs, which HIP has under the same names."""

    def capture(self, work: Callable[[], T]) -> Tuple[T, Callable[[], None]]:
        """Capture what *work* queues as a graph, without running it; return what *work* returned, and what runs it.

        Everything that *work* reads and writes must stay where it is in memory. Other threads may go on with theirs, such as
        the loader's, which asks for pinned memory: that would break a capture in the mode "global" (torch.cuda.graph, its
        ``capture_error_mode``, which torch has since 2.1).
        """
        graph = self._api.CUDAGraph()
        has_mode = "capture_error_mode" in inspect.signature(self._api.graph).parameters
        options = {"capture_error_mode": "thread_local"} if has_mode else {}
        with self._api.graph(graph, **options):
            done = work()
        return done, graph.replay


def ordinal_for(local_rank: int, visible: int) -> int:
    """Return which of *visible* devices rank *local_rank* of a node uses.

    A launcher either shows all devices of a node to each rank, or to each rank just its own one.

    Raises:
        WorkerFailure: ``too_few_devices``, two ranks would share a device.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    text = f"rank {local_rank} of this node finds {visible} devices; each rank needs one of its own"
    raise WorkerFailure("too_few_devices", text)


#: What watches for errors of collectives asks events for their state, which must not happen while a graph is captured.
#: The first name is that of torch 2.2 and newer.
WATCHDOGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class CapturedStep:
    """Steps of one trainer: the first *eager* ones are ordinary ones, the next is captured, the others are replayed.

    All batches must have one shape. ``accelerator`` has, beside the protocol's, ``aside(work)``, which runs work on a
    side stream, and ``capture(work)``, which returns what work returned and what runs it again.
    """

    def __init__(self, accelerator: Accelerator, eager: int) -> None:
        self._device: Any = accelerator
        self._eager = eager
        self._replay: Optional[Callable[[], None]] = None
        self._inputs: Tuple[Tensor, ...] = ()
        self._loss: Optional[Tensor] = None

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._replay is not None

    def step(self, trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
        """Train one step on a batch that is on the device; return its loss.

        Raises:
            WorkerFailure: ``worker_exit``, the batch has another shape than the first.
        """
        if self._eager > 0:
            self._eager -= 1
            loss: Tensor = self._device.aside(lambda: _whole_step(trainer, tensors))
            return loss
        if self._replay is None or self._loss is None:
            self._inputs = tuple(tensor.clone() for tensor in tensors)
            trainer.forget()
            self._loss, self._replay = self._device.capture(lambda: _captured_part(trainer, self._inputs))
        else:
            self._take(tensors)
        assert self._replay is not None  # noqa: S101 - set just above
        self._replay()
        if trainer.scaler is not None:
            trainer.update()
        return self._loss.detach().clone()  # the next replay writes to the same place

    def _take(self, tensors: Tuple[Tensor, ...]) -> None:
        for own, new in zip(self._inputs, tensors):
            if own.shape != new.shape:
                text = f"cuda_graphs: a batch of {tuple(new.shape)} came after one of {tuple(own.shape)}"
                raise WorkerFailure("worker_exit", text)
            own.copy_(new, non_blocking=True)


def _captured_part(trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
    """Do the part of a step that a graph can hold; its loss."""
    loss = trainer.loss(tensors[0], tensors[1])
    trainer.backward(loss)
    if trainer.scaler is None:
        trainer.update()
    return loss


def _whole_step(trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
    trainer.forget()
    loss = trainer.loss(tensors[0], tensors[1])
    trainer.backward(loss)
    trainer.update()
    return loss.detach()


def captured_step(
    parameters: Mapping[str, Any], accelerator: Accelerator, world: int
) -> Optional[CapturedStep]:
    """Return what captures steps, if the run asks for it.

    Raises:
        WorkerFailure: ``wrong_device``, this device has no graphs.
    """
    if not parameters.get("cuda_graphs"):
        return None
    if not hasattr(accelerator, "capture"):
        raise WorkerFailure(
            "wrong_device", f"cuda_graphs: {accelerator.type} has no graphs; set cuda_graphs=False"
        )
    return CapturedStep(accelerator, EAGER_STEPS if world == 1 else EAGER_STEPS_DDP)


def calm_watchdog(parameters: Mapping[str, Any], world: int, environ: MutableMapping[str, str]) -> None:
    """Prepare the process group of a run whose steps are captured; to be called before the ranks meet.

    What hangs then is ended by the run's time limit alone. A value that the environment has stays.
    """
    if parameters.get("cuda_graphs") and world > 1:
        for name in WATCHDOGS:
            environ.setdefault(name, "0")


def on_side_stream(
    accelerator: Accelerator, work: Callable[[], torch.nn.Module], *, wanted: bool
) -> torch.nn.Module:
    """Return what *work* makes; on a side stream where its steps will be captured, as DDP must be built on one."""
    device: Any = accelerator
    built: torch.nn.Module = device.aside(work) if wanted else work()
    return built


class Cuda(Capturing):
    """One GPU of one rank; a step of it can be captured."""

    type = "cuda"
    backend = "nccl"

    def __init__(self, ordinal: int) -> None:
        super().__init__(torch.cuda, torch.device("cuda", ordinal))
        self._properties = torch.cuda.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self.uuid = device_uuid(self._properties, ordinal)
        self._counter = NvmlCounter(self.uuid, nvml_pci_address(self._properties))
        found = self._counter.index()
        self.index = ordinal if found is None else found

    def energy_j(self) -> Optional[float]:
        """Return the board's energy counter, see the class of it above."""
        return self._counter.joules()

    def environment(self) -> Mapping[str, str]:
        """Return driver, CUDA, cuDNN and NCCL versions, and which GPU this is."""
        cudnn: Any = torch.backends.cudnn  # without types
        found = {
            "cuda": str(torch.version.cuda),
            "cudnn": str(cudnn.version() or ""),
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
            "device_uuid": self.uuid or "",
            "driver": self._counter.driver() or "",
        }
        if torch.distributed.is_available() and hasattr(torch.cuda, "nccl"):
            found["nccl"] = ".".join(map(str, nccl_version()))
        return {name: value for name, value in found.items() if value}


def nccl_version() -> Tuple[int, ...]:
    """Return NCCL's version, or an empty tuple where torch was built without it."""
    nccl: Any = torch.cuda.nccl  # without types
    try:
        version = nccl.version()
    except (RuntimeError, AttributeError):
        return ()
    return tuple(version) if isinstance(version, tuple) else (int(version),)


def device_uuid(properties: Any, ordinal: int, visible: Optional[str] = None) -> Optional[str]:
    """Return ``GPU-...`` of the device, or None where neither torch (before 2.4) nor CUDA_VISIBLE_DEVICES tells.

    An index in CUDA_VISIBLE_DEVICES is no help: CUDA may order devices by speed, NVML orders them by bus.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if ordinal < len(entries) and entries[ordinal].startswith(("GPU-", "MIG-")):
        return entries[ordinal]
    return None


def nvml_pci_address(properties: Any) -> Optional[str]:
    """Return ``domain:bus:device.0`` in NVML's spelling, or None where torch does not tell (before 2.5)."""
    bus = getattr(properties, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):08X}:{bus:02X}:{getattr(properties, 'pci_device_id', 0):02X}.0"


def open_cuda(local_rank: int) -> Cuda:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an NVIDIA GPU here.
    """
    if torch.version.cuda is None:
        text = f"torch {torch.__version__} of this environment is built without CUDA; it cannot use an NVIDIA GPU"
        raise WorkerFailure("wrong_device", text)
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        text = f"torch {torch.__version__} finds no NVIDIA GPU (CUDA_VISIBLE_DEVICES={visible!r}); check driver and allocation"
        raise WorkerFailure("wrong_device", text)
    return Cuda(ordinal_for(local_rank, torch.cuda.device_count()))


#: Where MIOpen keeps what it found, and the kernels that it built.
DATABASES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")


class Rocm(Capturing):
    """One GPU (on MI250X: one die) of one rank; a step of it can be captured."""

    type = "rocm"
    backend = "nccl"  # RCCL has NCCL's names

    def __init__(self, ordinal: int) -> None:
        super().__init__(torch.cuda, torch.device("cuda", ordinal))
        self._properties: Any = torch.cuda.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self._counter = AmdCounter(linux_pci_address(self._properties))
        found = self._counter.index()
        self.index = ordinal if found is None else found

    def energy_j(self) -> Optional[float]:
        """Return the board's energy counter, see the class of it above."""
        return self._counter.joules()

    def environment(self) -> Mapping[str, str]:
        """Return HIP, MIOpen and RCCL versions, and which GPU this is."""
        cudnn: Any = torch.backends.cudnn  # tells MIOpen's version in HIP builds
        found = {
            "hip": str(torch.version.hip),
            "miopen": str(cudnn.version() or ""),
            "gcn_architecture": str(getattr(self._properties, "gcnArchName", "")),
            "miopen_database": os.environ.get(DATABASES[0], ""),
        }
        return {name: value for name, value in found.items() if value}


def linux_pci_address(properties: Any) -> Optional[str]:
    """Return ``domain:bus:device.0`` in Linux's spelling, or None where torch does not tell (before 2.5)."""
    bus = getattr(properties, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


def prepare_miopen(
    environ: MutableMapping[str, str], find: Optional[str], torch_version: str, root: Optional[Path] = None
) -> None:
    """Tell MIOpen how to look for kernels, and where on this node to keep what it finds.

    Variables that the environment has already stay, but for the find mode if the test names one. *root* is the folder
    of temporary files ($TMPDIR).
    """
    if find is not None:
        environ["MIOPEN_FIND_MODE"] = find.upper()
    missing = [name for name in DATABASES if not environ.get(name)]
    if missing:
        folder = _own_folder(root or Path(tempfile.gettempdir()), torch_version)
        for name in missing:
            environ[name] = folder


def _own_folder(root: Path, torch_version: str) -> str:
    """Return a folder that is this user's alone: always the same one, unless somebody else has made it."""
    folder = root / f"mlhpc-miopen-{os.getuid()}-{re.sub(r'[^A-Za-z0-9.]', '-', torch_version)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return tempfile.mkdtemp(prefix="mlhpc-miopen-")
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return str(folder) if mine else tempfile.mkdtemp(prefix="mlhpc-miopen-", dir=root)


def open_rocm(local_rank: int) -> Rocm:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an AMD GPU here.
    """
    if getattr(torch.version, "hip", None) is None:
        text = (
            f"torch {torch.__version__} of this environment is built without ROCm; it cannot use an AMD GPU"
        )
        raise WorkerFailure("wrong_device", text)
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        visible = {name: os.environ.get(name) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
        text = (
            f"torch {torch.__version__} finds no AMD GPU ({visible}); check driver, /dev/kfd and allocation"
        )
        raise WorkerFailure("wrong_device", text)
    return Rocm(ordinal_for(local_rank, torch.cuda.device_count()))


class Xpu(Queued):
    """One GPU (on Max 1550: one tile, unless the driver joins them) of one rank."""

    type = "xpu"
    backend = "xccl"

    def __init__(self, ordinal: int, api: Any) -> None:
        super().__init__(api, torch.device("xpu", ordinal))
        self._properties = api.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self.index = ordinal

    def energy_j(self) -> Optional[float]:
        """Return None: Level Zero's counter needs its own tools (sysman), which torch does not pass on."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return driver version and what this GPU is."""
        names = ("driver_version", "platform_name", "max_compute_units", "gpu_eu_count")
        found = {f"xpu_{name}": str(getattr(self._properties, name, "")) for name in names}
        return {name: value for name, value in found.items() if value}


def open_xpu(local_rank: int) -> Xpu:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an Intel GPU here; ``not_supported``, this torch does not count
            the time of events on it.
    """
    api: Any = getattr(torch, "xpu", None)
    if api is None or not getattr(torch.version, "xpu", None):
        text = (
            f"torch {torch.__version__} of this environment is built without XPU; it cannot use an Intel GPU"
        )
        raise WorkerFailure("wrong_device", text)
    if not api.is_available() or api.device_count() == 0:
        visible = os.environ.get("ONEAPI_DEVICE_SELECTOR")
        text = f"torch {torch.__version__} finds no Intel GPU (ONEAPI_DEVICE_SELECTOR={visible!r}); check driver and allocation"
        raise WorkerFailure("wrong_device", text)
    if not hasattr(api, "max_memory_allocated"):
        text = f"torch {torch.__version__} lacks memory statistics and timing of Intel GPUs; 2.6 and newer have them"
        raise WorkerFailure("not_supported", text)
    return Xpu(ordinal_for(local_rank, api.device_count()), api)
