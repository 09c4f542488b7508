"""What a third party adds by one hook each, in a conftest.py, runs on a node that has none of it installed."""

from __future__ import annotations

import pytest
from inner_sessions import CONFTEST

pytestmark = pytest.mark.servers  # ranks that import torch

HOOKS = """
from pytest_mlhpc.worker.workloads.definitions import Field, Workload

FIELDS = {"global_batch": Field(4, "samples of a step"), "seed": Field(0, "seed")}
PRESETS = {"smoke": {"steps": 5, "warmup": 2}}

@hookimpl
def mlhpc_workloads():
    return tuple(
        Workload(name, "of a site", f"site_{name}", FIELDS, PRESETS, extra_modules=(f"site_{name}",))
        for name in ("line", "pooled")
    )

@hookimpl
def mlhpc_launchers(): return {"nicely": "site_nicely"}

@hookimpl
def mlhpc_record(record):
    with open("verdicts.txt", "a") as file:
        file.write(record.verdict + "\\n")
"""
LINE = """
import torch
from pytest_mlhpc.worker.workloads.base import Task, TensorSpec

def task(parameters):
    return Task(
        name="line", model=lambda: torch.nn.Linear(8, 1), prepare=lambda x, y: (x, y),
        loss=torch.nn.functional.mse_loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        input=TensorSpec((8,), torch.float32), target=TensorSpec((1,), torch.float32),
    )
"""
#: A device whose compiler cannot take the workload.
POOLED = """
from pytest_mlhpc.worker.failure import WorkerFailure

def task(parameters):
    raise WorkerFailure("cannot_lower", "no kernel matches MaxPool3d")
"""
LAUNCHER = """
from pytest_mlhpc.launch.plain import launch as plain

def launch(run, nodes, environment):
    argv, variables = plain(run, nodes, environment)
    return ["nice", "-n", "1", *argv], variables
"""


@pytest.fixture
def site(suite):
    """A suite with a workload, a launcher and a receiver of records of its site."""
    files = {"conftest": CONFTEST + HOOKS, "site_line": LINE, "site_pooled": POOLED, "site_nicely": LAUNCHER}
    for name, text in files.items():
        suite.file(f"{name}.py", text)
    return suite


def test_workload_launcher_and_receiver_of_a_third_party_take_part(site):
    site.write("""
    @pytest.mark.train("line", launcher="nicely")
    def test_line(run):
        assert run["parameters"].value == 9
        assert run["loss"].last < run["loss"].first
    """)
    site.run().expect(0)
    assert site.folder.joinpath("verdicts.txt").read_text() == "new\n"


def test_a_workload_that_the_compiler_cannot_take_is_skipped_with_its_words(site):
    site.write("""
    @pytest.mark.train("pooled")
    def test_pooled(run): raise AssertionError("no run came to its end")
    """)
    site.run("-rs").expect(
        pytest.ExitCode.NO_TESTS_COLLECTED, "SKIPPED*no kernel matches MaxPool3d*", skipped=1
    )
    assert site.verdicts() == ["cannot_lower"]


def test_the_set_that_a_run_has_made_for_itself_is_removed_after_it(suite):
    suite.write("""
    @pytest.mark.train("cosmoflow", data="files", steps=2, warmup=1, judge=False)
    def test_it(run): assert run.measurement.data_source == "files"
    """)
    assert suite.run().ret == 0
    left = sorted(path.name for path in suite.state.glob("runs/*/*/*") if path.is_file())
    assert left == ["batch.log", "plan.json"]
    assert not list(suite.state.glob("runs/*/*/data"))
