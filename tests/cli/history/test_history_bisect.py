"""``mlhpc history bisect``: planted commits and set-ups are named, what cannot be is said, and nothing is left. All on `local`.

Programs vary by less than a hundredth of the loss, so that no answer depends on chance.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from git_checkouts import Checkout
from nights_of import nights, quiet, store
from running_suites import wait_for

SYSTEMS = """
schema: 1
systems:
  local:
    partitions:
      cpu:
        scheduler: local
        accelerator: cpu
        nodes: {cores: 1, memory: 1GiB, max: 1}
        environments:
          default: {python: python3}
          older: {python: python3, variables: {LIBRARY: "1"}}
"""

SUITE = """
import sys
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")

@program([sys.executable, "kernel.py"], RATE, files=["kernel.py"], env={"FOLDER": "@FOLDER@"})
def test_kernel(run):
    pass
"""

#: It says that it has begun, and waits from the run on whose number the file ``wait`` has; its figure varies by its number.
KERNEL = """
import math, os, pathlib, time
at = pathlib.Path(os.environ["FOLDER"])
with open(at / "runs", "a") as runs:
    print(file=runs, flush=True)
    number = runs.tell()
if (at / "wait").exists() and number >= int((at / "wait").read_text()):
    (at / "begun").touch()
    time.sleep(600)
