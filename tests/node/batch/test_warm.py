"""Ranks that a warm process forks: they find what a fresh interpreter finds, whatever ranks before them did, and end as others do."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from batches import finish, messages, start, write_plan
from nosy_runs import is_alive, nosy, pair
from pods import Pods, run_plan
from running_suites import LIMIT_S, wait_for

from pytest_mlhpc.node.batch import warm
from pytest_mlhpc.node.processes import descendants
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.worker.workloads.trainings import OWN_TRAININGS

pytestmark = pytest.mark.servers

HERE = str(Path(__file__).parent)
WORKER = str(Path(__file__).parents[1] / "worker")

#: Where a batch forks ranks: for the session that started it, in a pod, and in a job, whose lines go to files.
PLACES = ("local", "pod", "job")

#: Runs of one allocation, one after the other: what their rank does, and whether it may be forked.
RUNS = {
    "fresh": ((), False),
    "first": ((), True),
    "mess": (("mess",), True),
    "after mess": ((), True),
    "says": (("say",), True),
    "says fresh": (("say",), False),
    "dies": (("say", "die"), True),
    "dies fresh": (("say", "die"), False),
    "aborts": (("abort",), True),
    "aborts fresh": (("abort",), False),
    "leaves": (("leave",), True),
    "leaves fresh": (("leave",), False),
    "daemon": (("start_a_daemon",), True),
    "last": ((), True),
}

#: Runs of two ranks, by torchrun where they are not forked; which of their variables are torchrun's own.
PAIRS = {
    "pair": ((), True),
    "messy pair": (("mess",), True),
    "pair after mess": ((), True),
    "pair fresh": ((), False),
    "one of two dies": (("second_dies",), True),
    "one of two dies fresh": (("second_dies",), False),
}
TORCHRUN_S = ("TORCHELASTIC_", "ROLE_", "GROUP_WORLD_SIZE", "PET_", "KINETO_")


@dataclass(frozen=True)
class Done:
    """What came of an allocation whose runs have ended."""

    folder: Path
    messages: Sequence[Message]
    errors: str

    def facts(self, run: str, rank: str = "") -> dict:
        """What a rank of *run* found, but for what is drawn by chance."""
        facts = json.loads((self.folder / run / f"facts{rank}.json").read_text())
        return {name: fact for name, fact in facts.items() if name not in ("drawn", "warm")}

    def fact(self, run: str, name: str, rank: str = ""):
        return json.loads((self.folder / run / f"facts{rank}.json").read_text())[name]

    def body(self, run: str, kind: str) -> dict:
        (body,) = [one.body for one in self.messages if (one.run_id, one.kind) == (run, kind)]
        return body

    def end(self, run: str) -> list[int]:
        return self.body(run, "end")["exit"]

    def failure(self, run: str) -> tuple[str, str]:
        body = self.body(run, "failed")
        return body["outcome"], body["text"]

    def log(self, run: str) -> str:
        return (self.folder / run / "rank0.log").read_text()


def do_all(folder: Path, *runs, place: str = "local") -> Done:
    """Do *runs* in one allocation at *place*."""
    names = [run.run_id for run in runs]
    if place == "pod":
        group = Pods(folder, *runs)
        try:
            group.start()
            assert group.ends() == {0: 0}, group.errors()
        finally:
            group.close()
        return Done(group.work(0), group.messages(), group.errors())
    (folder / "lines").mkdir()
    code, output, errors = finish(start(folder, *runs, lines="lines" if place == "job" else ""))
    assert code == 0, errors
    output = (folder / "lines/alloc.jsonl").read_bytes() if place == "job" else output
    return Done(folder, messages(output, *names), errors)


@pytest.fixture(scope="module", params=PLACES)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """An allocation with all of RUNS."""
    folder = tmp_path_factory.mktemp("warm")
    runs = [nosy(name, acts, may=may) for name, (acts, may) in RUNS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLHPC_TEST", str(folder))
        yield do_all(folder, *runs, place=request.param)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """An allocation with all of PAIRS, and a training of two ranks."""
    variables = {"MLHPC_WORKLOAD_MODULE": "tiny_workload", "PYTHONPATH": WORKER}
    trained = run_plan(
        "training", workload="tiny", parameters={"global_batch": 8}, launcher="torchrun", ranks=2, steps=2, warm=True,
        variables=variables, secret="s" * 32,
    )  # fmt: skip
    runs = [pair(name, acts, may=may) for name, (acts, may) in PAIRS.items()]
    return do_all(tmp_path_factory.mktemp("pairs"), *runs, trained)


def test_the_modules_of_all_our_trainings_are_imported_before_a_rank_is_forked():
    assert {workload.module for workload in OWN_TRAININGS} <= {*warm.IMPORTED}


def test_a_forked_rank_finds_what_a_fresh_interpreter_finds(done):
    assert done.facts("first") == done.facts("fresh")
    assert (done.fact("fresh", "warm"), bool(done.fact("first", "warm"))) == (None, True)


def test_nothing_that_a_rank_changed_reaches_the_next_one(done):
    assert done.facts("after mess") == done.facts("first")
    assert done.fact("after mess", "warm") == done.fact("first", "warm")


def test_the_same_process_forks_all_ranks_whatever_became_of_those_before(done):
    forked = [done.fact(run, "warm") for run, (_, may) in RUNS.items() if may]
    assert set(forked) == {done.fact("first", "warm")}
    assert done.facts("last") == done.facts("first")


def test_no_two_ranks_draw_the_same_numbers(done):
    drawn = [number for run in RUNS for number in done.fact(run, "drawn")]
    assert len(set(drawn)) == len(drawn)


def test_cuda_is_not_initialised_before_the_fork(done):
    assert not done.fact("first", "cuda")


@pytest.mark.parametrize("run", ["dies", "aborts", "leaves"])
def test_a_forked_rank_ends_as_a_fresh_one(done, run):
    assert done.end(run) == done.end(f"{run} fresh")


@pytest.mark.parametrize("run", ["says", "dies", "aborts", "leaves"])
def test_a_run_of_a_forked_rank_fails_as_that_of_a_fresh_one(done, run):
    """One that tells of its failure is ended by its batch, or ends before: its end says nothing."""
    assert done.failure(run)[0] == done.failure(f"{run} fresh")[0]


def test_exit_codes_and_signals_are_those_of_the_rank(done):
    assert [done.end(run) for run in ("dies", "aborts", "leaves")] == [[-9], [-6], [3]]


def test_output_is_the_rank_s_own(done):
    assert done.log("dies") == done.log("dies fresh") == "on standard output\non standard error\n"


def test_nothing_is_left_of_an_allocation(done):
    assert not is_alive(done.fact("first", "warm"))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_of_several_forked_ranks_finds_what_one_of_torchrun_finds(pairs, rank):
    """Torchrun's ranks obey Ctrl-C, which the batch's ignore; where they are forked, rank 0 has the store that torchrun has else."""
    apart = {"variables", "signals", "handlers", *(["files"] if rank == "0" else [])}
    forked, fresh = (
        {name: fact for name, fact in pairs.facts(run, rank).items() if name not in apart}
        for run in ("pair", "pair fresh")
    )
    assert forked == fresh


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_forked_ranks_have_the_variables_of_their_places_and_none_of_torchrun_s_agent(pairs, rank):
    forked, fresh = (pairs.fact(run, "variables", rank) for run in ("pair", "pair fresh"))
    assert (forked["RANK"], forked["LOCAL_RANK"], forked["WORLD_SIZE"]) == (rank, rank, "2")
    assert forked == {name: text for name, text in fresh.items() if not name.startswith(TORCHRUN_S)}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_nothing_that_several_ranks_changed_reaches_the_next_ones(pairs, rank):
    assert pairs.facts("pair after mess", rank) == pairs.facts("pair", rank)
    assert pairs.fact("pair after mess", "warm", rank) == pairs.fact("pair", "warm", rank)


def test_no_two_forked_ranks_of_a_run_draw_the_same_numbers(pairs):
    drawn = [number for rank in "01" for number in pairs.fact("pair", "drawn", rank)]
    assert len(set(drawn)) == len(drawn)


def test_a_forked_rank_of_several_that_is_killed_is_named(pairs):
    text = "rank 1 was killed by SIGKILL (the kernel does that when memory runs out)"
    for run in ("one of two dies", "one of two dies fresh"):
        outcome, said = pairs.failure(run)
        assert (outcome, said[: len(text)]) == ("worker_killed", text)
        assert pairs.end(run)[1] == -9


def test_several_forked_ranks_train_together(pairs):
    measured = pairs.body("training", "measurement")
    assert (measured["ranks"], measured["environment"]["interpreter"]) == (2, "warm")
    assert pairs.end("training") == [0, 0]


class Batch:
    """A batch that takes further plans."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = None
        self._number = 0

    def give(self, run) -> Path:
        """Let it do a plan with *run*; return the folder of the run."""
        self._number += 1
        folder = self.folder / f"plan{self._number}"
        folder.mkdir(mode=0o700)
        if self.process is None:
            self.process = start(folder, run, more=True)
        else:
            path = write_plan(folder, run)
            self.process.stdin.write(os.fsencode(path) + b"\n")
            self.process.stdin.flush()
        return folder / run.run_id

    def finish(self, run) -> Path:
        """Let it do a plan with *run* to its end, before which no other may come; return the folder of the run."""
        folder = self.give(run)
        output = b""
        while not any(one.kind == "end" for one in messages(output, run.run_id)):
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, self.process.stderr.read()
            output += data
        return folder

    def do(self, run) -> dict:
        """Let it do a plan with *run* to its end; return what the rank found."""
        return json.loads((self.finish(run) / "facts.json").read_text())


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    """Make a batch that ends with the test."""
    made = Batch(tmp_path)
    yield made
    if made.process is not None:
        with made.process as process:
            process.kill()


