"""What somebody has who installs the wheel and has no checkout: suites, pages, systems, and messages that name them."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from pytest_mlhpc import __version__

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "pytest_mlhpc").rglob("*.py"))


@pytest.fixture
def call(installed, tmp_path):
    """Return what runs a program of the environment in an empty folder, and returns what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(program, *words, code=0):
        done = subprocess.run(
            [installed / "bin/python", "-m", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**inherited, "MLHPC_STATE": str(tmp_path / "state")},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_version_is_the_same_everywhere(installed):
    (metadata,) = installed.glob("lib/python*/site-packages/pytest_mlhpc-*.dist-info/METADATA")
    text = metadata.read_text()
    assert f"\nVersion: {__version__}\n" in text
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert [f"3.{minor}" for minor in range(11, 15)] == re.findall(r"Classifier: .* :: (3\.\d+)", text)


@pytest.mark.servers
def test_a_suite_of_the_wheel_runs_in_an_empty_folder(call):
    words = ("--system", "local", "--mlhpc-preset", "smoke", "-k", "cosmoflow and memory")
    said = call("pytest", "--pyargs", "pytest_mlhpc.suites.training", *words)
    assert "1 passed" in said


def test_all_suites_of_the_wheel_are_collected(call, installed):
    said = call("pytest", "--pyargs", "pytest_mlhpc.suites", "--collect-only", "-q")
    files = {
        path.name for path in installed.glob("lib/python*/site-packages/pytest_mlhpc/suites/*/test_*.py")
    }
    assert files == {path.name for path in (ROOT / "suites").glob("*/test_*.py")}
    assert files - set(re.findall(r"(test_\w+\.py)::", said)) == {"test_characterisation.py"}


def test_a_project_begins_with_what_the_wheel_holds(call):
    call("pytest_mlhpc.cli", "init")
    call("pytest_mlhpc.cli", "systems", "add", "archer2")
    assert "archer2" in call("pytest_mlhpc.cli", "systems", "list")
    assert "no problem" in call("pytest_mlhpc.cli", "systems", "check")
    assert "test_first.py" in call("pytest", "--collect-only", "-q", "--system", "local")


def test_the_command_that_roofline_names_is_there(call):
    command = re.search(
        r"run: pytest (--pyargs [\w.]+) --system NAME", call("pytest_mlhpc.cli", "papers", "roofline")
    )
    assert "test_peaks" in call("pytest", *command[1].split(), "--system", "local", "--collect-only", "-q")


def test_every_page_that_a_message_names_is_in_the_wheel(installed):
    (package,) = installed.glob("lib/python*/site-packages/pytest_mlhpc")
    named = {name for path in SOURCES for name in re.findall(r"\bpage\('(\w+)'\)", path.read_text())}
    assert {path.stem for path in (package / "docs").glob("*.md")} == named


def test_no_message_names_a_file_of_the_checkout():
    """Docstrings may: whoever reads them has the sources. `docs/CODEOWNERS` is a file of the user's repository."""
    found = []
    for text, path in [(path.read_text(), path) for path in SOURCES]:
        if not re.search(r"\bdocs/|pytest suites/\w", text):
            continue
        tree = ast.parse(text)
        sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in sentences:
                found += [
                    (path.name, node.value)
                    for _ in re.findall(r"\bdocs/(?!CODEOWNERS)|pytest suites/\w", node.value)
                ]
    assert {name for name, _ in found} == {"locations.py"}, found
