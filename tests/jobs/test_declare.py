"""The public names: decorators with types for editors and checkers, fields as the workloads have them."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest

import pytest_mlhpc
from pytest_mlhpc.jobs import decorators
from pytest_mlhpc.jobs.spec import UNIVERSAL
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

FIELDS = {workload.name: workload.fields for workload in WORKLOADS}
TRAININGS = ("cosmoflow", "deepcam", "resnet50", "language_model")

#: Decorator's fields -> the workloads that it declares, and fields that it takes as arguments of its own.
TYPED = {
    "TrainFields": (TRAININGS, ()),
    "StorageFields": (("storage",), ()),
    "CollectiveFields": (("collective",), ()),
    "RooflineFields": (("peaks", "kernels", "gradients", "reading"), ()),
    "ProgramFields": (("command",), ("command", "metrics")),
    "NodesFields": (("nodes", "vet"), ("nodes", "level")),
}

#: Type of a field -> how it is annotated.
ANNOTATED = {
    "int": int, "float": float, "str": str, "bool": bool, "judge": bool, "duration": str, "size": int, "list": typing.Sequence, "words": str, "sanity": str,
    "sizes": typing.Sequence, "mapping": typing.Mapping, "line": str, "ranks": int,
}  # fmt: skip

SUITE = """
from pytest_mlhpc import Metric, Run, System, nodes, program, train

@train("cosmoflow", global_batch=32, judge=False, precision="bf16")
def test_good(run: Run, system: System) -> None:
    assert run["loss"].value > 0

@train("cosmoflow", globl_batch=32)
def test_field(run: Run) -> None: ...

@program("./bench", Metric("rate", r"(.)", "MB/s", redce="max"), nodes="2")
def test_metric(run: Run) -> None: ...

@nodes(count=4, vet="quik")
def test_vet() -> None: ...
"""


def test_every_public_name_is_there_and_others_are_not():
    assert all(getattr(pytest_mlhpc, name) for name in pytest_mlhpc.__all__)
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        exec("from pytest_mlhpc import trian")  # noqa: S102 - our own text


def allowed(workload):
    """Return the fields that a test of *workload* may set."""
    definition = next(one for one in WORKLOADS if one.name == workload)
    return {
        name: field
        for name, field in {**UNIVERSAL, **definition.fields}.items()
        if name not in definition.without
    }


@pytest.mark.parametrize("name", TYPED)
def test_a_decorator_knows_the_fields_of_its_workloads(name):
    workloads, own = TYPED[name]
    hints = typing.get_type_hints(getattr(decorators, name))
    fields = {field for workload in workloads for field in allowed(workload)} - set(own)
    assert set(hints) == fields


def test_the_page_of_tests_explains_all_shared_fields_which_are_at_most_26():
    shared = set(UNIVERSAL)
    for kind in ("Fields", "MeasuredFields", "ProgramFields", "RepeatedFields"):
        shared |= set(typing.get_type_hints(getattr(decorators, kind)))
    of_nodes = set(typing.get_type_hints(decorators.NodesFields)) - shared
    page = (Path(__file__).parents[2] / "docs" / "writing-benchmarks.md").read_text()
    assert [
        name for name in sorted(shared | of_nodes) if f"`{name}`" not in page and f"`{name}=" not in page
    ] == []
    assert (len(shared), len(of_nodes)) <= (26, 3)


@pytest.mark.parametrize("name", TYPED)
def test_a_fields_type_is_that_of_its_workloads(name):
    workloads, own = TYPED[name]
    hints = typing.get_type_hints(getattr(decorators, name))
    wrong = []
    for field, definition in ((f, d) for w in workloads for f, d in allowed(w).items() if f not in own):
        parts = typing.get_args(hints[field]) or (hints[field],)
        literals = {
            value
            for part in (hints[field], *parts)
            if typing.get_origin(part) is typing.Literal
            for value in typing.get_args(part)
        }
        if definition.choices:
            fits = set(definition.choices) <= literals
        else:
            kinds = {typing.get_origin(part) or part for part in (hints[field], *parts)}
            wanted = ANNOTATED[definition.type]
            fits = (typing.get_origin(wanted) or wanted) in kinds or field == "bagging"
        if not fits or (definition.default is None) > (type(None) in parts):
            wrong.append((field, hints[field]))
    assert wrong == []


def test_a_checker_finds_what_is_misspelt_and_nothing_else(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={tmp_path}/cache"]
    environment = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(Path(pytest_mlhpc.__file__).parents[1])}
    done = subprocess.run(
        [*argv, "test_suite.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line.partition(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [(place, text.partition(";")[0]) for place, _, text in errors] == [
        ("test_suite.py:8", 'Unexpected keyword argument "globl_batch" for "train"'),
        ("test_suite.py:11", 'Unexpected keyword argument "redce" for "Metric"'),
        ("test_suite.py:11", 'Argument "nodes" to "program" has incompatible type "str"'),
        ("test_suite.py:14", 'Argument "vet" to "nodes" has incompatible type "Literal[\'quik\']"'),
    ], done.stdout + done.stderr
