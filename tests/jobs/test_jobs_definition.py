"""The definition of a job: what is computed and on what data, and nothing else."""

from dataclasses import replace

import pytest

from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.plan import run_plan
from pytest_mlhpc.node.worker.data import dataset_files
from pytest_mlhpc.node.worker.workloads.fields import arithmetic
from pytest_mlhpc.papers.throughput import TUNING


@pytest.fixture
def gpus(target):
    def make(accelerator):
        nodes = replace(target.partition.nodes, devices=4)
        return replace(target, partition=replace(target.partition, accelerator=accelerator, nodes=nodes))

    return make


def test_it_is_sorted_text_of_what_is_computed(declare):
    assert declare("resnet50", devices_per_node=2, stem="epcc", learning_rate=0.05, seed=0).definition == (
        "resnet50 channels_last=false classes=1000 data=memory devices=2 global_batch=16 gradient_accumulation=1 image_size=64 "
        "label_smoothing=0.1 learning_rate=0.05 nodes=1 optimizer=sgd precision=fp32 preset=smoke seed=0 stem=epcc steps=40 warmup=16"
    )


@pytest.mark.parametrize(
    ("workload", "one", "other"),
    [
        ("cosmoflow", {}, {"kernel_size": 2}),
        ("cosmoflow", {}, {"devices_per_node": 2}),
        ("cosmoflow", {}, {"data": "files"}),
        ("cosmoflow", {}, {"data": "cosmo"}),
        ("cosmoflow", {}, {"cache": "cold"}),
        ("cosmoflow", {}, {"steps": 99}),
        ("cosmoflow", {}, {"warmup": 9}),
        ("cosmoflow", {}, {"compile": "default"}),
        ("resnet50", {"devices_per_node": 4}, {"devices_per_node": 4, "batch_norm_group": "all"}),
        (
            "resnet50",
            {"devices_per_node": 4, "batch_norm_group": 2},
            {"devices_per_node": 4, "batch_norm_group": 4},
        ),
        ("storage", {"file_size": "1GiB"}, {"file_size": "2GiB"}),
        ("kernels", {}, {"of": "deepcam"}),
        ("kernels", {}, {"batch": 4}),
        ("kernels", {}, {"precision": "bf16"}),
        ("kernels", {}, {"fields": {"kernel_size": 2}}),
    ],
)
def test_what_changes_the_computation_changes_it(declare, workload, one, other):
    assert declare(workload, **one).definition != declare(workload, **other).definition


@pytest.mark.parametrize(
    ("workload", "one", "other"),
    [
        ("cosmoflow", {}, {"judge": False, "time_limit": 5, "name": "x"}),
        ("cosmoflow", {}, {"requires": ["ib"]}),
        ("cosmoflow", {"learning_rate": 1}, {"learning_rate": 1.0}),
        ("storage", {"file_size": "1GiB"}, {"file_size": "1024MiB"}),
        ("storage", {"path": "/a"}, {"path": "/b"}),
    ],
)
def test_what_changes_no_computation_does_not(declare, workload, one, other):
    assert declare(workload, **one).definition == declare(workload, **other).definition


@pytest.mark.parametrize(
    ("workload", "fields", "part"),
    [
        ("storage", {}, " cache=cold "),
        ("storage", {"cache": "warm"}, " cache=warm "),
        ("reading", {}, " cache=warm "),
        ("reading", {"cache": "cold"}, " cache=cold "),
        ("cosmoflow", {"compile": "default"}, "compile=default"),
        ("cosmoflow", {"threads": 2}, "threads=2"),
    ],
)
def test_it_names_what_must_never_be_compared(declare, workload, fields, part):
    assert part in declare(workload, **fields).definition


def test_what_is_unset_is_no_part_of_it(declare):
    text = declare().definition
    assert text.startswith("cosmoflow base_channels=8 channels_last=false data=memory devices=1 dropout=0.5 ")
    assert not [field for field in ("tuning", "compile", "threads", "None", "null") if field in text]


