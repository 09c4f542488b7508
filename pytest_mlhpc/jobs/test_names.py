"""Names of tests for people: as short as they can be while no two of them are the same."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from pytest_mlhpc.jobs.spec import JobSpec

#: Stands for what was cut out of a name.
_CUT = "..."


def short_names(specs: Sequence[JobSpec]) -> list[str]:
    """Return the node ids of *specs* without what all have in common or nothing needs: ``test_copy[16]``.

    The target goes where all have the same one. The file stays only where two files have a test of that name.
    """
    one_target = len({spec.target.id for spec in specs}) == 1
    ids = [_without_target(spec) if one_target else spec.node_id for spec in specs]
    names = [name.partition("::")[2] or name for name in ids]
    counts = collections.Counter(names)
    return [whole if counts[name] > 1 else name for whole, name in zip(ids, names, strict=True)]


def cut_names(names: Sequence[str], width: int) -> list[str]:
    """Return *names* cut in the middle to at most *width* characters, where those that differ still differ if they can."""
    cut = [_cut_middle(name, width) for name in names]
    for text in {one for one in cut if cut.count(one) > 1}:
        same = [number for number, one in enumerate(cut) if one == text]
        columns = enumerate(zip(*[names[number] for number in same], strict=False))
        common = next((at for at, letters in columns if len(set(letters)) > 1), 0)
        for number in same:
            rest = names[number][max(0, common - width // 3) :]
            cut[number] = _cut_end(_CUT + rest if len(names[number]) > width else names[number], width)
    return cut


def _without_target(spec: JobSpec) -> str:
    """Return the node id of *spec* without its target, which is the first of its parameters."""
    test, bracket, parameters = spec.node_id.partition("[")
    if not bracket or not parameters.startswith(spec.target.id):
        return spec.node_id
    rest = parameters[len(spec.target.id) :]
    return test if rest == "]" else f"{test}[{rest.removeprefix('-')}"


def _cut_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = min(max(len(text) - text.find("["), width // 3), 2 * width // 3)
    return f"{text[: width - tail - len(_CUT)]}{_CUT}{text[len(text) - tail :]}"


def _cut_end(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - len(_CUT)]}{_CUT}"
