"""A made-up ``pynvml``: constants, errors, structures and signatures of the installed nvidia-ml-py, values from a specification.

A specification, as in the fault corpus:

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
# ruff: noqa: N802 - names are those of the real module

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

NVMLError = pynvml.NVMLError

#: Name without its prefix -> number.
ERRORS = {
    name.removeprefix("NVML_ERROR_"): code
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}

#: Functions whose value depends on further arguments -> how a specification writes each of these.
KEYS: dict[str, tuple[Mapping[int, str], ...]] = {
    "nvmlDeviceGetTotalEccErrors": (
        {0: "corrected", 1: "uncorrected"},
        {0: "volatile", 1: "aggregate"},
    ),
    "nvmlDeviceGetMemoryErrorCounter": (
        {0: "corrected", 1: "uncorrected"},
        {0: "volatile", 1: "aggregate"},
        {0: "l1", 1: "l2", 2: "dram", 3: "registers", 4: "texture", 6: "cbu", 7: "sram"},
    ),
    "nvmlDeviceGetRetiredPages": ({0: "single", 1: "double"},),
    "nvmlDeviceGetNvLinkState": ({link: str(link) for link in range(64)},),
}


def _memory(total: int, used: int) -> pynvml.c_nvmlMemory_t:
    return pynvml.c_nvmlMemory_t(total=total, free=total - used, used=used)


#: Functions that return more than what a specification says -> how it is made of that.
MADE: dict[str, Callable[[Any], Any]] = {
    "nvmlDeviceGetPciInfo": lambda bus: pynvml.nvmlFriendlyObject({"busId": bus}),
    "nvmlDeviceGetMemoryInfo": lambda sizes: _memory(*sizes),
    "nvmlDeviceGetUtilizationRates": lambda share: pynvml.c_nvmlUtilization_t(gpu=share, memory=0),
    "nvmlDeviceGetRetiredPages": lambda count: [0x1000 * page for page in range(count)],
    "nvmlDeviceGetComputeRunningProcesses": lambda every: [pynvml.nvmlFriendlyObject(one) for one in every],
}

#: Functions that fill the structure to which their last argument refers, by ``ctypes.byref``.
FILLING = {"nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetSramEccErrorStatus"}


@functools.cache
def _numbers_of_arguments(name: str) -> range:
    parameters = inspect.signature(getattr(pynvml, name)).parameters.values()
    needed = sum(one.default is inspect.Parameter.empty for one in parameters)
    return range(needed, len(parameters) + 1)


class _Handle:
    def __init__(self, index: int) -> None:
        self.index = index


class FakeNvml:
    """The module, by a specification; ``inits`` is how often it is initialised and not shut down."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.inits = 0
        self._spec = spec
        self._calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name in (self._spec.get("missing") or ()):
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        real = getattr(pynvml, name)
        if not name.startswith(("nvmlDevice", "nvmlSystem")) or not callable(real):
            return real
        call = functools.partial(self._call, name)
        setattr(self, name, call)
        return call

    def _call(self, name: str, *given: Any) -> Any:
        """Answer as the real function would, of the device whose handle comes first, or of the system."""
        if len(given) not in _numbers_of_arguments(name):
            raise TypeError(f"{name} does not take {len(given)} arguments")
        if name.startswith("nvmlSystem"):
            return self._text(self._given("system", name, self._spec.get(name)))
        handle, *further = given
        if name == "nvmlDeviceGetFieldValues":
            return self._field_values(self._of(handle, name), *further)
        keys = [words[number] for words, number in zip(KEYS.get(name, ()), further, strict=False)]
        value = self._of(handle, name, "/".join(keys) or None)
        if name not in FILLING:
            return MADE.get(name, lambda same: same)(value)
        for field, content in value.items():
            setattr(further[0]._obj, field, content)
        return pynvml.NVML_SUCCESS

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
        return self._text(self._given(str(handle.index), name, value, key), handle.index)

    def _text(self, value: Any, index: int = 0) -> Any:
        if not isinstance(value, str):
            return value
        text = value.replace("{index}", str(index))
        return text.encode() if self._spec.get("bytes") else text

    def _field_values(self, given: Mapping[int, Any], identifiers: list[int]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(identifiers))()
        for value, identifier in zip(values, identifiers, strict=True):
            content = given.get(identifier, {"error": "NOT_SUPPORTED"})
            value.fieldId = identifier
            value.value.ullVal = 0xDEADBEEF00000000  # left over: only the field of its type counts
            if isinstance(content, Mapping):
                value.nvmlReturn = ERRORS[content["error"]]
            else:
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                value.value.uiVal = content
        return values

    def nvmlInit(self) -> None:
        error = (self._spec.get("init") or {}).get("error")
        if error:
            raise NVMLError(ERRORS[error])
        self.inits += 1

    def nvmlShutdown(self) -> None:
        if self.inits < 1:
            raise NVMLError(ERRORS["UNINITIALIZED"])
        self.inits -= 1

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        names = self._spec.get("nvmlSystemGetProcessName") or {}
        name = "nvmlSystemGetProcessName"
        return self._text(self._given("system", name, names.get(pid, {"error": "NOT_FOUND"})))

    def nvmlDeviceGetCount(self) -> Any:
        return self._given("system", "nvmlDeviceGetCount", self._spec.get("count", 0))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        if not 0 <= index < int(self._spec.get("count", 0)):
            raise NVMLError(ERRORS["INVALID_ARGUMENT"])
        own = (self._spec.get("devices") or {}).get(index) or {}
        self._given(str(index), "handle", own.get("handle", "granted"))
        return _Handle(index)
