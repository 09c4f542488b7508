"""What a user of pytest sees of a wrong systems.yaml: every problem, exit code 4, and nothing written or started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """\
import pathlib, pytest
pathlib.Path("imported").touch()
@pytest.mark.train("command", argv=["touch", "started"])
def test_never(run): ...
"""
GOOD = "systems: {mine: {partitions: {cpu: {scheduler: local}}}}\n"
NEEDS = (
    "systems: {mine: {partitions: {cpu: {scheduler: local, environments: {d: {python: '${MY_PYTHON}'}}}}}}\n"
)
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 5)}]" for n in range(1, 30))]
)

pytestmark = pytest.mark.servers


def run_pytest(folder: Path, systems: str | bytes, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_never.py").write_text(TEST)
    (folder / "systems.yaml").write_bytes(systems if isinstance(systems, bytes) else systems.encode())
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=60
    )


def assert_refused(run: subprocess.CompletedProcess[str], folder: Path, state_dir: Path, *texts: str) -> None:
    said = run.stdout + run.stderr
    for text in texts:
        assert text in said
    assert "Traceback" not in said
    assert run.returncode == 4
    assert sorted(path.name for path in folder.iterdir()) == ["systems.yaml", "test_never.py"]
    assert not state_dir.exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "site"
    path.mkdir()
    return path


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("systems", "texts"),
    [
        (
            "systems:\n  mine: {}\n  mine: {}\nsystmes: 1\n",
            ["systems.yaml:3: systems.mine: is given twice, first in line 2"],
        ),
        (
            GOOD.replace("local", "loacl").replace("cpu", "a;b"),
            ["'a;b' is not a name", "serves scheduler 'loacl'", "did you mean 'local'?"],
        ),
        (NEEDS, ["systems.yaml:1: ", "the environment variable MY_PYTHON is not set"]),
    ],
    ids=["duplicate", "several", "variable"],
)
def test_a_wrong_file_ends_with_4_and_starts_nothing(folder: Path, state_dir: Path, systems, texts, workers):
    run = run_pytest(folder, systems, "--system", "mine", "-n", workers)
    assert_refused(run, folder, state_dir, *texts)


@pytest.mark.parametrize(
    ("systems", "text"),
    [
        ("", "is empty"),
        ("systems:\n\tmine:\n", "systems.yaml:2: a tab"),
        (b"\xfe\xff", "systems.yaml:1: byte 0xfe is not UTF-8"),
        ("systems: !!python/object/apply:os.system ['touch owned']\n", "the tag"),
        (BOMB, "values with its aliases written out"),
        (b"#" * 50_000_000, "50,000,000 bytes"),
        ("include: [systems.yaml]\n", "includes go round in a circle"),
    ],
    ids=["empty", "tab", "encoding", "tag", "bomb", "large", "cycle"],
)
def test_a_hostile_file_ends_with_4_and_starts_nothing(folder: Path, state_dir: Path, systems, text):
    assert_refused(run_pytest(folder, systems, "--system", "mine"), folder, state_dir, text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--system", "mien"], "unknown system 'mien' (did you mean 'mine'?)"),
        (["--system", "mine:cpuu"], "unknown partition 'cpuu' (did you mean 'cpu'?)"),
        (
            ["--system", "mine", "--environment", "defualt"],
            "unknown environment 'defualt' (did you mean 'default'?)",
        ),
        (["--system", "mine", "--systems-file", "nothing.yaml"], "nothing.yaml': there is no such file"),
    ],
    ids=["system", "partition", "environment", "file"],
)
def test_a_wrong_word_on_the_command_line_ends_with_4(folder: Path, state_dir: Path, options, text):
    assert_refused(run_pytest(folder, GOOD, *options), folder, state_dir, text)


def test_without_system_a_wrong_file_is_never_read(folder: Path):
    (folder / "test_plain.py").write_text("def test_plain(): ...\n")
    run = run_pytest(folder, "\tbroken", "test_plain.py")
    assert run.returncode == 0
