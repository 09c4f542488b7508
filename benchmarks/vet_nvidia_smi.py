"""What ``nvidia-smi -q -a`` prints of a case of the fault corpus: as much of it as its NVML specification says.

Names, their order and indentation are those of the driver's own program; sections that no case says anything about are left
out. Where NVML refuses a value there is "N/A" or "Unknown Error", as there. Module IDs, which the cases do not have, count from one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"

#: Error of NVML -> what the program prints, and its exit code. The codes are those of its manual page, "Return value".
REFUSALS = {
    "DRIVER_NOT_LOADED": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        9,
    ),
    "LIBRARY_NOT_FOUND": (
        "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
        12,
    ),
    "LIB_RM_VERSION_MISMATCH": ("Failed to initialize NVML: Driver/library version mismatch", 18),
    "UNKNOWN": ("Failed to initialize NVML: Unknown Error", 255),
}

#: What stands in the place of a value that NVML refuses.
WORDS = {
    "NOT_SUPPORTED": "N/A",
    "FUNCTION_NOT_FOUND": "N/A",
    "GPU_IS_LOST": "GPU is lost",
    "NO_PERMISSION": "Insufficient Permissions",
}

COUNTERS = {
    "SRAM Correctable": (0, 7),
    "SRAM Uncorrectable": (1, 7),
    "DRAM Correctable": (0, 2),
    "DRAM Uncorrectable": (1, 2),
}


def printed(spec: Mapping[str, Any]) -> tuple[str, int]:
    """Return the text and the exit code."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    fake = importlib.import_module("fake_nvml")
    nvml = fake.FakeNvml({**spec, "missing": (), "bytes": False})
    names = {code: name for name, code in fake.ERRORS.items()}
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except fake.NVMLError as error:
        text, code = REFUSALS.get(names[error.value], REFUSALS["UNKNOWN"])
        return text + "\n", code
    if not count:
        return "No devices were found\n", 6

    def value(get: Callable[[], Any]) -> str:
        try:
            return str(get())
        except fake.NVMLError as error:
            return WORDS.get(names[error.value], "Unknown Error")

    lines, code = ["==============NVSMI LOG==============", "", f"Attached GPUs : {count}"], 0
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except fake.NVMLError as error:
            word = WORDS.get(names[error.value], "Unknown Error")
            lines.append(f"Unable to determine the device handle for GPU{index}: {word}")
            code = 15 if names[error.value] == "GPU_IS_LOST" else 255
            continue
        lines += _device(nvml, handle, index, value)
    return "\n".join(lines) + "\n", code


def _device(nvml: Any, handle: Any, index: int, value: Callable[[Callable[[], Any]], str]) -> list[str]:
    def memory(name: str) -> str:
        return value(lambda: f"{getattr(nvml.nvmlDeviceGetMemoryInfo(handle), name) >> 20} MiB")

    def ecc(which: int) -> str:
        return value(lambda: ("Disabled", "Enabled")[nvml.nvmlDeviceGetEccMode(handle)[which]])

    def counted(counter: int) -> list[str]:
        return [
            f"            {name:30}: {value(lambda kind=kind, place=place: nvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, counter, place))}"  # type: ignore[misc]
            for name, (kind, place) in COUNTERS.items()
        ]

    return [
        f"GPU {value(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)}",
        f"    Product Name                          : {value(lambda: nvml.nvmlDeviceGetName(handle))}",
        f"    GPU UUID                              : {value(lambda: nvml.nvmlDeviceGetUUID(handle))}",
        f"    VBIOS Version                         : {value(lambda: nvml.nvmlDeviceGetVbiosVersion(handle))}",
        f"    Module ID                             : {index + 1}",
        "    FB Memory Usage",
        f"        Total                             : {memory('total')}",
        f"        Used                              : {memory('used')}",
        f"        Free                              : {memory('free')}",
        "    ECC Mode",
        f"        Current                           : {ecc(0)}",
        f"        Pending                           : {ecc(1)}",
        "    ECC Errors",
        "        Volatile",
        *counted(0),
        "        Aggregate",
        *counted(1),
        "    Retired Pages",
        "        Single Bit ECC                    : N/A",
        "        Double Bit ECC                    : N/A",
        "    Temperature",
        f"        GPU Current Temp                  : {value(lambda: f'{nvml.nvmlDeviceGetTemperature(handle, 0)} C')}",
    ]
