"""README's table of systems by workloads by modes, from what tests ran (``features.json``, see ``feature_evidence.py``).

``python tests/feature_table.py`` writes it between its two markers; ``make features`` runs all tests before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE, README = ROOT / "tests/features.json", ROOT / "README.md"
START, END = "<!-- features: start -->", "<!-- features: end -->"

WORKLOADS = ("cosmoflow", "deepcam", "resnet50", "language_model")
MODES = (
    "timed", "to quality", "bagging", "sharded", "characterised", "lowered", "compiled", "CPU back-end", "stand-in",
)  # fmt: skip
#: Modes in which the device itself took no part.
_WITHOUT_DEVICE = {"lowered", "compiled", "CPU back-end", "stand-in"}

#: Systems that are told apart by their scheduler, all on CPUs, and devices: name, module in worker/accelerators, remark.
_SCHEDULERS = ("this machine", "Slurm", "Kubernetes")
_DEVICES = (
    ("NVIDIA GPUs", "cuda", ""),
    ("AMD GPUs", "rocm", ""),
    ("Intel GPUs", "xpu", ""),
    ("Cerebras", "wse", ""),
    ("Graphcore", "ipu", "archived"),
)

Evidence = Mapping[str, Sequence[Sequence[str]]]


def table(evidence: Evidence, accelerators: Path = ROOT / "pytest_mlhpc/worker/accelerators") -> str:
    """Return the table as Markdown. A device that no test had says so, and one that has no code yet."""
    found = {tuple(one) for of_test in evidence.values() for one in of_test}
    rows = [
        _row(f"CPUs, {system}", {(w, m) for s, d, w, m in found if (s, d) == (system, "cpu")}, "")
        for system in _SCHEDULERS
    ]
    for name, device, remark in _DEVICES:
        told = {(workload, mode) for _, of_run, workload, mode in found if of_run == device}
        rows.append(_row(name, told, _state(device, told, remark, accelerators)))
    head = ["| system | " + " | ".join(WORKLOADS) + " | besides |", "|---" * (len(WORKLOADS) + 2) + "|"]
    return "\n".join([*head, *rows])


def _state(device: str, told: set[tuple[str, str]], remark: str, accelerators: Path) -> str:
    """Return what a row says of a device beside its cells."""
    if not (accelerators / f"{device}.py").is_file() and not (accelerators / device).is_dir():
        return ", ".join(word for word in (remark, "not yet") if word)
    modes = {mode for _, mode in told}
    if modes - _WITHOUT_DEVICE:
        return remark
    known = "lowered only" if "lowered" in modes else "needs hardware, not run"
    return ", ".join(word for word in (remark, known) if word)


def _row(name: str, told: set[tuple[str, str]], state: str) -> str:
    cells = []
    for workload in WORKLOADS:
        modes = [mode for mode in MODES if (workload, mode) in told]
        cells.append(", ".join(modes) or "-")
    others = sorted(mode for workload, mode in told if workload == "other")
    title = f"{name} ({state})" if state else name
    return "| " + " | ".join([title, *cells, ", ".join(others) or "-"]) + " |"


def between(text: str) -> str:
    """Return what stands between the markers.

    Raises:
        ValueError: they are not there once each, in this order.
    """
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{START} and {END} must stand there once each, in this order")
    return text.partition(START)[2].partition(END)[0].strip("\n")


def replaced(text: str, inside: str) -> str:
    """Return *text* with *inside* between the markers."""
    between(text)
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{inside}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write README's table."""
    text = README.read_text(encoding="utf-8")
    README.write_text(replaced(text, table(json.loads(EVIDENCE.read_text()))), encoding="utf-8")
    sys.stdout.write(f"{README}: {len(json.loads(EVIDENCE.read_text()))} tests gave evidence\n")


if __name__ == "__main__":
    main()
