"""Volumes measured by real ranks: what is reported, that the page cache is not what is measured, and every way to fail."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_ranks import plan, run_ranks, sabotaged
from rank_helpers import Batch, prepare_rank
from zipped_batch import bodies, run_batch

from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import storage
from pytest_mlhpc.node.worker.probes.volume import Blocks, SmallFiles
from pytest_mlhpc.session import check_measurement

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
def in_memory(volume: Path) -> Iterator[Path]:
    """Return a file system in memory with room for one MiB and 100 files."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=100", "tmpfs", volume], check=True)
    try:
        yield volume
    finally:
        subprocess.run(["umount", "--lazy", volume], check=True)


def short(path: Path | str, parameters=(), **changes):
    fields = {**SHORT, "path": str(path), **dict(parameters)}
    return plan("storage", parameters=fields, **{"steps": 2, "warmup_steps": 1, **changes})


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def blocks(tmp_path):
    """Return files of eight blocks, of which rank 3 has written one in its seventh repetition."""
    made = Blocks(64 * KIB, 8 * KIB, direct=False)
    made.write(tmp_path / "file", rank=3, repetition=7)
    return made


def test_a_file_is_read_as_it_was_written(tmp_path, blocks):
    direct = Blocks(64 * KIB, 8 * KIB, direct=True)
    direct.write(tmp_path / "direct", rank=3, repetition=7)
    for made, name in ((blocks, "file"), (direct, "direct")):
        assert (tmp_path / name).stat().st_size == 64 * KIB
        made.read(tmp_path / name, rank=3, repetition=7)


def write_other_repetition(path: Path) -> None:
    path.unlink()
    Blocks(64 * KIB, 8 * KIB, direct=False).write(path, rank=3, repetition=6)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: os.truncate(path, 60 * KIB), "block 7 of 8 is not what rank 3 wrote: 4096 bytes of 8192"),
        (lambda path: path.write_bytes(b"\0" * 64 * KIB), "block 0 of 8 is not what rank 3 wrote: 8192 bytes"),
        (write_other_repetition, r"stamp \(3, 6, 0\) instead of \(3, 7, 0\)"),
    ],
    ids=["cut short", "zeros", "of another repetition"],
)  # fmt: skip
def test_a_block_that_is_not_what_was_written_is_found(tmp_path, blocks, damage, text):
    damage(tmp_path / "file")
    with pytest.raises(WorkerFailure, match=rf"wrong_result: .*{text}"):
        blocks.read(tmp_path / "file", rank=3, repetition=7)


def test_a_file_is_never_written_over(tmp_path, blocks):
    with pytest.raises(FileExistsError):
        blocks.write(tmp_path / "file", rank=3, repetition=8)


@pytest.mark.parametrize("size", [1, 20, 32, 3901])
def test_small_files_of_any_size_hold_what_they_should(tmp_path, size):
    small = SmallFiles(5, size)
    paths = small.paths(tmp_path)
    contents = [small.content(1, 2, number) for number in range(5)]
    small.create(paths, contents)
    assert small.stat(paths) == 5 * size
    assert small.read(paths) == contents
    assert {len(content) for content in contents} == {size}
    small.unlink(paths)
    assert names_in(tmp_path) == []


def test_what_was_just_written_is_warm_and_nothing_is_cold(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 64 * KIB)
    assert storage._state([file], "unknown") == "warm"
    file.write_bytes(b"")
    assert storage._state([file], "warm") == "cold"  # nothing of it is in memory


@pytest.mark.servers
class TestRanks:
    @pytest.mark.parametrize(
        ("io", "cache", "found"),
        [("direct", "cold", "cold"), ("buffered", "cold", "cold"), ("buffered", "warm", "warm"), ("buffered", "unknown", "cold")],
    )  # fmt: skip
    def test_a_volume_is_measured_in_the_asked_state_and_left_as_it_was(
        self, ranks, volume, io, cache, found
    ):
        measurement = ranks(short(volume, {"io": io}, cache=cache)).measurement
        assert (measurement.cache, measurement.data_source) == (found, "none")
        rates = [measurement.metric(name) for name in RATES]
        assert {rate.name: rate.unit for rate in rates} == RATES
        assert all(rate.value > 0 and len(rate.samples) == 2 for rate in rates)
        assert measurement.environment["filesystem"]
        assert measurement.environment["files_read"] == "own"
        assert names_in(volume) == []

    def test_two_ranks_measured_what_was_asked(self, ranks, declare_probe, volume):
        spec, run = declare_probe("storage", ranks=2, path=str(volume), **SHORT)
        measurement = ranks(run).measurement
        assert check_measurement.check(measurement, spec, run) == []
        assert measurement.metric("write_bandwidth_of_slowest_rank").value > 0
        assert names_in(volume) == []

    def test_ranks_of_several_nodes_read_each_others_files(self, ranks, volume):
        measurement = ranks(short(volume, ranks=2, nodes=2)).measurement
        assert measurement.environment["files_read"] == "of the next node"
        assert names_in(volume) == []

    def test_nodes_that_share_no_disk_read_their_own_files(self, ranks, tmp_path):
        disks = [tmp_path / f"disk{rank}" for rank in range(2)]
        for disk in disks:
            disk.mkdir()
        run = short(f"{tmp_path}/disk$LOCAL_RANK", ranks=2, nodes=2)
        assert ranks(run).measurement.environment["files_read"] == "own"
        assert [names_in(disk) for disk in disks] == [[], []]

    def test_without_a_path_the_folder_of_the_run_is_measured(self, ranks, tmp_path):
        assert ranks(short("")).measurement.run_id == "run-1"
        assert names_in(tmp_path / "data") == []

    @needs_root
    @pytest.mark.parametrize("cache", ["warm", "unknown"])
    def test_a_file_system_in_memory_can_be_measured_as_what_it_is(self, ranks, in_memory, cache):
        assert ranks(short(in_memory, cache=cache)).measurement.cache == "warm"


