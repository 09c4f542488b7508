"""Say what each workload is made of: ``python -m pytest_mlhpc.node.worker.workloads.describe [-]`` prints one JSON list.

Without argument it describes our own workloads; with ``-`` it reads what to describe from standard input, a JSON list of
objects with ``workload, module, preset, variant, parameters``. Sizes are counted without memory or data, so the
largest model is described as fast as the smallest.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from pytest_mlhpc.node.worker.workloads.catalogue import VARIANTS, WORKLOADS
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of


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
    """Print the descriptions. Returns 0."""
    asked = json.load(sys.stdin) if list(arguments) == ["-"] else requests()
    json.dump([describe(request) for request in asked], sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