def test_the_runs_of_a_further_plan_are_forked_by_the_same_process_in_their_own_folder(batch):
    first, second = batch.do(nosy("one", ("mess",))), batch.do(nosy("two"))
    assert first["warm"] == second["warm"]
    assert second["folder"]
    assert second["path"]


def test_a_batch_ends_when_no_further_plan_can_come(batch):
    pid = batch.do(nosy("one"))["warm"]
    batch.process.stdin.close()
    assert batch.process.wait(LIMIT_S) == 0
    wait_for(lambda: not is_alive(pid))


def test_a_warm_process_that_died_is_made_again(batch):
    first = batch.do(nosy("one"))["warm"]
    os.kill(int(first), signal.SIGKILL)
    wait_for(lambda: not is_alive(first))
    second, third = batch.do(nosy("two"))["warm"], batch.do(nosy("three"))["warm"]
    assert first not in (second, third)
    assert third is not None


def test_a_rank_outlives_the_warm_process_that_forked_it(batch):
    first = batch.do(nosy("one"))["warm"]
    folder = batch.give(nosy("two", ("stay",)))
    wait_for((folder / "staying").exists)
    rank = int((folder / "staying").read_text() or 0)
    os.kill(int(first), signal.SIGKILL)
    wait_for(lambda: not is_alive(first))
    assert is_alive(rank)