#: The file system says that there is room, and has none.
FULL = """
import os
os.statvfs = lambda path: os.statvfs_result((4096, 4096) + (10**9,) * 6 + (0, 255))
"""
LIMITED = (
    f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({128 * KIB}, {resource.RLIM_INFINITY}))"
)
ZEROS = """
import os
real = os.readv
def lose(descriptor, buffers):
    got = real(descriptor, buffers)
    buffers[0][:8] = bytes(8)
    return got
os.readv = lose
"""
NO_SPACE = "No space left on device; free space, raise the quota or limit, or use smaller files"
IN_MEMORY = "(tmpfs): files are warm in the page cache after they were told to be cold; a file system in memory is never cold"


def assert_failure(texts, folder, ranks, parameters, sabotage):
    """A run in *folder* fails with these texts, the first in front, and leaves nothing there."""
    fields = {"cache": "warm", **parameters}
    run = short(folder, fields, cache=fields.pop("cache"))
    (failure,) = ranks(run, **sabotaged(folder.parent, sabotage)).failures
    assert names_in(folder) == []
    assert failure.startswith(texts[0])
    assert [text for text in texts if text not in failure] == []


@pytest.mark.servers
@needs_root
@pytest.mark.parametrize(
    ("parameters", "sabotage", "texts"),
    [
        ({"cache": "cold"}, "", ["volume_unusable: ", IN_MEMORY, "ask for cache='warm' or 'unknown'"]),
        ({"file_size": 4096 * KIB}, "", ["disk_full: ", "GB free for this user, the run needs 0.00428 GB"]),
        ({"files": 200, "file_size": 64 * KIB}, "", ["disk_full: ", "more files, the run needs 204: remove files"]),
        ({"file_size": 4096 * KIB}, FULL, ["disk_full: measuring in ", NO_SPACE]),
        ({"files": 99}, FULL, ["disk_full: measuring in ", NO_SPACE]),
    ],
    ids=[
        "memory is never cold", "no room for bytes", "no room for files", "bytes of others meanwhile", "files of others meanwhile",
    ],
)  # fmt: skip
def test_a_small_file_system_that_fails_is_named_and_left_as_it_was(ranks, in_memory, parameters, sabotage, texts):  # fmt: skip
    assert_failure(texts, in_memory, ranks, parameters, sabotage)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("sabotage", "texts"),
    [
        (LIMITED, ["disk_full: ", "File too large"]),
        (ZEROS, ["wrong_result: ", "/large: block 0 of 4 is not what rank 0 wrote"]),
    ],
    ids=["a limit on the size of files", "other content comes back"],
)
def test_a_volume_that_fails_is_named_and_left_as_it_was(ranks, volume, sabotage, texts):
    assert_failure(texts, volume, ranks, {}, sabotage)


@pytest.mark.servers
@needs_root
def test_a_read_only_volume_is_named(ranks, in_memory):
    subprocess.run(["mount", "-o", "remount,ro", in_memory], check=True)
    named = [
        "volume_unusable: making a folder in ",
        "it is mounted read-only: name a path that may be written to",
    ]
    assert_failure(named, in_memory, ranks, {}, "")


@pytest.mark.servers
def test_a_missing_volume_is_named_and_ends_all_ranks(ranks, tmp_path):
    failures = ranks(short(tmp_path / "nowhere", ranks=2)).failures
    text = "there is no such folder: make it, or mount the volume on this node"
    assert [text in failure for failure in failures] == [True, True]


@pytest.mark.servers
@needs_root
def test_of_two_ranks_the_one_that_finds_the_disk_full_is_named_and_both_clean_up(in_memory, tmp_path):
    run = short(
        in_memory, {"file_size": 640 * KIB}, cache="warm", ranks=2, launcher="torchrun", python=sys.executable
    )
    run = dataclasses.replace(run, variables=sabotaged(tmp_path, FULL))
    (failure,) = bodies(run_batch([sys.executable], tmp_path, run), run, "failed")
    assert failure["outcome"] == "disk_full"
    assert "No space left on device" in failure["text"]
    assert names_in(in_memory) == []


WRITES_FOR_EVER = """
import os, time
def wait(descriptor):
    open(os.environ["MLHPC_PLAN"] + ".writing", "w").close()
    time.sleep(600)
os.fsync = wait
"""


@pytest.mark.servers
@pytest.mark.parametrize(
    ("number", "code", "left"), [(signal.SIGTERM, 1, 0), (signal.SIGKILL, -signal.SIGKILL, 1)]
)
def test_what_a_rank_that_was_ended_leaves_the_next_run_removes(rank_server, volume, number, code, left):
    folder = volume.parent
    with Batch(str(folder / "channel")) as batch:
        environment = prepare_rank(batch, short(volume), folder, **sabotaged(folder, WRITES_FOR_EVER))
        with rank_server.start(environment, folder) as rank:
            while not (folder / "plan.json.writing").exists():
                assert rank.poll(0.01) is None
            assert names_in(volume) == ["mlhpc-storage-run-1-0"]
            os.kill(rank.pid, number)
            assert rank.finish()[0] == code
    assert names_in(volume) == ["mlhpc-storage-run-1-0"] * left
    assert run_ranks(rank_server, folder, short(volume, run_id="run-2")).measurement.run_id == "run-2"
    assert names_in(volume) == []
