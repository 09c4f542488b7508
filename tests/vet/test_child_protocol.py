"""How vetting's child is spoken to, and how it dies."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from child_driver import PATIENCE_S, ROOT, Child

from pytest_mlhpc.vet.child import main
from pytest_mlhpc.vet.child.protocol import Answers, ArgumentError, Arguments, parse
from pytest_mlhpc.vet.finding import Outcome
from pytest_mlhpc.vet.load import CHILD, Load, works
from pytest_mlhpc.vet.settings import Settings


def without_torch(folder: Path, program: str) -> dict[str, str]:
    """Return an environment whose torch does *program* when it is imported."""
    (folder / "torch.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


@dataclass
class Life:
    """All that one child said, from its start to the end of its input while it computed."""

    begun: list[Any]
    ready: dict[str, Any]
    hashed: Outcome
    last: list[Any]
    code: int


@pytest.fixture(scope="module")
def life() -> Life:
    shares = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "7", "OMP_THREAD_LIMIT": "1"}
    with Child(environ=shares) as child:
        begun = [child.next(), child.next()]
        ready = child.ready()
        hashed = child.outcome("hash", seconds=0.01)
        child.order("gemm", seconds=600)
        last = [child.next()]
        code = child.end()
        return Life(begun, ready, hashed, [*last, child.next()], code)


@pytest.mark.servers
def test_it_says_what_hangs_before_it_is_ready_and_then_what_it_has(life: Life) -> None:
    assert life.begun == [{"id": 0, "begun": "importing torch"}, {"id": 0, "begun": "opening devices"}]
    assert life.ready["kind"] == "cpu"
    assert life.ready["torch"]
    assert life.ready["models"][0].endswith(f", {life.ready['threads']} cores")


@pytest.mark.servers
def test_settings_that_share_a_node_between_ranks_do_not_count(life: Life) -> None:
    assert life.ready["threads"] == len(os.sched_getaffinity(0))


@pytest.mark.servers
def test_the_end_of_its_input_ends_it_while_it_computes(life: Life) -> None:
    assert life.last == [{"id": 2, "begun": "gemm fp32"}, None]
    assert life.code == 0


@pytest.mark.servers
def test_settings_and_cores_do_not_change_what_is_voted_on(life: Life, child: Child, other: Child) -> None:
    values = set()
    for outcome in (life.hashed, *(one.outcome("hash", seconds=0.01) for one in (child, child, other))):
        assert outcome.findings == ()
        (fact,) = outcome.facts
        assert fact.severity.value == "CRITICAL"
        assert f"torch {life.ready['torch']}" in fact.name
        values.add((fact.name, fact.scope, fact.value))
    assert len(values) == 1


@pytest.mark.servers
def test_the_engine_starts_it_and_has_it_carry_out_all_that_a_quick_vetting_orders() -> None:
    told: list[Any] = []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    load = Load(Settings(), CHILD, environ=environ, say=told.append, loaded=lambda on: None)
    load.start()

    def until(kind: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not told or told[-1]["kind"] != kind:
            assert time.monotonic() < deadline, told
            assert load.held is not None, told
            select.select([load.held.leash.answers, load.held.leash.words], [], [], 1.0)
            load.tend()
        return told.pop()

    try:
        assert until("ready")["ready"]["kind"] == "cpu"
        for number, work in enumerate(works(Settings())[0], 1):
            load.do(number, work.name, {"round": 0, "nodes": 3, "seconds": 0.01}, PATIENCE_S)
            assert until("answer")["id"] == number
    finally:
        assert load.held is not None
        assert load.held.let_go() == ""


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
        assert answer["id"] == 0
        assert answer["why"] == "no_torch"
        assert answer["error"].startswith(f"torch cannot be imported or used by {sys.executable}: ")
        assert child.process.wait(PATIENCE_S) == 3


def test_the_end_of_its_input_ends_it_while_an_import_hangs(tmp_path: Path) -> None:
    with Child(environ=without_torch(tmp_path, "import time; time.sleep(600)")) as child:
        assert child.next() == {"id": 0, "begun": "importing torch"}
        assert child.end() == 0


def test_it_ends_when_nobody_reads_its_answers() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "pytest_mlhpc.vet.child.main", "--answers", str(writing)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writing], cwd=ROOT
    ) as process:
        os.close(writing)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
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
        (b'{"id": 7, "do": "pair", "args": {"timeout_s": NaN}}\n', "pair: timeout_s is nan, not a number"),
        (b"[" * 100_000 + b"\n", "is no JSON"),
        (b"x" * 3_000_000 + b"\n", "a line has more than 1048576 bytes"),
    ],
)
def test_garbage_is_answered_and_the_next_order_carried_out(child: Child, line: bytes, words: str) -> None:
    child.write(line)
    answer = child.answer()
    assert words in answer["error"]
    assert answer["why"] == "usage"
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
    assert answer["why"] in ("memory", "failed"), answer
    assert "error" in answer
    assert len(other.outcome("memory", seconds=0.01).readings) == 1


def test_settings_of_other_arithmetic_do_not_reach_the_libraries() -> None:
    environ = {"NVIDIA_TF32_OVERRIDE": "1", "CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    main.prepare(environ)
    os.close(int(environ["NCCL_DEBUG_FILE"].rpartition("/")[2]))
    assert "NVIDIA_TF32_OVERRIDE" not in environ
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["NCCL_SOCKET_IFNAME"]) == ("1", "ib0")


def test_orders_are_parsed_with_their_arguments() -> None:
    order = parse(json.dumps({"id": 3, "do": "gemm", "args": {"round": 1}}).encode())
    assert (order.id, order.do, order.args, order.problem) == (3, "gemm", {"round": 1}, "")


def test_arguments_are_bounded() -> None:
    arguments = Arguments({"level": "deep", "port": 70000, "path": "a\nb", "first": 1, "round": 1})
    assert arguments.seconds(1.0, 60.0) == 60.0
    with pytest.raises(ArgumentError, match="port is 70000, not a whole number from 1 to 65535"):
        arguments.whole("port", None, 1, 65535)
    with pytest.raises(ArgumentError, match="not a text"):
        arguments.text("path", "")
    with pytest.raises(ArgumentError, match="first is 1, not true or false"):
        arguments.flag("first")
    with pytest.raises(ArgumentError, match="address is None, not a text"):
        arguments.text("address", None)