def test_moving_the_file_or_the_data_changes_nothing(declare, target):
    moved = replace(target, datasets={"cosmo": replace(target.datasets["cosmo"], path="/elsewhere")})
    there, here = declare(data="cosmo", on=moved, node_id="new/place.py::test_it"), declare(data="cosmo")
    assert there.definition == here.definition
    assert "/" not in there.definition


def test_a_path_to_a_set_of_ours_is_planned_as_synthetic_and_is_not_compared_with_real_data(
    declare, tmp_path
):
    (tmp_path / "sample").write_bytes(b"x")
    real = declare(data=str(tmp_path))
    assert run_plan(real, 0).data_kind == "real"
    dataset_files.write_manifest(tmp_path, dataset_files.describe(tmp_path, {"workload": "cosmoflow"}))
    made = declare(data=str(tmp_path))
    assert run_plan(made, 0).data_kind == "synthetic"
    assert run_plan(declare(data=str(tmp_path / "train")), 0).data_kind == "synthetic"
    assert made.definition != real.definition


def test_a_damaged_manifest_is_left_to_the_run_to_report(declare, tmp_path):
    (tmp_path / dataset_files.MANIFEST).write_text("{")
    assert run_plan(declare(data=str(tmp_path)), 0).data_kind == "real"


def test_tuning_fills_in_what_is_open_and_keeps_both_asked_and_effective_values(declare, gpus):
    spec = declare("language_model", on=gpus("cuda"), tuning="fast", precision="fp16")
    assert spec.asked == {"tuning": "fast", "precision": "fp16"}
    tuned = {"precision": "fp16", "fused_optimizer": True, "compile": "default"}
    assert spec.parameters.items() >= tuned.items()
    assert declare(on=gpus("cuda"), cuda_graphs=True).parameters["cuda_graphs"] is True


def test_that_of_a_tuned_run_names_what_is_computed_and_not_how(declare, gpus):
    tuned = declare("language_model", on=gpus("cuda"), tuning="fast").definition
    assert "precision=bf16" in tuned
    assert "tuning=fast" in tuned
    assert not [field for field in ("compile", "fused_optimizer") if field in tuned]
    asked = declare("language_model", on=gpus("cuda"), tuning="fast", compile="default").definition
    assert "compile=default" in asked


def test_fast_is_one_on_devices_that_compute_the_same(declare, gpus):
    texts = {
        declare("language_model", on=gpus(kind), tuning="fast").definition for kind in ("cuda", "rocm", "xpu")
    }
    assert len(texts) == 1
    assert declare("language_model", tuning="fast").definition not in texts  # a CPU stays in fp32


def test_how_a_device_computes_is_each_machines_own_where_each_is_compared_at_its_best():
    assert {*arithmetic.FIELDS} <= TUNING


RATE = Metric("rate", r"rate: (\S+)", "items/s")


@pytest.mark.parametrize(
    ("fields", "definition"),
    [
        ({"command": "./bench -n 4"}, 'program command=["./bench","-n","4"] devices=1 nodes=1'),
        (
            {"command": ["/opt/a/bench", "--data=/scratch/me/set", "/tmp/x/run.py", "https://a/b"]},
            'program command=["bench","--data=set","run.py","https://a/b"] devices=1 nodes=1',
        ),
        (
            {
                "command": "./bench",
                "metrics": [RATE, Metric("peak", r"peak: (\S+)", "items/s", reduce="max")],
            },
            'program command=["./bench"] devices=1 nodes=1 reduce={"peak":"max"}',
        ),
    ],
    ids=["its arguments", "of absolute paths the last name", "how samples become a figure"],
)
def test_that_of_a_program_has(declare, fields, definition):
    assert declare("command", **{"metrics": [RATE], **fields}).definition == definition


def test_where_a_program_starts_and_what_its_metrics_match_change_nothing(declare):
    other = Metric("rate", r"speed: (\S+)", "items/s")
    one = declare("command", command="./bench", metrics=[RATE])
    assert one.definition == declare("command", command="./bench", metrics=[other], cwd="/a").definition


def test_a_run_to_a_quality_has_as_many_steps_as_it_needs(declare):
    assert " steps=" not in declare("cosmoflow", until="quality", data="files").definition
