"""Pages of docs/, and sessions of pytest with the examples that stand in them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ACCELERATORS = (ROOT / "docs/accelerators.md").read_text(encoding="utf-8")

COLLECT = ("--collect-only", "-q")


def section(heading: str) -> str:
    """Return what docs/accelerators.md says below this heading."""
    return ACCELERATORS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(kind: str, text: str) -> list[str]:
    """Return the blocks of code of this kind."""
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def session(
    folder: Path, tests: str, *arguments: str, systems: str = "", file: str = "test_x.py"
) -> tuple[int, str]:
    """Run pytest on these tests, with these systems if any; return its exit code and all that it printed."""
    (folder / file).write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    if systems:
        (folder / "systems.yaml").write_text(systems)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**os.environ, "MLHPC_STATE": str(folder / "state"), "PYTHONPATH": str(ROOT), "CI": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout
