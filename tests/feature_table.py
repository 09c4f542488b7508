"""The tables of docs/state.md: systems by workloads by modes, from what tests ran, and versions, from what tests use.

What tests ran is in ``features.json`` (``feature_evidence.py``). ``python tests/feature_table.py`` writes both tables between
their markers; ``make features`` runs all tests before.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE, PAGE = ROOT / "tests/features.json", ROOT / "docs/state.md"

#: What test machines and images have.
TESTED_PYTHON = "3.11"

WORKLOADS = ("cosmoflow", "deepcam", "resnet50", "language_model")
MODES = (
    "timed", "to quality", "bagging", "sharded", "characterised", "lowered", "compiled", "CPU back-end", "stand-in",
)  # fmt: skip
#: Modes in which the device itself took no part.
_WITHOUT_DEVICE = {"lowered", "compiled", "CPU back-end", "stand-in"}

#: Systems that are told apart by their scheduler, all on CPUs, and devices: name, type, remark.
_SCHEDULERS = ("this machine", "Slurm", "Kubernetes")
_DEVICES = (
    ("NVIDIA GPUs", "cuda", ""),
    ("AMD GPUs", "rocm", ""),
    ("Intel GPUs", "xpu", ""),
    ("Cerebras", "wse", ""),
    ("Graphcore", "ipu", "archived"),
)

Evidence = Mapping[str, Sequence[Sequence[str]]]


def table(evidence: Evidence) -> str:
    """Return the table as Markdown. A device that no test had says so."""
    found = {tuple(one) for of_test in evidence.values() for one in of_test}
    rows = [
        _row(f"CPUs, {system}", {(w, m) for s, d, w, m in found if (s, d) == (system, "cpu")}, "")
        for system in _SCHEDULERS
    ]
    for name, device, remark in _DEVICES:
        reported = {(workload, mode) for _, of_run, workload, mode in found if of_run == device}
        rows.append(_row(name, reported, _state(reported, remark)))
    head = ["| system | " + " | ".join(WORKLOADS) + " | besides |", "|---" * (len(WORKLOADS) + 2) + "|"]
    return "\n".join([*head, *rows])


def _state(reported: set[tuple[str, str]], remark: str) -> str:
    """Return what a row says of a device beside its cells."""
    modes = {mode for _, mode in reported}
    if modes - _WITHOUT_DEVICE:
        return remark
    known = "lowered only" if "lowered" in modes else "needs hardware, not run"
    return ", ".join(word for word in (remark, known) if word)


def _row(name: str, reported: set[tuple[str, str]], state: str) -> str:
    cells = []
    for workload in WORKLOADS:
        modes = [mode for mode in MODES if (workload, mode) in reported]
        cells.append(", ".join(modes) or "-")
    others = sorted(mode for workload, mode in reported if workload == "other")
    title = f"{name} ({state})" if state else name
    return "| " + " | ".join([title, *cells, ", ".join(others) or "-"]) + " |"


def versions(root: Path = ROOT) -> str:
    """Return the table of versions as Markdown: what tests install, start, and read recorded answers of."""

    def read(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    def pinned(name: str) -> str:
        return re.findall(rf"^{name}==(\S+)$", read("constraints.txt"), re.MULTILINE)[0]

    project = tomllib.loads(read("pyproject.toml"))["project"]
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    oldest = {
        name: re.findall(rf'"{name}>=([\d.]+)', read("pyproject.toml"))[0] for name in ("pytest", "torch")
    }
    old_torch = re.findall(
        r"\.venv-torch-([\d.]+)/\.stamp", read("Makefile").partition("old-torch:")[2].partition("##")[0]
    )
    recorded = sorted(path.name for path in (root / "tests/provision/slurm/outputs").iterdir())
    (kubernetes,) = re.findall(
        r'^VERSION = "([\d.]+)"', read("ci/kubernetes.d/testkubernetes/parts.py"), re.MULTILINE
    )
    slow = f"{', '.join(old_torch)} (`make test-slow`)"
    rows = [
        ("Python, where pytest runs", TESTED_PYTHON, "-", ", ".join(one for one in pythons if one != TESTED_PYTHON)),
        ("Python, on nodes", TESTED_PYTHON, "3.9 (syntax)", "3.10, 3.12 and newer"),
        ("pytest", pinned("pytest"), "-", f"{oldest['pytest']} and newer"),
        ("torch", f"{pinned('torch')}; {slow}", "-", "others from 1.13"),
        ("Slurm", f"{recorded[0]}; 24.11 (`make test-slow`)", ", ".join(recorded), "others"),
        ("Kubernetes", kubernetes, "1.20 to 1.34 (states of pods, schemas)", "others"),
    ]  # fmt: skip
    return "\n".join(
        [
            "| part | tested | parsed | untested |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def between(text: str, name: str) -> str:
    """Return what stands between the markers of table *name*.

    Raises:
        ValueError: they are not there once each, in this order.
    """
    start, end = _markers(name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"{start} and {end} must stand there once each, in this order")
    return text.partition(start)[2].partition(end)[0].strip("\n")


def replaced(text: str, name: str, inside: str) -> str:
    """Return *text* with *inside* between the markers of table *name*."""
    between(text, name)
    start, end = _markers(name)
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{inside}\n{end}{rest.partition(end)[2]}"


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: start -->", f"<!-- {name}: end -->"


def main() -> None:
    """Write both tables."""
    evidence = json.loads(EVIDENCE.read_text())
    text = replaced(PAGE.read_text(encoding="utf-8"), "features", table(evidence))
    PAGE.write_text(replaced(text, "versions", versions()), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(evidence)} tests gave evidence\n")


if __name__ == "__main__":
    main()
