"""A project whose pipelines run for real on this machine, by gitlab-ci-local, with jobs in shells.

What it does not do as GitLab does (4.64.1): `resource_group`, `id_tokens` and patterns of inputs are ignored, a child pipeline
gets its parent's variables unexpanded, a job that is named runs whatever its rules say of `when`, and its own exit code takes a
job with allowed exit codes for one that may fail anyhow. Its summary does not.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from over_time_services import share
from services import ROOT

from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import read_records

#: Longest end of a pipeline on a busy machine, in seconds; a limit, never a measure.
_LIMIT_S = 3600.0
#: Those that a test may say otherwise; GitLab's own users may not.
_PREDEFINED = "CI_PIPELINE_SOURCE,CI_COMMIT_SHA,CI_MERGE_REQUEST_IID"
#: A line of the summary: the job, and where a failed one's script lies; other warnings are sentences.
_SUMMARY = re.compile(r"\s*(PASS|WARN|FAIL)\s+(\S+)\s*(?:pre_script|script|post_script|after_script)?\s*\Z")

DATA = Path(__file__).with_name("real") / "gitlab/data"


def read(name: str) -> str:
    """Return a file that tests put into a project."""
    return (DATA / name).read_text(encoding="utf-8")


SUITE = read("suite.py.txt")
IGNORED = "__pycache__/\n.pytest_cache/\n.benchmarks/\n.gitlab-ci-local/\nmlhpc-out/\npublic/\n"
PIPELINE = read("pipeline.yml")


@dataclass(frozen=True)
class Pipeline:
    """What became of one: exit code, all that was said, and job -> PASS, WARN (an allowed failure) or FAIL."""

    code: int
    text: str
    jobs: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        found = (_SUMMARY.match(line) for line in self.text.splitlines())
        object.__setattr__(self, "jobs", {match[2]: match[1] for match in found if match})


@dataclass(frozen=True)
class Project:
    """A checkout with a benchmark, its accepted value and a .gitlab-ci.yml, on a branch whose remote is `server`."""

    folder: Path
    program: str
    environment: dict[str, str]

    @property
    def state(self) -> Path:
        return self.folder.parent / "kept"

    @property
    def server(self) -> Path:
        return self.folder.parent / "server.git"

    @property
    def out(self) -> Path:
        """Where artefacts of the jobs of system `local` come back to."""
        return self.folder / "mlhpc-out/local"

    def git(self, *words: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder or self.folder), *words], env=self.environment, capture_output=True, text=True,
            timeout=_LIMIT_S, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def commit(self) -> str:
        """Commit all files and return the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "a change")
        return self.git("rev-parse", "HEAD")

    def records(self) -> list[Record]:
        return list(read_records(self.state, pytest.fail))

    def run(self, source: str, *words: str, **variables: str) -> Pipeline:
        """Run the pipeline of a source, or those of its jobs that are named."""
        done = self._call(source, words, variables)
        return Pipeline(done.returncode, done.stdout + done.stderr)

    def jobs(self, source: str, *, schema: bool = False, **variables: str) -> dict[str, str]:
        """Return the jobs that a pipeline of a source has -> when they run; with *schema*, check all YAML against GitLab's."""
        done = self._call(source, ("--list-csv",), variables, schema=schema)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.count(";") >= 5]
        return {row["name"]: row["when"] for row in csv.DictReader(lines, delimiter=";")}

    def _call(
        self, source: str, words: tuple[str, ...], variables: dict[str, str], *, schema: bool = False
    ) -> subprocess.CompletedProcess[str]:
        if self.git("status", "--porcelain"):
            self.commit()  # jobs see what is in git and nothing else
        given = {"CI_PIPELINE_SOURCE": source, **variables}
        argv = [
            self.program,
            "--force-shell-executor",
            "--shell-isolation",
            f"--ignore-predefined-vars={_PREDEFINED}",
        ]
        argv += [] if schema else ["--json-schema-validation=false"]
        argv += [word for name, value in given.items() for word in ("--variable", f"{name}={value}")]
        return subprocess.run(
            [*argv, *words], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip


@pytest.fixture(scope="session")
def gitlab_ci_local(request: pytest.FixtureRequest) -> Iterator[str]:
    """The program."""
    for service in share(request.config, "gitlab-ci-local"):
        yield service.environment["MLHPC_GITLAB_CI_LOCAL"]


@pytest.fixture(scope="session")
def accepted_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of one benchmark that was accepted on this machine at 4 items/s, not yet in git."""
    folder = tmp_path_factory.mktemp("accepted")
    shutil.copytree(ROOT / "ci/gitlab/templates", folder / "ci/gitlab/templates")
    (folder / "suites").mkdir()
    (folder / "suites/test_echo.py").write_text(SUITE, encoding="utf-8")
    (folder / "conftest.py").touch()
    (folder / ".gitignore").write_text(IGNORED, encoding="utf-8")
    (folder / "setup.sh").write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "suites", "--system", "local:cpu", "--mlhpc-baseline=update", "-q", "-p", "no:cacheprovider",
         f"--mlhpc-state={tmp_path_factory.mktemp('state')}"],
        cwd=folder, env=_environment(), capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def project(gitlab_ci_local: str, accepted_project: Path, tmp_path: Path) -> Project:
    """That checkout as a project of its own."""
    return make_project(gitlab_ci_local, accepted_project, tmp_path)


def make_project(program: str, accepted: Path, folder: Path) -> Project:
    """Copy a checkout into a folder, as a project with a remote."""
    shutil.copytree(accepted, folder / "project")
    environment = {**_environment(), "GIT_CONFIG_GLOBAL": str(folder / "gitconfig")}
    made = Project(folder / "project", program, environment)
    (folder / "gitconfig").write_text(
        f'[user]\nname = a\nemail = a@b\n[url "{made.server}"]\npushInsteadOf = https://gitlab.example.org/hpc/bench.git\n',
        encoding="utf-8",
    )
    made.write(".gitlab-ci.yml", PIPELINE.replace("STATE", str(made.state)))
    made.git("init", "--quiet", "--initial-branch", "main")
    made.git("init", "--quiet", "--bare", str(made.server))
    made.git("config", "receive.advertisePushOptions", "true", folder=made.server)
    made.git("remote", "add", "origin", "https://gitlab.example.org/hpc/bench.git")
    made.commit()
    made.git("update-ref", "refs/remotes/origin/main", "HEAD")
    made.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    return made


def _environment() -> dict[str, str]:
    foreign = ("CI_", "GITLAB", "GITHUB", "GIT_", "COVERAGE_", "COV_CORE_", "MLHPC_INFLUX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "NO_COLOR": "1"}
