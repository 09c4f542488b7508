"""amdsmi as far as vetting asks it, with the names, arguments, answers and errors of five real releases.

What is written down here was read in the sources of the releases in ``RELEASES`` (``amdsmi_interface.py``, ``amdsmi_exception.py`` and
``amdsmi_wrapper.py`` of the package ``amdsmi``, also ``py-interface/`` of github.com/ROCm/amdsmi). Between them differ:

- functions that came later (``SINCE``);
- the key of the memory's size: ``vram_size_mb`` until 6.1.2, ``vram_size`` from 6.2.4 on, both in MiB;
- ``throttle_status`` and ``indep_throttle_status``: integers in 6.0.2, from 6.1.2 on True or False, so that the bits are lost;
- what a device does not support: 0xFFFF, 0xFFFFFFFF or 0xFFFFFFFFFFFFFFFF by the field's width in 6.0.2, 'N/A' later.

A specification holds what the C library gives, from which the fake makes what the release makes of it::

    release: 7.0.2
    init: {error: 34}            # optional: amdsmi_init fails with this status
    devices:
      - bdf: "0000:05:00.0"
        total_ecc_count: {correctable_count: 0, uncorrectable_count: 0, deferred_count: 0}
        xgmi_link_status: {error: 2}

A device's keys are functions without ``amdsmi_get_`` and ``gpu_``. ``{error: N}`` raises AmdSmiLibraryException with that status,
``{raises: text}`` something else; what is not given is not supported (status 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import yaml

RELEASES = ("6.0.2", "6.1.2", "6.2.4", "6.3.3", "7.0.2")

_TABLES = yaml.safe_load(Path(__file__).with_name("fake_amdsmi.yaml").read_text())

#: Functions that take a processor's handle alone: name -> key of the specification.
OF_A_DEVICE: dict[str, str] = _TABLES["functions"]

#: Functions that not all of these releases have: the first that does.
SINCE: dict[str, str] = _TABLES["since"]

UNKNOWN_STATUS = "AMDSMI_STATUS_UNKNOWN_ERROR - An unknown error occurred"
UNSUPPORTED = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


AmdSmiInitFlags = IntEnum("AmdSmiInitFlags", _TABLES["init_flags"])
AmdSmiRasErrState = IntEnum("AmdSmiRasErrState", _TABLES["ras_states"])


class AmdSmiException(Exception):  # noqa: N818 - the library's name
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = abs(err_code)
        self.err_info = _TABLES["status"].get(self.err_code, UNKNOWN_STATUS)

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"

    def get_error_code(self) -> int:
        return self.err_code

    def get_error_info(self, detailed: bool = True) -> str:
        return self.err_info if detailed else self.err_info.split(" - ")[0]


class AmdSmiParameterException(AmdSmiException):
    pass


class Handle:
    """amdsmi_processor_handle: opaque."""

    def __init__(self, device: Mapping[str, Any]) -> None:
        self.device = device


class FakeAmdsmi:
    """The module."""

    AmdSmiInitFlags = AmdSmiInitFlags
    AmdSmiRasErrState = AmdSmiRasErrState
    AmdSmiException = AmdSmiException
    AmdSmiLibraryException = AmdSmiLibraryException
    AmdSmiParameterException = AmdSmiParameterException

    def __init__(self, specification: Mapping[str, Any]) -> None:
        self.release = str(specification.get("release", RELEASES[-1]))
        if self.release not in RELEASES:
            raise ValueError(f"fake amdsmi knows the releases {RELEASES}, not {self.release}")
        self.__version__ = self.release
        self._specification = specification
        self._open = 0

    def amdsmi_init(self, flag: Any = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
        if not isinstance(flag, AmdSmiInitFlags):
            raise AmdSmiParameterException(flag)
        _raise(self._specification.get("init"))
        self._open += 1

    def amdsmi_shut_down(self) -> None:
        self._ready()
        self._open -= 1

    def amdsmi_get_lib_version(self) -> dict[str, Any]:
        return {"major": 26, "minor": 0, "release": 0, "build": "0"}

    def amdsmi_get_processor_handles(self) -> list[Handle]:
        self._ready()
        return [Handle(device) for device in self._specification.get("devices", ())]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        key = OF_A_DEVICE.get(name)
        if key is None or RELEASES.index(self.release) < RELEASES.index(SINCE.get(name, RELEASES[0])):
            raise AttributeError(f"module 'amdsmi' has no attribute {name!r}")

        def call(processor_handle: Handle) -> Any:
            self._ready()
            if not isinstance(processor_handle, Handle):
                raise AmdSmiParameterException(processor_handle)
            raw = processor_handle.device.get(key, {"error": 2})
            _raise(raw)
            made = getattr(self, f"_{key}", None)
            return made(raw) if made else self._validated(raw)

        return call

    def _ready(self) -> None:
        if not self._open:
            raise AmdSmiLibraryException(32)

    def _validated(self, raw: Any) -> Any:
        """What is not supported is 'N/A' after 6.0.2."""
        if isinstance(raw, Mapping):
            return {key: self._validated(value) for key, value in raw.items()}
        if isinstance(raw, list):
            return [self._validated(value) for value in raw]
        return "N/A" if raw in UNSUPPORTED and self.release != "6.0.2" else raw

    def _asic_info(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        made = {"vendor_id": 0x1002, "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]", **raw}
        made["market_name"] = made.get("market_name") or "N/A"
        for key in ("vendor_id", "device_id"):
            made[key] = hex(made[key]) if made.get(key) else "N/A"
        if self.release in {"6.0.2", "6.1.2", "6.2.4"}:
            made.pop("num_compute_units", None)
            made.pop("target_graphics_version", None)
        return dict(self._validated(made))

    def _vram_info(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        made = {"vram_type": 4, "vram_vendor": "", **raw}
        if self.release in {"6.0.2", "6.1.2"}:
            made["vram_size_mb"] = made.pop("vram_size")
        return made

    def _bad_page_info(self, raw: list[Mapping[str, int]]) -> list[dict[str, int]]:
        """``{status, times}`` stands for that many pages."""
        pages = [one["status"] for one in raw for _ in range(one.get("times", 1))]
        return [
            {"value": place, "page_address": 0x1000 * (place + 1), "page_size": 0x1000, "status": status}
            for place, status in enumerate(pages)
        ]

    def _ras_blocks(self, raw: Mapping[str, int]) -> list[dict[str, str]]:
        return [
            {"block": block, "status": AmdSmiRasErrState(raw.get(block, AmdSmiRasErrState.DISABLED)).name}
            for block in _TABLES["blocks"]
        ]

    def _metrics(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        made = {"throttle_status": 0xFFFFFFFF, "indep_throttle_status": 0xFFFFFFFFFFFFFFFF, **raw}
        if self.release == "6.0.2":
            return made
        for key in ("throttle_status", "indep_throttle_status"):
            made[key] = "N/A" if made[key] in UNSUPPORTED else bool(made[key])
        return dict(self._validated(made))

    def _xgmi_link_status(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        states = [_TABLES["links"].get(state, "N/A") for state in raw["status"]]
        return {"status": states[: raw["total_links"]], "total_links": raw["total_links"]}


def _raise(raw: Any) -> None:
    if isinstance(raw, Mapping) and "error" in raw:
        raise AmdSmiLibraryException(raw["error"])
    if isinstance(raw, Mapping) and "raises" in raw:
        raise RuntimeError(raw["raises"])
