"""What the hook writes of a program, with a stand-in for the four places of torch that it touches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.screen.screen_cli import HOOK
from pytest_mlhpc.screen.told import read_told

TORCH = {
    "torch/__init__.py": "from torch import autograd, profiler",
    "torch/autograd.py": "enabled = False\ndef _profiler_enabled(): return enabled\n",
    "torch/profiler.py": (
        "import json\n"
        "class profile:\n"
        "    def start(self): pass\n"
        "    def stop(self): pass\n"
        "    def export_chrome_trace(self, path):\n"
        "        events = [{'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::mm', 'ts': 0, 'dur': 5}]\n"
        "        open(path, 'w').write(json.dumps({'traceEvents': events}))\n"
    ),
    "torch/optim/__init__.py": "from torch.optim.optimizer import Optimizer",
    "torch/optim/optimizer.py": (
        "hooks = []\n"
        "def register_optimizer_step_post_hook(hook): hooks.append(hook)\n"
        "class Optimizer:\n"
        "    def step(self): [hook(self, (), {}) for hook in hooks]\n"
    ),
    "torch/utils/__init__.py": "",
    "torch/utils/data/__init__.py": "from torch.utils.data.dataloader import _BaseDataLoaderIter",
    "torch/utils/data/dataloader.py": (
        "import time\n"
        "class _BaseDataLoaderIter:\n"
        "    def __iter__(self): return self\n"
        "    def __next__(self): time.sleep(0.02); return 1\n"
    ),
}

TRAIN = """
import torch.optim, torch.utils.data
optimizer, other = torch.optim.Optimizer(), torch.optim.Optimizer()
batches = torch.utils.data._BaseDataLoaderIter()
for step in range(8):
    next(batches)
    optimizer.step()
    other.step()
"""


@pytest.fixture
def run(tmp_path):
    """Run a program below the hook; return what it told, and how it ended."""
    for name, text in TORCH.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(text)
    (tmp_path / "told").mkdir()

    def do(code, **variables):
        environment = {
            **os.environ, "PYTHONPATH": f"{HOOK}{os.pathsep}{tmp_path / 'lib'}", "MLHPC_SCREEN": str(tmp_path / "told"),
            "MLHPC_SCREEN_PROFILE": "3:2", **variables,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        return read_told(tmp_path / "told"), done

    return do


def test_steps_of_the_first_optimizer_their_waits_and_a_profile_are_told(run):
    (one,), done = run(TRAIN, RANK="3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (one.rank, len(one.ends), one.profiled) == (3, 8, (3, 2))
    assert all(wait >= 0.02 for wait in one.waits)
    assert one.profile is not None
    assert one.profile.top == (("aten::mm", 1.0),)
    assert len(one.steps()) == 3  # of seven, without the first and those from the fourth to the sixth


def test_a_program_with_its_own_profiler_on_keeps_it(run):
    (one,), done = run("import torch.autograd; torch.autograd.enabled = True\n" + TRAIN)
    assert done.returncode == 0
    assert one.profile is None
    assert one.notes == ("torch's profiler (the program had its own on)",)


def test_ranks_that_were_forked_tell_of_themselves_alone(run):
    code = "import os, torch.optim\nfor _ in range(2):\n    if os.fork() == 0:\n        exec(TRAIN); raise SystemExit\nos.wait(); os.wait()"
    spoken, done = run(f"TRAIN = {TRAIN!r}\n{code}")
    assert done.returncode == 0, done.stderr
    assert [len(one.ends) for one in spoken] == [8, 8]


def test_a_folder_that_is_gone_is_no_matter_to_the_program(run, tmp_path):
    code = f"import shutil; shutil.rmtree({str(tmp_path / 'told')!r})\n{TRAIN}print('end')"
    spoken, done = run(code)
    assert (spoken, done.returncode, done.stdout, done.stderr) == ((), 0, "end\n", "")


def test_what_breaks_in_the_hook_stays_there(run, tmp_path):
    (tmp_path / "lib/torch/profiler.py").write_text(
        "class profile:\n    def start(self): raise RuntimeError('no Kineto')\n"
    )
    (tmp_path / "lib/torch/utils/data/dataloader.py").write_text(
        "def _BaseDataLoaderIter(): return iter(range(99))\n"
    )
    (one,), done = run(TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert one.notes == ("torch's profiler (it did not start: no Kineto)",)


def test_a_program_without_torch_is_left_alone(run, tmp_path):
    spoken, done = run("import json, sys; print([type(one).__name__ for one in sys.meta_path][0])")
    assert (spoken, done.stdout, done.returncode) == ((), "Finder\n", 0)
    assert not list(Path(tmp_path / "told").iterdir())
    assert json.dumps(done.stderr) == '""'
