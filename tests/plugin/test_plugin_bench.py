"""README's `make bench` on this machine: all that the project's suites train here, by the command that stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT_S = 2400


def test_the_first_bench_of_a_checkout_trains_every_workload_and_accepts_what_it_found(tmp_path, state_dir):
    (rule,) = re.findall(
        r"^bench:.*\n\t\$\(BIN\)/pytest (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    shutil.copytree(ROOT / "suites", tmp_path / "suites", ignore=shutil.ignore_patterns("baselines"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *rule.split()],
        cwd=tmp_path,
        env={**os.environ, "MLHPC_STATE": str(state_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for workload in ("cosmoflow", "deepcam", "resnet50", "language_model"):
        assert re.search(rf"^test_{workload}\S* .* new$", done.stdout, re.MULTILINE), done.stdout
    assert not re.search(r"[1-9]\d* (failed|error)", done.stdout)
