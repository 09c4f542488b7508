"""A made-up ``pynvml`` (nvidia-ml-py): names, signatures, constants, structures and errors of the real one, values from a specification.

``test_fake_nvml.py`` compares all that is here with the real module, so that it cannot drift. A specification, as in the
fault corpus:

count                 devices; or ``{error: NAME}``
device                {function: value} of every device; ``{index}`` in a text is its number
devices               {index: {function: value}} laid over ``device``, mappings key by key; ``handle: {error: GPU_IS_LOST}`` refuses the handle
init                  ``{error: DRIVER_NOT_LOADED}``: what ``nvmlInit`` raises
missing               functions and structures that this nvidia-ml-py does not have
unknown               functions that this driver does not have (``FunctionNotFound``)
bytes                 true: texts are bytes, as before nvidia-ml-py 11.5
nvmlSystemGet...      values of functions of the system, by name

A value is ``{error: NAME}`` (of ``NVML_ERROR_NAME``), ``{then: [first, second, ...]}`` for one call after the other (the last
stays), or the value. Of functions with more arguments than the handle it may be a mapping from them
(``uncorrected/volatile/dram``, a link's number) with ``default``. What is not there is NotSupported.
"""
# ruff: noqa: N801, N802, N803 - names are those of the real module

from __future__ import annotations

import ctypes
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

ERRORS = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "INSUFFICIENT_POWER": 8,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "IRQ_ISSUE": 11,
    "LIBRARY_NOT_FOUND": 12,
    "FUNCTION_NOT_FOUND": 13,
    "CORRUPTED_INFOROM": 14,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "IN_USE": 19,
    "MEMORY": 20,
    "NO_DATA": 21,
    "VGPU_ECC_NOT_SUPPORTED": 22,
    "ARGUMENT_VERSION_MISMATCH": 25,
    "NOT_READY": 27,
    "GPU_NOT_FOUND": 28,
    "INVALID_STATE": 29,
    "UNKNOWN": 999,
}

CONSTANTS = {
    "NVML_SUCCESS": 0,
    **{f"NVML_ERROR_{name}": code for name, code in ERRORS.items()},
    "NVML_FEATURE_DISABLED": 0,
    "NVML_FEATURE_ENABLED": 1,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_AGGREGATE_ECC": 1,
    "NVML_MEMORY_LOCATION_L1_CACHE": 0,
    "NVML_MEMORY_LOCATION_L2_CACHE": 1,
    "NVML_MEMORY_LOCATION_DRAM": 2,
    "NVML_MEMORY_LOCATION_REGISTER_FILE": 3,
    "NVML_MEMORY_LOCATION_TEXTURE_MEMORY": 4,
    "NVML_MEMORY_LOCATION_SRAM": 7,
    "NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS": 0,
    "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR": 1,
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230,
    "NVML_GPU_RECOVERY_ACTION_NONE": 0,
    "NVML_GPU_RECOVERY_ACTION_GPU_RESET": 1,
    "NVML_GPU_RECOVERY_ACTION_NODE_REBOOT": 2,
    "NVML_GPU_RECOVERY_ACTION_DRAIN_P2P": 3,
    "NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET": 4,
    "NVML_VALUE_TYPE_DOUBLE": 0,
    "NVML_VALUE_TYPE_UNSIGNED_INT": 1,
    "NVML_VALUE_TYPE_UNSIGNED_LONG": 2,
    "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG": 3,
    "NVML_GPU_FABRIC_STATE_NOT_SUPPORTED": 0,
    "NVML_GPU_FABRIC_STATE_NOT_STARTED": 1,
    "NVML_GPU_FABRIC_STATE_IN_PROGRESS": 2,
    "NVML_GPU_FABRIC_STATE_COMPLETED": 3,
    "nvmlClocksEventReasonGpuIdle": 0x1,
    "nvmlClocksEventReasonApplicationsClocksSetting": 0x2,
    "nvmlClocksEventReasonSwPowerCap": 0x4,
    "nvmlClocksEventReasonHwSlowdown": 0x8,
    "nvmlClocksEventReasonSyncBoost": 0x10,
    "nvmlClocksEventReasonSwThermalSlowdown": 0x20,
    "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
    "nvmlClocksEventReasonDisplayClockSetting": 0x100,
    "nvmlGpuFabricInfo_v2": 0x02000024,
    "nvmlEccSramErrorStatus_v1": 0x1000068,
}

