"""What becomes of the fields of a test: values, defaults, launchers, judged metrics, and what must be reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.jobs.contradictions import duplicates, lacking
from pytest_mlhpc.jobs.planning import run_of

RATE = {"rate": {"pattern": r"rate: (\S+)", "unit": "items/s", "better": "higher"}}


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
        ("cosmoflow", {"devices": 4}, {"ranks": 4, "launcher": "torchrun"}),
        ("cosmoflow", {"devices": 4, "launcher": "plain"}, {"launcher": "plain"}),
        ("cosmoflow", {"launcher": "torchrun"}, {"launcher": "torchrun"}),
        ("cosmoflow", {"launcher": "ours"}, {"launcher": "site_tools.launch"}),  # a third party's payload module
        ("cosmoflow", {"data": "cosmo"}, {"data": "cosmo"}),
        ("cosmoflow", {"data": "/some/where"}, {"data": "/some/where"}),
        ("cosmoflow", {"judge": False}, {"judged": ()}),
        ("cosmoflow", {"judge": ["mfu"]}, {"judged": ("mfu",)}),
        ("cosmoflow", {"time_limit": "30m"}, {"time_limit_s": 1800.0}),
        ("cosmoflow", {"time_limit": "1h30m"}, {"time_limit_s": 5400.0}),
        ("cosmoflow", {"time_limit": 90}, {"time_limit_s": 90.0}),
        ("cosmoflow", {"time_limit": 0.5}, {"time_limit_s": 0.5}),
        ("collective", {}, {"ranks": 2, "launcher": "torchrun"}),  # one rank has nobody to talk to
        ("gradients", {}, {"ranks": 2}),
    ],
)  # fmt: skip
def test_a_field_becomes_what_is_run(declare, workload, fields, attributes):
    spec = declare(workload, **fields)
    assert {name: getattr(spec, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("workload", "fields", "parameters"),
    [
        ("cosmoflow", {"preset": "reference"}, {"input_size": 128}),
        ("cosmoflow", {"devices": 4}, {"global_batch": 32}),  # the workload's batch of each device, times the devices
        ("storage", {"file_size": "8MiB", "block_size": "64KiB", "files": 10}, {"file_size": 8 << 20, "block_size": 64 << 10}),
        ("collective", {"sizes": ("8B", "1MiB")}, {"sizes": [8, 1 << 20]}),
    ],
)  # fmt: skip
def test_a_field_becomes_a_parameter(declare, workload, fields, parameters):
    assert declare(workload, **fields).parameters.items() >= parameters.items()


@pytest.mark.parametrize(
    ("workload", "fields", "reported", "never"),
    [
        ("cosmoflow", {"judge": ["mfu"]}, ["mfu"], []),  # a run that does not report it has failed
        ("collective", {"sizes": ["8B", "1KiB", "3MiB", "12B"]},
         ["latency", "bus_bandwidth", "time_8b", "time_1kib", "bus_bandwidth_3mib", "time_12b"], []),
        ("collective", {"operation": "point_to_point", "peers": "each", "devices": 3, "sizes": ["8B"]},
         ["time_8b", "time_8b_rank1", "bus_bandwidth_8b_rank2"], ["rank0", "rank3"]),
        ("storage", {"devices": 2}, ["write_bandwidth_of_slowest_rank"], []),
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


def test_a_collective_without_devices_has_no_such_parameter_and_reads_no_data(declare):
    spec = declare("collective")
    assert "devices" not in spec.parameters
    assert " data=" not in spec.benchmark
    run = run_of(spec, 0)
    assert (run.data_source, run.data_path, run.data_kind) == ("none", None, "none")


def test_a_command_runs_beside_others_and_judges_metrics_with_a_direction(declare):
    metrics = {**RATE, "size": {"unit": "B", "better": "none"}}
    spec = declare("command", argv=("./bench", "-n", 4), metrics=metrics)
    assert spec.argv == ("./bench", "-n", "4")
    assert not spec.exclusive
    assert (spec.judged, spec.expected_metrics) == (("rate",), ("rate", "size"))


def test_paths_and_numbers_in_argv_reach_the_program_and_the_record_as_text(command):
    spec = command(argv=[Path("/opt/bench"), "-n", 4, 0.5])
    assert spec.argv == ("/opt/bench", "-n", "4", "0.5")
    assert json.loads(json.dumps(spec.asked))["argv"] == ["/opt/bench", "-n", "4", "0.5"]


@pytest.mark.parametrize(
    ("partition", "fields", "text"),
    [
        ({}, {"devices": 8}, ""),
        ({}, {"devices": 9}, "has 8 cores, 9 ranks asked"),
        ({}, {"nodes": 5, "devices": 5}, "at most 4 nodes, 5 asked"),
        ({"accelerator": "cuda"}, {}, "has 0 devices, 1 asked"),
        ({"features": frozenset({"ib"})}, {"features": ["ib"]}, ""),
        ({"features": frozenset({"ib"})}, {"features": ["ib", "nvme"]}, "sys:part has no feature 'nvme'"),
    ],
)
def test_a_partition_does_not_run_what_it_lacks(declare, target, partition, fields, text):
    found = lacking(declare(on=replace(target, partition=replace(target.partition, **partition)), **fields))
    assert text in found
    assert bool(text) is bool(found)


def test_two_tests_with_one_key_are_named_both(declare):
    first, second = declare(node_id="a.py::test_it"), declare(node_id="b.py::test_it")
    (problem,) = duplicates([first, second])
    assert "b.py::test_it" in str(problem)
    assert "the same key as a.py::test_it" in str(problem)
    assert duplicates([first, declare(node_id="b.py::test_it", name="other")]) == []
