"""Definitions: written, read again, and compared in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.store.definition import changed, difference, digest, parse, text_of
from pytest_mlhpc.store.record import Epoch

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
FIGURES = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
VALUES = st.text(max_size=20) | FIGURES | st.lists(st.integers(0, 9), max_size=3)
STEPS = "cosmoflow nodes=1 steps={}"


@given(fields=st.dictionaries(NAMES, VALUES, max_size=6))
def test_what_a_definition_was_made_of_is_read_again(fields):
    found = parse(text_of("work", fields))
    assert (found.workload, set(found.fields)) == ("work", set(fields))
    for name, value in fields.items():
        assert text_of("work", {name: value}) == f"work {name}={found.fields[name]}"


@given(st.text(max_size=60))
def test_no_text_is_too_odd_to_be_looked_at(text):
    for odd in (text, f"w {text}", f"w a=1 {text}"):
        parse(odd)
        difference(odd, "w a=1")


@pytest.mark.parametrize(
    "text", ["", " a=1", "w a=1x:", "w a=", "w a", 'w a="x', "w  a=1", "w a=" + "[" * 5000]
)
def test_what_is_no_definition_has_no_parts(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (STEPS.format(100), STEPS.format(100), ""),
        (STEPS.format(100), STEPS.format(200), "steps 100 -> 200"),
        ("w a=1", "w a=1 compile=default", "compile (unset) -> default"),
        ('w command=["./a","-n","1"]', 'w command=["./a","-n","2"]', 'command ["./a","-n","1"] -> ["./a","-n","2"]'),
        ('w name="a b"', "w name=c", "name a b -> c"),
        ("v a=1", "w a=2", "workload v -> w, a 1 -> 2"),
        ("w a=1 b=1 c=1 d=1 e=1 f=1", "w", "a 1 -> (unset), b 1 -> (unset), c 1 -> (unset), d 1 -> (unset), and 2 more"),
        ("", "w a=1", "definition (none) -> w a=1"),
        (f"w a={'x' * 99}", "w", f"a {'x' * 57}... -> (unset)"),
    ],
)  # fmt: skip
def test_a_difference_names_each_field_with_both_values(before, after, said):
    assert difference(before, after) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [("A", "A", ""), ("A", "", ""), ("", "A", ""), ("A", "B", "device model A -> B")],
)
def test_another_device_model_is_another_epoch_and_an_unknown_one_is_not(before, after, said):
    assert changed(Epoch("w a=1", before), Epoch("w a=1", after)) == said


def test_definition_and_device_are_named_together():
    assert changed(Epoch("w a=1", "A"), Epoch("w a=2", "B")) == "a 1 -> 2, device model A -> B"


def test_a_digest_is_short_and_its_own():
    assert len(digest("w a=1")) == 12
    assert digest("w a=1") != digest("w a=2")
    assert digest("") == ""
