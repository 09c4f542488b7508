"""Volumes measured by real ranks: what is reported, that the page cache is not what is measured, and every way to fail."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_ranks import plan, sabotaged
from rank_helpers import Batch, finish, start_rank
from zipped_batch import bodies, run_batch

from pytest_mlhpc.results import validate
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import storage
from pytest_mlhpc.worker.probes.files import Blocks, SmallFiles

KIB = 1024
RATES = {"write_bandwidth": "B/s", "read_bandwidth": "B/s", "create_rate": "items/s", "stat_rate": "items/s",
         "small_read_rate": "items/s", "unlink_rate": "items/s"}  # fmt: skip
SHORT = {"file_size": 256 * KIB, "block_size": 64 * KIB, "files": 20}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture
def mounted(volume: Path) -> Iterator[Path]:
    """Return a file system in memory with room for one MiB and 100 files."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=100", "tmpfs", volume], check=True, timeout=10
    )
    try:
        yield volume
    finally:
        subprocess.run(["umount", "--lazy", volume], check=True, timeout=10)


def short(path: Path | str, **changes):
    parameters = {**SHORT, "path": str(path), **changes.pop("parameters", {})}
    return plan("storage", parameters=parameters, **{"steps": 2, "warmup_steps": 1, **changes})


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_read_as_it_was_written(tmp_path, direct):
    blocks = Blocks(64 * KIB, 8 * KIB, direct=direct)
    blocks.write(tmp_path / "file", rank=3, repetition=7)
    assert (tmp_path / "file").stat().st_size == 64 * KIB
    blocks.read(tmp_path / "file", rank=3, repetition=7)


def damage_other_repetition(path: Path) -> None:
    path.unlink()
    Blocks(64 * KIB, 8 * KIB, direct=False).write(path, rank=3, repetition=6)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 60 * KIB), "block 7 of 8 is not what rank 3 wrote: 4096 bytes of 8192"),
        (lambda path: path.write_bytes(b"\0" * 64 * KIB), "block 0 of 8 is not what rank 3 wrote: 8192 bytes"),
        (damage_other_repetition, r"stamp \(3, 6, 0\) instead of \(3, 7, 0\)"),
    ],
    ids=["cut short", "zeros", "of another repetition"],
)  # fmt: skip
def test_a_block_that_is_not_what_was_written_is_found(tmp_path, damage, words):
    blocks = Blocks(64 * KIB, 8 * KIB, direct=False)
    blocks.write(tmp_path / "file", rank=3, repetition=7)
    damage(tmp_path / "file")
    with pytest.raises(WorkerFailure, match=rf"wrong_result: .*{words}"):
        blocks.read(tmp_path / "file", rank=3, repetition=7)


def test_a_file_is_never_written_over(tmp_path):
    blocks = Blocks(8 * KIB, 8 * KIB, direct=False)
    blocks.write(tmp_path / "file", rank=0, repetition=1)
    with pytest.raises(FileExistsError):
        blocks.write(tmp_path / "file", rank=0, repetition=2)


@pytest.mark.parametrize("size", [1, 20, 32, 3901])
def test_small_files_of_any_size_hold_what_they_should(tmp_path, size):
    small = SmallFiles(5, size)
    paths = small.paths(tmp_path)
    contents = [small.content(1, 2, number) for number in range(5)]
    small.create(paths, contents)
    assert small.stat(paths) == 5 * size
    assert small.read(paths) == contents
    assert all(len(content) == size for content in contents)
    small.unlink(paths)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.servers
def test_a_volume_is_measured_cold_and_left_as_it_was(ranks, volume):
    run = short(volume)
    measurement = ranks(run).measurement
    found = {metric.name: metric for metric in measurement.metrics}
    assert {name: found[name].unit for name in RATES} == RATES
    assert all(found[name].value > 0 and len(found[name].samples) == 2 for name in RATES)
    assert (measurement.cache, measurement.data_source) == ("cold", "none")
    assert measurement.environment["filesystem"]
    assert measurement.environment["files_read"] == "own"
    assert leftovers(volume) == []