_TYPES = {0: "corrected", 1: "uncorrected"}
_COUNTERS = {0: "volatile", 1: "aggregate"}
_LOCATIONS = {0: "l1", 1: "l2", 2: "dram", 3: "registers", 4: "texture", 6: "cbu", 7: "sram"}
_CAUSES = {0: "single", 1: "double"}


class NVMLError(Exception):
    """The base of all errors; ``NVMLError(code)`` makes the class of that code, as the real one does."""

    _classes: dict[int, type[NVMLError]] = {}  # noqa: RUF012 - filled below, once

    def __new__(cls, value: int) -> NVMLError:  # noqa: PYI034 - one of its classes, not always this
        error = Exception.__new__(cls._classes.get(value, cls) if cls is NVMLError else cls)
        error.value = value
        return error

    def __str__(self) -> str:
        names = {code: name for name, code in ERRORS.items()}
        return names.get(self.value, f"NVML Error with code {self.value}").replace("_", " ").capitalize()

    def __eq__(self, other: object) -> bool:  # as the real one, which therefore cannot be hashed
        return self.value == getattr(other, "value", None)

    __hash__ = None  # type: ignore[assignment]


def _error_class(name: str, code: int) -> type[NVMLError]:
    def new(cls: type, *_args: object) -> NVMLError:
        return NVMLError.__new__(cls, code)

    return type("NVMLError_" + string.capwords(name, "_").replace("_", ""), (NVMLError,), {"__new__": new})


NVMLError._classes.update({code: _error_class(name, code) for name, code in ERRORS.items()})


class c_nvmlValue_t(ctypes.Union):
    _fields_ = (
        ("dVal", ctypes.c_double),
        ("uiVal", ctypes.c_uint),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong),
        ("sllVal", ctypes.c_longlong),
        ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    )


class c_nvmlFieldValue_t(ctypes.Structure):
    _fields_ = (
        ("fieldId", ctypes.c_uint32),
        ("scopeId", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latencyUsec", ctypes.c_int64),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", c_nvmlValue_t),
    )


class c_nvmlMemory_t(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class c_nvmlUtilization_t(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )

    def __init__(self) -> None:
        super().__init__(version=CONSTANTS["nvmlGpuFabricInfo_v2"])


class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("aggregateUncParity", ctypes.c_ulonglong),
        ("aggregateUncSecDed", ctypes.c_ulonglong),
        ("aggregateCor", ctypes.c_ulonglong),
        ("volatileUncParity", ctypes.c_ulonglong),
        ("volatileUncSecDed", ctypes.c_ulonglong),
        ("volatileCor", ctypes.c_ulonglong),
        ("aggregateUncBucketL2", ctypes.c_ulonglong),
        ("aggregateUncBucketSm", ctypes.c_ulonglong),
        ("aggregateUncBucketPcie", ctypes.c_ulonglong),
        ("aggregateUncBucketMcu", ctypes.c_ulonglong),
        ("aggregateUncBucketOther", ctypes.c_ulonglong),
        ("bThresholdExceeded", ctypes.c_uint),
    )

    def __init__(self) -> None:
        super().__init__(version=CONSTANTS["nvmlEccSramErrorStatus_v1"])


STRUCTURES = (
    c_nvmlValue_t,
    c_nvmlFieldValue_t,
    c_nvmlMemory_t,
    c_nvmlUtilization_t,
    c_nvmlGpuFabricInfo_v2_t,
    c_nvmlEccSramErrorStatus_v1_t,
)


