"""Mutations are found again wherever their function goes, and change nothing else."""

import ast

import pytest
from mutants import Mutant, find, order_tests
from mutations import Mutation, mutations, replace

SOURCE = '''\
"""A module."""

LIMIT = 3


class Fence:
    def holds(self, value: int = 2) -> bool:
        """Return whether it does; 1 < 2."""
        if not value < LIMIT and value is not None:
            self.note(f"beyond {1 + 1}")
            raise ValueError(value + 1)
        return value / 2 < 4


def outer():
    def inner():
        return 1
    for _ in range(2):
        continue
    return inner() + inner() + 1 if LIMIT else False
'''


def named(function: str) -> set[tuple[str, str]]:
    return {(one.original, one.mutated) for one, _ in mutations(SOURCE) if one.function == function}


def test_operators_constants_returns_and_calls_change():
    assert named("Fence.holds") == {
        ("not value < LIMIT and value is not None", "not value < LIMIT or value is not None"),
        ("not value < LIMIT", "value < LIMIT"),
        ("value < LIMIT", "value <= LIMIT"),
        ("value is not None", "value is None"),
        ("self.note(f'beyond {1 + 1}')", "pass"),
        ("return value / 2 < 4", "return None"),
        ("value / 2 < 4", "value / 2 <= 4"),
        ("value / 2", "value * 2"),
        ("value / 2", "value / 3"),
        ("value / 2 < 4", "value / 2 < 5"),
    }


def test_a_nested_function_has_its_own_mutations():
    assert named("outer.inner") == {("return 1", "return None"), ("return 1", "return 2")}
    assert ("continue", "break") in named("outer")
    assert not any(original == "return 1" for original, _ in named("outer"))


@pytest.mark.parametrize("mutation", [one for one, _ in mutations(SOURCE)], ids=str)
def test_a_mutated_module_differs_in_that_place_alone(mutation):
    place = dict(mutations(SOURCE))[mutation]
    changed = replace(SOURCE, place)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
    assert len(changed.splitlines()) == len(SOURCE.splitlines())
    differing = [
        number
        for number, (old, new) in enumerate(zip(SOURCE.splitlines(), changed.splitlines(), strict=True), 1)
        if old != new
    ]
    assert set(differing) <= set(range(place.line, place.end_line + 1))


def test_a_statement_over_several_lines_keeps_the_numbers_of_the_lines_after_it():
    source = "def one():\n    go(\n        1,\n    )\n    return 5\n"
    place = dict(mutations(source))[Mutation("one", "go(1)", "pass", 0)]
    assert replace(source, place) == "def one():\n    pass\n\n\n    return 5\n"


def pinned(**changed: object) -> Mutant:
    facts = {"function": "Fence.holds", "original": "value < LIMIT", "mutated": "value <= LIMIT", "nth": 0}
    return Mutant(area="judge", module="judge/fence.py", **{**facts, **changed})  # type: ignore[arg-type]


def test_a_mutant_is_found_after_its_module_has_moved_and_its_lines_have_changed():
    moved = SOURCE.replace("        if not", "        # a comment\n\n        if not")
    assert find(pinned(), {"judge/limits.py": moved})[0] == "judge/limits.py"
    assert find(pinned(), {"judge/fence.py": SOURCE, "judge/limits.py": moved})[0] == "judge/fence.py"


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ({"a.py": SOURCE.replace("holds", "contains")}, "no module has"),
        ({"a.py": SOURCE.replace("value < LIMIT", "value < 7")}, "no module has"),
        ({"a.py": SOURCE, "b.py": SOURCE}, "several modules have"),
    ],
    ids=["renamed", "rewritten", "twice"],
)
def test_a_mutant_that_is_not_to_be_found_is_named(sources, text):
    with pytest.raises(LookupError, match=f"{text} judge/fence.py: Fence.holds: value < LIMIT"):
        find(pinned(), sources)


def test_tests_that_name_the_module_come_first(tmp_path):
    folder = tmp_path / "tests/judge"
    folder.mkdir(parents=True)
    for name, text in (
        ("test_a.py", "import os"),
        ("test_b.py", "from pytest_mlhpc.judge import entry, fence"),
        ("test_c.py", "from pytest_mlhpc.judge.fence import Fence"),
        ("test_d.py", "from pytest_mlhpc.judge.fences import Fence"),
    ):
        (folder / name).write_text(text)
    found = order_tests(tmp_path, "judge/fence.py", ["tests/judge"])
    assert [name[-4] for name in found] == ["b", "c", "a", "d"]
