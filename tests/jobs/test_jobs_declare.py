"""What becomes of the fields of a test: values, defaults, launchers, judged metrics, and what must be reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.contradictions import duplicates, lacking, unfulfilled
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.plan import plan_of, run_plan
from pytest_mlhpc.jobs.spec import same_needs
from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

RATE = (Metric("rate", r"rate: (\S+)", "items/s"),)


def test_parametrize_wins_over_marker_over_preset_over_default(declare):
    spec = declare(params={"steps": 7}, steps=5, warmup=2, input_size=64)
    assert (spec.steps, spec.warmup_steps) == (7, 2)
    assert spec.parameters["input_size"] == 64  # marker
    assert spec.parameters["base_channels"] == 8  # preset smoke
    assert spec.parameters["kernel_size"] == 3  # default
    assert spec.asked == {"steps": 7, "warmup": 2, "input_size": 64}


@pytest.mark.parametrize(
    ("workload", "fields", "attributes"),
    [
        ("cosmoflow", {}, {"preset": "smoke", "ranks": 1, "launcher": "plain", "exclusive": True}),
        ("cosmoflow", {"devices_per_node": 4}, {"ranks": 4, "launcher": "torchrun"}),
        ("cosmoflow", {"data": "cosmo"}, {"data": "cosmo"}),
        ("cosmoflow", {"data": "/some/where"}, {"data": "/some/where"}),
        ("cosmoflow", {"judge": False}, {"judged": ()}),
        ("cosmoflow", {"judge": ["model_flops_utilization"]}, {"judged": ("model_flops_utilization",)}),
        ("cosmoflow", {"time_limit": "30m"}, {"time_limit_s": 1800.0}),
        ("cosmoflow", {"time_limit": "1h30m"}, {"time_limit_s": 5400.0}),
        ("cosmoflow", {"time_limit": 90}, {"time_limit_s": 90.0}),
        ("cosmoflow", {"time_limit": 0.5}, {"time_limit_s": 0.5}),
        ("collective", {}, {"ranks": 2, "launcher": "torchrun"}),  # one rank has no partner
        ("gradients", {}, {"ranks": 2}),
        ("cosmoflow", {"nodes": 2, "devices_per_node": 4}, {"nodes": 2, "ranks": 8}),  # totals are not asked for
    ],
)  # fmt: skip
def test_a_field_becomes_what_is_run(declare, workload, fields, attributes):
    spec = declare(workload, **fields)
    assert {name: getattr(spec, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("workload", "fields", "parameters"),
    [
        ("cosmoflow", {"preset": "reference"}, {"input_size": 128}),
        ("cosmoflow", {"devices_per_node": 4}, {"global_batch": 32}),  # the workload's batch of each device, times the devices
        ("storage", {"file_size": "8MiB", "block_size": "64KiB", "files": 10}, {"file_size": 8 << 20, "block_size": 64 << 10}),
        ("collective", {"sizes": ("8B", "1MiB")}, {"sizes": [8, 1 << 20]}),
    ],
)  # fmt: skip
def test_a_field_becomes_a_parameter(declare, workload, fields, parameters):
    assert declare(workload, **fields).parameters.items() >= parameters.items()


def test_the_preset_of_a_test_wins_over_that_of_the_session(declare):
    spec = declare(params={"preset": "reference"}, preset="small")
    assert (spec.preset, spec.parameters["input_size"]) == ("reference", 128)
    assert " preset=reference " in spec.definition


@pytest.mark.parametrize(
    ("named", "devices", "launcher"),
    [
        ("auto", 1, "plain"), ("auto", 4, "torchrun"), ("plain", 4, "torchrun"), ("torchrun", 1, "plain"),
        ("srun", 1, "srun"), ("ours", 4, "site_tools.launch"),  # a third party's payload module
    ],
)  # fmt: skip
def test_a_partition_names_who_starts_the_ranks_of_a_training(declare, target, named, devices, launcher):
    partition = replace(target.partition, launcher=named)
    spec = declare(on=replace(target, partition=partition), devices_per_node=devices)
    assert spec.launcher == launcher


@pytest.mark.parametrize(
    ("workload", "fields", "reported", "never"),
    [
        ("cosmoflow", {"judge": ["energy"]}, ["energy"], []),  # a run that does not report it has failed
        ("collective", {"sizes": ["8B", "1KiB", "3MiB", "12B"]},
         ["latency", "bus_bandwidth", "time_8b", "time_1kib", "bus_bandwidth_3mib", "time_12b"], []),
        ("collective", {"operation": "point_to_point", "peers": "each", "devices_per_node": 3, "sizes": ["8B"]},
         ["time_8b", "time_8b_rank1", "bus_bandwidth_8b_rank2"], ["rank0", "rank3"]),
        ("storage", {"devices_per_node": 2}, ["write_bandwidth_of_slowest_rank"], []),
        ("storage", {}, [], ["write_bandwidth_of_slowest_rank"]),
        ("peaks", {"precisions": ["fp32", "fp16"]},
         ["gemm_flops_fp32", "gemm_flops_fp16", "copy_bandwidth", "triad_bandwidth"], ["gemm_flops_bf16"]),
        ("kernels", {"of": "deepcam"}, ["achieved_flops", "step_bytes_modelled", "profiled_step_time"], []),
    ],
)  # fmt: skip
def test_what_is_measured_must_be_reported(declare, workload, fields, reported, never):
    expected = declare(workload, **fields).expected_metrics
    assert set(reported) <= set(expected)
    assert not [name for name in expected for part in never if part in name]


@pytest.mark.parametrize(
    "workload", [one for one in WORKLOADS if one.judged and one.name != "lowering"], ids=lambda one: one.name
)
def test_what_is_judged_without_being_asked_is_known_before_a_run(declare, workload):
    spec = declare(workload.name)
    known = workload.may_report({**spec.parameters, "devices": spec.ranks})
    assert set(spec.judged) <= set(known)
    assert declare(workload.name, judge=list(spec.judged)).judged == spec.judged


def test_a_collective_without_devices_has_no_such_parameter_and_reads_no_data(declare):
    spec = declare("collective")
    assert "devices" not in spec.parameters
    assert " data=" not in spec.definition
    run = run_plan(spec, 0)
    assert (run.data_source, run.data_path, run.data_kind) == ("none", None, "none")


@pytest.mark.parametrize(
    ("workload", "fields", "may"),
    [
        ("cosmoflow", {}, True),
        ("cosmoflow", {"preset": "reference"}, False),  # an import is nothing of such a run
        ("cosmoflow", {"devices_per_node": 2}, True),  # several ranks on one node
        ("cosmoflow", {"nodes": 2}, False),  # those on other nodes are started there
        ("cosmoflow", {"devices_per_node": 2, "backend": "mpi"}, False),  # MPI starts its ranks itself
        ("cosmoflow", {"compile": "default"}, False),  # its rank imports the compiler
        ("cosmoflow", {"binding": "cores"}, False),  # its rank chooses cores before it imports torch
        ("storage", {"preset": "reference"}, True),  # a probe is short in each preset
    ],
)
def test_ranks_of_short_runs_may_be_forked(declare, workload, fields, may):
    assert run_plan(on(declare(workload, **fields), "local", "cpu"), 0).warm is may


@pytest.mark.parametrize(
    ("scheduler", "accelerator", "may"),
    [("local", "cpu", True), ("local", "cuda", True), ("kubernetes", "cuda", True), ("slurm", "cpu", True)]
    + [("local", accelerator, False) for accelerator in ("rocm", "xpu", "ipu", "wse")],
)
def test_ranks_are_forked_only_where_that_was_tried(declare, scheduler, accelerator, may):
    assert run_plan(on(declare("cosmoflow"), scheduler, accelerator), 0).warm is may


def test_ranks_are_forked_only_where_the_partition_says_so(declare):
    assert not run_plan(on(declare("cosmoflow"), "kubernetes", "cpu", warm=False), 0).warm


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "podrun", "poprun"])
def test_ranks_that_their_launcher_must_start_are_not_forked(declare, launcher):
    assert not run_plan(replace(on(declare("cosmoflow"), "slurm", "cpu"), launcher=launcher), 0).warm


@pytest.mark.parametrize(
    ("scheduler", "runs", "warm"),
    [
        ("local", 1, True),
        ("kubernetes", 1, False),
        ("kubernetes", 2, True),
        ("slurm", 1, False),
        ("slurm", 2, True),
    ],
)
def test_a_run_alone_in_an_allocation_is_fresh_but_on_local(declare, scheduler, runs, warm):
    spec = on(declare("cosmoflow"), scheduler, "cpu")
    plan = plan_of([(spec, attempt) for attempt in range(runs)], Path("/runs"), "")
    assert {run.warm for run in plan.runs} == {warm}


def on(spec, scheduler, accelerator, *, warm=True):
    """Return *spec* on a partition of this scheduler and accelerator, on which ranks may be forked or not."""
    partition = replace(spec.target.partition, scheduler=scheduler, accelerator=accelerator, warm=warm)
    return replace(spec, target=replace(spec.target, partition=partition))


@pytest.mark.parametrize(
    ("cwd", "folder"),
    [(None, None), (".", "/suites/a"), ("../data", "/suites/data"), ("/scratch", "/scratch")],
)
def test_a_folder_to_start_in_is_relative_to_the_tests_file(declare, cwd, folder):
    spec = declare("command", command="./bench", metrics=RATE, cwd=cwd, folder=Path("/suites/a"))
    assert spec.cwd == folder


TWO = (Metric("rate", r"rate: (\S+)", "MB/s"), Metric("setup", r"setup: (\S+)", "ms"))


@pytest.mark.parametrize(
    ("reference", "metrics", "found"),
    [
        ({"sys": 180, "other": 90}, TWO[:1], {"rate": 180e6}),
        ({"sys": 180, "sys:part": 90.5}, TWO[:1], {"rate": 90.5e6}),
        ({"other": 90}, TWO[:1], {}),
        ({"rate": {"sys": 180}, "setup": {"sys": 3}}, TWO, {"rate": 180e6, "setup": 0.003}),
        ({}, TWO, {}),
        (None, TWO, {}),
    ],
)
def test_a_promise_is_of_this_system_or_partition_in_base_units(declare, reference, metrics, found):
    spec = declare("command", command="./bench", metrics=metrics, reference=reference)
    assert spec.references == pytest.approx(found)
    assert spec.definition == declare("command", command="./bench", metrics=metrics).definition


@pytest.mark.parametrize(
    ("marked", "params", "others", "owner"),
    [
        ({"owner": "ada"}, {"owner": "bob"}, ("@file", "ops"), "bob"),
        ({"owner": " ada, bob "}, {}, ("@file", "ops"), "ada, bob"),
        ({}, {}, ("@file", "ops"), "@file"),
        ({"owner": " "}, {}, ("", "ops"), "ops"),
        ({}, {}, ("", "ops"), "ops"),
        ({}, {}, ("", ""), ""),
    ],
)
def test_the_owner_of_a_test_is_its_own_or_that_of_its_file_or_of_the_partition(
    target, marked, params, others, owner
):
    of_file, of_partition = others
    on = replace(target, partition=replace(target.partition, owner=of_partition))
    declared = Declaration("t.py::test_it", "test_it", "cosmoflow", on, marked, params, owner=of_file)
    known = {workload.name: workload for workload in WORKLOADS}
    assert resolve(declared, known, None, {"plain": "pytest_mlhpc.node.launch"}).owner == owner


def test_an_owner_changes_nothing_that_is_computed_or_shared(declare):
    owned, plain = declare(owner="ada"), declare()
    assert (owned.definition, owned.parameters) == (plain.definition, plain.parameters)
    assert same_needs(owned, plain)


def test_a_program_that_lies_next_to_its_test_is_started_by_its_whole_path(declare, tmp_path):
    (tmp_path / "bench").touch()
    spec = declare("command", command="./bench -n 4", metrics=RATE, folder=tmp_path)
    assert spec.argv == ("./bench", "-n", "4")
    assert run_plan(spec, 0).argv == (f"{tmp_path}/bench", "-n", "4")
    elsewhere = declare("command", command="./bench -n 4", metrics=RATE, folder=tmp_path, cwd="/scratch")
    assert run_plan(elsewhere, 0).argv == ("./bench", "-n", "4")


def test_pods_do_not_have_the_folder_of_a_test(declare, target, tmp_path):
    (tmp_path / "bench").touch()
    pods = replace(target, partition=replace(target.partition, scheduler="kubernetes"))
    fields = {"command": "./bench", "metrics": RATE, "folder": tmp_path, "on": pods}
    assert run_plan(declare("command", **fields), 0).argv == ("./bench",)
    with pytest.raises(
        SpecError, match=r"cwd: '\.' is relative to the test's file, which its nodes do not have"
    ):
        declare("command", cwd=".", **fields)


def test_a_command_runs_at_the_same_time_as_others_and_judges_metrics_with_a_direction(declare):
    metrics = [*RATE, Metric("size", unit="B", better="none")]
    spec = declare("command", command=("./bench", "-n", 4), metrics=metrics)
    assert spec.argv == ("./bench", "-n", "4")
    assert not spec.exclusive
    assert (spec.judged, spec.expected_metrics) == (("rate",), ("rate", "size"))


@pytest.mark.parametrize("given", [[Path("/opt/bench"), "-n", 4, "a b"], "/opt/bench -n 4 'a b'"])
def test_a_command_reaches_the_program_and_the_record_as_a_list_of_arguments(command, given):
    spec = command(command=given)
    assert spec.argv == ("/opt/bench", "-n", "4", "a b")
    assert json.loads(json.dumps(spec.asked))["command"] == list(spec.argv)


@pytest.mark.parametrize(
    ("metric", "rule"),
    [
        (Metric("rate", "x(.)", "items/s"), {"pattern": "x(.)", "unit": "items/s", "better": "higher"}),
        (Metric("t", unit="us"), {"unit": "s", "better": "lower", "scale": 1e-6, "declared": "us"}),
        (Metric("t", unit="s", better="none", reduce="max", tolerance=0.1),
         {"unit": "s", "better": "none", "reduce": "max", "tolerance": 0.1}),
    ],
)  # fmt: skip
def test_a_metric_reaches_the_run_in_base_units(command, metric, rule):
    spec = command(metrics=[metric])
    assert spec.asked["metrics"] == {metric.name: rule}
    assert run_plan(spec, 0).metrics == {metric.name: MetricPattern(**rule)}


@pytest.mark.parametrize(
    ("partition", "fields", "text"),
    [
        ({}, {"devices_per_node": 8}, ""),
        ({}, {"devices_per_node": 9}, "has 8 cores, 9 ranks asked"),
        ({}, {"nodes": 5}, "at most 4 nodes, 5 asked"),
        ({"accelerator": "cuda"}, {}, "has 0 devices, 1 asked"),
    ],
)
def test_a_partition_does_not_run_what_it_lacks(declare, target, partition, fields, text):
    found = lacking(declare(on=replace(target, partition=replace(target.partition, **partition)), **fields))
    assert text in found
    assert bool(text) is bool(found)


@pytest.mark.parametrize(
    ("requires", "text"),
    [
        (["+ib", "-nvme", "cpu"], ""),
        (["ib", "nvme"], "sys:part has no feature 'nvme'"),
        (
            ["-ib", "nvme", "-cpu"],
            "sys:part has the feature 'ib' and no feature 'nvme' and the feature 'cpu'",
        ),
    ],
)
def test_features_and_the_accelerator_are_what_a_test_may_require_or_refuse(target, requires, text):
    assert unfulfilled(requires, replace(target.partition, features=frozenset({"ib"}))) == text


def test_two_tests_of_one_identity_are_named_both(declare):
    first, second = (declare(node_id=f"{file}.py::test_it", name="it") for file in "ab")
    assert [str(problem).partition(";")[0] for problem in duplicates([first, second])] == [
        "a.py::test_it: name: the test has the same identity as b.py::test_it",
        "b.py::test_it: name: the test has the same identity as a.py::test_it",
    ]
    assert duplicates([first, declare(node_id="b.py::test_it")]) == []
