"""A device whose compiler cannot take a workload: the test is skipped with the compiler's words, and its body never runs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers  # a rank that imports torch

CONFTEST = """
from pytest_mlhpc.hookspecs import hookimpl
from pytest_mlhpc.worker.workloads.definitions import Field, Workload

@hookimpl
def mlhpc_schedulers(): return {"elsewhere": None}

@hookimpl
def mlhpc_workloads():
    fields = {"global_batch": Field(1, "samples of a step"), "seed": Field(0, "seed")}
    presets = {"smoke": {"steps": 1, "warmup": 0}}
    return (Workload("pooled", "pools", "site_pooled", fields, presets, extra_modules=("site_pooled",)),)
"""
WORKLOAD = """
from pytest_mlhpc.worker.failure import WorkerFailure

def task(parameters):
    raise WorkerFailure("cannot_lower", "no kernel matches MaxPool3d")
"""


def test_a_workload_that_the_compiler_cannot_take_is_skipped_with_its_words(suite):
    for name, text in {"conftest": CONFTEST, "site_pooled": WORKLOAD}.items():
        suite.pytester.path.joinpath(f"{name}.py").write_text(text)
    suite.write("""
    @pytest.mark.train("pooled")
    def test_pooled(run): raise AssertionError("no run came to its end")
    """)

    result = suite.run("-rs")

    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED  # a session that measured nothing
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no kernel matches MaxPool3d*"])
    (record,) = suite.records()
    assert record["verdict"] == "cannot_lower"
