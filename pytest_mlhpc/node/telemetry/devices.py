"""No torch. Samples of a node's accelerators: NVIDIA's by nvidia-ml-py, AMD's by amdsmi, where these are.

What a board or a version does not tell is None. Names of calls and units: NVML API reference (milliwatts, MHz, bytes),
amdsmi's Python API (watts, MHz, MiB; ``N/A`` or the largest number of a type where nothing is known).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, Optional, Protocol, Tuple

from pytest_mlhpc.node.telemetry.samples import DeviceSample

#: Numbers by which AMD's driver says "not known": the largest of 16, 32 and 64 bits.
UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

#: NVML_CLOCK_SM, NVML_TEMPERATURE_GPU.
CLOCK_SM, TEMPERATURE_GPU = 1, 0

MIB = 1 << 20


class Devices(Protocol):
    """Where samples of devices come from. ``text`` says what is there, or why nothing is."""

    text: str

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each device."""


class NoDevices:
    """A node without a library that tells of accelerators."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return nothing."""
        return ()


@dataclass(frozen=True)
class _Board:
    """One device, with what never changes of it."""

    handle: Any
    index: int
    identity: str
    model: str
    limit_w: Optional[float] = None
    highest_hz: Optional[float] = None


class Nvidia:
    """All GPUs that NVML shows."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        module.nvmlInit()
        self._boards = [self._board(index) for index in range(int(module.nvmlDeviceGetCount()))]
        self.text = f"{len(self._boards)} x {self._boards[0].model}" if self._boards else "NVML shows no GPU"

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each GPU; those that have fallen off the bus are without figures."""
        return tuple(self._sample(board) for board in self._boards)

    def _board(self, index: int) -> _Board:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        clock = self._ask("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM)
        return _Board(
            handle,
            index,
            _text(self._ask("nvmlDeviceGetUUID", handle)) or str(index),
            _text(self._ask("nvmlDeviceGetName", handle)) or "GPU",
            None if limit is None else limit / 1e3,
            None if clock is None else clock * 1e6,
        )

    def _sample(self, board: _Board) -> DeviceSample:
        handle = board.handle
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        clock = self._ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        celsius = self._ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU)
        users = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return DeviceSample(
            index=board.index,
            identity=board.identity,
            model=board.model,
            busy=None if rates is None else rates.gpu / 100.0,
            memory_busy=None if rates is None else rates.memory / 100.0,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_bytes=None if memory is None else int(memory.total),
            power_w=None if power is None else power / 1e3,
            power_limit_w=board.limit_w,
            celsius=None if celsius is None else float(celsius),
            clock_hz=None if clock is None else clock * 1e6,
            highest_clock_hz=board.highest_hz,
            reasons=None if reasons is None else int(reasons),
            pids=tuple(int(user.pid) for user in users),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        function: Optional[Callable[..., Any]] = getattr(self._nvml, name, None)
        if function is None:  # an older nvidia-ml-py
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


class Amd:
    """All GPUs that amdsmi shows. Its reasons for low clocks have other names; they are no part of these samples."""

    def __init__(self, module: Any) -> None:
        self._smi = module
        module.amdsmi_init()
        handles = list(module.amdsmi_get_processor_handles())
        self._boards = [self._board(index, handle) for index, handle in enumerate(handles)]
        self.text = f"{len(handles)} x {self._boards[0].model}" if handles else "amdsmi shows no GPU"

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each GPU."""
        return tuple(self._sample(board) for board in self._boards)

    def _board(self, index: int, handle: Any) -> _Board:
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        identity = self._ask_text("amdsmi_get_gpu_device_uuid", handle) or str(index)
        model = str(asic.get("market_name") or "GPU")
        cap = number(self._ask("amdsmi_get_power_cap_info", handle), "power_cap")
        limit = None if cap is None else cap / 1e6 if cap > 1e5 else cap  # microwatts in newer releases
        return _Board(handle, index, identity, model, limit)

    def _sample(self, board: _Board) -> DeviceSample:
        activity = self._ask("amdsmi_get_gpu_activity", board.handle)
        metrics = self._ask("amdsmi_get_gpu_metrics_info", board.handle)
        memory = self._ask("amdsmi_get_gpu_vram_usage", board.handle)
        busy, traffic = number(activity, "gfx_activity"), number(activity, "umc_activity")
        used, total = number(memory, "vram_used"), number(memory, "vram_total")
        clock = number(metrics, "current_gfxclk")
        return DeviceSample(
            index=board.index,
            identity=board.identity,
            model=board.model,
            busy=None if busy is None else busy / 100.0,
            memory_busy=None if traffic is None else traffic / 100.0,
            memory_used_bytes=None if used is None else int(used * MIB),
            memory_bytes=None if total is None else int(total * MIB),
            power_w=number(metrics, "current_socket_power", "average_socket_power"),
            power_limit_w=board.limit_w,
            celsius=number(metrics, "temperature_hotspot"),
            clock_hz=None if clock is None else clock * 1e6,
        )

    def _ask(self, name: str, handle: Any) -> Mapping[str, Any]:
        found = self._call(name, handle)
        return found if isinstance(found, Mapping) else {}

    def _ask_text(self, name: str, handle: Any) -> str:
        found = self._call(name, handle)
        return found if isinstance(found, str) else ""

    def _call(self, name: str, handle: Any) -> Any:
        function: Optional[Callable[..., Any]] = getattr(self._smi, name, None)
        if function is None:
            return None
        try:
            return function(handle)
        except self._smi.AmdSmiException:
            return None


def number(found: Mapping[str, Any], *names: str) -> Optional[float]:
    """Return the first of *names* that *found* has a known number for."""
    for name in names:
        value = found.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in UNKNOWN:
            return float(value)
    return None


def find_devices(load: Callable[[str], Any] = importlib.import_module) -> Devices:
    """Return what tells of this node's accelerators. *load* imports a module; tests have another."""
    said: List[str] = []
    kinds: Tuple[Tuple[str, Callable[[Any], Any]], ...] = (("pynvml", Nvidia), ("amdsmi", Amd))
    for name, kind in kinds:
        found = _open(name, kind, load)
        if found.read():
            return found
        said.append(found.text)
    return NoDevices("; ".join(said))


def _open(name: str, kind: Callable[[Any], Any], load: Callable[[str], Any]) -> Devices:
    try:
        found: Devices = kind(load(name))
    except ImportError:
        return NoDevices(f"no module {name}")
    except Exception as error:  # noqa: BLE001 - drivers raise classes of their own; screening goes on without
        return NoDevices(f"{name}: {error}")
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