@MORE@
print("rate:", @RATE@ * (1 + 0.0005 * math.sin(number)))
"""

GOOD, BAD = 100.0, 90.0
#: 5 nights on both sides of the loss.
FIGURES = [*quiet(5, GOOD), *quiet(5, BAD, 2)]


class World:
    """A checkout whose test became slower, and the nights that say so."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder, self.state = folder, state
        self.checkout = Checkout.made(folder / "checkout")
        self.checkout.write("systems.yaml", SYSTEMS)
        self.checkout.write("pytest.ini", "[pytest]\n")
        self.checkout.write(".gitignore", "__pycache__\n")
        self.checkout.write("test_suite.py", SUITE.replace("@FOLDER@", str(folder)))

    def commit(self, rate: object, message: str, more: str = "") -> str:
        """Commit a program of that rate."""
        text = f"# {message}\n" + KERNEL.replace("@RATE@", str(rate)).replace("@MORE@", more)
        self.checkout.write("kernel.py", text)
        return self.checkout.commit(message)

    def nights(self, good: str, bad: str, *, figures=FIGURES, **fields) -> None:
        """Record nights of the commit *good*, then as many of *bad*."""
        changes = {
            "system": "local", "partition": "cpu", "node_id": "test_suite.py::test_kernel[local:cpu+default]",
            "benchmark": "test_suite.py::test_kernel", "options": ("--mlhpc-environment", "default"), **fields,
        }  # fmt: skip
        made = nights(figures, **changes)
        half = len(made) // 2
        commits = [good] * half + [bad] * (len(made) - half)
        store(
            self.state,
            [replace(one, commit=commit) for one, commit in zip(made, commits, strict=True)],
            fields.get("environment", "s1"),
        )

    def left(self) -> list[str]:
        """Return what should not be left after a bisection."""
        files = [
            *self.state.glob("bisect/*"),
            *self.state.glob("worktrees/*"),
            *self.state.glob("ledger/*.jsonl"),
        ]
        return [
            *map(str, files),
            *self.checkout.worktrees(),
            *self.checkout.git("status", "--porcelain").splitlines(),
        ]

    def runs(self) -> int:
        """Return how often the program was started."""
        path = self.folder / "runs"
        return path.stat().st_size if path.exists() else 0

    @contextmanager
    def process(self):
        """Start the command as a process of its own, which ends with the block at the latest."""
        argv = [sys.executable, "-m", "pytest_mlhpc.cli", "history", "bisect", "test_kernel"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(argv, cwd=self.checkout.folder, text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def world(tmp_path, state_dir, monkeypatch):
    made = World(tmp_path, state_dir)
    monkeypatch.chdir(made.checkout.folder)
    for name in ("CI", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def slowed(world):
    """Three commits after the good one, of which the second made it slower."""
    good = world.commit(GOOD, "start")
    world.commit(GOOD, "harmless")
    culprit = world.commit(BAD, "unroll-no-loops")
    bad = world.commit(BAD, "comment")
    world.nights(good, bad)
    return world, culprit


def test_the_commit_that_made_it_slower_is_named_with_how_sure_that_is(slowed, mlhpc):
    world, culprit = slowed
    printed = mlhpc("history", "bisect", "test_kernel")
    first, second = printed.out.splitlines()
    assert first == f"commit {culprit[:12]} (unroll-no-loops, a)"
    assert " sure, after 8 runs in 2 comparisons; today's loss by it is 10.0%" in second
    assert "3 commits: " in printed.err
    assert "comparison 2: today is 0." in printed.err
    assert world.left() == []


def test_a_plan_says_what_would_be_run_and_runs_nothing(slowed, mlhpc):
    world, _ = slowed
    printed = mlhpc("history", "bisect", "test_kernel", "--dry-run")
    assert (
        "plan: 2 comparisons if none errs, each of 4 to 30 runs in one allocation, about 8 runs"
        in printed.out
    )
    assert "next: --mlhpc-against rev=" in printed.out
    assert (world.runs(), world.left()) == (0, [])


def test_a_budget_in_node_hours_is_counted_in_runs_of_its_nights(world, mlhpc):
    good = world.commit(GOOD, "start")
    world.nights(good, world.commit(BAD, "slower"), node_hours=0.25)
    out = mlhpc("history", "bisect", "test_kernel", "--dry-run", "--budget", "2nh").out
    assert "budget: 8 runs" in out


def test_the_answer_for_programs_has_all_probabilities(slowed, mlhpc):
    _, culprit = slowed
    found = json.loads(mlhpc("history", "bisect", "test_kernel", "--json").out)
    assert (found["outcome"], found["named"]) == ("named", [culprit])
    shares = [one["probability"] for one in found["candidates"]]
    assert sum(shares) + found["none"] == pytest.approx(1)
    assert max(shares) == shares[1] >= 0.95
    assert [one["runs"] for one in found["comparisons"]] == [4, 4]


def test_the_environment_that_made_it_slower_is_named_and_what_cannot_be_set_is_listed(world, mlhpc):
    commit = world.commit("({'1': 100.0}.get(os.environ.get('LIBRARY'), 90.0))", "start")
    changed = [{"torch": "2.7", "driver": "570"}] * 5 + [{"torch": "2.8", "driver": "580"}]
    world.nights(commit, commit, environments=changed)
    world.nights(commit, commit, figures=quiet(4), environments=[{"torch": "2.7"}], environment="older")
    printed = mlhpc("history", "bisect", "test_kernel")
    assert printed.out.splitlines()[0] == "environment=older (torch 2.7 -> 2.8)"
    assert "cannot be set: driver 570 -> 580" in printed.err
    assert "no commit is a candidate: both nights ran commit" in printed.err
    assert world.left() == []


def test_a_variable_that_made_it_slower_is_named(world, mlhpc):
    commit = world.commit("({'8': 100.0}.get(os.environ.get('OMP_NUM_THREADS'), 90.0))", "start")
    changed = [{"env_OMP_NUM_THREADS": "8"}] * 5 + [{"env_OMP_NUM_THREADS": "1"}]
    world.nights(commit, commit, environments=changed)
    out = mlhpc("history", "bisect", "test_kernel").out
    assert out.splitlines()[0] == "variables.OMP_NUM_THREADS=8 (env_OMP_NUM_THREADS 8 -> 1)"
    assert world.left() == []


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (GOOD, "the loss does not come back today: 100 samples/s"),
        (BAD, "is as slow as the nights after it, also without the candidates: suspect the machine"),
    ],
)
def test_a_loss_that_no_candidate_shows_is_nobodys(world, mlhpc, rate, said):
    good = world.commit(rate, "start")
    world.nights(good, world.commit(rate, "harmless"))
    printed = mlhpc("history", "bisect", "test_kernel", code=1)
    assert "only one candidate: commit " in printed.err
    assert "none of 1 candidate, " in printed.out
    assert said in printed.out
    assert world.left() == []


@pytest.mark.parametrize(
    ("more", "why"),
    [(None, "files: there is no 'kernel.py'"), ("raise SystemExit(3)", "worker_exit: run ")],
    ids=["file", "exit"],
)
def test_a_commit_that_cannot_run_is_skipped_and_named(world, mlhpc, more, why):
    good = world.commit(GOOD, "start")
    if more is None:
        (world.checkout.folder / "kernel.py").unlink()
        broken = world.checkout.commit("broken")
    else:
        broken = world.commit(BAD, "broken", more)
    fixed = world.commit(BAD, "repaired")
    world.nights(good, fixed)
    out = mlhpc("history", "bisect", "test_kernel").out
    assert out.splitlines()[0] == "one of 2 candidates, which no comparison tells apart:"
    assert [f"commit {one[:12]}" in out for one in (broken, fixed)] == [True, True]
    (skipped,) = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert skipped.startswith(f"skipped: rev={broken[:12]}: ")
    assert why in skipped
    assert world.left() == []


def test_a_commit_that_does_not_build_is_skipped_and_named(world, mlhpc):
    """The build copies the program, unless its source says that it cannot."""
    built = 'made = build("sh build.sh", files=["build.sh", "kernel.py"])\n\n@program'
    suite = SUITE.replace("@FOLDER@", str(world.folder)).replace("Metric, program", "Metric, build, program")
    suite = suite.replace("@program", built).replace(
        '"kernel.py"], RATE, files=["kernel.py"]', '"{made}/built.py"], RATE'
    )
    world.checkout.write("test_suite.py", suite.replace("(run)", "(run, made)"))
    world.checkout.write("build.sh", "cp kernel.py built.py")
    good = world.commit(GOOD, "start")
    world.checkout.write("build.sh", "exit 1")
    broken = world.commit(BAD, "broken")
    world.checkout.write("build.sh", "cp kernel.py built.py")
    world.nights(good, world.commit(BAD, "repaired"))
    out = mlhpc("history", "bisect", "test_kernel").out
    assert out.splitlines()[0] == "one of 2 candidates, which no comparison tells apart:"
    assert f"skipped: rev={broken[:12]}: build_failed: " in out
    assert world.left() == []


def test_a_merge_is_named_with_how_to_look_into_it(world, mlhpc):
    good = world.commit(GOOD, "start")
    world.checkout.git("checkout", "-q", "-b", "side")
    world.commit(GOOD, "one")
    side = world.commit(BAD, "two")
    world.checkout.git("checkout", "-q", "main")
    world.checkout.git("merge", "-q", "--no-ff", "-m", "merge side", "side")
    bad = world.checkout.git("rev-parse", "HEAD")
    world.nights(good, bad)
    lines = mlhpc("history", "bisect", "test_kernel").out.splitlines()
    assert lines[0] == f"commit {bad[:12]} (merge side, a, a merge of 2 commits)"
    assert (
        lines[2] == f"inside the merge: git checkout {side[:12]}, then --good {good[:12]} --bad {side[:12]}"
    )
    world.checkout.git("checkout", "-q", side)
    words = ("--good", good, "--bad", side)
    assert "2 commits: " in mlhpc("history", "bisect", "test_kernel", "--dry-run", *words).out


def test_a_set_up_that_cannot_be_is_skipped(world, mlhpc):
    commit = world.commit(BAD, "start")
    world.nights(commit, commit)
    out = mlhpc("history", "bisect", "test_kernel", "--try", "environment=oldest", code=1).out
    assert out.startswith(
        "not known: what is left cannot be compared with a set-up without it, after 0 runs:\n"
    )
    assert "no selected partition has it" in out
    assert world.left() == []


def test_a_checkout_that_does_not_run_ends_it(world, mlhpc):
    good = world.commit(GOOD, "start")
    world.nights(good, world.commit(BAD, "broken", "raise SystemExit(3)"))
    out = mlhpc("history", "bisect", "test_kernel", code=3).out
    assert "worker_exit: run 1 of 4 (A): " in out
    assert "the same command goes on" in out


#: It ends the batch that runs it, as a lost node does: in its third run, or in all.
LOST = """
import signal
if number @WHEN@:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""


def test_an_allocation_that_is_lost_half_way_is_made_again(world, mlhpc):
    good = world.commit(GOOD, "start", LOST.replace("@WHEN@", "== 3"))
    bad = world.commit(BAD, "slower", LOST.replace("@WHEN@", "== 3"))
    world.nights(good, bad)
    printed = mlhpc("history", "bisect", "test_kernel")
    assert "; once more" in printed.err
    assert printed.out.startswith(f"commit {bad[:12]} ")
    assert world.left() == []


def test_allocations_that_are_lost_again_and_again_end_it_for_now(world, mlhpc):
    good = world.commit(GOOD, "start", LOST.replace("@WHEN@", "> 0"))
    world.nights(good, world.commit(BAD, "slower", LOST.replace("@WHEN@", "> 0")))
    out = mlhpc("history", "bisect", "test_kernel", code=75).out
    assert "the same command goes on" in out


def test_a_budget_that_is_spent_says_what_would_do_and_is_gone_on_with(world, mlhpc):
    """The runs differ so much that two pairs tell nothing; the next ones do not."""
    wild = "if number <= 4:\n    print('rate:', [80, 100, 90, 110][number - 1]); raise SystemExit"
    good = world.commit(GOOD, "start", wild)
    bad = world.commit(BAD, "slower", wild)
    world.nights(good, bad)
    out = mlhpc("history", "bisect", "test_kernel", "--budget", "4 runs", code=3).out
    assert out.startswith("not known after 4 runs: ")
    assert "goes on from here, and would probably do" in out
    assert (
        mlhpc("history", "bisect", "test_kernel", "--budget", "4", code=2).err.count(
            "cannot tell 1 candidate"
        )
        == 1
    )
    assert "going on after 1 comparison" in mlhpc("history", "bisect", "test_kernel").err


def test_a_bisection_that_is_killed_leaves_no_process_and_goes_on_from_what_was_measured(slowed, mlhpc):
    world, culprit = slowed
    (world.folder / "wait").write_text("5")  # after the first comparison
    with world.process() as process:
        wait_for((world.folder / "begun").exists)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not world.checkout.worktrees() and not list(world.state.glob("ledger/*.jsonl")))
    (world.folder / "wait").unlink()
    assert world.runs() == 5
    wait_for(lambda: not _running(world))
    printed = mlhpc("history", "bisect", "test_kernel")
    assert "going on after 1 comparison of before" in printed.err
    assert printed.out.startswith(f"commit {culprit[:12]} ")
    assert world.left() == []


def test_a_second_bisection_of_the_same_loss_is_refused(slowed, mlhpc):
    world, _ = slowed
    (world.folder / "wait").write_text("1")
    with world.process() as process:
        wait_for((world.folder / "begun").exists)
        err = mlhpc("history", "bisect", "test_kernel", code=4).err
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert "another `mlhpc history bisect` of this loss is at work" in err
    assert not _running(world)
    assert world.checkout.worktrees() == []


def _running(world) -> list[str]:
    """Return the processes that have the state directory of *world* in their command line or surroundings."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(str(world.folder)) in text and process.name != str(os.getpid()):
            found.append(process.name)
    return found


def test_a_damaged_file_of_answers_is_said_and_all_is_measured_again(slowed, mlhpc):
    world, culprit = slowed
    (world.folder / "wait").write_text("5")  # after the first comparison
    with world.process() as process:
        wait_for((world.folder / "begun").exists)
        process.send_signal(signal.SIGINT)
        process.wait(300)
    (world.folder / "wait").unlink()
    (path,) = world.state.glob("bisect/*.json")
    path.write_text('{"answers": [{"against": "rev=x"')
    printed = mlhpc("history", "bisect", "test_kernel")
    assert "all is measured again" in printed.err
    assert printed.out.startswith(f"commit {culprit[:12]} ")


def test_a_test_that_has_nothing_of_the_checkout_is_not_tried_with_each_commit(world, mlhpc):
    world.checkout.write(
        "test_suite.py", SUITE.replace('"kernel.py"], RATE, files=["kernel.py"]', '"-c", "print(1)"], RATE')
    )
    good = world.commit(GOOD, "start")
    world.commit(GOOD, "one")
    world.nights(good, world.commit(BAD, "two"))
    out = mlhpc("history", "bisect", "test_kernel", code=1).out
    (skipped,) = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert skipped.count("rev=") == 2
    assert skipped.endswith("both sides are the same: nothing that it runs comes from the checkout")
    assert world.left() == []


def test_a_hostile_subject_is_one_line(world, mlhpc):
    good = world.commit(GOOD, "start")
    bad = world.commit(BAD, "slower")
    world.checkout.git("commit", "-q", "--amend", "-m", "a\u2028b\x0bc\x1b[31m")
    bad = world.checkout.git("rev-parse", "HEAD")
    world.nights(good, bad)
    out = mlhpc("history", "bisect", "test_kernel", "--dry-run").out
    assert f"1 commit: {bad[:12]} to {bad[:12]}" in out
    assert "\x1b" not in out


# --- refused before anything runs


def refused_without_runs(world, mlhpc, *words, code=2):
    printed = mlhpc("history", "bisect", *words, code=code)
    assert (world.runs(), world.left()) == (0, [])
    return printed.err if code == 2 else printed.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["test_kernal"], "did you mean 'test_kernel'?"),
        (["test_kernel", "--metric", "speed"], "no metric 'speed'; --metric takes rate"),
        (["test_kernel", "--environment", "new"], "0 nights of it are watched, and a level change needs 6: 6 nights missing"),
        (["test_kernel", "--since", "1d"], "its level changed, but not for the worse since then"),
        (["test_kernel", "--try", "rev=main"], "--try rev=main: give the range of commits as --good and --bad"),
        (["test_kernel", "--try", "enviroment=a"], "did you mean environment=...?"),
        (["test_kernel", "--budget", "much"], "--budget 'much': write runs, such as '60 runs', or node-hours"),
        (["test_kernel", "--budget", "5nh"], "no node-hours are recorded of this series; write runs"),
        (["test_kernel", "--budget", "7 runs"], "2 comparisons of at least 4 runs are 8, and with the noise of its nights about 8"),
        (["test_kernel", "--good", "nothing"], "nothing: "),
        (["test_kernel", "--bad", "HEAD~1"], "run `git checkout "),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_with_what_would_do(slowed, mlhpc, words, why):
    world, _ = slowed
    assert why in refused_without_runs(world, mlhpc, *words)


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ([*quiet(5, GOOD), 0.0, 0.0, 0.0, 0.0, 0.0], "a level of 0 has no ratio to another"),
        ([100.0, 90.0, 90.0], "3 nights of it are watched, and a level change needs 6: 3 nights missing"),
        (quiet(10), "its level has not changed in 10 nights"),
        ([*quiet(5, BAD), *quiet(5, GOOD, 2)], "its level changed, but not for the worse"),
    ],
)
def test_a_history_without_a_loss_has_nothing_to_bisect(world, mlhpc, figures, why):
    commit = world.commit(GOOD, "start")
    world.nights(commit, commit, figures=figures)
    assert why in refused_without_runs(world, mlhpc, "test_kernel")


