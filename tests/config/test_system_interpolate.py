"""``${ENV}`` and ``{derived}``, and nothing else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.cli.options import chosen_systems
from pytest_mlhpc.config.build import DERIVED, derived_values, fill, resolve
from pytest_mlhpc.errors import UsageError


def put(text, environ, *, template=False):
    """Return the text, the missing variables, the complaints."""
    missing, complaints = [], []
    add = lambda message, near: complaints.append((message, near))  # noqa: E731
    return (
        resolve(text, environ, missing=missing.append, complain=add, template=template),
        missing,
        complaints,
    )


def escaped(text: str) -> str:
    """Write *text* so that a template gives it back."""
    return re.sub(r"\$\{|\{|\}", lambda match: {"${": "$${", "{": "{{", "}": "}}"}[match.group()], text)


@pytest.mark.parametrize(
    ("text", "environ", "found"),
    [
        ("a-${X}-${Y_1}", {"X": "1", "Y_1": "2"}, "a-1-2"),
        ("${X}", {"X": ""}, ""),
        ("${X}", {"X": "${Y} $(id) `id`", "Y": "no"}, "${Y} $(id) `id`"),
        ("$${X} $X {y}", {"X": "1"}, "${X} $X {y}"),
    ],
    ids=["two", "an empty one", "a value that is never looked at again", "an escaped one"],
)
def test_a_variable_is_put_in(text, environ, found):
    assert put(text, environ) == (found, [], [])


def test_a_missing_variable_is_reported_and_stays():
    assert put("a ${X}", {}) == ("a ${X}", ["X"], [])


@pytest.mark.parametrize("text", ["${", "${}", "${X-1}", "${X:-default}", "${ X }", "${{X}}"])
def test_anything_else_after_a_dollar_and_brace_is_a_mistake(text):
    assert "names no variable" in put(text, {"X": "1"})[2][0][0]


def test_a_misspelt_derived_value_gets_the_nearest_name():
    ((message, near),) = put("{cores_per_rnak}", {}, template=True)[2]
    assert ("is not one of" in message, near) == (True, "cores_per_rank")


@pytest.mark.parametrize(
    "text", ["{", "{}", "{cores.real}", "{cores!r}", "{0}", '{"a": 1}', "{cores:>9999999999}"]
)
def test_other_braces_in_a_template_are_a_mistake(text):
    assert "is no derived value" in put(text, {}, template=True)[2][0][0]


def test_derived_values_are_put_in_for_each_run():
    values = derived_values(cores=288, memory=1024, devices=4, nodes=2, ranks=8)
    text = "{cores}/{cores_per_rank}/{ranks_per_node}/{memory_per_rank}/{nodes}"
    assert fill(text, values) == "288/72/4/256/2"


def test_there_is_a_value_for_every_name_and_a_rank_has_at_least_one_core():
    values = derived_values(cores=2, memory=1, devices=0, nodes=1, ranks=9)
    assert (set(values), values["cores_per_rank"]) == (set(DERIVED), 1)


def test_filling_what_is_unknown_is_a_usage_error():
    with pytest.raises(UsageError, match=r"'\{x\}': \{x\} has no value here"):
        fill("{x}", {"cores": 1})


@given(st.text(alphabet="ab${} X_", max_size=30))
def test_an_escaped_template_gives_the_text_back(text):
    resolved, missing, complaints = put(escaped(text), {}, template=True)
    assert (missing, complaints) == ([], [])
    assert fill(resolved, {}) == text


@given(st.text(max_size=30))
def test_a_variables_value_survives_both_steps_as_it_is(value):
    assert fill(put("${X}", {"X": value}, template=True)[0], {}) == value


@given(st.text(alphabet="ab${}cores_", max_size=40), st.booleans())
def test_text_without_complaint_fills_without_error(text, template):
    resolved, missing, complaints = put(text, {}, template=template)
    if template and not missing and not complaints:
        fill(resolved, derived_values(cores=1, memory=1, devices=0, nodes=1, ranks=1))


@pytest.mark.parametrize(
    ("matters", "smallest"),
    [
        pytest.param("matters: 3 %", 0.03, id="written"),
        pytest.param("matters: '${LOSS}'", 0.02, id="of a variable"),
        pytest.param("matters: '${NOT_SET}'", None, id="of a variable that is not set"),
        pytest.param("max_jobs: 1", None, id="not said"),
    ],
)
def test_what_matters_on_a_partition_is_read_without_building_it(tmp_path, monkeypatch, matters, smallest):
    monkeypatch.setenv("LOSS", "2 %")
    monkeypatch.delenv("NOT_SET", raising=False)
    path = tmp_path / "systems.yaml"
    path.write_text(f"systems: {{cirrus: {{partitions: {{standard: {{scheduler: local, {matters}}}}}}}}}\n")
    systems = chosen_systems(str(path))
    assert (systems.matters("cirrus", "standard"), systems.matters("archer2", "standard")) == (smallest, None)
