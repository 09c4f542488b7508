"""Ranks behind torchrun: which one failed first, and how, is told although torchrun stands between."""

import signal
from pathlib import Path

import pytest
from batches import finish, messages, start
from pods import run_plan

pytestmark = pytest.mark.servers

LAUNCHER = """
def launch(run, nodes, environment):
    argv = [run.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    return argv + [run.parameters["script"]], dict(environment)
"""


#: All ranks meet; then one dies while the other waits for it.
#: What stands for ranks begins with what those of local allocations begin with.
PROVISION = Path(__file__).parents[2] / "provision"

#: All ranks meet; then one dies while the other waits for it.
KILLED = """
from stand_in.rank import *
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
if channel.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones)
"""

FAILED = """
from stand_in.rank import *
channel.report(a_report())
channel.close()
sys.exit(7 if channel.rank == 1 else 0)
"""


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """Return what a batch tells of two runs, by run."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "by_torchrun.py").write_text(LAUNCHER)
    scripts, runs = {"killed": KILLED, "failed": FAILED}, []
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(script)
        fields = {"workload": "resnet50", "argv": (), "ranks": 2, "launcher": "by_torchrun"}
        runs.append(run_plan(name, parameters={"script": str(folder / f"{name}.py")}, **fields))
    code, output, _ = finish(start(folder, *runs, PYTHONPATH=f"{folder}:{PROVISION}", OMP_NUM_THREADS="1"))
    assert code == 0
    found = messages(output, *scripts)
    return {name: {item.kind: item.body for item in found if item.run_id == name} for name in scripts}


@pytest.mark.parametrize(
    ("run", "outcome", "text", "code"),
    [
        pytest.param(
            "killed",
            "worker_killed",
            "rank 1 was killed by SIGKILL",
            -signal.SIGKILL,
            id="killed while the other waits in all_reduce",
        ),
        pytest.param(
            "failed",
            "worker_exit",
            "rank 1 ended with exit code 7 after it had reported",
            7,
            id="failed after all had reported",
        ),
    ],
)
def test_the_rank_behind_torchrun_that_ended_badly_is_named(bodies, run, outcome, text, code):
    assert list(bodies[run]) == ["started", "failed", "end"]
    assert bodies[run]["failed"]["outcome"] == outcome
    assert bodies[run]["failed"]["text"].startswith(text)
    assert bodies[run]["end"]["exit"][1] == code
