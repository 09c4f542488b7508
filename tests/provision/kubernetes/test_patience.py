"""A cause that may heal is waited for as long as its limit says."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.kubernetes.causes import Cause
from pytest_mlhpc.provision.kubernetes.patience import Patience

PULL = Cause("image_pull", "ErrImagePull", "image")
BACK_OFF = Cause("image_pull", "ImagePullBackOff", "image")
CONFIG = Cause("container_config", "no secret", "config")
FINAL = Cause("image_pull", "InvalidImageName")


@pytest.mark.parametrize(
    ("notes", "now", "overdue"),
    [
        pytest.param([], 1e9, None, id="with nothing wrong nothing is overdue"),
        pytest.param([(100.0, {"p": PULL})], 109.9, None, id="its limit has not passed"),
        pytest.param([(100.0, {"p": PULL})], 110.0, PULL, id="its limit has passed"),
        pytest.param([(100.0, {"p": PULL}), (108.0, {"p": BACK_OFF})], 110.0, BACK_OFF, id="one that changes its word goes on ageing"),
        pytest.param(
            [(100.0, {"p": PULL}), (105.0, {}), (106.0, {"p": PULL})], 115.0, None, id="one that heals gets all its time again"
        ),
        pytest.param([(0.0, {"p": PULL, "q": CONFIG})], 10.5, CONFIG, id="of two the one that is longest overdue"),
        pytest.param([(5.0, {"p": FINAL})], 5.0, FINAL, id="one that never heals is overdue at once"),
    ],
)  # fmt: skip
def test_a_cause_is_overdue(notes, now, overdue):
    patience = Patience({"image": 10.0, "config": 2.0})
    for when, causes in notes:
        patience.note(causes, when)
    assert patience.overdue(now) == overdue


def test_the_next_look_is_when_a_limit_passes():
    patience = Patience({"image": 10.0})
    assert patience.next_look() is None
    patience.note({"p": PULL}, 100.0)
    assert patience.next_look() == 110.0
    patience.note({"p": BACK_OFF}, 108.0)
    assert patience.waited(BACK_OFF, 110.0) == 10.0
