"""What the hook writes of a program, with a stand-in for the four places of torch that it touches."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.screen.hook_output import read_traces
from pytest_mlhpc.screen.run import HOOK

#: As far as the hook touches it.
TORCH = Path(__file__).with_name("torch_stand_in")

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
    shutil.copytree(TORCH, tmp_path / "lib")
    (tmp_path / "told").mkdir()
    path = f"{HOOK}{os.pathsep}{tmp_path / 'lib'}"
    usual = {"PYTHONPATH": path, "MLHPC_SCREEN": str(tmp_path / "told"), "MLHPC_SCREEN_PROFILE": "3:2"}

    def do(code, **variables):
        environment = {**os.environ, **usual, **variables}
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        return read_traces(tmp_path / "told"), done

    return do


def test_steps_of_the_first_optimizer_their_waits_and_a_profile_are_reported(run):
    (one,), done = run(TRAIN, RANK="3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (one.rank, len(one.ends), one.profiled) == (3, 8, (3, 2))
    assert all(wait >= 0.02 for wait in one.waits)
    assert one.profile.top == (("aten::mm", 1.0),)
    assert len(one.steps()) == 3  # of seven, without the first and those from the fourth to the sixth


def test_a_program_with_its_own_profiler_on_keeps_it(run):
    (one,), done = run("import torch.autograd; torch.autograd.enabled = True\n" + TRAIN)
    assert (done.returncode, one.profile) == (0, None)
    assert one.notes == ("torch's profiler (the program had its own on)",)


def test_ranks_that_were_forked_tell_of_themselves_alone(run):
    fork = "if os.fork() == 0: exec(TRAIN); raise SystemExit\n"
    spoken, done = run(f"import os, torch.optim\nTRAIN = {TRAIN!r}\n{fork}{fork}os.wait(); os.wait()")
    assert done.returncode == 0, done.stderr
    assert [len(one.ends) for one in spoken] == [8, 8]


def test_a_folder_that_is_gone_is_no_matter_to_the_program(run, tmp_path):
    spoken, done = run(f"import shutil; shutil.rmtree({str(tmp_path / 'told')!r})\n{TRAIN}print('end')")
    assert (spoken, done.returncode, done.stdout, done.stderr) == ((), 0, "end\n", "")


def test_what_breaks_in_the_hook_stays_there(run, tmp_path):
    broken = "class profile:\n    def start(self): raise RuntimeError('no Kineto')\n"
    (tmp_path / "lib/torch/profiler.py").write_text(broken)
    loader = "def _BaseDataLoaderIter(): return iter(range(99))\n"
    (tmp_path / "lib/torch/utils/data/dataloader.py").write_text(loader)
    (one,), done = run(TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert one.notes == ("torch's profiler (it did not start: no Kineto)",)


def test_a_program_without_torch_is_left_alone(run, tmp_path):
    spoken, done = run("import json, sys; print([type(one).__name__ for one in sys.meta_path][0])")
    assert (spoken, done.stdout, done.returncode, done.stderr) == ((), "Finder\n", 0, "")
    assert not list((tmp_path / "told").iterdir())
