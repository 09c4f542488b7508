"""Measuring a folder takes no more than it may, and leaves nothing there, whatever happens."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from corpus import named
from full_disk import Limited

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.checks import storage
from pytest_mlhpc.node.vet.checks.storage import (
    PIECE,
    PREFIX,
    STALE_S,
    Measured,
    _files,
    _size,
    file_system,
    measure,
)
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Room
from pytest_mlhpc.node.vet.passive import chosen
from pytest_mlhpc.node.vet.policy import ExpectedNode, built_in

#: Measures a folder, and stops when the file is written.
STOPPING = """
import sys, pathlib, pytest_mlhpc.node.vet.checks.storage as storage
def stop(fd):
    print('written', flush=True)
    sys.stdin.read()
storage._forget = stop
storage.measure(pathlib.Path(sys.argv[1]), 4 * storage.PIECE, 10)
"""


def context(folder: Path) -> Context:
    return Context(built_in(), ExpectedNode(paths={"storage": str(folder)}))


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("here")
    measured = measure(tmp_path, 2 * PIECE, 10)
    assert measured.size == 2 * PIECE
    assert min(measured.write, measured.read, measured.create, measured.stat) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nothing_is_measured_where_there_is_no_room(tmp_path: Path) -> None:
    measured = measure(tmp_path, PIECE - 1, 0)
    assert (measured.write, measured.read, measured.create, measured.size) == (None, None, None, 0)


def test_a_disk_that_is_full_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with Limited().full(PIECE + 1):
        outcome = named("storage").examine(Machine(environ={}), context(tmp_path))
    (finding,) = outcome.findings
    assert (finding.severity, finding.rule, outcome.readings) == (Severity.CRITICAL, "storage.failed", ())
    assert "File too large" in finding.reason
    assert not list(tmp_path.iterdir())


@pytest.mark.servers
def test_a_killed_measurement_keeps_no_room_and_the_next_removes_its_folder(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STOPPING, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    (left,) = tmp_path.iterdir()
    assert not list(left.iterdir()), "the file has no name, so its room is free again"
    measure(tmp_path, 0, 1)
    assert left.exists(), "it may be another's that still runs"
    old = left.stat().st_mtime - STALE_S - 1
    os.utime(left, (old, old))
    measure(tmp_path, 0, 1)
    assert not left.exists()


def test_what_is_old_but_not_ours_is_left(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to("other")
    for name in ("other", f"{PREFIX}link"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    measure(tmp_path, 0, 1)
    assert (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("free", "kind", "memory", "size"),
    [
        (1 << 40, "ext4", "MemAvailable: 1 kB", 256 << 20),
        (1 << 28, "ext4", "MemAvailable: 1 kB", 1 << 26),
        (0, "ext4", "MemAvailable: 1 kB", 0),
        (1 << 40, "tmpfs", "MemAvailable: 131072 kB", 16 << 20),
        (1 << 20, "tmpfs", "MemAvailable: 131072 kB", 1 << 18),
        (1 << 40, "tmpfs", "MemAvailable: lots", 0),
        (1 << 40, "tmpfs", "", 0),
    ],
)
def test_no_more_is_written_than_a_quarter_of_room_and_an_eighth_of_memory(
    tmp_path: Path, free: int, kind: str, memory: str, size: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(memory)
    assert _size(Machine(root=tmp_path), Room(free, None), kind) == size


@pytest.mark.parametrize(("room", "files"), [(None, 100), (10_000, 100), (200, 100), (199, 0), (0, 0)])
def test_no_files_are_made_where_few_can_be(room: int | None, files: int) -> None:
    assert _files(Room(1, room)) == files


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/tmp/x", "tmpfs"), ("/tmp", "tmpfs"), ("/tmpfoo", "ext4"), ("/", "ext4"), ("/scratch/a/b", "lustre")],
)
def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path, folder: str, kind: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nmgs:/s /scratch lustre rw 0 0\nbroken\n"
    (tmp_path / "proc/self/mounts").write_text(mounts)
    assert file_system(Machine(root=tmp_path), folder) == kind


def test_a_relative_folder_for_temporary_files_is_not_taken_for_one_at_the_root() -> None:
    outcome = named("storage").examine(Machine(environ={"TMPDIR": "made-up"}), Context(built_in()))
    assert {one.severity for one in outcome.findings} <= {Severity.PASS, Severity.WARNING}
    assert "/tmp" in outcome.findings[-1].reason


def test_each_rate_that_was_measured_is_a_figure_with_its_floor(tmp_path: Path) -> None:
    with patch.object(storage, "measure", return_value=Measured(1e9, 2e9, None, 40.0, 5)):
        outcome = named("storage").examine(Machine(environ={}), context(tmp_path))
    assert [(one.key, one.value, one.unit, one.floor) for one in outcome.readings] == [
        ("storage/write", 1e9, "B/s", "storage/write"),
        ("storage/read", 2e9, "B/s", "storage/read"),
        ("storage/stat", 40.0, "1/s", "storage/stat"),
    ]


@pytest.mark.parametrize(("no_load", "measured"), [(False, True), (True, False)])
def test_storage_is_not_measured_where_nothing_may_load_the_node(no_load: bool, measured: bool) -> None:
    run, _ = chosen([named("storage")], VetSettings(no_load=no_load))
    assert bool(run) is measured
