"""Writing a checkpoint: what is measured, what is found, and that nothing is left."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from child_driver import PATIENCE_S, ROOT

from pytest_mlhpc.node.vet.finding import CheckOutcome, Origin, Severity
from pytest_mlhpc.node.vet.load import checkpoint
from pytest_mlhpc.node.vet.load.main import measured

SMALL = 16 << 20

#: Writes a checkpoint, and stops when it is to be synced.
STOPPING = """
import sys, os; from pytest_mlhpc.node.vet.load import checkpoint
def stop(descriptor):
    print('synced', flush=True)
    sys.stdin.read()
os.fsync = stop
checkpoint.write_and_read(sys.argv[1], 1)
"""


def run(**args: object) -> CheckOutcome:
    return measured("checkpoint", checkpoint.run, None, args, lambda what: None)


def trouble(folder: Path, **args: object) -> tuple[Severity, Origin, str]:
    """Return how bad what was found is, who has to mend it, and its reason; nothing is measured, and nothing left."""
    outcome = run(path=str(folder), **args)
    (finding,) = outcome.findings
    assert (outcome.readings, list(folder.glob("*"))) == ((), [])
    return finding.severity, finding.origin, finding.reason


def test_both_ways_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    outcome = run(path=str(tmp_path), size=SMALL, round=1)
    assert outcome.findings == ()
    keys = [(reading.key, reading.unit, reading.round) for reading in outcome.readings]
    assert keys == [(f"checkpoint/{way}/16MiB", "B/s", 1) for way in ("write", "read")]
    assert min(reading.value for reading in outcome.readings) > 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_nothing_is_measured_and_that_is_said() -> None:
    outcome = run()
    assert outcome.readings == ()
    assert [one.severity for one in outcome.findings] == [Severity.INFO]
    assert "not measured" in outcome.findings[0].reason


@pytest.mark.parametrize(
    ("folder", "size", "words"),
    [("none", SMALL, "no such folder on this node"), ("", 1 << 59, "No space left")],
    ids=["a missing folder", "too little room"],
)
def test_what_is_found_before_anything_is_written_is_the_users_to_mend(
    tmp_path: Path, folder: str, size: int, words: str
) -> None:
    *verdict, reason = trouble(tmp_path / folder, size=size)
    assert verdict == [Severity.CRITICAL, Origin.USER]
    assert words in reason


@pytest.mark.parametrize(
    ("number", "origin", "words"),
    [
        (errno.EDQUOT, Origin.USER, "your quota is used up"),
        (errno.EACCES, Origin.USER, "you may not write there"),
        (errno.EROFS, Origin.USER, "mounted read-only"),
        (errno.EIO, Origin.NODE, "look at the node's mounts"),
        (errno.ESTALE, Origin.NODE, "look at the node's mounts"),
    ],
)
def test_errors_say_whose_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, origin: Origin, words: str
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    *verdict, reason = trouble(tmp_path, size=SMALL)
    assert verdict == [Severity.CRITICAL, origin]
    assert words in reason


def test_content_that_changed_on_the_way_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.pread

    def flip(descriptor: int, count: int, offset: int) -> bytes:
        data = bytearray(honest(descriptor, count, offset))
        if offset == 0:
            data[12345] ^= 1
        return bytes(data)

    monkeypatch.setattr(os, "pread", flip)
    (finding,) = run(path=str(tmp_path), size=SMALL).findings
    verdict = (finding.rule, finding.severity, finding.origin)
    assert verdict == ("checkpoint.content", Severity.CRITICAL, Origin.NODE)


def test_a_file_system_that_wants_names_gets_one_and_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, seen = os.pwrite, []

    def stale(descriptor: int, data: bytes, offset: int) -> int:
        if not data or len(data) == 1:
            raise OSError(errno.ESTALE, "stale")
        seen.append(len(list(tmp_path.iterdir())))
        return honest(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", stale)
    assert len(run(path=str(tmp_path), size=SMALL).readings) == 2
    assert set(seen) == {1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.servers
def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STOPPING, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"synced\n"
        process.kill()
        process.wait(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []
