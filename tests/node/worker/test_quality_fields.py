"""What a test may ask of a run to a quality target, and what is refused at collection."""

import pytest
from probe_ranks import NAMED

from pytest_mlhpc.config.model import Environment, NodeType, Partition, Target
from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.node.worker.workloads.fields.quality import FIELDS

LAUNCHERS = dict.fromkeys(("plain", "torchrun"), "pytest_mlhpc.node.launch")


def declared(workload: str = "cosmoflow", **fields):
    environment = Environment("default", "python3")
    partition = Partition(
        system="sys", name="part", scheduler="fake", launcher="auto", accelerator="cpu",
        nodes=NodeType(cores=8, memory=2**36, max=4), environments=(environment,), preset="smoke",
    )  # fmt: skip
    declaration = Declaration("t.py::t", "t", workload, Target(partition, environment), fields, {})
    return resolve(declaration, NAMED, "smoke", LAUNCHERS)


def problems(workload: str = "cosmoflow", **fields) -> list[str]:
    with pytest.raises(SpecError) as caught:
        declared(workload, **{"until": "quality", "data": "files", **fields})
    return [str(problem) for problem in caught.value.problems]


def test_keys_of_other_runs_stay_as_they_are():
    assert not [name for name in FIELDS if f"{name}=" in declared().definition]


def test_a_run_to_a_quality_is_a_benchmark_of_its_own_and_asks_for_no_steps():
    spec = declared(until="quality", data="files", target=0.2, staging="files", staging_path="/a/b")
    named = [text in spec.definition for text in ("until=quality", "target=0.2", "/a/b")]
    assert named == [True, True, False]
    assert (spec.steps, spec.warmup_steps) == (1, 0)
    times = {"time_to_train", "staging_time", "training_time", "evaluation_time"}
    assert times | {"epochs", "quality"} <= set(spec.expected_metrics)


@pytest.mark.parametrize(
    ("workload", "fields", "text"),
    [
        *(("cosmoflow", {name: 5}, "means nothing with until='quality', which ends where the target is reached")
          for name in ("steps", "warmup")),
        ("cosmoflow", {"until": None, "data": "memory", "target": 0.5}, "target means nothing without until='quality'"),
        ("cosmoflow", {"cache": "warm"}, "time to train counts from the first touch of data that is in no cache"),
        ("cosmoflow", {"data": "memory"}, "data='memory' was never on storage"),
        ("cosmoflow", {"staging_share": "node"}, "staging_share means nothing without staging"),
        ("cosmoflow", {"train_samples": 4, "global_batch": 8}, "train_samples=4 is less than one step of 8 samples"),
        ("cosmoflow", {"eval_samples": 1, "devices_per_node": 2}, "eval_samples=1 is less than one for each of 2 devices"),
        ("cosmoflow", {"schedule": {"milestones": [3], "factors": [0.1]}}, "milestones means nothing to kind='constant'"),
        ("cosmoflow", {"schedule": {"kind": "cosine", "length": 9, "power": 1}}, "power means nothing to kind='cosine'"),
        ("cosmoflow", {"schedule": {"warmup_factor": 8}}, "warmup_factor means nothing without warmup"),
        ("cosmoflow", {"target": -0.1}, "target=-0.1: an error cannot be below 0"),
        ("language_model", {"target": -1.0}, "target=-1: an error cannot be below 0"),
        ("resnet50", {"target": 75.9}, "target=75.9 is beyond 1, which is all answers right; 75.9 % are 0.759"),
        ("deepcam", {"target": 82}, "82 % are 0.82"),
        ("language_model", {"staging": "files", "staging_share": "node"}, "text is one string of bytes"),
        ("resnet50", {"staging": "archives", "staging_share": "node"}, "does not see all class folders"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_at_collection(workload, fields, text):
    assert any(text in problem for problem in problems(workload, **fields))
