"""mlhpc_here, end to end: pytest inside an allocation of the real cluster submits nothing and leaves the allocation alone."""

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from services import wait_until

pytestmark = pytest.mark.servers

ONE = """\
@script("echo rate: 7", time_limit=600)
def test_one(run):
    assert run["rate"].value == 7
"""

TWO = """
@script("echo rate: 7", nodes=2, ranks_per_node=1, time_limit=600)
def test_two(run):
    pass
"""

#: A rank on each of two nodes that would run for ever, and says where it is.
HANGING = """\
@script(
    "touch {folder}/rank-$SLURM_PROCID; exec sleep 600",
    nodes=2, ranks_per_node=1, time_limit=300,
)
def test_hanging(run):
    pass
"""


@dataclass
class Around:
    """A job that runs pytest of *suite* as its batch script, as ``sbatch --wrap`` would."""

    suite: Any
    id: str
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""

    @property
    def state(self) -> str:
        return next(job.state for job in self.suite.slurm.jobs() if job.id == self.id)

    def steps(self) -> list[str]:
        """Return the names of its steps, but for the script itself."""
        said = self.suite.slurm.run("squeue", "--steps", "-h", "-j", self.id, "-o", "%j").stdout.split()
        return [name for name in said if name not in {"batch", "extern"}]

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        assert wait_until(condition), f"no {what}:\n{self.text}"
        return condition()

    def code(self) -> int:
        """Wait for pytest's end and return its exit code."""
        found = self.until("end", lambda: re.search(r"^EXIT=(\d+)$", self.text, re.MULTILINE))
        return int(found[1])

    def signal(self, name: str) -> None:
        """Send pytest a signal."""
        (self.suite.folder / "signal").write_text(name)


@pytest.fixture
def around(suite):
    """Start jobs whose script runs pytest with mlhpc_here and then waits, so that what it leaves in them can be seen."""
    made: list[Around] = []

    def start(
        *options: str,
        first: tuple[str, ...] = (),
        sbatch: tuple[str, ...] = ("-N2",),
        after: str = "sleep 3600",
    ) -> Around:
        folder = suite.folder
        words = [
            sys.executable, "-m", "pytest", f"--rootdir={folder}", "-p", "no:cacheprovider", "-o", "mlhpc_here=true", f"--mlhpc-state={suite.state}", *options,
        ]  # fmt: skip
        script = folder / "around.sh"
        script.write_text(
            f"#!/bin/bash\ncd {shlex.quote(str(folder))}\nexport COLUMNS=200\n{shlex.join([*words, *first])} &\n"
            f"pid=$!\n"
            # from within: a node may have its own numbers of processes
            "( while [ ! -s signal ]; do sleep 0.2; done; kill -$(cat signal) $pid ) &\nwatcher=$!\n"
            f"wait $pid\necho EXIT=$?\nkill $watcher 2>/dev/null\n{after.replace('SESSION', shlex.join(words))}\n"
        )
        output = folder / f"around-{len(made)}.out"
        done = suite.slurm.run(
            "sbatch", "--parsable", "-p", "cpu", "--exclusive", "--time=60", f"--output={output}",
            f"--chdir={folder}", *sbatch, script,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made.append(Around(suite, done.stdout.strip(), output))
        return made[-1]

    yield start
    for one in made:
        suite.slurm.run("scancel", one.id)


def test_runs_are_steps_of_the_allocation_and_nothing_is_submitted(suite, around):
    suite.tests(ONE + TWO)
    job = around("--system", "cluster", after="true")
    assert job.code() == 0, job.text
    assert "running on cluster:part (in this allocation)" in job.text
    assert "2 passed" in job.text
    assert suite.jobs() == []
    assert {record["job_id"] for record in suite.records()} == {job.id}
    assert len({node for record in suite.records() for node in record["nodes"]}) == 2


def test_another_partition_is_a_usage_error_and_what_does_not_fit_the_job_is_that_tests(suite, around):
    suite.partition(also={"other": {"partition": "gpu"}})
    suite.tests(ONE + TWO + ONE.replace("time_limit=600", "time_limit=3600").replace("test_one", "test_long"))
    job = around(
        first=("--system", "cluster:other", "-k", "one"),
        sbatch=("-N1",),
        after="SESSION --system cluster:part -k two; echo TWO=$?; SESSION --system cluster:part -k long; echo LONG=$?",
    )
    assert job.code() == 4, job.text
    job.until("the other sessions", lambda: "TWO=1" in job.text and "LONG=1" in job.text)
    assert "is in Slurm's partition 'cpu', but cluster:other is 'gpu'" in job.text
    assert "2 nodes are asked for, job" in job.text
    assert "3660 s are needed (time_limit and margin), but job" in job.text
    assert suite.records() == []


def test_kill_9_of_pytest_ends_all_its_steps_and_not_the_allocation(suite, around):
    suite.tests(HANGING.replace("{folder}", str(suite.folder)) + ONE)
    # The next session in the allocation clears up after the dead one, in whose ledger no job of the user's may stand.
    again = "\nwhile [ ! -e again ]; do sleep 0.2; done; SESSION -k test_one; echo AGAIN=$?; sleep 3600"
    job = around("--system", "cluster", first=("-k", "test_hanging"), after=again)
    job.until("ranks on both nodes", lambda: len(list(suite.folder.glob("rank-*"))) == 2)
    assert job.steps()
    job.signal("KILL")
    assert job.code() == 137, job.text
    job.until("end of the steps", lambda: not job.steps())
    assert job.state == "RUNNING"
    (suite.folder / "again").touch()
    assert job.until("second session", lambda: "AGAIN=0" in job.text)
    assert job.state == "RUNNING"


def test_sigterm_ends_the_run_and_not_the_allocation(suite, around):
    suite.tests(HANGING.replace("{folder}", str(suite.folder)))
    job = around("--system", "cluster")
    job.until("ranks on both nodes", lambda: len(list(suite.folder.glob("rank-*"))) == 2)
    job.signal("TERM")
    assert job.code() == 2, job.text
    job.until("end of the steps", lambda: not job.steps())
    assert job.state == "RUNNING"
