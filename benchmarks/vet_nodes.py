"""Vettings of several made-up nodes, all on this machine: one slowed, one hung or missing, and thousands that report at once.

Each node is a process of `mlhpc vet` of its own that finds the first one over TCP, as under a launcher; they have one boot
id, so that they compute one after the other. ``slowed`` has torch's real child and this machine's real checks; ``repeated``
the small child of :mod:`benchmarks.vet_child`, with drawn figures and real exchanges, and scripted checks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row
from benchmarks.vet_child import KIND, SLOW

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests/node/vet"

NODES, SLOWED, BY, WITHIN_S = 6, "node3", 0.20, 45.0

#: Number of agents -> longest time to one verdict, in seconds; most memory of the leader, in MiB; steepest growth.
AGENTS_S = {256: 10.0, 1024: 15.0, 4096: 30.0}
AGENTS_MIB, EXPONENT = 400.0, 1.1

#: What is wrong with node3 (of 5), and the whole time for vetting in seconds: what it is told by, by name.
TROUBLES: dict[str, tuple[dict[str, Any], float]] = {
    "never comes": ({}, 10.0),
    "a check hangs": ({"hang": "second"}, 10.0),
    "a check hangs and holds Python's lock": ({"hang_in_c": "second"}, 10.0),
    "a watch hangs under load": ({"hang": "sample", "takes": 0.7}, 20.0),
    "its child hangs at its start": ({"child_hang": "start"}, 20.0),
    "its child hangs computing": ({"child_hang": "memory"}, 20.0),
    "its child hangs in an exchange": ({"child_hang": "pair"}, 30.0),
    "its agent is killed": ({"child_stop_agent": "gemm"}, 20.0),
    "its agent is stopped": ({"child_freeze_agent": "memory"}, 20.0),
}


@dataclass(frozen=True)
class Run:
    """One vetting: its wall time in seconds, what became of the nodes by host, why, and figures by which it can be checked."""

    seconds: float
    code: int
    bad: Mapping[str, str]
    last_line: str
    reasons: Mapping[str, str]
    slowness: Mapping[str, float]

    @property
    def exact(self) -> bool:
        """Whether the slow node is called unfit, and no other node anything but fit."""
        return dict(self.bad) == {SLOWED: "unfit"}

    def healthy(self, fitness: str) -> list[str]:
        """Return the healthy nodes that are called so."""
        return [host for host, said in self.bad.items() if host != SLOWED and said == fitness]


def vet(
    nodes: int,
    *,
    missing: int = -1,
    settings: Mapping[str, Any],
    script: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    scripted: bool = False,
) -> Run:
    """Start *nodes* processes but one, wait for the first one's end, end the others, and return what it said."""
    agents = _tests("vet_agents")
    with tempfile.TemporaryDirectory(prefix="mlhpc-bench-vet-") as name:
        program = TESTS / "scripted_main.py" if scripted else ROOT / "benchmarks/vet_node.py"
        every = {"MLHPC_STATE": f"{name}/state", **(environ or {})}
        vetting = agents.Vetting(
            Path(name),
            nodes=nodes,
            script=dict(script or {}),
            settings=dict(settings),
            environ=every,
            program=program,
        )
        begun = time.monotonic()
        try:
            vetting.start_all(missing)
            vetting.processes[0].wait(180.0)
            seconds = time.monotonic() - begun
        finally:
            for process in vetting.processes.values():  # one of them may be stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
                process.kill()
        ended = vetting.end()
    if not ended.verdict:
        raise SystemExit(f"there is no verdict:\n{ended.output[0]}\n{ended.errors[0]}")
    found = ended.verdict["nodes"]
    return Run(
        seconds,
        ended.codes[0],
        {node["host"]: node["fitness"] for node in found if node["fitness"] != "fit"},
        ended.last_line,
        {node["host"]: node["reason"] for node in found},
        _slowness(found),
    )


def _slowness(nodes: list[dict[str, Any]]) -> dict[str, float]:
    """Return by which share each host's worst compared figure is below its peers' median."""
    found: dict[str, float] = {}
    for node in nodes:
        for one in node["findings"]:
            if one["rule"] == "peers" and one["value"] and one["peer_median"]:
                share = 1 - one["value"] / one["peer_median"]
                found[node["host"]] = max(found.get(node["host"], 0.0), share)
    return found


def _vet_slowed(kind: str, script: Mapping[str, Any], times: int) -> list[Run]:
    """Vet six nodes *times* times, of which one stands still a fifth of the time; say at once what is not as it should be."""
    environ = {KIND: kind, SLOW: f"{SLOWED} {BY}"}
    # A folder in memory: six nodes of one machine would measure one disk at the same time.
    settings = {"need": NODES - 1, "budget_s": 60.0, "wanted": {"paths": {"storage": "/dev/shm"}}}  # noqa: S108 - it makes a folder of its own there
    runs = []
    for number in range(times):
        run = vet(NODES, settings=settings, script=script, environ=environ)
        runs.append(run)
        if not run.exact:
            said = {host: run.reasons[host][:160] for host in run.bad}
            print(f"{kind} {number}, load {os.getloadavg()[0]:.1f}: {said}", file=sys.stderr, flush=True)
    return runs


