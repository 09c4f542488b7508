"""The sampler beside a benchmark: its figures are of the timed window, and it is off unless asked for."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from full_disk import small_disk
from screen_samples import GIB, MIB, device, process, samples

from pytest_mlhpc.batch.processes import descendants
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.screen.node import summary
from pytest_mlhpc.screen.node.summary import figures, window
from pytest_mlhpc.worker.failure import WorkerFailure


def values(looks):
    return {one.name: (one.value, one.unit, one.over) for one in figures(looks)}


def test_cores_are_what_processes_used_while_they_lived():
    def tree(second):
        return [
            process(10, second, cores=1.5),
            *([process(11, second, cores=0.5)] if 5 <= second < 15 else []),
        ]

    found = values(samples(tree, seconds=21))
    assert found["telemetry_cores"] == (pytest.approx((1.5 * 20 + 0.5 * 9) / 20), "1", "sum")
    assert found["telemetry_memory"] == (400 * MIB, "B", "max")
    assert found["telemetry_cost"] == (pytest.approx(0.001), "1", "max")
    assert "telemetry_power" not in found


def test_devices_are_told_in_base_units():
    looks = samples(lambda second: [process(10, second, read_bytes=second * MIB)],
                    lambda second: [device(0, celsius=60.0 + second), device(1, power_w=300.0, busy=0.5)])  # fmt: skip
    found = values(looks)
    assert found["telemetry_power"] == (800.0, "W", "sum")
    assert found["telemetry_temperature"] == (pytest.approx(79 + 273.15), "K", "max")
    assert found["telemetry_device_busy"] == (pytest.approx(0.745), "1", "mean")
    assert found["telemetry_read_rate"] == (pytest.approx(MIB), "B/s", "sum")


def test_the_window_is_what_counts_unless_it_is_shorter_than_two_looks():
    looks = samples(lambda second: [process(10, second, rss_bytes=GIB * (second + 1))])
    assert [one.time_s for one in window(looks, 103.0, 105.5)] == [103.0, 104.0, 105.0]
    assert window(looks, 103.1, 103.2) == looks
    assert figures(looks[:1]) == ()


def test_a_line_that_is_cut_short_is_the_end():
    beside = pytest.importorskip(
        "pytest_mlhpc.screen.node.beside", reason="torch is not installed", exc_type=ImportError
    )
    looks = samples(lambda second: [process(10, second)], seconds=2)
    text = "".join(json.dumps(to_json(look)) + "\n" for look in looks) + '{"time_s": 1'
    assert beside.read(io.BytesIO(text.encode())) == looks
    assert summary.ZERO_CELSIUS == 273.15


#: A rank with the sampler beside it, as far as the sampler can tell; its words say how long it waits for the first look.
RANK = """
import sys, tempfile, time
from pytest_mlhpc.screen.node import beside
with tempfile.TemporaryFile() as file:
    watcher = beside.start(file)
    if sys.argv[1] == "looked":
        beside.await_look(file, watcher)
    print(watcher.pid, flush=True)
    time.sleep(600)
"""


def gone(pid):
    """Wait until a process has ended; whether its parent has taken its exit code is not asked."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("when", ["started", "looked"])
def test_the_sampler_of_a_rank_that_is_killed_ends_by_itself(when):
    rank = subprocess.Popen([sys.executable, "-c", RANK, when], stdout=subprocess.PIPE, text=True)
    with rank:
        watcher = int(rank.stdout.readline())
        assert watcher in descendants(rank.pid)
        rank.kill()
    assert rank.returncode == -signal.SIGKILL
    ended = gone(watcher)
    if not ended:
        os.kill(watcher, signal.SIGKILL)
    assert ended, "the sampler looks on for a rank that was killed"


def test_a_sampler_that_died_is_not_waited_for(tmp_path, monkeypatch):
    beside = pytest.importorskip(
        "pytest_mlhpc.screen.node.beside", reason="torch is not installed", exc_type=ImportError
    )
    monkeypatch.setattr(beside, "LOOK_S", 1e9)  # who waits for the dead waits for ever
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    dead.wait()
    with (tmp_path / "looks").open("w+b") as file:
        file.write(b"{}\n" * 3)
        file.flush()
        beside.await_look(file, dead)
        assert file.tell() == 9


def refused():
    """Run with the sampler beside it what must not begin; return what is said instead."""
    from pytest_mlhpc.screen.node.beside import watched
    from pytest_mlhpc.worker.distributed import Group

    begun = []
    with pytest.raises(WorkerFailure) as told:
        watched(lambda *_: begun.append("trained"))(None, Group(), None, Path(), lambda *_: None)
    assert begun == []
    return told.value


@pytest.mark.parametrize("mounted", [True, False])
def test_a_full_disk_is_told_before_the_training_begins(mounted, tmp_path, monkeypatch):
    pytest.importorskip("torch", exc_type=ImportError)
    folder = tmp_path / "small"
    with small_disk(folder, mounted=mounted) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with disk.full(left=8192):
            told = refused()
        assert list(folder.iterdir()) == []
    assert told.outcome == "disk_full"
    assert f"telemetry has no file for what it sees in {folder} on " in told.text
    assert f"{disk.words}; make room there, name another folder in TMPDIR, or run" in told.text


def test_no_folder_for_temporary_files_is_told_before_the_training_begins(tmp_path, monkeypatch):
    pytest.importorskip("torch", exc_type=ImportError)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    told = refused()
    assert told.outcome == "disk_full"
    assert "No such file or directory; make room there, name another folder in TMPDIR" in told.text


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/no/python", "cannot be started on "),
        (shutil.which("false"), "ended with exit code 1 on "),
    ],
)
def test_a_sampler_that_does_not_start_is_told_before_the_training_begins(program, words, monkeypatch):
    pytest.importorskip("torch", exc_type=ImportError)
    monkeypatch.setattr(sys, "executable", program)
    told = refused()
    assert told.outcome == "launch_failed"
    assert f"the sampler of telemetry {words}" in told.text
    assert told.text.endswith(", or run without telemetry")
