"""PAYLOAD, no torch. What a run to a quality target was asked for, with all that is unset filled in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields import quality as fields

#: Workload -> what is measured, its better direction, and the target of its benchmark.
#:
#: cosmoflow, deepcam: MLPerf HPC v3.0 (mlcommons/training_policies, ``hpc_training_rules.adoc``). resnet50: MLPerf Training
#: until v4.0. language_model: log-perplexity of Llama 3.1 8B in MLPerf Training v5.1, for its own tokens: for bytes it is
#: an easy one.
TARGETS: Mapping[str, Tuple[str, str, float]] = {
    "cosmoflow": ("eval_error", "lower", 0.124),
    "deepcam": ("eval_accuracy", "higher", 0.82),
    "resnet50": ("eval_accuracy", "higher", 0.759),
    "language_model": ("eval_error", "lower", 3.3),
}

#: Workload -> training epochs between evaluations where it is not 1 (MLPerf Training rules for ResNet-50).
_EVERY = {"resnet50": 4}

#: Share of the run's time limit in which the target must be reached: failing with the curve beats being killed.
_SHARE_OF_LIMIT = 0.9

#: Files that one rank copies at a time: parallel file systems answer one file slowly and several at once.
_STAGING_WORKERS = 4


@dataclass(frozen=True)
class Target:
    """A quality to reach: ``key`` is its word in MLPerf's logs, eval_error or eval_accuracy."""

    key: str
    better: str
    value: float

    def reached(self, quality: float) -> bool:
        """Whether *quality* is as good as the target, or better."""
        return quality <= self.value if self.better == "lower" else quality >= self.value


@dataclass(frozen=True)
class Staging:
    """How samples get to the node: ``how`` is files or archives, ``share`` all or node."""

    how: str
    path: str
    share: str
    workers: int


@dataclass(frozen=True)
class Settings:
    """All of it. ``train_samples`` and ``eval_samples`` None: as many as the set has."""

    target: Target
    max_epochs: int
    max_seconds: float
    every: int
    train_samples: Optional[int]
    eval_samples: Optional[int]
    staging: Optional[Staging]
    whole: bool = True  #: whether these samples must be there; of a node's share of archives nobody knows how many it has

    @property
    def by_node(self) -> bool:
        """Whether each node has a share of the samples only."""
        return self.staging is not None and self.staging.share == "node"

    def of_share(self, nodes: int) -> Settings:
        """Return what is asked of the share of one of so many nodes; of one node all of it."""
        if nodes == 1:
            return self
        train, evaluated = (
            None if wanted is None else -(-wanted // nodes)
            for wanted in (self.train_samples, self.eval_samples)
        )
        return dataclasses.replace(self, train_samples=train, eval_samples=evaluated, whole=False)


def settings_of(run: RunPlan) -> Settings:
    """Return what *run* asks for.

    Raises:
        WorkerFailure: ``not_supported``, nobody has said what the quality of this workload is.
    """
    parameters = run.parameters
    if run.workload not in TARGETS:
        text = f"{run.workload} has no measure of quality; until='quality' is for {', '.join(TARGETS)}"
        raise WorkerFailure("not_supported", text)
    own = Target(*TARGETS[run.workload])
    asked = parameters.get("target")
    made = run.data_path is None
    train, evaluated = parameters.get("train_samples"), parameters.get("eval_samples")
    return Settings(
        target=own if asked is None else Target(own.key, own.better, float(asked)),
        max_epochs=int(parameters.get("max_epochs") or fields.MAX_EPOCHS),
        max_seconds=float(parameters.get("max_seconds") or _SHARE_OF_LIMIT * run.time_limit_s),
        every=int(parameters.get("evaluate_every") or _EVERY.get(run.workload, 1)),
        train_samples=int(train or fields.MADE_TRAINING) if made or train else None,
        eval_samples=int(evaluated or fields.MADE_EVALUATION) if made or evaluated else None,
        staging=_staging(parameters),
    )


def _staging(parameters: Mapping[str, Any]) -> Optional[Staging]:
    if parameters.get("staging") is None:
        return None
    return Staging(
        how=str(parameters["staging"]),
        path=str(parameters.get("staging_path") or "$TMPDIR"),
        share=str(parameters.get("staging_share") or "all"),
        workers=int(parameters.get("staging_workers") or _STAGING_WORKERS),
    )