def slowed(times: int) -> list[Row]:
    """Do it with torch's child and the real checks."""
    runs = _vet_slowed("torch", {}, times)
    exact = sum(run.exact for run in runs)
    return [
        Row(
            f"quick, {NODES} nodes with torch's child and real checks, {SLOWED} slowed {BY:.0%}: it alone is named",
            f"{times} of {times}",
            f"{exact} of {times}{_others(runs)}; its worst figure {_spread(runs)} below its peers",
            exact == times,
        ),
        _time_row(runs),
    ]


def repeated(times: int) -> list[Row]:
    """Do it with the small child, so that it can be done often."""
    before = os.getloadavg()[0]
    runs = _vet_slowed("small", {"all": {"boot_id": "one"}}, times)
    exact = sum(run.exact for run in runs)
    blamed = sum(bool(run.healthy("unfit")) for run in runs)
    return [
        Row(
            f"{NODES} nodes with drawn figures and real exchanges, {times} times, load {before:.1f} before: a healthy peer is blamed",
            "never",
            f"{blamed} of {times}{_others(runs)}",
            not blamed,
        ),
        Row(
            "... the slow node alone is named",
            f"{times} of {times}",
            f"{exact} of {times}; its worst figure {_spread(runs)} below its peers",
            exact == times,
        ),
        _time_row(runs),
    ]


def _time_row(runs: list[Run]) -> Row:
    seconds = [run.seconds for run in runs]
    text = f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    return Row(
        "... from the start to the end of the first node",
        f"<= {WITHIN_S:g} s",
        text,
        max(seconds) <= WITHIN_S,
    )


def _others(runs: list[Run]) -> str:
    """Say in how many vettings healthy nodes were called unfit or unknown, and the slow one neither."""
    words = [
        f"{count} with healthy nodes {fitness}"
        for fitness in ("unfit", "unknown")
        if (count := sum(bool(run.healthy(fitness)) for run in runs))
    ]
    if missed := sum(run.bad.get(SLOWED) != "unfit" for run in runs):
        words.append(f"{missed} in which {SLOWED} was not called unfit")
    return f" ({', '.join(words)})" if words else ""


def _spread(runs: list[Run]) -> str:
    shares = [run.slowness[SLOWED] for run in runs if SLOWED in run.slowness]
    if not shares:
        return "not"
    return f"{min(shares):.0%} to {max(shares):.0%} (median {statistics.median(shares):.0%})"


def troubled() -> list[Row]:
    """Have one node of five hang in every way there is, or not come; and the first one, which leads."""
    rows = []
    for what, (script, budget_s) in TROUBLES.items():
        absent = not script
        run = vet(
            5,
            missing=3 if absent else -1,
            scripted=True,
            settings={"need": 4, "budget_s": budget_s},
            script={"node3": script},
        )
        rows.append(_told(what, run, budget_s, run.exact))
    run = vet(
        1, scripted=True, settings={"budget_s": 10.0, "no_load": True}, script={"all": {"hang": "first"}}
    )
    rows.append(_told("the first node, alone, hangs in a check", run, 10.0, list(run.bad) == ["node0"]))
    return rows


def _told(what: str, run: Run, budget_s: float, named: bool) -> Row:
    reason = run.reasons.get(SLOWED, run.reasons.get("node0", "")).replace("[node_problem] ", "")
    said = "named alone" if named else f"{dict(run.bad)}"
    return Row(
        f"a hung or missing rank: {what}",
        f"named, <= {budget_s:g} s",
        f"{said}, {run.seconds:.1f} s: {reason[:90].replace('|', '/')} ...",
        named and run.seconds <= budget_s,
    )


def reported() -> list[Row]:
    """Have more and more agents report to one leader, to one verdict."""
    found = {number: _report_of(number) for number in AGENTS_S}
    rows = [
        Row(
            f"{number} agents (no torch) to one verdict of one leader, 25 checks of 8 devices each",
            f"<= {limit_s:g} s, <= {AGENTS_MIB:g} MiB",
            f"{one['good']} of {number} in {one['seconds']:.1f} s ({one['cpu_seconds']:.1f} s of computing and "
            f"{one['mebibytes']} MiB of the leader)",
            one["good"] == number and one["seconds"] <= limit_s and one["mebibytes"] <= AGENTS_MIB,
        )
        for (number, limit_s), one in zip(AGENTS_S.items(), found.values(), strict=True)
    ]
    exponent = statistics.linear_regression(
        [math.log(number) for number in found], [math.log(one["cpu_seconds"]) for one in found.values()]
    ).slope
    text = "growth of the leader's computing with the number of agents, exponent"
    return [*rows, Row(text, f"<= {EXPONENT:g}", f"{exponent:.2f}", exponent <= EXPONENT)]


def _report_of(number: int) -> dict[str, Any]:
    argv = [sys.executable, str(TESTS / "many_agents.py"), str(number)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{number} agents: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def _path() -> Iterator[None]:
    sys.path.insert(0, str(TESTS))
    try:
        yield
    finally:
        sys.path.remove(str(TESTS))


def _tests(name: str) -> Any:
    with _path():
        return importlib.import_module(name)  # as the tests of the same thing use it
