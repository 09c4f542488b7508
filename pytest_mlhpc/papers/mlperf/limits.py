"""What MLPerf's rules demand of each workload: targets, runs, data, model, optimizer. Data with sources.

Sources: MLPerf HPC Training Rules 3.0 (mlcommons/training_policies, hpc_training_rules.adoc), MLPerf Training Rules (the same,
training_rules.adoc), and the compliance checker's ``hpc_3.0.0`` (package mlperf-logging), which is what counts where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.papers.published import COSMOFLOW, DEEPCAM

#: Of the logs; the newest rules of MLPerf HPC.
USAGE: Final = "hpc"
RULESET: Final = "3.0.0"
#: Seconds from ``init_start`` to ``init_stop`` (hpc_3.0.0/common.yaml).
LONGEST_INIT_S: Final = 30 * 60.0


@dataclass(frozen=True)
class Quality:
    """How well a model must do. ``key`` is that of the logs' lines; ``runs`` are repeated and averaged (None: no rule)."""

    key: str
    target: float
    lower: bool  #: less is better
    name: str
    runs: int | None = None

    def reached(self, value: float, target: float | None = None) -> bool:
        """Return whether *value* is as good as the target, or as another one."""
        wanted = self.target if target is None else target
        return value <= wanted if self.lower else value >= wanted

    def as_strict(self, target: float) -> bool:
        """Return whether a run that was to reach *target* had to do at least as well as the rules demand."""
        return self.reached(target)


#: ResNet-50: MLPerf Training up to v4.0. Language model: Llama 3.1 8B of MLPerf Training v5.1, its log perplexity.
QUALITY: Final[Mapping[str, Quality]] = {
    "cosmoflow": Quality("eval_error", 0.124, lower=True, name="mean absolute error", runs=10),
    "deepcam": Quality("eval_accuracy", 0.82, lower=False, name="mean intersection over union", runs=5),
    "resnet50": Quality("eval_accuracy", 0.759, lower=False, name="top-1 accuracy", runs=5),
    "language_model": Quality("eval_error", 3.3, lower=True, name="log perplexity"),
}


@dataclass(frozen=True)
class Closed:
    """What the closed division of MLPerf HPC demands. ``values``: key of a log line -> what it must be."""

    train_samples: int
    eval_samples: int
    model: Mapping[str, str]
    optimizers: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    positive: tuple[str, ...] = ()  #: keys of log lines whose value must be more than zero


#: The benchmarks of MLPerf HPC that are workloads of ours.
CLOSED: Final[Mapping[str, Closed]] = {
    "cosmoflow": Closed(
        524_288, 65_536, COSMOFLOW, ("sgd",),
        values={"opt_momentum": 0.9},
    ),
    "deepcam": Closed(
        121_266, 15_158, DEEPCAM, ("adam", "adamw", "lamb"),
        values={"opt_eps": 1e-6, "opt_max_grad_norm": 1.0}, positive=("seed", "batchnorm_group_size"),
    ),
}  # fmt: skip
