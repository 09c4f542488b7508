"""Declaring what is no training: sizes as people write them, fields that mean nothing here, what must be reported."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.planning import run_of


def problems_of(call) -> list[str]:
    with pytest.raises(SpecError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


def test_sizes_are_written_as_people_write_them_and_travel_as_bytes(declare):
    spec = declare("storage", file_size="8MiB", block_size="64KiB", files=10)
    assert (spec.parameters["file_size"], spec.parameters["block_size"]) == (8 << 20, 64 << 10)
    assert declare("collective", sizes=("8B", "1MiB")).parameters["sizes"] == [8, 1 << 20]


def test_the_same_size_written_otherwise_is_the_same_benchmark(declare):
    assert declare("storage", file_size="1GiB").benchmark == declare("storage", file_size="1024MiB").benchmark
    assert declare("storage", file_size="1GiB").benchmark != declare("storage", file_size="2GiB").benchmark


def test_where_a_volume_is_mounted_is_no_part_of_the_benchmark(declare):
    assert declare("storage", path="/a").benchmark == declare("storage", path="/b").benchmark


def test_cold_and_warm_reads_are_never_compared(declare):
    assert " cache=cold " in declare("storage").benchmark
    assert " cache=warm " in declare("storage", cache="warm").benchmark


def test_no_data_set_is_read(declare):
    spec = declare("collective")
    run = run_of(spec, 0)
    assert (run.data_source, run.data_path, run.data_kind) == ("none", None, "none")
    assert " data=" not in spec.benchmark


@pytest.mark.parametrize(
    ("workload", "fields", "text"),
    [
        ("storage", {"file_size": "8 elephants"}, "file_size: '8 elephants' is not a size"),
        ("storage", {"file_size": 1.5}, "file_size: expected bytes, or a size like '64MiB', found 1.5"),
        (
            "storage",
            {"io": "direct", "cache": "warm"},
            "cache: direct I/O reads past the page cache, so that cache='warm' would not be true",
        ),
        (
            "storage",
            {"small_file_size": "1TiB"},
            "held in each rank's memory: 409,600.0 GiB, at most 4 are taken",
        ),
        (
            "storage",
            {"file_size": "8GiB", "block_size": "4GiB"},
            "block_size: two blocks are held in each rank's memory: 8.0 GiB, at most 4 are taken",
        ),
        (
            "collective",
            {"sizes": ["8B", 5]},
            "sizes: 5 bytes are no whole number of float32, of 4 bytes each",
        ),
        ("storage", {"block_size": 8}, "block_size: 8 is less than 64 bytes"),
        ("storage", {"file_size": 1000}, "block_size: file_size=1000 is no multiple of block_size=1048576"),
        (
            "storage",
            {"file_size": 1000, "block_size": 500, "io": "direct"},
            "block_size: block_size=500 is no multiple of 4096",
        ),
        ("storage", {"data": "files"}, "data: means nothing for storage"),
        ("collective", {"sizes": []}, "sizes: is an empty list"),
        ("collective", {"sizes": ["8B", "1elephant"]}, "sizes: '1elephant' is not a size"),
        ("collective", {"sizes": ["1KiB", 1024]}, "names a size twice"),
        ("collective", {"sizes": [2]}, "sizes: 2 is less than 4 bytes"),
        ("collective", {"sizes": "8B"}, "sizes: expected a list of sizes like ['8B', '64MiB'], found '8B'"),
        ("collective", {"devices": 1}, "devices: one rank has nobody to talk to"),
        ("collective", {"operation": "all_redcue"}, "did you mean 'all_reduce'?"),
        ("collective", {"peers": "each"}, "peers: all_reduce is between all ranks"),
        ("collective", {"cache": "cold"}, "cache: means nothing for collective"),
        ("nbody", {"bodies": 1023, "devices": 2}, "bodies: 1023 bodies do not divide over 2 devices"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_submitted(declare, workload, fields, text):
    (problem,) = problems_of(lambda: declare(workload, **fields))
    assert text in problem


def test_every_size_must_be_reported(declare):
    expected = declare("collective", sizes=["8B", "1KiB", "3MiB", "12B"]).expected_metrics
    assert {"latency", "bus_bandwidth", "time_8b", "time_1kib", "bus_bandwidth_3mib", "time_12b"} <= set(
        expected
    )


def test_every_peer_must_be_reported(declare):
    expected = declare(
        "collective", operation="point_to_point", peers="each", devices=3, sizes=["8B"]
    ).expected_metrics
    assert {"time_8b", "time_8b_rank1", "bus_bandwidth_8b_rank2"} <= set(expected)
    assert not any("rank0" in name or "rank3" in name for name in expected)


def test_the_slowest_rank_must_be_reported_where_there_are_several(declare):
    assert "write_bandwidth_of_slowest_rank" in declare("storage", devices=2).expected_metrics
    assert "write_bandwidth_of_slowest_rank" not in declare("storage").expected_metrics


def test_a_collective_has_two_ranks_unless_told_otherwise(declare):
    spec = declare("collective")
    assert (spec.ranks, spec.launcher) == (2, "torchrun")
    assert "devices" not in spec.parameters
