"""Benchmarks of reports, and the labels made of them."""

from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.keys import Benchmark

ONE = Benchmark(
    "suites/a.py::test_a",
    "cosmoflow data=memory devices=1 global_batch=16 kernel_size=3 nodes=1 preset=smoke steps=10",
)


def like(**changes):
    """ONE with other values in its definition."""
    text = ONE.definition
    for old, new in changes.items():
        text = text.replace(old.replace("_is_", "="), new)
    return Benchmark(ONE.name, text)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_is_too_odd_to_be_looked_at(name, text):
    odd = Benchmark(name, text)
    keys.parse(odd)
    keys.order(odd)
    assert keys.labels([odd, ONE])[1].keys() == {odd, ONE}


def test_a_label_says_what_tells_tests_of_one_name_apart_and_no_more():
    other = Benchmark(f"{ONE.name}[4]", like(devices_is_1="devices=4", batch_is_16="batch=64").definition)
    third = ONE._replace(name="suites/a.py::test_b")
    common, labels = keys.labels([ONE, other, third])
    assert common == "data=memory nodes=1 preset=smoke"
    batches = ["test_a devices=1 global_batch=16", "test_a devices=4 global_batch=64"]
    assert list(labels.values()) == [*batches, "test_b devices=1"]


def test_two_workloads_of_one_test_name_are_named():
    labels = keys.labels([ONE, like(cosmoflow="deepcam")])[1]
    assert list(labels.values()) == ["test_a (cosmoflow)", "test_a (deepcam)"]


def test_tests_that_compute_the_same_are_told_apart_by_their_whole_names():
    other = ONE._replace(name="suites/b.py::test_a")
    assert list(keys.labels([ONE, other])[1].values()) == [ONE.name, other.name]


def test_a_test_is_called_by_its_function_or_its_own_name():
    names = ["suites/a.py::test_a", "suites/a.py::TestIt::test_a[4-x]", "a: name [x]"]
    assert [keys.function_of(name) for name in names] == ["test_a", "test_a", "a: name [x]"]


def test_what_differs_is_named_with_both_values():
    other = like(devices_is_1="cache=cold devices=4", data_is_memory="seed=1")
    found = keys.differences(keys.parse(ONE), keys.parse(other))
    assert found == [
        "cache=cold (not without)",
        "no data (not memory)",
        "devices=4 (not 1)",
        "seed=1 (not without)",
    ]


def test_without_scale_the_batch_counts_per_device():
    weak = like(devices_is_1="devices=4", batch_is_16="batch=64")
    strong = like(devices_is_1="devices=4")
    assert keys.without_scale(weak) == keys.without_scale(ONE) != keys.without_scale(strong)
    odd = Benchmark("a", "no definition"), Benchmark("a", "none either")
    assert keys.without_scale(odd[0]) != keys.without_scale(odd[1])


def test_four_comes_before_sixteen():
    assert sorted(["d=16", "d=4", "d=1"], key=keys.natural) == ["d=1", "d=4", "d=16"]
