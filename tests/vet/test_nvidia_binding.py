"""The checks with the real nvidia-ml-py on a made-up NVML: structures go by reference, versions are right, texts are decoded."""
# ruff: noqa: N802 - names are those of the real library

from __future__ import annotations

import ctypes
from typing import Any

import pynvml
import pytest

from pytest_mlhpc.vet.check import Context, Wanted
from pytest_mlhpc.vet.checks.nvidia_inventory import Inventory
from pytest_mlhpc.vet.checks.nvidia_links import Links
from pytest_mlhpc.vet.checks.nvidia_memory import Memory
from pytest_mlhpc.vet.finding import Outcome, Severity
from pytest_mlhpc.vet.machine import Machine
from pytest_mlhpc.vet.policy import built_in

ARGUMENT_VERSION_MISMATCH = 25


def put(reference: Any, value: Any) -> int:
    """Write to what C would have got as a pointer."""
    reference._obj.value = value
    return 0


class Driver:
    """The functions of libnvidia-ml that the checks need, of one H200 with three faults. Any other one is not there."""

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return put(count, 1)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"560.35.03"
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, size: Any) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:
        text.value = b"GPU-4a1f0c52"
        return 0

    def nvmlDeviceGetPciInfo_v3(self, device: Any, info: Any) -> int:
        info._obj.busId = b"00000000:19:00.0"
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = 143771 << 20
        return 0

    def nvmlDeviceGetEccMode(self, device: Any, now: Any, later: Any) -> int:
        return put(now, 1) + put(later, 1)

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, state: Any) -> int:
        return put(state, 1)

    def nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> int:
        value = values._obj[0]
        assert (count.value, value.fieldId) == (1, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        value.value.ullVal = 0xDEADBEEF00000000
        value.valueType, value.value.uiVal = 1, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
        return 0

    def nvmlDeviceGetRemappedRows(self, device: Any, *counts: Any) -> int:
        return sum(put(count, value) for count, value in zip(counts, (0, 1, 0, 0), strict=True))

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: Any, counter: Any, count: Any) -> int:
        assert (kind.value, counter.value) == (
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        return put(count, 0)

    def nvmlDeviceGetSramEccErrorStatus(self, device: Any, status: Any) -> int:
        if status._obj.version != pynvml.nvmlEccSramErrorStatus_v1:
            return ARGUMENT_VERSION_MISMATCH
        status._obj.bThresholdExceeded = 1
        return 0

    def nvmlDeviceGetGpuFabricInfoV(self, device: Any, info: Any) -> int:
        if info._obj.version != pynvml.nvmlGpuFabricInfo_v2:
            return ARGUMENT_VERSION_MISMATCH
        info._obj.state = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Driver())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)


def seen(check: Any) -> tuple[Outcome, list[tuple[str, str]]]:
    context = Context(built_in(), Wanted(accelerator="cuda", devices=1, device_model="H200"))
    outcome = check.examine(Machine(modules={"pynvml": pynvml}), context)
    good = (Severity.PASS, Severity.INFO)
    return outcome, [(one.severity.value, one.rule) for one in outcome.findings if one.severity not in good]


def test_a_devices_own_words_are_read() -> None:
    outcome, trouble = seen(Inventory())
    assert trouble == []
    facts = {fact.name: fact.value for fact in outcome.facts}
    assert facts == {"nvidia driver": "560.35.03", "nvidia memory": "140GiB", "nvidia nvlinks": "18"}


def test_the_recovery_action_and_the_threshold_of_sram_are_read() -> None:
    outcome, trouble = seen(Memory())
    assert trouble == [("CRITICAL", "nvidia.recovery_action"), ("CRITICAL", "nvidia.sram_threshold")]
    assert (
        "GPU 0 (00000000:19:00.0, GPU-4a1f0c52): end all work that uses peer access"
        in outcome.findings[0].reason
    )


def test_the_state_of_the_fabric_is_read() -> None:
    outcome, trouble = seen(Links())
    assert trouble == [("CRITICAL", "nvidia.fabric")]
    assert "is in progress" in outcome.findings[0].reason


def test_structures_are_those_of_c() -> None:
    assert ctypes.sizeof(pynvml.c_nvmlGpuFabricInfo_v2_t) == pynvml.nvmlGpuFabricInfo_v2 & 0xFFFFFF
    assert ctypes.sizeof(pynvml.c_nvmlEccSramErrorStatus_v1_t) == pynvml.nvmlEccSramErrorStatus_v1 & 0xFFFFFF
