"""What a pod's init container finds out on its node alone: ``python -m pytest_mlhpc.node.batch.probe PLAN``.

Is the interpreter new enough, can torch be imported where a run needs it, are the devices there and do they answer, can
the work folder be written, is ``/dev/shm`` there? Prints one protocol line (``{"pod": "probe", ...}``, see ``node/batch/pod_stream.py``) and
says the same as text on standard error and to Kubernetes (``/dev/termination-log``).

Exit code 0: fit; 10: this node is not; 78: the set-up is wrong, on any node; 2: the plan cannot be used; 143: SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.batch.main import EXIT_PLAN
from pytest_mlhpc.node.batch.pod_hub import place_of
from pytest_mlhpc.node.batch.pod_stream import pod_line
from pytest_mlhpc.node.batch.vetting import START_S, limit_of
from pytest_mlhpc.node.child_process import Answers, ChildProcess
from pytest_mlhpc.node.processes import run_to_end, say
from pytest_mlhpc.node.protocol.plan import VETTED, Plan, RunPlan, read_plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import Exit, Origin
from pytest_mlhpc.node.vet.finding import VetVerdict as Vetting
from pytest_mlhpc.node.vet.verdict_files import FilesError, read

EXIT_UNFIT = 10
EXIT_SET_UP = 78  #: EX_CONFIG of sysexits.h (4.3BSD)

#: Oldest interpreter for the payload.
PYTHON = (3, 9)

#: How long torch and the devices may take to answer, in seconds: importing torch from a cold network disk takes a minute,
#: a healthy driver some seconds for each device.
ANSWER_S = 180.0

#: Least room in the work folder, in bytes: a few logs of 16 MiB.
ROOM = 64 << 20

#: Least size of /dev/shm, in bytes, where ranks are several or read data by several processes: what container runtimes give
#: to whoever does not ask.
SHARED_MEMORY = 64 << 20

#: Where Kubernetes reads a container's last message (terminationMessagePath).
LAST_WORDS = "/dev/termination-log"

#: Workloads that need no torch; vetting tells itself what is wrong with it.
_WITHOUT_TORCH = frozenset({"command", "nodes", VETTED})

#: Types of device that torch itself can count; others (ipu, wse) answer to their own software only.
_COUNTED = frozenset({"cuda", "rocm", "xpu"})


@dataclass(frozen=True)
class ProbeVerdict:
    """What was found: exit code, a name of ``store/record.py``, a sentence; ``facts`` for the record."""

    exit: int = 0
    outcome: str = ""
    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def unfit(text: str) -> ProbeVerdict:
    """Return the verdict on a node."""
    return ProbeVerdict(EXIT_UNFIT, "unfit_nodes", text)


def broken(text: str, outcome: str = "launch_failed") -> ProbeVerdict:
    """Return the verdict on a set-up that no other node would change."""
    return ProbeVerdict(EXIT_SET_UP, outcome, text)


def judge(plan: Plan, work: Path, shared_memory: Path) -> ProbeVerdict:
    """Look at everything; return the first trouble, or that there is none."""
    facts: Dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3])), "host": os.uname().nodename}
    checks: List[Callable[[], Optional[ProbeVerdict]]] = [
        lambda: _interpreters(plan),
        lambda: _work(work, facts),
        lambda: _shared_memory(plan, shared_memory, facts),
        lambda: _torch(plan, facts),
        lambda: _vetted(plan, work),
    ]
    for check in checks:
        found = check()
        if found is not None:
            return ProbeVerdict(found.exit, found.outcome, found.text, facts)
    return ProbeVerdict(facts=facts)


def _interpreters(plan: Plan) -> Optional[ProbeVerdict]:
    if sys.version_info < PYTHON:
        # The probe itself needs no more than 3.7, to say so.
        return broken(f"{sys.executable} is Python {sys.version.split()[0]}; the worker needs 3.9 or newer")
    for python in sorted({run.python for run in plan.runs if run.workload not in _WITHOUT_TORCH}):
        if shutil.which(python) is None:
            return broken(f"there is no interpreter {python} in the image")
    return None


def _work(work: Path, facts: Dict[str, Any]) -> Optional[ProbeVerdict]:
    path = work / ".mlhpc-probe"
    try:
        work.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 << 20))
        path.unlink()
        free = shutil.disk_usage(str(work)).free
    except PermissionError as error:
        return broken(f"cannot write {work} as user {os.geteuid()}: {error.strerror}; set fs_group")
    except OSError as error:
        return unfit(f"cannot write {work}: {error.strerror}")
    facts["work_free_bytes"] = free
    return unfit(f"{work} has {free} bytes free, less than {ROOM}") if free < ROOM else None


def _shared_memory(plan: Plan, folder: Path, facts: Dict[str, Any]) -> Optional[ProbeVerdict]:
    if not any(_needs_torch(run) for run in plan.runs):
        return None
    try:
        size = shutil.disk_usage(str(folder)).total
    except OSError as error:
        return broken(f"{folder} cannot be used: {error.strerror}; set shared_memory")
    facts["shared_memory_bytes"] = size
    if size < SHARED_MEMORY:
        return broken(f"{folder} has {size} bytes, less than {SHARED_MEMORY}: set shared_memory to more")
    return None


def _torch(plan: Plan, facts: Dict[str, Any]) -> Optional[ProbeVerdict]:
    for python in sorted({run.python for run in plan.runs if _needs_torch(run)}):
        runs = [run for run in plan.runs if run.python == python and _needs_torch(run)]
        answer = ask_torch(python, runs[0].variables)
        if answer is None:
            return unfit(f"torch or its devices did not answer within {ANSWER_S:g} s")
        facts.update({name: answer.get(name) for name in ("torch", "kind", "models")})
        found = judge_answer(answer, needed_devices(runs))
        if found is not None:
            return found
    return None


def ask_torch(python: str, variables: Mapping[str, str]) -> Optional[Mapping[str, Any]]:
    """Ask torch of itself and its devices, in a process with a run's *variables*: a driver may never answer. None: it did not."""
    environment = {**os.environ, **variables}
    if "PYTHONPATH" in os.environ:
        paths = [os.environ["PYTHONPATH"], variables.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        child = ChildProcess(__spec__.name, python=python, environ=environment)
    except OSError as error:
        return {"error": f"cannot start {python}: {error.strerror}"}
    child.expect(0, "torch", ANSWER_S)
    answer, hung = child.answer()
    code = child.ended
    child.end()
    if hung:
        return None
    if answer is not None:
        return answer
    if code is not None and code < 0:
        return {"torch": "?", "error": f"torch died of signal {-code} when asked for its devices"}
    why = child.trouble or f"ended with exit code {code}"
    return {"error": f"{python} {why} when asked for torch"}


def answer_of_torch() -> Dict[str, Any]:
    """Return what torch says of itself and of the devices; each of them has computed something."""
    from pytest_mlhpc.node.worker.probe import probe

    found = probe()
    try:
        import torch
    except Exception:  # noqa: BLE001 - the answer has it already
        return found
    found["torch"] = str(torch.__version__)
    versions = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu"}
    found["built"] = [kind for kind, name in versions.items() if getattr(torch.version, name, None)]
    if hasattr(torch, "xpu") and not hasattr(torch.version, "xpu"):
        found["built"].append("xpu")  # perhaps: not all versions tell
    device = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}.get(found.get("kind", ""))
    try:
        for index in range(len(found.get("models", [])) if device else 0):
            ones = torch.ones(64, 64, device=f"{device}:{index}")
            if float((ones @ ones).sum()) != 64.0**3:
                found["error"] = f"device {index} computes wrong"
    except Exception as error:  # noqa: BLE001 - drivers raise anything
        found["error"] = f"device {index} does not work: {error}"
    return found


