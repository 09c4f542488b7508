"""Made-up measurements, specs and entries for tests of the judge and of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_mlhpc.config.model import Environment, NodeType, Partition, Target
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judge import JudgeInputs
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, RankReport
from pytest_mlhpc.store.record import JudgedBy, Record

SECOND = 1_000_000_000
#: What the made-up runs compute.
DEFINITION = "resnet50 devices=1 nodes=1 preset=smoke steps=10"


def target(system: str = "cirrus", fingerprint: str = "", name: str = "standard") -> Target:
    environment = Environment("default", "python3")
    partition = Partition(system, name, "slurm", "srun", "cpu", NodeType(288, 768 << 30), (environment,))
    return Target(partition, environment, fingerprint=fingerprint)


def inputs(
    entries: Mapping[str, Entry], nights: Mapping[str, Sequence[Attempts]], **terms: Any
) -> JudgeInputs:
    """Return what runs are judged by: terms are those of a site of one series, which may re-run four times."""
    fields: dict[str, Any] = {
        "entries": {}, "since_ns": {}, "default_branch": "main", "mode": "fail", "local": False, "nightly": True,
        "series": 1, "reruns_allowed": 4, "reruns_broken": 0,
    }  # fmt: skip
    return JudgeInputs(entries, nights, JudgedBy(**{**fields, **terms}))


def spec(judged: tuple[str, ...] = ("rate",), **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "node_id": "suites/test_a.py::test_a[cirrus:standard]", "name": "test_a", "workload": "resnet50", "target": target(),
        "preset": "smoke", "parameters": {}, "asked": {}, "nodes": 1, "ranks": 1, "steps": 10, "warmup_steps": 1,
        "time_limit_s": 60.0, "launcher": "plain", "judged": judged, "expected_metrics": judged,
        "benchmark": "suites/test_a.py::test_a", "definition": DEFINITION,
    }  # fmt: skip
    return JobSpec(**{**fields, **changes})


def rank(number: int = 0, **changes: Any) -> RankReport:
    fields: dict[str, Any] = {
        "rank": number, "local_rank": number, "host": "n1", "device_type": "cpu", "device_index": number, "device_model": "EPYC",
        "steps": 10, "samples": 100, "started_ns": SECOND, "ended_ns": 3 * SECOND, "epoch_s": 1.0, "wait_s": 0.1, "copy_s": 0.0,
        "warmup_s": 0.5, "step_times_s": (0.1,) * 10, "losses": (2.0, 1.0),
    }  # fmt: skip
    return RankReport(**{**fields, **changes})


def measurement(
    value: float = 100.0,
    *,
    name: str = "rate",
    unit: str = "samples/s",
    better: str = "higher",
    more: tuple[MetricValue, ...] = (),
    **changes: Any,
) -> Measurement:
    fields: dict[str, Any] = {
        "run_id": "01890000-0000-7000-8000-000000000001", "nonce": "n", "attempt": 0, "workload": "resnet50",
        "device_type": "cpu", "device_model": "EPYC", "nodes": ("n1",), "ranks": 1, "devices": 1, "steps": 10, "samples": 100,
        "started_ns": SECOND, "ended_ns": 3 * SECOND, "metrics": (MetricValue(name, value, unit, better), *more),
        "step_times_s": (0.1,) * 10, "data_kind": "synthetic", "data_source": "memory",
    }  # fmt: skip
    return Measurement(**{**fields, **changes})


def entry(value: float = 100.0, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "value": value, "unit": "samples/s", "better": "higher", "tolerance": 0.05, "definition": DEFINITION,
    }  # fmt: skip
    return Entry(**{**fields, **changes})


def record(number: int = 1, value: float = 100.0, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "id": f"01890000-0000-7000-8000-{number:012d}", "session": "01890000-0000-7000-8000-aaaaaaaaaaaa",
        "node_id": "suites/test_a.py::test_a[cirrus:standard]", "benchmark": "suites/test_a.py::test_a",
        "definition": DEFINITION, "system": "cirrus", "partition": "standard", "environment": "default", "device_model": "EPYC", "attempt": 0,
        "created_ns": (1_800_000_000 + number) * SECOND, "verdict": "passed", "purpose": "nightly", "branch": "main",
        "judged": ("rate",), "measurement": measurement(value),
    }  # fmt: skip
    return Record(**{**fields, **changes})