@pytest.mark.servers
@pytest.mark.parametrize(("io", "cache"), [("direct", "cold"), ("buffered", "warm"), ("buffered", "unknown")])
def test_it_is_said_how_it_was_read(ranks, volume, io, cache):
    run = short(volume, parameters={"io": io}, cache=cache)
    assert ranks(run).measurement.cache == {"unknown": "cold"}.get(cache, cache)


@pytest.mark.servers
def test_two_ranks_measured_what_was_asked(ranks, declare_probe, volume):
    spec, run = declare_probe("storage", ranks=2, path=str(volume), **SHORT)
    measurement = ranks(run).measurement
    assert validate.check(measurement, spec, run) == []
    assert measurement.metric("write_bandwidth_of_slowest_rank").value > 0
    assert leftovers(volume) == []


@pytest.mark.servers
def test_ranks_of_several_nodes_read_each_others_files(ranks, volume):
    measurement = ranks(short(volume, ranks=2, nodes=2)).measurement
    assert measurement.environment["files_read"] == "of the next node"
    assert leftovers(volume) == []


@pytest.mark.servers
def test_nodes_that_share_no_disk_read_their_own_files(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / f"disk{rank}").mkdir()
    run = short(f"{tmp_path}/disk$LOCAL_RANK", ranks=2, nodes=2)
    assert ranks(run).measurement.environment["files_read"] == "own"
    assert [leftovers(tmp_path / f"disk{rank}") for rank in range(2)] == [[], []]


@pytest.mark.servers
def test_without_a_path_the_folder_of_the_run_is_measured(ranks, tmp_path):
    ranks(short("")).measurement  # noqa: B018 - asserts that all ranks reported
    assert leftovers(tmp_path / "data") == []


@pytest.mark.servers
@needs_root
def test_a_file_system_in_memory_is_never_cold_and_that_is_said(ranks, mounted):
    (text,) = ranks(short(mounted)).failures
    assert text.startswith("volume_unusable: ")
    assert "(tmpfs): files are warm in the page cache after they were told to be cold" in text
    assert "ask for cache='warm' or 'unknown'" in text
    assert leftovers(mounted) == []


@pytest.mark.servers
@needs_root
@pytest.mark.parametrize("cache", ["warm", "unknown"])
def test_a_file_system_in_memory_can_be_measured_as_what_it_is(ranks, mounted, cache):
    assert ranks(short(mounted, cache=cache)).measurement.cache == "warm"


@pytest.mark.servers
@needs_root
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"file_size": 4096 * KIB}, "GB free for this user, the run needs 0.00428 GB"),
        ({"files": 200, "file_size": 64 * KIB}, "more files, the run needs 204: remove files"),
    ],
    ids=["bytes", "files"],
)
def test_a_volume_without_room_is_not_touched(ranks, mounted, parameters, words):
    (text,) = ranks(short(mounted, cache="warm", parameters=parameters)).failures
    assert text.startswith("disk_full: ")
    assert words in text.replace("200 files", "files")
    assert leftovers(mounted) == []


FULL = """
import dataclasses
import os
real, os.statvfs = os.statvfs, lambda path: os.statvfs_result((4096, 4096) + (10**9,) * 6 + (0, 255))
"""


@pytest.mark.servers
@needs_root
@pytest.mark.parametrize("parameters", [{"file_size": 4096 * KIB}, {"files": 99}], ids=["bytes", "files"])
def test_a_volume_that_others_fill_meanwhile_is_cleaned_up(ranks, mounted, tmp_path, parameters):
    run = short(mounted, cache="warm", parameters=parameters)
    (text,) = ranks(run, **sabotaged(tmp_path, FULL)).failures
    assert text.startswith("disk_full: measuring in ")
    assert "No space left on device; free space, raise the quota or limit, or use smaller files" in text
    assert leftovers(mounted) == []


LIMITED = (
    f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({128 * KIB}, {resource.RLIM_INFINITY}))"
)