def _vetted(plan: Plan, work: Path) -> Optional[ProbeVerdict]:
    """Vet this node by all checks that need neither others nor load; those are the agents' first entry.

    Not where runs are about nothing else: what they want is a verdict on this very node, not another one.
    """
    if plan.vetting is None or any(run.workload == VETTED for run in plan.runs):
        return None
    out = work / ".mlhpc-vet"
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.node.batch.vetting",
        "--alone",
        json.dumps(to_json(plan.vetting)),
        str(out),
    ]
    limit = limit_of(plan.vetting) + START_S
    try:
        done = run_to_end(argv, limit, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return unfit(f"vetting did not end within {limit:g} s")
    try:
        found = read(out).verdict
    except FilesError as error:
        last = done.stdout.decode("utf-8", "replace").strip()[-500:]
        return broken(f"the node could not be vetted (exit code {done.returncode}): {error}; {last}")
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return verdict_of(found)


def verdict_of(found: Vetting) -> Optional[ProbeVerdict]:
    """Return what vetting of this node alone means: another node helps only where this one is at fault.

    What nobody can judge here, as a container may not read it, is the same on all nodes: the agents' vetting, which knows
    more, says the last word on it.
    """
    if found.exit in (Exit.READY, Exit.UNKNOWN):
        return None
    reasons = [node.reason for node in found.nodes if node.reason]
    said = "; ".join(reasons) or found.text
    if found.exit in (Exit.USAGE, Exit.INTERNAL):
        return broken(said)
    users = reasons and all(reason.startswith(f"[{Origin.USER.value}]") for reason in reasons)
    return broken(said) if users else unfit(said)


def _needs_torch(run: RunPlan) -> bool:
    return run.workload not in _WITHOUT_TORCH


def needed_devices(runs: Sequence[RunPlan]) -> Tuple[str, int]:
    """Return type and number of the devices that ranks on one node take; an empty type where nobody can count them."""
    kinds = {run.device_type for run in runs} & _COUNTED
    if not kinds:
        return "", 0
    kind = min(kinds)
    return kind, max(run.ranks // max(1, run.nodes) for run in runs if run.device_type == kind)


def judge_answer(answer: Mapping[str, Any], wanted: Tuple[str, int]) -> Optional[ProbeVerdict]:
    """Compare what torch has said with the devices that are wanted; None: it has them."""
    kind, count = wanted
    error = answer.get("error")
    if error and not answer.get("torch"):
        return broken(str(error), "import_failed")
    if not kind:
        return None
    built = answer.get("built")
    if isinstance(built, list) and kind not in built:
        has = ", ".join(map(str, built)) or "CPUs"
        return broken(
            f"torch {answer.get('torch')} is built for {has}, but the runs want {kind}", "wrong_device"
        )
    if error:
        return unfit(str(error))
    models = answer.get("models")
    found_devices = len(models) if isinstance(models, list) and answer.get("kind") == kind else 0
    if found_devices < count:
        return unfit(f"{count} devices of type {kind} are needed, torch finds {found_devices}")
    return None


def main(arguments: List[str]) -> int:
    """Judge this node and return the exit code. With ``--answers FD`` be the process that asks torch."""
    if arguments[:1] == ["--answers"]:
        Answers(int(arguments[1])).send(answer_of_torch())
        return 0
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM)
    )  # the first process has no default
    if len(arguments) != 1:
        say("usage: python -m pytest_mlhpc.node.batch.probe PLAN")
        return EXIT_PLAN
    try:
        plan = read_plan(Path(arguments[0]).absolute(), own_disk=True)
        work = place_of(os.environ, plan).work
    except (OSError, ValueError, TypeError, RecursionError) as error:
        verdict = ProbeVerdict(
            EXIT_PLAN, "protocol_mismatch", f"the plan {arguments[0]} cannot be used: {error}"
        )
    else:
        verdict = judge(plan, work, Path(os.environ.get("MLHPC_SHM") or "/dev/shm"))  # noqa: S108 - it is the place
    body = {"fit": verdict.exit == 0, "exit": verdict.exit, "outcome": verdict.outcome}
    sys.stdout.buffer.write(pod_line("probe", {**body, "text": verdict.text[:2000], "facts": verdict.facts}))
    sys.stdout.flush()
    if verdict.text:
        say(verdict.text)
        with contextlib.suppress(OSError):  # there is none outside of a pod
            if os.path.exists(LAST_WORDS):  # noqa: PTH110 - a path as text
                Path(LAST_WORDS).write_text(verdict.text[:4000], encoding="utf-8")
    return verdict.exit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
