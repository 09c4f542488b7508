"""Starts one process for each node of a made-up allocation, all on this machine, with scripted checks and children."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent

#: Guards against hangs, in seconds: no vetting here takes so long, however busy the machine.
BUDGET_S, HANG_S = 300.0, 600.0


@dataclass
class Vetting:
    """One vetting of *nodes* made-up nodes; ``script`` by host is what checks and children of ``program`` do.

    As a context it kills what still runs at its end.
    """

    folder: Path
    nodes: int = 1
    script: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    program: Path = HERE / "scripted_main.py"
    processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out, self._settings = self.folder / "vet", self.folder / "settings.json"
        self.key = secrets.token_hex(8)
        settings = {"out": str(self.out), "budget_s": BUDGET_S, **self.settings}
        self._settings.write_text(json.dumps(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def start(self, rank: int, **environ: str) -> subprocess.Popen[str]:
        """Start the process of one node."""
        hosts = [f"node{number}" for number in range(self.nodes)]
        place = {"KEY": self.key, "RANK": str(rank), "NODES": str(self.nodes), "LEADER": "127.0.0.1"}
        place |= {"HOST": hosts[rank], "NODELIST": ",".join(hosts)}
        own = {f"MLHPC_VET_{name}": value for name, value in place.items()}
        own["MLHPC_SCRIPT"] = json.dumps(self.script)
        own["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[2])])
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        argv, env = (
            [sys.executable, self.program, self._settings],
            {**os.environ, **own, **self.environ, **environ},
        )
        self.processes[rank] = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, text=True, **pipes)
        return self.processes[rank]

    def start_all(self, *but: int) -> None:
        """Start all nodes' processes."""
        for rank in set(range(self.nodes)) - set(but):
            self.start(rank)

    def end(self, limit_s: float = HANG_S) -> Ended:
        """Wait for all; return what they printed."""
        deadline = time.monotonic() + limit_s
        printed = {
            rank: one.communicate(timeout=max(0.1, deadline - time.monotonic()))
            for rank, one in self.processes.items()
        }
        path = self.out / "verdict.json"
        return Ended(
            self.out,
            {rank: one.returncode for rank, one in self.processes.items()},
            {rank: out for rank, (out, _) in printed.items()},
            {rank: err for rank, (_, err) in printed.items()},
            json.loads(path.read_text()) if path.exists() else {},
        )


def vet(folder: Path, nodes: int = 1, **options: Any) -> Ended:
    """Vet with all nodes' processes; return how it ended."""
    with Vetting(folder, nodes, **options) as vetting:
        vetting.start_all()
        return vetting.end()


@dataclass
class Ended:
    """How a vetting ended, with the folder of its files."""

    out: Path
    codes: dict[int, int]
    output: dict[int, str]
    errors: dict[int, str]
    verdict: dict[str, Any]

    @property
    def last_line(self) -> str:
        return (self.output[0].strip().splitlines() or [""])[-1]

    def fitness(self) -> dict[str, str]:
        return {node["host"]: node["fitness"] for node in self.verdict["nodes"]}

    def not_fit(self) -> set[str]:
        return {host for host, fitness in self.fitness().items() if fitness != "fit"}

    def findings(self, host: str, *severities: str) -> list[dict[str, Any]]:
        (node,) = [node for node in self.verdict["nodes"] if node["host"] == host]
        return [one for one in node["findings"] if not severities or one["severity"] in severities]
