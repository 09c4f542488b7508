"""A suite of programs that tell where they run: the same on every system that sees the tests' folder."""

from pathlib import Path

SUITE = r"""
import pathlib
from pytest_mlhpc import Metric, program

HERE = pathlib.Path(__file__).parent
SEEN = Metric("seen", r"seen: (\S+)", "1", better="none")


def folder_of(run):
    return pathlib.Path(next(line for line in run.output.splitlines() if line.startswith("/")))


@program("sh -c 'echo seen: 1; pwd; : > made'", SEEN)
def test_without_cwd(run):
    assert (folder_of(run) / "made").is_file()
    assert HERE not in [folder_of(run), *folder_of(run).parents]


@program("./bench", SEEN)
def test_beside(run):
    assert folder_of(run) != HERE


@program("sh ./bench", SEEN, cwd=".")
def test_here(run):
    assert folder_of(run).samefile(HERE)


@program("sh ./deep/bench", SEEN, cwd="..")
def test_above(run):
    assert folder_of(run).samefile(HERE.parent)
"""


def write_programs(folder: Path) -> None:
    """Write the suite into a folder below *folder*, so that it is not the one in which pytest is started."""
    inner = folder / "deep"
    inner.mkdir()
    (inner / "test_programs.py").write_text(SUITE)
    bench = inner / "bench"
    bench.write_text("#!/bin/sh\necho seen: 1\npwd\n")
    bench.chmod(0o755)
