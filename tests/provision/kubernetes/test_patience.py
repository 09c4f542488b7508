"""A cause that may heal is waited for as long as its limit says."""

from __future__ import annotations

from pytest_mlhpc.provision.kubernetes.causes import Cause
from pytest_mlhpc.provision.kubernetes.patience import Patience

PULL = Cause("image_pull", "ErrImagePull", "image")
BACK_OFF = Cause("image_pull", "ImagePullBackOff", "image")
CONFIG = Cause("container_config", "no secret", "config")


def test_a_cause_is_overdue_once_its_limit_has_passed():
    patience = Patience({"image": 10.0})
    patience.note({"p": PULL}, 100.0)
    assert patience.overdue(109.9) is None
    assert patience.overdue(110.0) == PULL
    assert patience.next_look() == 110.0


def test_a_cause_that_changes_its_word_goes_on_ageing():
    patience = Patience({"image": 10.0})
    patience.note({"p": PULL}, 100.0)
    patience.note({"p": BACK_OFF}, 108.0)
    assert patience.overdue(110.0) == BACK_OFF
    assert patience.waited(BACK_OFF, 110.0) == 10.0


def test_a_cause_that_heals_gets_all_its_time_again():
    patience = Patience({"image": 10.0})
    patience.note({"p": PULL}, 100.0)
    patience.note({}, 105.0)
    patience.note({"p": PULL}, 106.0)
    assert patience.overdue(115.0) is None


def test_of_two_the_one_that_is_longest_overdue_is_told():
    patience = Patience({"image": 10.0, "config": 2.0})
    patience.note({"p": PULL, "q": CONFIG}, 0.0)
    assert patience.overdue(10.5) == CONFIG


def test_a_cause_that_never_heals_is_overdue_at_once():
    patience = Patience({})
    final = Cause("image_pull", "InvalidImageName")
    patience.note({"p": final}, 5.0)
    assert patience.overdue(5.0) == final


def test_with_nothing_wrong_there_is_nothing_to_look_at():
    assert Patience({}).next_look() is None
    assert Patience({}).overdue(1e9) is None
