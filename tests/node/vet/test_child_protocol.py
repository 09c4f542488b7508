"""How vetting's child is spoken to, and how it dies."""

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child_driver import PATIENCE_S, ROOT, Child

from pytest_mlhpc.node.child_process import Answers
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.load import main
from pytest_mlhpc.node.vet.load.arguments import ArgumentError, Arguments
from pytest_mlhpc.node.vet.workers import CHILD, LoadRunner, works


def without_torch(folder: Path, program: str) -> dict[str, str]:
    """Return an environment whose torch does *program* when it is imported."""
    (folder / "torch.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


#: Settings of a rank that shares its node with others.
SHARED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "7", "OMP_THREAD_LIMIT": "1"}


@pytest.mark.servers
def test_it_says_what_hangs_before_it_is_ready_and_then_that_it_has_all_cores_whatever_is_set() -> None:
    with Child(environ=SHARED) as child:
        assert child.next() == {"id": 0, "begun": "importing torch"}
        assert child.next() == {"id": 0, "begun": "opening devices"}
        ready = child.ready()
    cores = len(os.sched_getaffinity(0))
    assert (ready["kind"], ready["threads"], bool(ready["torch"])) == ("cpu", cores, True)
    assert ready["models"][0].endswith(f", {cores} cores")


@pytest.mark.servers
def test_the_end_of_its_input_ends_it_while_it_computes() -> None:
    with Child() as child:
        child.ready()
        child.order("gemm", seconds=600)
        assert child.next() == {"id": 1, "begun": "gemm fp32"}
        assert (child.end(), child.next()) == (0, None)


@pytest.mark.servers
def test_settings_and_cores_do_not_change_what_is_voted_on(child: Child, other: Child) -> None:
    with Child(environ=SHARED) as shared:
        torch = shared.ready()["torch"]
        outcomes = [one.outcome("hash", seconds=0.01) for one in (shared, child, child, other)]
    assert [outcome.findings for outcome in outcomes] == [()] * 4
    ((fact,),) = {outcome.facts for outcome in outcomes}
    assert fact.severity is Severity.CRITICAL
    assert f"torch {torch}" in fact.name


@pytest.mark.servers
def test_the_engine_starts_it_and_has_it_carry_out_all_that_a_quick_vetting_orders() -> None:
    reported: list[Any] = []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    load = LoadRunner(VetSettings(), CHILD, environ=environ, say=reported.append, loaded=lambda on: None)
    load.start()

    def until(kind: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not reported or reported[-1]["kind"] != kind:
            assert time.monotonic() < deadline, reported
            assert load.child is not None, reported
            select.select([load.child.answers, load.child.printed], [], [], 1.0)
            load.tend()
        return reported.pop()

    try:
        assert until("ready")["ready"]["kind"] == "cpu"
        for number, work in enumerate(works(VetSettings())[0], 1):
            load.do(number, work.name, {"round": 0, "nodes": 3, "seconds": 0.01}, PATIENCE_S)
            assert until("answer")["id"] == number
    finally:
        assert load.child is not None
        assert load.child.end() == ""


@pytest.mark.parametrize(
    "program",
    [
        "raise ImportError('libcudart.so.12: cannot open shared object file')",
        "raise OSError('libgomp.so.1: cannot open shared object file')",
        "__version__ = '0'",
    ],
)
def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path, program: str) -> None:
    with Child(environ=without_torch(tmp_path, program)) as child:
        answer = child.answer()
        assert (answer["id"], answer["why"], child.process.wait(PATIENCE_S)) == (0, "no_torch", 3)
    assert answer["error"].startswith("torch cannot be used (")
    assert answer["error"].endswith(
        f") by {sys.executable}; install it there, or vet without load: --no-load"
    )


def test_the_end_of_its_input_ends_it_while_an_import_hangs(tmp_path: Path) -> None:
    with Child(environ=without_torch(tmp_path, "import time; time.sleep(600)")) as child:
        assert child.next() == {"id": 0, "begun": "importing torch"}
        assert child.end() == 0