@pytest.mark.servers
def test_a_limit_on_the_size_of_files_is_named(ranks, volume, tmp_path):
    (text,) = ranks(short(volume), **sabotaged(tmp_path, LIMITED)).failures
    assert text.startswith("disk_full: ")
    assert "File too large" in text
    assert leftovers(volume) == []


@pytest.mark.servers
@needs_root
def test_a_read_only_volume_is_named(ranks, mounted):
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True, timeout=10)
    (text,) = ranks(short(mounted)).failures
    assert text.startswith("volume_unusable: making a folder in ")
    assert "it is mounted read-only: name a path that may be written to" in text


@pytest.mark.servers
def test_a_missing_volume_is_named_and_ends_all_ranks(ranks, tmp_path):
    failures = ranks(short(tmp_path / "nowhere", ranks=2)).failures
    assert len(failures) == 2
    assert all(
        "there is no such folder: make it, or mount the volume on this node" in text for text in failures
    )


ZEROS = """
import dataclasses
import os
real = os.readv
def lost(descriptor, buffers):
    got = real(descriptor, buffers)
    buffers[0][:8] = bytes(8)
    return got
os.readv = lost
"""


@pytest.mark.servers
def test_content_that_comes_back_otherwise_fails_the_run(ranks, volume, tmp_path):
    (text,) = ranks(short(volume), **sabotaged(tmp_path, ZEROS)).failures
    assert text.startswith("wrong_result: ")
    assert "/large: block 0 of 4 is not what rank 0 wrote" in text
    assert leftovers(volume) == []


SLOW = """
import os, time
real = os.fsync
def slow(descriptor):
    open(os.environ["MLHPC_PLAN"] + ".writing", "w").close()
    time.sleep(60)
os.fsync = slow
"""


def stopped(volume: Path, tmp_path: Path, number: int) -> list[tuple[int, str]]:
    """Return how a rank ended that got a signal while it wrote."""
    run = short(volume)
    with Batch(str(tmp_path / "channel")) as batch:
        process = start_rank(batch, run, tmp_path, **sabotaged(tmp_path, SLOW))
        while not (tmp_path / "plan.json.writing").exists():
            assert process.poll() is None
            os.sched_yield()
        assert leftovers(volume) == ["mlhpc-storage-run-1-0"]
        process.send_signal(number)
        return finish(process)


@pytest.mark.servers
def test_a_rank_that_is_told_to_end_removes_what_it_made(volume, tmp_path):
    ((code, _),) = stopped(volume, tmp_path, signal.SIGTERM)
    assert code == 1
    assert leftovers(volume) == []


@pytest.mark.servers
def test_what_a_killed_rank_leaves_the_next_run_removes(ranks, volume, tmp_path):
    ((code, _),) = stopped(volume, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert leftovers(volume) == ["mlhpc-storage-run-1-0"]
    (tmp_path / "sitecustomize.py").unlink()
    (tmp_path / "channel").unlink()
    run = short(volume, run_id="run-2")
    assert ranks(run).measurement.run_id == "run-2"
    assert leftovers(volume) == []


def test_what_was_just_written_is_warm_and_nothing_is_cold(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 64 * KIB)
    assert storage._state([file], "unknown") == "warm"
    file.write_bytes(b"")
    assert storage._state([file], "warm") == "cold"  # nothing of it is in memory


@pytest.mark.servers
@needs_root
def test_of_two_ranks_the_one_that_finds_the_disk_full_is_named_and_both_clean_up(
    mounted, tmp_path, monkeypatch
):
    run = short(mounted, cache="warm", ranks=2, launcher="torchrun", python=sys.executable,
                parameters={"file_size": 640 * KIB})  # fmt: skip
    extra = sabotaged(tmp_path, FULL)["PYTHONPATH"]
    run = dataclasses.replace(run, variables={"PYTHONPATH": extra})
    (failure,) = bodies(run_batch([sys.executable], tmp_path, run), run, "failed")
    assert failure["outcome"] == "disk_full"
    assert "No space left on device" in failure["text"]
    assert leftovers(mounted) == []
