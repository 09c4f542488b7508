"""Plans of runs, and pods without Kubernetes: agents as processes of this machine, each with variables and folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.protocol.lines import Decoder, Fault, Message
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.provision.kubernetes.log_parser import AgentOutput

#: After so many seconds a test hangs; an allocation may have a dozen runs, each of which imports torch.
HANG_S = 800.0


def run_plan(name: str = "run-0001", **changes: Any) -> RunPlan:
    fields = {
        "run_id": name, "nonce": "nonce", "secret": "hidden", "attempt": 0, "workload": "command", "parameters": {}, "nodes": 1, "ranks": 1,
        "cores_per_rank": 1, "device_type": "cpu", "launcher": "plain", "time_limit_s": 600.0, "steps": 1,
        "warmup_steps": 0, "argv": ("true",), "python": sys.executable,
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def bash(script: str, name: str = "run-0001", **changes: Any) -> RunPlan:
    """Return a run of a shell script on one node."""
    return run_plan(name, argv=("bash", "-c", script), **changes)


def both(script: str, name: str = "run-0001", **changes: Any) -> RunPlan:
    """Return a run of a shell script on two pods, two ranks unless told otherwise."""
    return bash(script, name, **{"nodes": 2, "ranks": 2, "launcher": "podrun", **changes})


class Pods:
    """Agents of one allocation. ``plan`` is the controller's, whose directory the agents do not know."""

    def __init__(
        self, folder: Path, *runs: RunPlan, pods: int = 1, allocation: str = "a", **environ: str
    ) -> None:
        self.folder, self.pods, self.environ = folder, pods, environ
        self.port = nodes.free_port()
        self.plan = Plan(allocation, "", str(folder / "controller"), pods, 1200.0, runs)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._decoded: dict[int, tuple[int, list[Message | Fault]]] = {}  #: of logs so long

    def work(self, rank: int) -> Path:
        return self.folder / f"pod{rank}" / "work"

    def write(self, rank: int, plan: Plan | None = None) -> Path:
        """Make a pod's folders; return its home."""
        home = self.folder / f"pod{rank}"
        self.work(rank).mkdir(parents=True, exist_ok=True)
        (home / "info").mkdir(exist_ok=True)
        inside = replace(plan or self.plan, directory="/mlhpc/work")
        (home / "plan.json").write_text(json.dumps(to_json(inside)))
        return home

    def environment(self, rank: int, **environ: str) -> dict[str, str]:
        ours = {
            "MLHPC_PODS": str(self.pods), "MLHPC_POD_RANK": str(rank), "MLHPC_POD_NAME": f"p-{rank}",
            "MLHPC_POD_IP": "127.0.0.1", "MLHPC_NODE_NAME": f"node{rank}", "MLHPC_WORK": str(self.work(rank)),
            "MLHPC_INFO": str(self.folder / f"pod{rank}" / "info"), "MLHPC_PORT": str(self.port), "OMP_NUM_THREADS": "1",
            "MLHPC_LEADER": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[1]),
        }  # fmt: skip
        return {**os.environ, **ours, **self.environ, **environ}

    def start(self, *ranks: int, plan: Plan | None = None, **environ: str) -> None:
        for rank in ranks or range(self.pods):
            home = self.write(rank, plan)
            with (home / "log").open("ab") as out:
                self._start(rank, out.fileno(), environ)

    def start_into(self, descriptor: int, rank: int = 0) -> None:
        """Start an agent that prints into a pipe."""
        self.write(rank)
        self._start(rank, descriptor, {})

    def _start(self, rank: int, out: int, environ: Mapping[str, str]) -> None:
        home = self.folder / f"pod{rank}"
        with (home / "err").open("ab") as err:
            self.agents[rank] = subprocess.Popen(
                [sys.executable, "-m", "pytest_mlhpc.node.batch.pod", str(home / "plan.json")],
                env=self.environment(rank, **environ), cwd=home, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip

    def log(self, rank: int = 0) -> bytes:
        return (self.folder / f"pod{rank}" / "log").read_bytes()

    def errors(self, rank: int = 0) -> str:
        return (self.folder / f"pod{rank}" / "err").read_text()

    def ends(self) -> dict[int, int]:
        """Wait for all agents and return their exit codes."""
        return {rank: agent.wait(HANG_S) for rank, agent in self.agents.items()}

    def output(self, run: str, name: str, rank: int = 0) -> Path:
        """Return where the controller has put what came of a stream."""
        self.messages(rank)
        return self.folder / "controller" / run / f"{name}.log"

    def messages(self, rank: int = 0) -> list[Message | Fault]:
        log = self.log(rank)
        if len(log) != self._decoded.get(rank, (-1, []))[0]:
            self._decoded[rank] = len(log), messages_of(self.plan, log)
        return self._decoded[rank][1]

    def kinds(self, rank: int = 0) -> list[tuple[str, str]]:
        """Return (run, kind) of all messages but progress."""
        found = self.messages(rank)
        assert not [item for item in found if isinstance(item, Fault)], found
        return [(item.run_id, item.kind) for item in found if item.kind != "progress"]

    def bodies(self, kind: str, run: str = "") -> list[Mapping[str, Any]]:
        """Return what all messages of a kind say, of one run or of all."""
        return [item.body for item in self.messages() if item.kind == kind and run in {"", item.run_id}]

    def failure(self, run: str = "") -> Mapping[str, Any]:
        """Return the first failure, of one run or of all."""
        found = self.bodies("failed", run)
        assert found, (self.messages(), self.errors())
        return found[0]

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for orphan in orphans():
            with contextlib.suppress(OSError):
                os.kill(orphan, signal.SIGKILL)


def orphans() -> list[int]:
    """Return the processes that an agent has left: in a pod they would be gone with its first process."""
    cookie = f"MLHPC_TEST={os.environ['MLHPC_TEST']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                found += [int(entry.name)] * (cookie in (entry / "environ").read_bytes().split(b"\0"))
    return found


def messages_of(plan: Plan, log: bytes) -> list[Message | Fault]:
    """Return what a controller understands of a pod's log."""
    stream = AgentOutput(plan)
    lines = b"".join(stream.feed(line) for line in log.splitlines(keepends=True)) + stream.finish()
    decoder = Decoder({run.run_id: run.nonce for run in plan.runs})
    return [*decoder.feed(lines), *decoder.finish()]