def test_it_ends_when_nobody_reads_its_answers() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "pytest_mlhpc.node.vet.load.main", "--answers", str(writing)]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": [writing]}
    with subprocess.Popen(argv, cwd=ROOT, **pipes) as process:
        os.close(writing)
        assert process.wait(PATIENCE_S) == 1
        assert b"its answers cannot be written" in process.stderr.read()


@pytest.mark.parametrize(
    "options",
    [[], ["--answers"], ["--answers", "x"], ["--answers", "1", "--other", "2"], ["--answers", "987"]],
)
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(options) == 2
    error = capsys.readouterr().err
    assert "usage:" in error or "descriptor 987 is not open" in error


def test_an_accelerator_that_is_asked_for_and_not_there_is_named() -> None:
    reading, writing = os.pipe()
    assert main._open(Answers(writing), "cuda") is None
    os.close(writing)
    with open(reading) as answers:  # noqa: PTH123 - a descriptor
        answer = json.loads(answers.readlines()[-1])
    assert answer["why"] == "no_device"
    assert "finds no cuda device here" in answer["error"]


@pytest.mark.servers
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"hello\n", "is no JSON"),
        (b"\xff\xfe\x00\n", "is no JSON"),
        (b"[1, 2]\n", "is no JSON object"),
        (b'{"id": 7, "do": 1}\n', "do is 1, not a text"),
        (b'{"id": 7, "do": "gemm", "args": 3}\n', "args is 3, not an object"),
        (b'{"id": 7, "do": "rm -rf"}\n', "do is 'rm -rf', not one of gemm, memory"),
        (b'{"id": 7, "do": "gemm", "args": {"level": "fast"}}\n', "gemm: level is 'fast', not quick or deep"),
        (
            b'{"id": 7, "do": "gemm", "args": {"seconds": -1}}\n',
            "gemm: seconds is -1, not a number from 0.01 to 3600",
        ),
        (b'{"id": 7, "do": "pair", "args": {"timeout_s": NaN}}\n', "NaN is no number of JSON"),
        (b"[" * 100_000 + b"\n", "is no JSON"),
        (b"x" * 3_000_000 + b"\n", "a line has more than 1048576 bytes"),
    ],
)
def test_garbage_is_answered_and_the_next_order_carried_out(child: Child, line: bytes, words: str) -> None:
    child.write(line)
    answer = child.answer()
    assert (answer["why"], words in answer["error"]) == ("usage", True), answer
    assert child.outcome("host_copy").readings == ()


@pytest.mark.servers
def test_short_memory_is_answered_and_the_next_order_carried_out(other: Child) -> None:
    pid = other.process.pid
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
    resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), hard))
    try:
        answer = other.ask("memory", seconds=0.1)
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
    assert answer.get("why") in ("memory", "failed"), answer
    assert len(other.outcome("memory", seconds=0.01).readings) == 1


def test_settings_of_other_arithmetic_do_not_reach_the_libraries() -> None:
    environ = {"NVIDIA_TF32_OVERRIDE": "1", "CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    main.prepare(environ)
    os.close(int(environ["NCCL_DEBUG_FILE"].rpartition("/")[2]))
    assert "NVIDIA_TF32_OVERRIDE" not in environ
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["NCCL_SOCKET_IFNAME"]) == ("1", "ib0")


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (
            lambda given: given.whole("port", None, 1, 65535),
            "port is 70000, not a whole number from 1 to 65535",
        ),
        (lambda given: given.text("path", ""), "not a text"),
        (lambda given: given.flag("first"), "first is 1, not true or false"),
        (lambda given: given.text("address", None), "address is None, not a text"),
    ],
)
def test_arguments_are_bounded(read: Callable[[Arguments], object], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        read(Arguments({"port": 70000, "path": "a\nb", "first": 1}))


def test_a_deep_vetting_takes_its_time() -> None:
    assert Arguments({"level": "deep"}).seconds(1.0, 60.0) == 60.0
