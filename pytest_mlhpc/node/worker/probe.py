"""Prints one line of JSON: the accelerators that torch sees, or why it cannot tell.

``{"kind": "cuda", "models": [...], "torch": "2.13.0", "file": path, "why": ""}`` or ``{"error": text}``. ``kind`` is cuda,
rocm, xpu, or an empty string where torch works and sees none; ``why`` is then torch's own word for it. The controller runs this file's text with an environment's
interpreter; the first argument is the time limit in seconds, after which the process ends itself by SIGALRM.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from typing import Any, Dict, List


def probe() -> Dict[str, Any]:
    """Return what is printed. Any exception of torch or of a driver is an answer, not a crash."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything: OSError, RuntimeError, ...
        return {"error": f"torch cannot be imported: {type(error).__name__}: {error}"}
    answer: Dict[str, Any] = {
        "kind": "",
        "models": [],
        "torch": str(torch.__version__),
        "file": str(getattr(torch.version, "__file__", "")),
        "why": "",
    }
    try:
        models = _models(torch.cuda) if torch.cuda.is_available() else []
        if models:
            answer.update(kind="rocm" if getattr(torch.version, "hip", None) else "cuda", models=models)
            return answer
        xpu = getattr(torch, "xpu", None)  # not in torch 1.13
        models = _models(xpu) if xpu is not None and xpu.is_available() else []
        if models:
            answer.update(kind="xpu", models=models)
        else:
            answer["why"] = _why_none(torch)
    except Exception as error:  # noqa: BLE001 - drivers raise anything too
        return {"error": f"torch {torch.__version__} cannot ask its devices: {error}"}
    return answer


def _models(api: Any) -> List[str]:
    return [str(api.get_device_name(index)) for index in range(api.device_count())]


def _why_none(torch: Any) -> str:
    """Return what torch says when it is made to use the devices that it does not see."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - drivers raise anything
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return ""


def main() -> None:
    """Print the answer within the time limit."""
    if len(sys.argv) > 1:
        signal.alarm(int(sys.argv[1]))
    sys.stdout.write(json.dumps(probe()) + "\n")


if __name__ == "__main__":
    main()
