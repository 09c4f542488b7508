"""What a ledger says of an allocation, and the digest by which a later session finds its own jobs in it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from pytest_mlhpc.config.model import Dataset, Environment
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, job_name, ledger_entry, same_cluster, spec_digest
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.store.record import Provenance


def changed_target(spec, **partition):
    return replace(spec, target=replace(spec.target, partition=replace(spec.target.partition, **partition)))


DIGEST = """
from pytest_mlhpc.jobs.ledger_entry import spec_digest
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.config.model import *
e = Environment('default', 'python3', variables={'B': '2', 'A': '1'})
p = Partition('s', 'p', 'slurm', 'srun', 'cpu', NodeType(8, 2**30), (e,), frozenset({'a', 'b', 'c'}))
s = JobSpec('n', 't', 'w', Target(p, e), 'smoke', {'x': {'q', 'r', 's'}}, {}, 1, 1, 1, 0, 60.0, 'plain')
print(spec_digest(s))
"""


def test_another_process_with_other_hash_seeds_agrees(tmp_path):
    root = str(Path(__file__).resolve().parents[2])

    def digest(seed):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        return subprocess.check_output([sys.executable, "-c", DIGEST], env=environ, cwd=tmp_path)

    assert len({digest(seed) for seed in "012"}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec,
        lambda spec: replace(spec, node_id="moved/elsewhere.py::test_it"),
        lambda spec: replace(spec, asked={"steps": 4}),
        lambda spec: replace(spec, judged=("epoch",), expected_metrics=("loss",)),
        lambda spec: changed_target(replace(spec, owner="ada"), owner="@hpc/ops"),
        lambda spec: changed_target(spec, budget="20 node-hours", max_jobs=1, features=frozenset({"nvme"})),
        lambda spec: changed_target(spec, environments=()),
        lambda spec: replace(spec, target=replace(spec.target, datasets={})),
        lambda spec: replace(spec, time_limit_s=int(spec.time_limit_s)),
    ],
)
def test_what_does_not_change_the_job_does_not_change_its_digest(declare, change):
    assert spec_digest(change(declare())) == spec_digest(declare())


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, name="other"),
        lambda spec: replace(spec, nodes=2),
        lambda spec: replace(spec, parameters={**spec.parameters, "seed": 12345}),
        lambda spec: replace(spec, time_limit_s=spec.time_limit_s + 1),
        lambda spec: replace(spec, cwd="/another/checkout"),
        lambda spec: replace(spec, benchmark="another key"),
        lambda spec: changed_target(spec, scheduler_options={"account": "z01"}),
        lambda spec: changed_target(spec, name="other"),
        lambda spec: replace(
            spec, target=replace(spec.target, environment=Environment("default", "python3"))
        ),
    ],
)
def test_what_changes_the_job_changes_its_digest(declare, change):
    assert spec_digest(change(declare())) != spec_digest(declare())


def test_the_data_set_that_is_used_counts(declare):
    spec = declare(data="cosmo")
    moved = replace(spec.target, datasets={"cosmo": Dataset("cosmo", "/elsewhere", "real")})
    assert spec_digest(replace(spec, target=moved)) != spec_digest(spec)


def test_paths_sets_and_enums_count_by_what_they_say(declare):
    odd = {"p": PurePosixPath("/a"), "s": frozenset({2, 1}), "e": JobState.QUEUED, "f": 1.0, "t": (1, None)}
    plain = {"p": "/a", "s": [1, 2], "e": JobState.QUEUED.value, "f": 1, "t": [1, None]}
    digests = {spec_digest(replace(declare(), parameters=values)) for values in (odd, plain)}
    assert len(digests) == 1


def test_an_object_without_a_text_of_its_own_is_refused_by_name(declare):
    spec = replace(declare(), parameters={"model": [object()]})
    with pytest.raises(TypeError, match=r"spec\.parameters\.model\[0\]: object is neither plain JSON nor"):
        spec_digest(spec)


def test_an_entry_says_all_that_a_later_session_needs(declare, tmp_path):
    specs = [declare(node_id="t.py::a"), declare(node_id="t.py::b")]
    plan = plan_of([(specs[0], 0), (specs[1], 2)], tmp_path, "sha")
    entry = ledger_entry(plan, specs, "s1", "archer2", provenance=Provenance("nightly", "main", "abc"))
    assert (entry.id, entry.job_name) == (plan.allocation_id, job_name(plan.allocation_id))
    assert (entry.partition, entry.scheduler, entry.directory) == ("sys:part", "fake", plan.directory)
    assert (entry.session, entry.uid, entry.native_id) == ("s1", os.getuid(), "")
    runs = [(run.run_id, run.node_id, run.attempt) for run in entry.runs]
    assert runs == [(plan.runs[0].run_id, "t.py::a", 0), (plan.runs[1].run_id, "t.py::b", 2)]
    assert entry.runs[0].digest == spec_digest(specs[0])
    assert (entry.cluster, entry.commit, entry.branch, entry.purpose) == ("archer2", "abc", "main", "nightly")
    assert from_json(LedgerEntry, to_json(entry)) == entry
    bare = ledger_entry(plan, specs, "s1")
    assert (bare.cluster, bare.commit, bare.branch, bare.purpose) == ("", "", "", "")


@pytest.mark.parametrize(
    ("one", "other", "same"), [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)]
)
def test_jobs_of_two_clusters_are_distinguished_where_both_names_are_known(one, other, same):
    assert same_cluster(LedgerEntry("job", "sys:part", cluster=one), other) is same
