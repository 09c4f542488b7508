"""What docs/accelerators.md says of IPUs: every field is there, and the example is collected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_mlhpc.worker.workloads.fields import ipu

PAGE = (Path(__file__).parents[2] / "docs/accelerators.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Graphcore (ipu)\n")[2].partition("\n## ")[0]

SYSTEMS = """\
systems:
  pod:
    partitions:
      ipu:
        scheduler: local
        accelerator: ipu
        nodes: {cores: 1, memory: 1GiB, max: 1, devices: 4, device_model: Graphcore Bow IPU}
        environments: {default: {python: python3}}
"""


def collected(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "systems.yaml").write_text(SYSTEMS)
    (folder / "test_x.py").write_text(f"import pytest\n\n{text}")
    command = ["-m", "pytest", "--collect-only", "-q", "--system", "pod", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )


def test_the_table_names_every_field_and_its_limits():
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert [re.findall(r"`(\w+)`", row)[0] for row in rows] == list(ipu.FIELDS)
    assert f"an even number from {ipu.LEAST_TILES} to {ipu.MOST_TILES}" in SECTION
    assert f"a power of 2 up to {ipu.COUNTS[-1]}" in SECTION


def test_it_says_that_no_ipu_has_seen_this():
    assert "none of\nthis has ever run on an IPU" in SECTION
    assert "Python 3.8" in SECTION


@pytest.mark.servers
def test_the_example_is_collected_and_a_contradiction_is_not(tmp_path):
    (block,) = re.findall(r"((?:^    .*\n)+)", SECTION, re.MULTILINE)
    example = textwrap.dedent(block)
    ended = collected(tmp_path, example)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 test collected" in ended.stdout

    ended = collected(tmp_path, example.replace("gradient_accumulation=16", "gradient_accumulation=2"))
    assert ended.returncode == 4
    says = "gradient_accumulation: a pipeline of 4 IPUs needs as many micro-batches to a step"
    assert says in ended.stdout + ended.stderr
