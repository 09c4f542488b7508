"""What ``mlhpc status`` says to type next works where it is typed, whichever folder that is."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.cli import main

BROKEN = """
@program("false", RATE)
def test_it(run): pass
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Return how a line is typed in a folder; `pytest` is that of these tests."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "pytest").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest -p no:cacheprovider "$@"\n')
    (tools / "pytest").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return lambda line, folder: subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("where", ["deep/er", ".."])
def test_the_next_command_runs_the_same_test_wherever_it_is_typed(suite, shell, capfd, monkeypatch, where):
    suite.write(BROKEN)
    suite.run().assert_outcomes(failed=1)
    folder = (suite.folder / where).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    capfd.readouterr()
    assert main(["status"]) == 0
    line = capfd.readouterr().out.splitlines()[3].removeprefix("  next: ")
    assert line.startswith(f"(cd {suite.folder} && pytest ")
    again = shell(line, folder)
    assert "1 failed" in again.stdout, again.stdout + again.stderr
    assert len({record["node_id"] for record in suite.records()}) == 1
    assert len(suite.records()) == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], ["--mlhpc-environment", "first"]),
        (["--mlhpc-environment", "second", "--mlhpc-preset", "small"], ["--mlhpc-environment", "second", "--mlhpc-preset", "small"]),
    ],
    ids=["what the partition says", "what was given"],
)  # fmt: skip
def test_the_next_command_names_what_the_failed_test_ran_with(suite, capfd, monkeypatch, given, named):
    systems = (suite.folder / "systems.yaml").read_text()
    suite.file("systems.yaml", systems.replace("cpu: {", "cpu: {environments: {first: {}, second: {}}, ", 1))
    suite.write(BROKEN)
    suite.run(*given).assert_outcomes(failed=1)
    monkeypatch.chdir(suite.folder)
    capfd.readouterr()
    assert main(["status"]) == 0
    command = shlex.split(capfd.readouterr().out.splitlines()[3])
    assert command[command.index("--system") + 2 :] == named


def test_a_folder_that_is_gone_is_not_gone_to(suite, capfd, monkeypatch):
    suite.write(BROKEN)
    suite.run().assert_outcomes(failed=1)
    suite.folder.rename(suite.folder.with_name("elsewhere"))
    monkeypatch.chdir(Path("/"))
    capfd.readouterr()
    assert main(["status"]) == 0
    assert capfd.readouterr().out.splitlines()[3].startswith("  next: pytest ")
