"""The picture of the README: what pytest prints when the program of docs/tutorial.md has become slower.

``python -m benchmarks.terminal`` writes docs/terminal.svg.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "pytest suites/ --system local"
WIDTH = 110


def session(folder: Path) -> str:
    """Run the command once in *folder*; return what it prints, with its colours."""
    environment = {
        **os.environ,
        "MLHPC_STATE": str(folder / "state"),
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        # What developers have installed besides is not the reader's.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p pytest_mlhpc.plugin",
    }
    environment.pop("CI", None)
    argv = [sys.executable, "-m", *COMMAND.split()]
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, check=False
    ).stdout


def commit(folder: Path, message: str) -> None:
    """Commit all files of *folder*: the verdict names the commits between which the speed has changed."""
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "--quiet"), ("add", "suites"), ("commit", "--quiet", "-m", message)):
        subprocess.run([*git, *words], cwd=folder, check=True)


def main() -> None:
    """Write each program of the tutorial, run the suite, and draw the last session."""
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", tutorial, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = ""
        for file, text in blocks:
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if (folder / "suites/test_bench.py").exists():
                commit(folder, file)
                printed = session(folder)
    shown = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown.print(Text.from_ansi(f"$ {COMMAND}\n{printed.rstrip()}"))
    (ROOT / "docs/terminal.svg").write_text(shown.export_svg(title=COMMAND), encoding="utf-8")


if __name__ == "__main__":
    main()
