"""How vetting's child is spoken to, and how it dies."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_driver import PATIENCE_S, ROOT, Child

from pytest_mlhpc.vet.child.main import prepare
from pytest_mlhpc.vet.child.protocol import ArgumentError, Arguments, parse


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as started:
        started.ready()
        yield started


def without_torch(folder: Path, says: str) -> dict[str, str]:
    """Return an environment whose torch does *says* when it is imported."""
    folder.mkdir()
    (folder / "torch.py").write_text(says)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.servers
def test_it_says_what_hangs_before_it_is_ready_and_then_what_it_has() -> None:
    with Child() as child:
        assert child.next() == {"id": 0, "begun": "importing torch"}
        assert child.next() == {"id": 0, "begun": "opening devices"}
        ready = child.ready()
        assert ready["kind"] == "cpu"
        assert ready["torch"]
        assert ready["threads"] == len(os.sched_getaffinity(0))
        assert ready["models"][0].endswith(f", {ready['threads']} cores")
        assert child.end() == 0


@pytest.mark.parametrize(
    "says",
    [
        "raise ImportError('libcudart.so.12: cannot open shared object file')",
        "raise OSError('libgomp.so.1: cannot open shared object file')",
        "__version__ = '0'",
    ],
)
def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path, says: str) -> None:
    with Child(environ=without_torch(tmp_path / "broken", says)) as child:
        answer = child.answer()
        assert answer["id"] == 0
        assert answer["why"] == "no_torch"
        assert answer["error"].startswith(f"torch cannot be imported or used by {sys.executable}: ")
        assert child.process.wait(PATIENCE_S) == 3


def test_the_end_of_its_input_ends_it_while_an_import_hangs(tmp_path: Path) -> None:
    with Child(environ=without_torch(tmp_path / "slow", "import time; time.sleep(600)")) as child:
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
def test_wrong_options_are_refused(options: list[str]) -> None:
    argv = [sys.executable, "-m", "pytest_mlhpc.vet.child.main", *options]
    ended = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 2
    assert b"usage:" in ended.stderr or b"descriptor 987 is not open" in ended.stderr


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
def test_the_end_of_its_input_ends_it_while_it_computes() -> None:
    with Child() as child:
        child.ready()
        child.order("gemm", seconds=600)
        assert child.next() == {"id": 1, "begun": "gemm fp32"}
        assert child.end() == 0
        assert child.next() is None


@pytest.mark.servers
def test_when_killed_nothing_is_left() -> None:
    with Child() as child:
        child.ready()
        child.order("all_reduce", seconds=600)
        message = child.next()
        assert message is not None
        assert "begun" in message
        child.process.send_signal(signal.SIGKILL)
        assert child.next() is None  # no descendant holds the descriptor open
        assert child.process.wait() == -signal.SIGKILL


@pytest.mark.servers
def test_short_memory_is_answered_and_the_next_order_carried_out() -> None:
    with Child() as child:
        child.ready()
        size = int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.prlimit(child.process.pid, resource.RLIMIT_AS)[1]
        resource.prlimit(child.process.pid, resource.RLIMIT_AS, (size + (1 << 20), hard))
        answer = child.ask("memory", seconds=0.1)
        assert answer["why"] in ("memory", "failed"), answer
        assert "error" in answer
        resource.prlimit(child.process.pid, resource.RLIMIT_AS, (hard, hard))
        assert len(child.outcome("memory", seconds=0.05).readings) == 1


@pytest.mark.servers
def test_a_wanted_accelerator_that_is_not_there_is_named() -> None:
    with Child("--accelerator", "cuda") as child:
        answer = child.answer()
        assert answer["why"] == "no_device"
        assert "finds no cuda device here" in answer["error"]
        assert child.process.wait(PATIENCE_S) == 3


@pytest.mark.servers
def test_settings_that_share_a_node_between_ranks_do_not_count() -> None:
    shares = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    with Child(environ=shares) as child:
        assert child.ready()["threads"] == len(os.sched_getaffinity(0))


def test_settings_of_other_arithmetic_do_not_reach_the_libraries() -> None:
    environ = {"NVIDIA_TF32_OVERRIDE": "1", "CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "ib0"}
    prepare(environ)
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
