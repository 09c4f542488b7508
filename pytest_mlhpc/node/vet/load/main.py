"""The child: ``python -m pytest_mlhpc.node.vet.load.main --answers FD [--accelerator auto|cpu|cuda|rocm|xpu]``.

Reads orders as JSON lines on standard input, one after another: ``{"id": 1, "do": "gemm", "args": {...}}``. Writes JSON
lines to descriptor FD:

* ``{"ready": {"torch": "2.9.0", "kind": "cuda", "models": [...], "threads": 2}}`` once devices are open; before that ``{"id": 0,
  "begun": "importing torch"}`` and ``"opening devices"``, as both may hang; or ``{"id": 0, "error": "..."}`` and exit code 3;
* ``{"id": 1, "begun": "gemm bf16"}`` before anything that may hang;
* ``{"id": 1, "outcome": {...}}``, an :class:`Outcome`; or ``{"id": 1, "error": "a sentence", "why": "hung"}``. Lines that are no
  orders are answered with the id null.

All orders take ``round`` (0) and ``level`` (quick or deep); those that measure take ``seconds`` in place of the level's time. What
else there is stands in the modules of the commands. The end of standard input ends the child at once, whatever it is doing:
whoever had started it is gone. It starts no processes and leaves no files.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional

from pytest_mlhpc.node.child_process import Answers, Order, Orders, OwnerLost
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import CheckOutcome
from pytest_mlhpc.node.vet.load import node_facts
from pytest_mlhpc.node.vet.load.arguments import ArgumentError, Arguments, Begun, Failed
from pytest_mlhpc.node.vet.load.node_facts import forget_shares
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import built_in

#: ``do`` -> module and function, called as ``function(node, arguments, begun, exam)``.
COMMANDS = {
    "gemm": ("gemm", "run"),
    "memory": ("memory", "run_memory"),
    "host_copy": ("memory", "run_host_copy"),
    "hash": ("digest", "run"),
    "all_reduce": ("collectives", "run_all_reduce"),
    "pair": ("pair", "run"),
    "checkpoint": ("checkpoint", "run"),
    "transport": ("collectives", "run_transport"),
}

#: Settings by which users choose other arithmetic, or slow it down to find faults in programs: nodes are compared without.
_OTHER_ARITHMETIC = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL",
    "HIP_LAUNCH_BLOCKING", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
)  # fmt: skip

#: Exit code where torch or the devices cannot be used at all.
UNUSABLE = 3


def main(argv: List[str]) -> int:
    """Serve until standard input ends. Returns 2 for wrong options, 3 where there is no torch, 1 when nobody reads."""
    options = _options(argv)
    if options is None:
        sys.stderr.write(
            "usage: python -m pytest_mlhpc.node.vet.load.main --answers FD [--accelerator KIND]\n"
        )
        return 2
    try:
        answers = Answers(options["answers"])
    except OSError as error:
        sys.stderr.write(f"descriptor {options['answers']} is not open: {error}\n")
        return 2
    orders = Orders()
    try:
        node = _open(answers, options["accelerator"])
        if node is None:
            return UNUSABLE
        while True:
            order = orders.next()
            carry_out(order, node, answers)
    except OwnerLost as error:
        sys.stderr.write(f"vetting's child ends: its answers cannot be written: {error}\n")
        return 1


def _options(argv: List[str]) -> Optional[Dict[str, Any]]:
    """Return the options, or None for wrong ones."""
    pairs = dict(zip(argv[::2], argv[1::2]))
    number = pairs.get("--answers", "")
    if len(argv) % 2 or set(pairs) - {"--answers", "--accelerator"} or not number.isdigit():
        return None
    return {"answers": int(number), "accelerator": pairs.get("--accelerator", "auto")}


def _open(answers: Answers, accelerator: str) -> Any:
    """Import torch and open the devices; None, with the reason reported, where that fails."""
    forget_shares(os.environ)
    prepare(os.environ)
    warnings.simplefilter("ignore")  # torch's; nobody reads them here
    try:
        answers.begun(0)("importing torch")
        devices = importlib.import_module("pytest_mlhpc.node.vet.load.devices")
        answers.begun(0)("opening devices")
        node = devices.open_node(accelerator, answers.begun(0))
    except Failed as error:
        answers.error(0, str(error), error.why)
        return None
    except Exception as error:  # noqa: BLE001 - an environment's torch may raise anything when it is loaded
        text = f"torch cannot be used ({type(error).__name__}: {error}) by {sys.executable}; install it there, or vet without load: --no-load"
        answers.error(0, text, "no_torch")
        return None
    ready = {"torch": node.torch, "kind": node.kind, "models": list(node.models), "threads": node.threads}
    answers.send({"ready": ready})
    return node


def prepare(environ: Any) -> None:
    """Set what libraries read when they are loaded.

    ``CUDA_DEVICE_ORDER``: devices have the numbers that the driver's tools give them. ``CUBLAS_WORKSPACE_CONFIG``: products
    are the same bit by bit each time (cuBLAS, "Results reproducibility"). The last: torch's watchdogs (two names of one, by release)
    would end this process where we wait no longer than we were asked to anyway.
    """
    for name in _OTHER_ARITHMETIC:
        environ.pop(name, None)
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    environ["NCCL_ASYNC_ERROR_HANDLING"] = environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    node_facts.prepare(environ)


def carry_out(order: Order, node: Any, answers: Answers) -> None:
    """Do what an order says, and answer it.

    Raises:
        OwnerLost: the answer cannot be written.
    """
    if order.problem:
        answers.error(order.id, order.problem, "usage")
        return
    if order.do not in COMMANDS:
        answers.error(order.id, f"do is {order.do!r:.60}, not one of {', '.join(COMMANDS)}", "usage")
        return
    try:
        module, function = COMMANDS[order.do]
        run = getattr(importlib.import_module(f"pytest_mlhpc.node.vet.load.{module}"), function)
        outcome = measured(order.do, run, node, order.args, answers.begun(order.id))
    except ArgumentError as error:
        answers.error(order.id, f"{order.do}: {error}", "usage")
    except Failed as error:
        answers.error(order.id, str(error), error.why)
    except Exception as error:  # noqa: BLE001 - drivers raise anything; the next order may still be carried out
        why = "memory" if _is_no_memory(error) else "failed"
        answers.error(order.id, f"{order.do} failed: {type(error).__name__}: {str(error)[:500]}", why)
    else:
        answers.send({"id": order.id, "outcome": to_json(outcome)})


def measured(
    name: str, run: Callable[..., None], node: Any, args: Mapping[str, Any], begun: Begun
) -> CheckOutcome:
    """Return what came of one command.

    Raises:
        ArgumentError: *args* are not what it takes.
        Failed: it could not be carried out.
    """
    began = time.monotonic()
    exam = Examination(name, Machine(), Context(built_in()))
    run(node, Arguments(args), begun, exam)
    return replace(exam.outcome(None), seconds=time.monotonic() - began)


def _is_no_memory(error: BaseException) -> bool:
    from pytest_mlhpc.node.vet.load.devices import is_no_memory

    return is_no_memory(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