class _Friendly:
    """As ``nvmlFriendlyObject``: what lists of processes are made of."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


class _Handle:
    def __init__(self, index: int) -> None:
        self.index = index


class FakeNvml:
    """The module, by a specification; ``inits`` is how often it is initialised and not shut down."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.inits = 0
        self._spec = spec
        self._missing = set(spec.get("missing") or ())
        self._calls: Counter[str] = Counter()
        self.NVMLError = NVMLError
        for error in NVMLError._classes.values():
            setattr(self, error.__name__, error)
        for name, value in (*CONSTANTS.items(), *((one.__name__, one) for one in STRUCTURES)):
            setattr(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._missing:
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        return super().__getattribute__(name)

    # -- values ---------------------------------------------------------------------------------------------------------

    def _given(self, place: str, name: str, value: Any, key: str | None = None) -> Any:
        """Return what the specification says of one call, or raise its error."""
        if name in (self._spec.get("unknown") or ()):
            raise NVMLError(ERRORS["FUNCTION_NOT_FOUND"])
        if self.inits < 1:
            raise NVMLError(ERRORS["UNINITIALIZED"])
        if key is not None and isinstance(value, Mapping) and not {"error", "then"} & set(value):
            found = value.get(key, value.get("default"))
            value = value.get(int(key), found) if key.isdigit() else found
        if isinstance(value, Mapping) and "then" in value:
            mark = f"{place}.{name}.{key}"
            turns = value["then"]
            value = turns[min(self._calls[mark], len(turns) - 1)]
            self._calls[mark] += 1
        if isinstance(value, Mapping) and "error" in value:
            raise NVMLError(ERRORS[value["error"]])
        if value is None:
            raise NVMLError(ERRORS["NOT_SUPPORTED"])
        return value

    def _of(self, handle: _Handle, name: str, key: str | None = None) -> Any:
        own = (self._spec.get("devices") or {}).get(handle.index) or {}
        value = (self._spec.get("device") or {}).get(name)
        if isinstance(value, Mapping) and isinstance(own.get(name), Mapping):
            value = {**value, **own[name]}
        else:
            value = own.get(name, value)
        given = self._given(str(handle.index), name, value, key)
        return self._text(given, handle.index) if isinstance(given, str) else given

    def _text(self, text: str, index: int = 0) -> Any:
        text = text.replace("{index}", str(index))
        return text.encode() if self._spec.get("bytes") else text

    def _system(self, name: str) -> Any:
        given = self._given("system", name, self._spec.get(name))
        return self._text(given) if isinstance(given, str) else given

    # -- the library ----------------------------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        error = (self._spec.get("init") or {}).get("error")
        if error:
            raise NVMLError(ERRORS[error])
        self.inits += 1

    def nvmlShutdown(self) -> None:
        if self.inits < 1:
            raise NVMLError(ERRORS["UNINITIALIZED"])
        self.inits -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._system("nvmlSystemGetDriverVersion")

    def nvmlSystemGetCudaDriverVersion(self) -> Any:
        return self._system("nvmlSystemGetCudaDriverVersion")

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        names = self._spec.get("nvmlSystemGetProcessName") or {}
        given = self._given("system", "nvmlSystemGetProcessName", names.get(pid, {"error": "NOT_FOUND"}))
        return self._text(given)

    def nvmlDeviceGetCount(self) -> Any:
        return self._given("system", "nvmlDeviceGetCount", self._spec.get("count", 0))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        if not 0 <= index < int(self._spec.get("count", 0)):
            raise NVMLError(ERRORS["INVALID_ARGUMENT"])
        own = (self._spec.get("devices") or {}).get(index) or {}
        self._given(str(index), "handle", own.get("handle", "granted"))
        return _Handle(index)

    # -- a device -------------------------------------------------------------------------------------------------------

    def nvmlDeviceGetName(self, handle: _Handle) -> Any:
        return self._of(handle, "nvmlDeviceGetName")

    def nvmlDeviceGetUUID(self, handle: _Handle) -> Any:
        return self._of(handle, "nvmlDeviceGetUUID")

    def nvmlDeviceGetVbiosVersion(self, handle: _Handle) -> Any:
        return self._of(handle, "nvmlDeviceGetVbiosVersion")

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> Any:
        return _Friendly({"busId": self._of(handle, "nvmlDeviceGetPciInfo")})

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle, version: int | None = None) -> c_nvmlMemory_t:
        total, used = self._of(handle, "nvmlDeviceGetMemoryInfo")
        return c_nvmlMemory_t(total=total, free=total - used, used=used)

    def nvmlDeviceGetEccMode(self, handle: _Handle) -> list[int]:
        return list(self._of(handle, "nvmlDeviceGetEccMode"))

    def nvmlDeviceGetMigMode(self, device: _Handle) -> list[int]:
        return list(self._of(device, "nvmlDeviceGetMigMode"))

    def nvmlDeviceGetPersistenceMode(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetPersistenceMode"))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetEnforcedPowerLimit"))

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        return int(self._of(handle, "nvmlDeviceGetTemperature"))

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> c_nvmlUtilization_t:
        return c_nvmlUtilization_t(gpu=self._of(handle, "nvmlDeviceGetUtilizationRates"), memory=0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetCurrentClocksEventReasons"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetCurrentClocksThrottleReasons"))

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetCurrPcieLinkGeneration"))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetMaxPcieLinkGeneration"))

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetCurrPcieLinkWidth"))

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetMaxPcieLinkWidth"))

    def nvmlDeviceGetNvLinkState(self, device: _Handle, link: int) -> int:
        return int(self._of(device, "nvmlDeviceGetNvLinkState", str(link)))

    def nvmlDeviceGetRemappedRows(self, device: _Handle) -> tuple[int, ...]:
        return tuple(self._of(device, "nvmlDeviceGetRemappedRows"))

    def nvmlDeviceGetRetiredPages(self, device: _Handle, sourceFilter: int) -> list[int]:
        count = self._of(device, "nvmlDeviceGetRetiredPages", _CAUSES[sourceFilter])
        return [0x1000 * page for page in range(count)]

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: _Handle) -> int:
        return int(self._of(device, "nvmlDeviceGetRetiredPagesPendingStatus"))

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, errorType: int, counterType: int) -> int:
        key = f"{_TYPES[errorType]}/{_COUNTERS[counterType]}"
        return int(self._of(handle, "nvmlDeviceGetTotalEccErrors", key))

    def nvmlDeviceGetMemoryErrorCounter(
        self,
        handle: _Handle,
        errorType: int,
        counterType: int,
        locationType: int,
    ) -> int:
        key = f"{_TYPES[errorType]}/{_COUNTERS[counterType]}/{_LOCATIONS[locationType]}"
        return int(self._of(handle, "nvmlDeviceGetMemoryErrorCounter", key))

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fieldIds: list[int]) -> Any:
        given = self._of(handle, "nvmlDeviceGetFieldValues")
        values = (c_nvmlFieldValue_t * len(fieldIds))()
        for value, ident in zip(values, fieldIds, strict=True):
            content = given.get(ident, {"error": "NOT_SUPPORTED"})
            value.fieldId = ident
            value.value.ullVal = (
                0xDEADBEEF00000000  # what was there before: only the field of its type counts
            )
            if isinstance(content, Mapping):
                value.nvmlReturn = ERRORS[content["error"]]
            else:
                value.valueType = CONSTANTS["NVML_VALUE_TYPE_UNSIGNED_INT"]
                value.value.uiVal = content
        return values

    def nvmlDeviceGetComputeRunningProcesses(self, handle: _Handle) -> list[_Friendly]:
        return [_Friendly(one) for one in self._of(handle, "nvmlDeviceGetComputeRunningProcesses")]

    def nvmlDeviceGetGpuFabricInfoV(self, device: _Handle, gpuFabricInfo: Any) -> int:
        self._fill(gpuFabricInfo, self._of(device, "nvmlDeviceGetGpuFabricInfoV"))
        return 0

    def nvmlDeviceGetSramEccErrorStatus(self, device: _Handle, status: Any) -> int:
        self._fill(status, self._of(device, "nvmlDeviceGetSramEccErrorStatus"))
        return 0

    @staticmethod
    def _fill(reference: Any, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            setattr(
                reference._obj, name, value
            )  # a structure by ``ctypes.byref``, as the real functions need it


FUNCTIONS = tuple(name for name in vars(FakeNvml) if name.startswith("nvml"))
