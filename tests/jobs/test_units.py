import pytest

from pytest_mlhpc.jobs.metrics import EXAMPLES, base_unit, better_of
from pytest_mlhpc.node.protocol.schema import UNITS


@pytest.mark.parametrize(
    ("text", "unit", "factor"),
    [
        ("MB/s", "B/s", 1e6), ("GiB/s", "B/s", 2**30), ("Gbit/s", "B/s", 1.25e8), ("kB", "B", 1e3), ("KiB", "B", 1024),
        ("us", "s", 1e-6), ("µs", "s", 1e-6), ("ms", "s", 1e-3), ("min", "s", 60), ("B/us", "B/s", 1e6),
        ("GFLOP/s", "FLOP/s", 1e9), ("TFLOPS", "FLOP/s", 1e12), ("%", "1", 0.01), ("img/s", "samples/s", 1),
        ("kIOPS", "items/s", 1e3), ("ops/s", "items/s", 1), ("kW", "W", 1e3), ("MHz", "Hz", 1e6), ("samples/J", "samples/J", 1),
    ],
)  # fmt: skip
def test_a_common_unit_is_scaled_to_its_base(text, unit, factor):
    assert base_unit(text) == (unit, pytest.approx(factor))


def test_every_base_unit_and_every_example_is_in_the_table():
    assert [base_unit(unit) for unit in UNITS] == [(unit, 1.0) for unit in UNITS]
    assert all(base_unit(text) for text in EXAMPLES.split(", "))


@pytest.mark.parametrize(
    ("text", "near"),
    [
        *[(text, "write one like 1, %, s, ms") for text in ("", "parsec", None, 3)],
        ("kitems/s", "did you mean 'items/s' or"), ("gb/s", "did you mean 'GB/s' or 'Gb/s'?"), ("usec", "did you mean 'us'?"),
        ("MB/", "did you mean 'MB/s' or"), ("GFLOPs", "did you mean 'GFLOPS'?"), ("k%", "did you mean '%'?"),
        *[(text, "did you mean") for text in ("/s", "ks/B", "m", "MMB")],
    ],
)  # fmt: skip
def test_an_unknown_unit_is_refused_with_similar_ones(text, near):
    with pytest.raises(ValueError, match=r"is unknown; ") as caught:
        base_unit(text)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("unit", "better"),
    [("B/s", "higher"), ("samples/J", "higher"), ("s", "lower"), ("J", "lower"), ("B", None), ("1", None)],
)
def test_rates_are_better_higher_and_times_lower(unit, better):
    assert better_of(unit) == better
