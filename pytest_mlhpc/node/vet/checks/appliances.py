"""Appliances as their hosts see them: Graphcore's IPUs by the SDK's tools, Cerebras' client."""

from __future__ import annotations

from typing import Dict, List, Optional

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable

#: The attribute by which an IPU tells how it is, and what it says when it is well.
STATE, WELL = "ipu error state", "no errors"

#: For one call of a tool, in seconds.
TIMEOUT_S = 6.0

#: Attributes that all IPUs of a board type should have in common.
ALIKE = ("driver version", "firmware version", "link speed", "link width")


def _judge_ipus(exam: Examination) -> Optional[str]:
    """Count IPUs, and name those whose error state is not "no errors"."""
    accelerator, least = exam.wanted.accelerator, exam.wanted.devices
    if accelerator not in ("auto", "ipu"):
        return None
    try:
        ipus = inventory(exam.machine, least or 1)
    except Absent:
        if accelerator == "auto":
            return None
        raise
    if least is None:
        least = 1 if accelerator == "ipu" else 0
    text = f"there are {len(ipus)} IPUs where {least} are described: check the partition of the pod (vipu)"
    exam.judge("graphcore.devices_missing", max(least - len(ipus), 0), text)
    if ipus and not any(STATE in ipu for ipu in ipus):
        exam.unknown(
            "graphcore.error_state",
            f"this SDK does not report the attribute {STATE!r} of IPUs: use a newer one",
        )
    else:
        for ipu in ipus:
            state = ipu.get(STATE, "not reported")
            text = (
                f"IPU {ipu['id']} says {STATE}: {state}; reset it, and have it checked if that does not help"
            )
            exam.judge("graphcore.error_state", int(state.lower() != WELL), text, ipu["id"])
    for ipu in ipus:
        for key in ALIKE:
            if ipu.get(key):
                exam.fact(f"ipu {key}", ipu[key], ipu.get("board type", ""), ipu["id"])
    return f"{len(ipus)} IPUs without errors" if ipus else None


def inventory(machine: Machine, ipus: int) -> List[Dict[str, str]]:
    """Return the attributes of each single IPU, by ``gc-inventory``, else by ``gc-info`` for the first *ipus*.

    Raises:
        Absent: neither is installed.
        Unreadable: they fail.
    """
    try:
        done = machine.command(["gc-inventory", "-j"], TIMEOUT_S)
    except Absent:
        return [_by_info(machine, place) for place in range(ipus)]
    try:
        listed = read_json(done.output)["devices"]
        found = [{str(key): str(value) for key, value in device.items()} for device in listed]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1][:200]
        raise Unreadable(
            f"gc-inventory -j (exit code {done.code}) does not list devices, it says: {message}"
        ) from error
    return [device for device in found if "id" in device and int(device.get("num ipus", "1") or 1) == 1]


def _by_info(machine: Machine, place: int) -> Dict[str, str]:
    done = machine.command(["gc-info", "--device-info", "-d", str(place)], TIMEOUT_S)
    found = {}
    for line in done.output.splitlines():
        key, between, value = line.partition(":")
        if between and value.strip():
            found[key.strip()] = value.strip()
    if done.code or "id" not in found:
        message = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1][:200]
        raise Unreadable(f"gc-info of IPU {place} fails (exit code {done.code}): {message}")
    return found


COMMAND = ("csctl", "get", "cluster", "--system-only")


def _judge_client(exam: Examination) -> Optional[str]:
    """Ask the appliance for its systems."""
    if exam.wanted.accelerator not in ("auto", "wse"):
        return None
    try:
        done = exam.machine.command(COMMAND, TIMEOUT_S)
    except Absent:
        if exam.wanted.accelerator == "auto":
            return None
        raise
    message = " ".join((done.errors if done.code else done.output).split())[:300]
    text = f"the appliance does not answer csctl (exit code {done.code}): {message or 'no message'}; ask its operators"
    exam.judge("cerebras.client", int(done.code != 0), text)
    return f"the appliance answers: {message}"


CHECKS = (
    Check.named("graphcore_ipus", _judge_ipus),
    Check.named("cerebras_client", _judge_client),
)
