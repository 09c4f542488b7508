"""The checks with the real nvidia-ml-py on a made-up NVML: structures go by reference, versions are right, texts are decoded."""
# ruff: noqa: N802 - names are those of the real library

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
from corpus import named, rows
from fake_nvml import FILLING, KEYS, MADE

from pytest_mlhpc.node.vet.finding import CheckOutcome
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import ExpectedNode, built_in

ARGUMENT_VERSION_MISMATCH = 25

#: Functions that write a text of C where an argument points, which place that has, and the text.
TEXTS = {
    "nvmlSystemGetDriverVersion": (0, b"560.35.03"),
    "nvmlDeviceGetName": (1, b"NVIDIA H200"),
    "nvmlDeviceGetUUID": (1, b"GPU-4a1f0c52"),
}

#: Functions that write one field of what their last argument refers to.
FIELDS = {
    "nvmlDeviceGetCount_v2": ("value", 1),
    "nvmlDeviceGetPciInfo_v3": ("busId", b"00000000:19:00.0"),
    "nvmlDeviceGetMemoryInfo": ("total", 143771 << 20),
    "nvmlDeviceGetNvLinkState": ("value", 1),
    "nvmlDeviceGetTotalEccErrors": ("value", 0),
    "nvmlDeviceGetSramEccErrorStatus": ("bThresholdExceeded", 1),
    "nvmlDeviceGetGpuFabricInfoV": ("state", pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS),
}

#: Versions that structures must say.
VERSIONS = {
    "nvmlDeviceGetSramEccErrorStatus": pynvml.nvmlEccSramErrorStatus_v1,
    "nvmlDeviceGetGpuFabricInfoV": pynvml.nvmlGpuFabricInfo_v2,
}


class Driver:
    """The functions of libnvidia-ml that the checks need, of one H200 with three faults. Any other one is not there."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in {*TEXTS, *FIELDS}:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name in TEXTS:
                place, text = TEXTS[name]
                arguments[place].value = text
                return 0
            referred = arguments[-1]._obj
            if name in VERSIONS and referred.version != VERSIONS[name]:
                return ARGUMENT_VERSION_MISMATCH
            setattr(referred, *FIELDS[name])
            return 0

        return call

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        return 0

    def nvmlDeviceGetEccMode(self, device: Any, now: Any, later: Any) -> int:
        now._obj.value = later._obj.value = 1
        return 0

    def nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> int:
        value = values._obj[0]
        assert (count.value, value.fieldId) == (1, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        value.value.ullVal = 0xDEADBEEF00000000
        value.valueType, value.value.uiVal = 1, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
        return 0

    def nvmlDeviceGetRemappedRows(self, device: Any, *counts: Any) -> int:
        for count, value in zip(counts, (0, 1, 0, 0), strict=True):
            count._obj.value = value
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Driver())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)


def examined(check: str) -> tuple[CheckOutcome, list[tuple[str, str]]]:
    """Return what a check says, and severity and rule of all that is not good."""
    context = Context(built_in(), ExpectedNode(accelerator="cuda", devices=1, device_model="H200"))
    outcome = named(check).examine(Machine(modules={"pynvml": pynvml}), context)
    return outcome, [row[1:3] for row in rows([outcome])]


def test_the_texts_of_a_device_are_read() -> None:
    outcome, trouble = examined("nvidia_inventory")
    assert trouble == []
    facts = {fact.name: fact.value for fact in outcome.facts}
    assert facts == {"nvidia driver": "560.35.03", "nvidia memory": "140GiB", "nvidia nvlinks": "18"}


def test_the_recovery_action_and_the_threshold_of_sram_are_read() -> None:
    outcome, trouble = examined("nvidia_memory")
    assert trouble == [("CRITICAL", "nvidia.recovery_action"), ("CRITICAL", "nvidia.sram_threshold")]
    place = "GPU 0 (00000000:19:00.0, GPU-4a1f0c52)"
    assert f"{place}: end all work that uses peer access" in outcome.findings[0].reason


def test_the_state_of_the_fabric_is_read() -> None:
    outcome, trouble = examined("nvidia_links")
    assert trouble == [("CRITICAL", "nvidia.fabric")]
    assert "is in progress" in outcome.findings[0].reason


def test_structures_are_those_of_c() -> None:
    assert ctypes.sizeof(pynvml.c_nvmlGpuFabricInfo_v2_t) == pynvml.nvmlGpuFabricInfo_v2 & 0xFFFFFF
    assert ctypes.sizeof(pynvml.c_nvmlEccSramErrorStatus_v1_t) == pynvml.nvmlEccSramErrorStatus_v1 & 0xFFFFFF


@pytest.mark.parametrize("name", sorted({*KEYS, *MADE, *FILLING}))
def test_every_function_with_an_answer_of_its_own_in_the_fake_is_a_real_one(name: str) -> None:
    assert callable(getattr(pynvml, name))
