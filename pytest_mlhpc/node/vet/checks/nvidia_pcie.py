"""PAYLOAD. Do PCIe links of NVIDIA GPUs run at their best while the devices compute? While idle they need not."""

from __future__ import annotations

from typing import Dict, List

from pytest_mlhpc.node.vet.checks import nvidia_load
from pytest_mlhpc.node.vet.checks.nvidia_library import Answer, Device, Library, Notes
from pytest_mlhpc.node.vet.checks.nvidia_load import Sample, seen_of
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Context, Machine


class Pcie:
    """Samples the PCIe link."""

    name = "nvidia_pcie"
    level = "quick"
    cost_s = 0.5
    reads = ("NVML: PCIe generation and width, now and at most, under load",)
    purpose = ""

    def begin(self, machine: Machine, context: Context) -> object:
        """Return the state before the load."""
        return nvidia_load.begin(machine, context)

    def sample(self, machine: Machine, state: object) -> object:
        """Return the state with what is seen now."""
        return nvidia_load.sample(machine, seen_of(state), _look_at_link)

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:  # noqa: ARG002 - of the protocol
        """Judge the best that each link has shown."""
        seen, notes = seen_of(state), Notes(self.name, context)
        if seen is None:
            return Outcome()
        for samples in seen.by_device().values():
            _judge_link(notes, samples)
        if seen.samples:
            notes.passed("PCIe links were at their best under load")
        elif not notes.findings:
            notes.info("there was no load to watch")
        return Outcome(tuple(notes.findings))


def _look_at_link(library: Library, device: Device) -> Dict[str, Answer]:
    return {
        what: library.ask(f"nvmlDeviceGet{what}", device.handle)
        for what in (
            "CurrPcieLinkWidth",
            "MaxPcieLinkWidth",
            "CurrPcieLinkGeneration",
            "MaxPcieLinkGeneration",
        )
    }


def _judge_link(notes: Notes, samples: List[Sample]) -> None:
    device = samples[-1].device
    for key, what, word in (
        ("pcie_width", "PcieLinkWidth", "lanes"),
        ("pcie_generation", "PcieLinkGeneration", "generation"),
    ):
        now = [one.values[f"Curr{what}"] for one in samples]
        most = [one.values[f"Max{what}"] for one in samples]
        best = max((one.value for one in now if one.ok), default=None)
        limit = max((one.value for one in most if one.ok), default=None)
        if best is None or limit is None:
            trouble = next(one for one in (*now, *most) if not one.ok)
            notes.unread(key, device, f"its PCIe {word}", trouble)
            continue
        if not limit:
            continue
        value = best / limit if key == "pcie_width" else limit - best
        text = (
            f"the PCIe link of {device.place} had {word} {best} of {limit} under load; "
            "have the board seated anew, and its slot and riser looked at"
        )
        notes.judge(key, value, text, device.label)


WATCHES = (Pcie(),)
