from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_mlhpc.jobs.planning import run_of
from pytest_mlhpc.worker.data import files


def test_the_key_is_sorted_text_of_what_is_computed(declare):
    assert declare("resnet50", devices=2, stem="epcc", learning_rate=0.05, seed=0).benchmark == (
        "resnet50[channels_last=false classes=1000 global_batch=16 gradient_accumulation=1 image_size=64 label_smoothing=0.1 "
        "learning_rate=0.05 optimizer=sgd precision=fp32 seed=0 stem=epcc] "
        "data=memory devices=2 name=test_it nodes=1 preset=smoke"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_size": 2},
        {"devices": 2},
        {"data": "files"},
        {"data": "cosmo"},
        {"cache": "cold"},
        {"name": "x"},
    ],
)
def test_what_changes_the_computation_changes_the_key(declare, change):
    assert declare(**change).benchmark != declare().benchmark


def test_moving_the_file_or_the_data_changes_nothing(declare, target):
    moved = replace(target, datasets={"cosmo": replace(target.datasets["cosmo"], path="/elsewhere")})
    there, here = declare(data="cosmo", on=moved, node_id="new/place.py::test_it"), declare(data="cosmo")
    assert there.benchmark == here.benchmark
    assert "/" not in there.benchmark


def test_step_counts_and_judging_are_no_part_of_it(declare):
    assert declare(steps=99, warmup=9, judge=False, time_limit=5).benchmark == declare().benchmark


def test_a_name_with_blanks_and_brackets_cannot_forge_another_key(declare):
    assert 'name="a b] devices=9"' in declare(name="a b] devices=9").benchmark


def test_a_whole_float_and_an_integer_compute_the_same(declare):
    assert declare(learning_rate=1).benchmark == declare(learning_rate=1.0).benchmark


def test_a_path_to_a_set_of_ours_is_planned_as_synthetic_and_shares_no_series_with_real_data(
    declare, tmp_path
):
    (tmp_path / "sample").write_bytes(b"x")
    real = declare(data=str(tmp_path))
    assert run_of(real, 0).data_kind == "real"
    files.write_manifest(tmp_path, files.describe(tmp_path, {"workload": "cosmoflow"}))
    made = declare(data=str(tmp_path))
    assert run_of(made, 0).data_kind == "synthetic"
    assert run_of(declare(data=str(tmp_path / "train")), 0).data_kind == "synthetic"
    assert made.benchmark != real.benchmark


def test_a_damaged_manifest_is_left_to_the_run_to_report(declare, tmp_path):
    (tmp_path / files.MANIFEST).write_text("{")
    assert run_of(declare(data=str(tmp_path)), 0).data_kind == "real"
