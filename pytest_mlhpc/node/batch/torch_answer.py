"""What torch says of itself and of this node's devices, asked in a process of its own: a driver may never answer.

``python -m pytest_mlhpc.node.batch.torch_answer`` prints it as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Dict, Mapping, Tuple

from pytest_mlhpc.node.files import read_json


def ask(python: str, variables: Mapping[str, str], limit_s: float) -> Tuple[Mapping[str, Any], bool]:
    """Let a process of its own, with the *variables* of a run, ask torch; return (answer, whether none came)."""
    environment = {**os.environ, **variables}
    if "PYTHONPATH" in os.environ:
        paths = [os.environ["PYTHONPATH"], variables.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        process = subprocess.Popen(
            [python, "-m", "pytest_mlhpc.node.batch.torch_answer"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"error": f"cannot start {python}: {error.strerror}"}, False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it until the container ends
            process.communicate(timeout=5.0)
        return {}, True
    with contextlib.suppress(ValueError, RecursionError, IndexError):
        answer = read_json(output.decode("utf-8", "replace").strip().splitlines()[-1])
        if isinstance(answer, dict):
            return answer, False
    if process.returncode < 0:
        return {
            "torch": "?",
            "error": f"torch died of signal {-process.returncode} when asked for its devices",
        }, False
    return {"error": f"{python} ended with exit code {process.returncode} when asked for torch"}, False


def answer() -> Dict[str, Any]:
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer()) + "\n")
