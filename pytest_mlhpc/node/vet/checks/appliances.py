"""Appliances as their hosts see them: Graphcore's IPUs by the SDK's tools, Cerebras' client."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine, Unreadable

#: The attribute by which an IPU tells how it is, and what it says when it is well.
STATE, WELL = "ipu error state", "no errors"

#: For one call of a tool, in seconds.
TIMEOUT_S = 6.0

#: Attributes that all IPUs of a board type should have in common.
ALIKE = ("driver version", "firmware version", "link speed", "link width")


class GraphcoreIpus:
    """Counts IPUs, and names those whose error state is not "no errors"."""

    name = "graphcore_ipus"
    level = "quick"
    cost_s = 2.0
    reads: Tuple[str, ...] = ("gc-inventory -j", "gc-info --device-info")
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look, and say what was seen."""
        accelerator = context.wanted.accelerator
        if accelerator not in ("auto", "ipu"):
            return CheckOutcome()
        try:
            ipus = inventory(machine, context.wanted.devices or 1)
        except Absent:
            if accelerator == "auto":
                return CheckOutcome()
            raise
        findings = [*self._count(context, ipus), *self._states(context, ipus)]
        if not findings and ipus:
            findings = [Finding(self.name, Severity.PASS, f"{len(ipus)} IPUs without errors")]
        return CheckOutcome(tuple(findings), facts=_facts(ipus))

    def _count(self, context: Context, ipus: List[Dict[str, str]]) -> List[Finding]:
        least = context.wanted.devices
        if least is None:
            least = 1 if context.wanted.accelerator == "ipu" else 0
        missing = max(least - len(ipus), 0)
        bound = context.policy["graphcore.devices_missing"]
        if not bound.reached(missing, bound.fail):
            return []
        reason = (
            f"there are {len(ipus)} IPUs where {least} are described: check the partition of the pod (vipu)"
        )
        return [
            Finding(
                self.name, Severity.CRITICAL, reason, rule=bound.key, metric="devices", value=float(missing)
            )
        ]

    def _states(self, context: Context, ipus: List[Dict[str, str]]) -> List[Finding]:
        bound = context.policy["graphcore.error_state"]
        if ipus and not any(STATE in ipu for ipu in ipus):
            reason = f"this SDK does not report the attribute {STATE!r} of IPUs: use a newer one"
            return [Finding(self.name, Severity.UNKNOWN, reason, rule=bound.key)]
        findings = []
        for ipu in ipus:
            state = ipu.get(STATE, "not reported")
            if bound.reached(state.lower() != WELL, bound.fail):
                reason = f"IPU {ipu['id']} says {STATE}: {state}; reset it, and have it checked if that does not help"
                findings.append(Finding(self.name, Severity.CRITICAL, reason, ipu["id"], bound.key))
        return findings


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
        found = [_texts(device) for device in listed]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        words = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1][:200]
        raise Unreadable(
            f"gc-inventory -j (exit code {done.code}) does not list devices, it says: {words}"
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
        words = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1][:200]
        raise Unreadable(f"gc-info of IPU {place} fails (exit code {done.code}): {words}")
    return found


def _texts(device: Mapping[str, Any]) -> Dict[str, str]:
    return {str(key): str(value) for key, value in device.items()}


def _facts(ipus: List[Dict[str, str]]) -> Tuple[Fact, ...]:
    return tuple(
        Fact(GraphcoreIpus.name, f"ipu {key}", ipu[key], ipu.get("board type", ""), ipu["id"])
        for ipu in ipus
        for key in ALIKE
        if ipu.get(key)
    )


COMMAND = ("csctl", "get", "cluster", "--system-only")

#: An appliance that takes longer does not answer, in seconds.


class CerebrasClient:
    """Asks the appliance for its systems."""

    name = "cerebras_client"
    level = "quick"
    cost_s = 2.0
    reads: Tuple[str, ...] = (" ".join(COMMAND),)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look, and say what was seen."""
        accelerator = context.wanted.accelerator
        if accelerator not in ("auto", "wse"):
            return CheckOutcome()
        try:
            done = machine.command(COMMAND, TIMEOUT_S)
        except Absent:
            if accelerator == "auto":
                return CheckOutcome()
            raise
        bound = context.policy["cerebras.client"]
        words = " ".join((done.errors if done.code else done.output).split())[:300]
        if bound.reached(done.code != 0, bound.fail):
            reason = f"the appliance does not answer csctl (exit code {done.code}): {words or 'no words'}; ask its operators"
            return CheckOutcome((Finding(self.name, Severity.CRITICAL, reason, rule=bound.key),))
        return CheckOutcome((Finding(self.name, Severity.PASS, f"the appliance answers: {words}"),))


CHECKS: Tuple[Check, ...] = (
    GraphcoreIpus(),
    CerebrasClient(),
)