@pytest.mark.parametrize("act", ["stay", ""], ids=["while a rank runs", "between two runs"])
def test_no_process_outlives_a_batch_that_is_killed(batch, act):
    batch.do(nosy("one"))
    if act:
        folder = batch.give(nosy("two", (act,)))
        wait_for((folder / "staying").exists)
    below = descendants(batch.process.pid)
    batch.process.kill()
    wait_for(lambda: not [pid for pid in below if is_alive(pid)])
    assert below


def test_another_environment_has_a_process_of_its_own(batch):
    one = batch.do(nosy("one"))
    other = batch.do(nosy("two", GOMP_SPINCOUNT="77"))
    assert one["warm"] != other["warm"]
    assert other["variables"]["GOMP_SPINCOUNT"] == "77"


def test_an_interpreter_whose_imports_start_threads_forks_no_rank(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (site / "sitecustomize.py").write_text(code)
    run = nosy("one", PYTHONPATH=f"{HERE}{os.pathsep}{site}")
    found = do_all(tmp_path, run)
    assert found.fact("one", "warm") is None
    assert "ranks of this environment are not forked: its imports started 1 threads" in found.errors


@pytest.mark.parametrize(
    ("threads", "files", "initialised", "reason"),
    [
        (1, {3: "/dev/null"}, False, ""),
        (3, {}, False, "its imports started 2 threads, which a child of a fork does not have"),
        (1, {}, True, "its imports initialised CUDA, which a child of a fork cannot use"),
        (1, {4: "/dev/nvidiactl"}, False, "its imports opened /dev/nvidiactl, which a child of a fork cannot use"),
        (1, {4: "/dev/kfd"}, False, "its imports opened /dev/kfd, which a child of a fork cannot use"),
    ],
)  # fmt: skip
def test_a_process_that_a_fork_would_break_forks_none(threads, files, initialised, reason):
    assert warm.why_not(threads, files, initialised=initialised) == reason


def test_a_further_plan_that_is_missing_ends_the_batch_and_its_log_says_why(batch):
    batch.finish(run_plan("one"))  # a program: torch is imported by ranks alone
    folder = batch.folder / "gone"
    folder.mkdir(mode=0o700)
    batch.process.stdin.write(os.fsencode(folder / "plan.json") + b"\n")
    batch.process.stdin.flush()
    assert batch.process.wait(LIMIT_S) == 2
    assert "cannot be used" in (folder / "batch.log").read_text()


def test_a_further_plan_in_a_folder_that_is_gone_ends_the_batch(batch):
    batch.finish(run_plan("one"))  # a program: torch is imported by ranks alone
    batch.process.stdin.write(os.fsencode(batch.folder / "gone" / "plan.json") + b"\n")
    batch.process.stdin.flush()
    assert batch.process.wait(LIMIT_S) == 74
