"""Real small trainings, each limited by one thing, and what is said of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TRAINING = Path(__file__).with_name("screened_training.py")

pytestmark = pytest.mark.servers


def screened(how, steps, *, launcher=(), options=()):
    """Return the report of a training's screening, as lines without their mark."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", "screen", "--seconds", "3600", "--profile", "5:3", *options, "--",
         sys.executable, *launcher, str(TRAINING), how, str(steps)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"trained {steps}" in done.stdout
    mark = "mlhpc screen: "
    lines = [line.removeprefix(mark) for line in done.stderr.splitlines() if line.startswith(mark)]
    assert 2 <= len(lines) <= 10
    return lines


def line_of(kind, lines):
    return next((line for line in lines if re.match(rf"\d\. {kind}\b", line)), "")


def test_a_training_that_reads_by_itself_waits_for_data():
    lines = screened("data", 25)
    where = "a step in the DataLoader .* no loader processes"
    (share,) = re.findall(rf"waiting for data (\d+) %: waits \d+ % of {where}", "\n".join(lines))
    assert int(share) > 50
    assert "num_workers" in line_of("waiting for data", lines)


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "steps", "launcher", "text"),
    [
        ("workers", 25, (), r"waiting for data \d+ %: .*its 1 process of loading"),
        ("growing", 150, (), r"memory: memory on .* grows by [\d.]+ MiB/s"),
        ("slow_rank", 15, RANKS, r"3 ranks on 1 node(.|\n)*one slow rank \d+ %: rank 1: the others are in collectives \d+ % of the time, it \d+ %"),
    ],
)  # fmt: skip
def test_a_training_is_limited_by(how, steps, launcher, text):
    lines = screened(how, steps, launcher=launcher)
    assert re.search(text, "\n".join(lines)), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options", "kind", "text", "absent"),
    [
        ("computing", (), "computing", r"operations run.*aten::", "waiting for data"),
        ("data", ("--profile", "off"), "waiting for data", "", "computing .*operations run"),
    ],
    ids=["by operations that compute", "without the profiler too"],
)
def test_what_limits_a_training_is_reported(how, options, kind, text, absent):
    lines = screened(how, 25, options=options)
    assert re.search(text, line_of(kind, lines)), lines
    assert line_of(kind, lines)
    assert not line_of(absent, lines)
