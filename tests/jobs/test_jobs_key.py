from __future__ import annotations

from dataclasses import replace

import pytest


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
