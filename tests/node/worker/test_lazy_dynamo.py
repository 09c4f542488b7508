"""torch's compiler front end is not imported by runs that compile nothing, and is the real one for whoever needs it."""

import json
import subprocess
import sys

import pytest

from pytest_mlhpc.node.worker import main as rank

START = """
import sys
import torch
from pytest_mlhpc.node.worker import main as rank

def stands_in():
    return isinstance(sys.modules.get("torch._dynamo"), rank.StandIn)

def train(fused=True):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return [float(value) for value in model.weight.detach().flatten()]
"""


#: Reads bodies, one a line as JSON; a fork of this interpreter runs each, after START. Answers exit code and output.
SERVE = """
import json, os, tempfile, traceback
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            code = 1
            os.dup2(file.fileno(), 1)
            try:
                exec(json.loads(line), globals())
                code = 0
            except BaseException:
                print(traceback.format_exc())
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        print(json.dumps([code, file.read()]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """An interpreter that has imported torch, which takes longest."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", START + SERVE], **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(server):
    """Run code after START in a process of its own, and return what it printed."""

    def run_and_read(body):
        server.stdin.write(json.dumps(body) + "\n")
        server.stdin.flush()
        code, text = json.loads(server.stdout.readline())
        assert code == 0, text
        return text.split()

    return run_and_read


def test_a_training_that_compiles_nothing_does_not_import_it(run):
    assert run("print(rank.install({'compile': None})); train(); print(stands_in())") == [
        "True",
        "True",
    ]


def test_the_same_is_trained_with_and_without_it(run):
    body = "torch.manual_seed(1); {}; print(*train())"
    assert run(body.format("rank.install({})")) == run(body.format("None"))


def test_a_run_that_compiles_has_the_real_one(run):
    assert run("print(rank.install({'compile': 'default'})); train(); print(stands_in())") == [
        "False",
        "False",
    ]


@pytest.mark.parametrize(
    "asks",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "torch._dynamo.config",
        "from torch._dynamo.utils import counters",
        "torch.compile(lambda x: x * 2, backend='eager')(torch.ones(2))",
        "torch._dynamo.reset()",
        "torch._dynamo.utils.counters",
        "torch._dynamo.trace_rules.lookup",
    ],
)
def test_whoever_asks_for_more_gets_the_real_one(run, asks):
    body = f"""
rank.install({{}})
train()
{asks}
import torch._dynamo.config as config, torch._dynamo.utils
print(stands_in(), torch._dynamo is sys.modules["torch._dynamo"], config is torch._dynamo.config)
print(any(isinstance(one, rank.SubmoduleFinder) for one in sys.meta_path))
train()
"""
    assert run(body) == ["False", "True", "True", "False"]


def test_it_is_left_alone_where_it_is_imported_already(run):
    assert run("import torch._dynamo; print(rank.install({}), stands_in())") == ["False", "False"]


def test_a_rank_of_several_trains_with_it(run):
    body = """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
rank.install({})
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(stands_in(), model._use_python_reducer)
"""
    assert run(body) == ["True", "False"]


def test_the_real_one_says_of_gradients_what_the_stand_in_says(run):
    assert run("import torch._dynamo.utils as u; print(u.get_optimize_ddp_mode())") == [
        rank.Utils.get_optimize_ddp_mode()
    ]


def test_at_the_end_what_others_registered_runs_and_torch_s_operators_stay(run):
    body = """
import atexit, weakref

def kept():
    return [one for one in weakref.finalize._registry if one.atexit and one.peek()[1].__module__ == "torch.library"]

class Own:
    pass

own = Own()
weakref.finalize(own, print, "own finalizer")
atexit.register(print, "own function")
print(len(kept()) > 0)
rank.spare_operators()
print(len(kept()))
rank.leave(0)
"""
    assert sorted(run(body)) == ["0", "True", "finalizer", "function", "own", "own"]