def test_several_series_with_a_loss_are_named(slowed, mlhpc):
    world, _ = slowed
    head = world.checkout.git("rev-parse", "HEAD")
    world.nights(head, head, environment="older")
    why = refused_without_runs(world, mlhpc, "test_kernel")
    assert "2 series became slower; choose one: --system local --environment default --metric rate" in why


def test_a_commit_that_git_no_longer_has_is_named_with_its_night(world, mlhpc):
    world.nights("ab" * 20, world.commit(BAD, "start"))
    why = refused_without_runs(world, mlhpc, "test_kernel")
    assert "the last good night, 20" in why
    assert "ran commit abababababab: " in why
    assert "has no such revision" in why


def test_a_shallow_clone_says_how_to_deepen_it(slowed, mlhpc, tmp_path, monkeypatch):
    world, _ = slowed
    world.checkout.git(
        "clone", "-q", "--depth", "1", f"file://{world.checkout.folder}", str(tmp_path / "shallow")
    )
    monkeypatch.chdir(tmp_path / "shallow")
    assert "the clone is shallow: run `git fetch --unshallow`" in refused_without_runs(
        world, mlhpc, "test_kernel"
    )


def test_a_checkout_with_changes_is_refused(slowed, mlhpc):
    world, _ = slowed
    world.checkout.write("kernel.py", "changed\n")
    err = mlhpc("history", "bisect", "test_kernel", code=2).err
    assert "has changes that are not committed, which no night had: commit or stash them" in err


def test_a_branch_that_was_rewritten_is_refused(world, mlhpc):
    world.commit(GOOD, "start")
    world.checkout.git("checkout", "-q", "-b", "other")
    good = world.commit(GOOD, "lost")
    world.checkout.git("checkout", "-q", "main")
    world.nights(good, world.commit(BAD, "new"))
    assert "the branch was rewritten since; or name one by --good" in refused_without_runs(
        world, mlhpc, "test_kernel"
    )


def test_nights_without_a_commit_leave_nothing_to_try(world, mlhpc):
    world.commit(BAD, "start")
    world.nights("", "", environments=[{"driver": "570"}] * 5 + [{"driver": "580"}])
    out = refused_without_runs(world, mlhpc, "test_kernel", code=1)
    assert "has no commit; --good REVISION names one" in out
    assert "cannot be set: driver 570 -> 580" in out
    assert "suspect the machine; or name a set-up" in out


def test_another_folder_is_no_checkout_of_the_suites(slowed, mlhpc, tmp_path, monkeypatch):
    world, _ = slowed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "run it in the checkout of the suites" in refused_without_runs(world, mlhpc, "test_kernel")
