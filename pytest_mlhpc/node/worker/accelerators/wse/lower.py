"""Lower one training for the wafer, in a process of its own: ``python -m pytest_mlhpc.node.worker.accelerators.wse.lower``.

A process has one back-end, and a compiler may end it. Standard input is one JSON object: ``run`` (the inner training's plan),
``folder`` and ``precision``. The last line of standard output is another: ``seconds`` and ``operations``, or ``reason``.
Lowering ends at CIRH, Cerebras' first dialect: that kernels match and that it fits a wafer is shown by a cluster alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NoReturn

import torch

from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.accelerators.wse import load, measure
from pytest_mlhpc.node.worker.accelerators.wse.measure import open_backend, reason, step_of
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: An operation of the dialect in MLIR's text form: ``%1 = "cirh.Conv"(...)`` or ``cirh.Conv ...``.
_OPERATION = re.compile(r'^\s*(?:%[\w:#, %]+= )?"?cirh\.\w+', re.MULTILINE)


def lower(run_json: str, folder: Path, precision: str) -> Dict[str, Any]:
    """Trace and lower a step of the run, and return how long that took and how many operations came of it.

    Raises:
        WorkerFailure: ``cannot_lower``, the compiler ended without a result.
    """
    run = from_json(RunPlan, json.loads(run_json), "the run")
    cstorch = load()
    torch.manual_seed(0)
    task = prepare.load_task(run)
    started = time.perf_counter()
    backend = open_backend(cstorch, "CSX", folder, precision, validate_only=True)
    step = step_of(cstorch, backend, task, task.model().train(), precision)
    loader = cstorch.utils.data.DataLoader(measure.stream, run_json, str(folder))
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=1)
    for batch_inputs, batch_targets in executor:
        step(batch_inputs, batch_targets)
    seconds = time.perf_counter() - started
    found = sorted(folder.glob("executors/0*/cirh.mlir"))
    operations = len(_OPERATION.findall(found[-1].read_text(errors="replace"))) if found else 0
    if not operations:
        said = "; ".join(errors(folder)) or f"the compiler left no graph below {folder}, and no reason"
        raise WorkerFailure("cannot_lower", f"cerebras.pytorch cannot lower {run.workload}: {said}")
    return {"seconds": seconds, "operations": operations}


def errors(folder: Path) -> List[str]:
    """Return what the compiler calls an error in its diagnostics below *folder*, each once.

    With ``validate_only`` it raises nothing: it leaves an empty graph and a file ``traceback_*.json`` beside it (2.10).
    """
    paths = sorted(folder.glob("executors/0*/traceback_*.json"))
    return list(dict.fromkeys(text for path in paths for text in _errors_in(_read(path))))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):  # cut off: the process was ended while it wrote
        return None


def _errors_in(part: Any) -> List[str]:
    if isinstance(part, list):
        return [text for one in part for text in _errors_in(one)]
    if not isinstance(part, dict):
        return []
    about = part.get("compileMetadata")
    severe = isinstance(about, dict) and about.get("severityLevel") == "Error"
    own = [" ".join(str(part["message"]).split())[:300]] if severe and part.get("message") else []
    return own + [text for one in part.values() for text in _errors_in(one)]


def main() -> NoReturn:
    """Do what standard input says, and tell what came of it."""
    die_with_parent(os.getppid())
    asked = json.loads(sys.stdin.read())
    try:
        reply = lower(asked["run"], Path(asked["folder"]), asked["precision"])
    except WorkerFailure as failure:
        reply = {"outcome": failure.outcome, "reason": failure.text}
    # Whatever the compiler raises is a reason.
    except Exception as error:  # noqa: BLE001
        reply = {"outcome": "cannot_lower", "reason": reason(error)}
    sys.stdout.write(f"\n{json.dumps(reply)}\n")
    sys.stdout.flush()
    os._exit(0)  # all is reported: what libraries do on their way out can only spoil it


if __name__ == "__main__":
    main()
