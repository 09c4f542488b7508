"""What a third party adds by one hook each, in a conftest.py, runs on a node that has none of it installed."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers

CONFTEST = """
from pytest_mlhpc.hookspecs import hookimpl
from pytest_mlhpc.worker.workloads.definitions import Field, Workload

WORKLOAD = Workload(
    name="line", summary="a straight line", module="site_line",
    fields={"global_batch": Field(4, "samples of a step"), "seed": Field(0, "seed")},
    presets={"smoke": {"steps": 5, "warmup": 2}}, extra_modules=("site_line",),
)

@hookimpl
def mlhpc_workloads(): return (WORKLOAD,)

@hookimpl
def mlhpc_schedulers(): return {"elsewhere": None}

@hookimpl
def mlhpc_launchers(): return {"nicely": "site_nicely"}

@hookimpl
def mlhpc_record(record):
    with open("told.txt", "a") as file:
        file.write(record.verdict + "\\n")
"""

WORKLOAD = """
import torch
from pytest_mlhpc.worker.workloads.base import Task, TensorSpec

def task(parameters):
    return Task(
        name="line", model=lambda: torch.nn.Linear(8, 1), prepare=lambda x, y: (x, y),
        loss=torch.nn.functional.mse_loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        input=TensorSpec((8,), torch.float32), target=TensorSpec((1,), torch.float32),
    )
"""

LAUNCHER = """
from pytest_mlhpc.launch.plain import launch as plain

def launch(run, nodes, environment):
    argv, variables = plain(run, nodes, environment)
    return ["nice", "-n", "1", *argv], variables
"""


def test_workload_launcher_and_receiver_of_a_third_party_take_part(suite, workers):
    for name, text in {"conftest": CONFTEST, "site_line": WORKLOAD, "site_nicely": LAUNCHER}.items():
        suite.pytester.path.joinpath(f"{name}.py").write_text(text)
    suite.write("""
    @pytest.mark.train("line", launcher="nicely")
    def test_line(run):
        assert run["parameters"].value == 9
        assert run["loss"].last < run["loss"].first
    """)
    result = suite.run(n=workers)
    assert result.ret == 0, result.stdout.str()
    assert suite.pytester.path.joinpath("told.txt").read_text() == "new\n"


def test_the_set_that_a_run_has_made_for_itself_is_removed_after_it(suite):
    suite.write("""
    @pytest.mark.train("cosmoflow", data="files", steps=2, warmup=1, judge=False)
    def test_it(run): assert run.measurement.data_source == "files"
    """)
    assert suite.run().ret == 0
    kept = sorted(path.name for path in suite.state.glob("runs/*/*/*") if path.is_file())
    assert kept == ["batch.log", "plan.json"]
    assert not list(suite.state.glob("runs/*/*/data"))
