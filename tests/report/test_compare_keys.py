"""Keys of benchmarks read again, and the labels made of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.jobs.key import _pairs
from pytest_mlhpc.report import keys

KEY = "cosmoflow[global_batch=16 kernel_size=3] data=memory devices=1 name=test_a nodes=1 preset=smoke"

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
FIGURES = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
VALUES = st.text(max_size=20) | FIGURES | st.lists(st.integers(0, 9), max_size=3)


@given(identity=st.dictionaries(NAMES, VALUES, max_size=4), rest=st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_a_key_was_made_of_is_read_again(identity, rest):
    key = keys.parse(f"work[{_pairs(identity)}] {_pairs(rest)}".rstrip())
    assert key.workload == "work"
    assert (set(key.identity), set(key.rest)) == (set(identity), set(rest))
    for name, value in identity.items():
        assert f"{name}={key.identity[name]}" == _pairs({name: value})


@given(st.text(max_size=60))
def test_no_text_is_too_odd_to_be_looked_at(text):
    for odd in (text, f"w[{text}]", f"w[a=1] {text}"):
        keys.parse(odd)
        keys.natural(odd)
        assert keys.labels([odd, KEY])[1].keys() == {odd, KEY}


@pytest.mark.parametrize(
    "text", ["", "test", "w[a=1", "w[a=1]x", "w[a=] b=1", 'w[a="x] b=1', "w[a=" + "[" * 5000]
)
def test_what_is_no_key_has_no_parts(text):
    assert keys.parse(text) is None


def test_a_label_says_what_tells_tests_of_one_name_apart_and_no_more():
    other = KEY.replace("devices=1", "devices=4").replace("batch=16", "batch=64")
    third = KEY.replace("test_a", "test_b")
    common, labels = keys.labels([KEY, other, third])
    assert common == "data=memory nodes=1 preset=smoke"
    batches = ["test_a devices=1 global_batch=16", "test_a devices=4 global_batch=64"]
    assert list(labels.values()) == [*batches, "test_b devices=1"]


def test_two_workloads_of_one_test_name_are_named():
    labels = keys.labels([KEY, KEY.replace("cosmoflow", "deepcam")])[1]
    assert list(labels.values()) == ["test_a (cosmoflow)", "test_a (deepcam)"]


def test_what_differs_is_named_with_both_values():
    other = KEY.replace("devices=1", "cache=cold devices=4").replace("data=memory ", "")
    found = keys.differences(keys.parse(KEY), keys.parse(other))
    assert found == ["cache=cold (not without)", "no data (not memory)", "devices=4 (not 1)"]


def test_without_scale_the_batch_counts_per_device():
    weak = KEY.replace("devices=1", "devices=4").replace("batch=16", "batch=64")
    strong = KEY.replace("devices=1", "devices=4")
    assert keys.without_scale(weak) == keys.without_scale(KEY) != keys.without_scale(strong)
    assert keys.without_scale("no key") == "no key"


def test_four_comes_before_sixteen():
    assert sorted(["d=16", "d=4", "d=1"], key=keys.natural) == ["d=1", "d=4", "d=16"]
