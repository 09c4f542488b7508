"""Every workload of this package: trainings, probes, programs, reserved and vetted nodes. No torch."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.protocol.plan import HELD, VETTED
from pytest_mlhpc.node.worker.workloads.definitions import Field, Workload
from pytest_mlhpc.node.worker.workloads.probing import PROBES
from pytest_mlhpc.node.worker.workloads.trainings import OWN_TRAININGS, parameters_of

_COMMAND = Workload(
    name="command",
    summary="any program, with metrics taken from what it prints",
    module="",
    fields={
        # Not part of the key: a program and its arguments name paths, and a moved file stays the same benchmark.
        "command": Field((), "program and arguments, run without a shell", "words", identity=False),
        "metrics": Field(
            (), "what is taken from the output: Metric(name, pattern, unit)", "list", identity=False
        ),
        "ranks_per_node": Field(
            None,
            "processes that the launcher starts on each node; unset: one, on the first node, by no launcher",
            minimum=1,
        ),
        "files": Field(
            (),
            "files, folders and globs, relative to the test's file, that the run finds in its folder",
            "words",
            identity=False,
        ),
        "artifacts": Field(
            (), "files of the run's folder that the test reads, names or globs", "words", identity=False
        ),
        "sanity": Field(
            (),
            "regular expressions that must match in the output, functions of the run that must hold",
            "sanity",
            identity=False,
        ),
        "cwd": Field(
            None,
            "folder to start in, relative to the test's file; unset: a new one of the run",
            "str",
            identity=False,
        ),
        "reference": Field(
            None,
            "what the metric promises on a system: {'cirrus': 180}, in the metric's unit; worse is below_reference",
            "mapping",
            identity=False,
        ),
    },
    presets={name: {"steps": 0, "warmup": 0} for name in ("smoke", "small", "reference")},
    judged=(),
    expected=(),
    without=("preset", "steps", "warmup", "data", "cache"),
    sample="run",
)

_NODES = Workload(
    name=HELD,
    summary="nodes on which a test runs programs of its own (fixture `allocation`)",
    module="",
    fields={},
    presets={name: {"steps": 0, "warmup": 0} for name in ("smoke", "small", "reference")},
    judged=(),
    expected=(),
    without=("preset", "steps", "warmup", "data", "cache"),
    sample="run",
)

_VET = Workload(
    name=VETTED,
    summary="no run: its nodes are vetted, and the test looks at what was found (fixture `vetting`)",
    module="",
    fields={
        "level": Field("quick", "how thoroughly: quick takes a minute, deep ten", "str", ("quick", "deep")),
        "need": Field(0, "how many nodes must be fit; 0: all", minimum=0),
        "unknown": Field(
            "",
            "what becomes of a node that cannot be judged; unset: as the partition says",
            "str",
            ("", "fail", "warn"),
        ),
        "require_comparison": Field(
            False, "whether a node is unknown whose figures have nothing to be compared with", "bool"
        ),
    },
    presets={name: {"steps": 0, "warmup": 0} for name in ("smoke", "small", "reference")},
    judged=(),
    expected=(),
    without=("preset", "steps", "warmup", "data", "cache"),
    sample="run",
)

#: Every workload that comes with the package.
WORKLOADS: Tuple[Workload, ...] = (
    *OWN_TRAININGS,
    *PROBES,
    _COMMAND,
    _NODES,
    _VET,
)

#: Variants that are worth a line of their own in a listing: workload -> name -> fields that differ from the preset.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cosmoflow": {"kernel_size=2": {"kernel_size": 2}},
    "resnet50": {"stem=epcc": {"stem": "epcc"}},
    "language_model": {"architecture=llama": {"architecture": "llama"}},
}


def requests(workloads: Iterable[Workload] = WORKLOADS) -> List[Dict[str, Any]]:
    """Return what there is to describe: each workload that trains, in each preset, in each variant."""
    rows: List[Dict[str, Any]] = []
    for workload in workloads:
        if not workload.module or workload.probe:
            continue
        variants: Dict[str, Mapping[str, Any]] = {"": {}, **VARIANTS.get(workload.name, {})}
        for preset, values in workload.presets.items():
            for variant, changes in variants.items():
                if changes and all(values.get(name) == value for name, value in changes.items()):
                    continue  # the preset is this variant already
                rows.append(
                    {
                        "workload": workload.name,
                        "module": workload.module,
                        "preset": preset,
                        "variant": variant,
                        "parameters": parameters_of(workload, preset, **changes),
                    }
                )
    return rows


def describe(request: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the request with what it comes to; with ``error`` instead where the workload cannot be built.

    Adds ``input_shape`` and ``input_type`` (one stored sample), ``model_parameters``, ``forward_flop`` and ``train_flop``
    (one sample), ``tokens_per_sample`` (0 but for language).
    """
    # Here, not above: the controller takes `requests` from this module and never imports torch.
    from pytest_mlhpc.node.worker.reporting import count

    described = dict(request)
    try:
        task = importlib.import_module(request["module"]).task(request["parameters"])
        cost = count(task)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # One third-party workload that cannot be built must not hide the others (NotImplementedError is a RuntimeError).
        described["error"] = f"{type(error).__name__}: {error}"
        return described
    described.update(
        input_shape=list(task.input.shape),
        input_type=str(task.input.dtype).replace("torch.", ""),
        model_parameters=cost.parameters,
        forward_flop=cost.forward,
        train_flop=cost.train,
        tokens_per_sample=task.tokens_per_sample,
    )
    return described


def main(arguments: Sequence[str]) -> int:
    """Print what each workload is made of, as one JSON list: our own, or with ``-`` what standard input asks for. Returns 0.

    That is a JSON list of objects with ``workload, module, preset, variant, parameters``. Sizes are counted without memory or
    data, so the largest model is described as fast as the smallest.
    """
    asked = json.load(sys.stdin) if list(arguments) == ["-"] else requests()
    json.dump([describe(request) for request in asked], sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
