"""Samples on their way to node-local storage: whole or shared, as files or archives, and nothing is left of them."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from probe_ranks import sabotaged
from quality_runs import figures, plan, told, trained
from rank_helpers import ROOT, Batch, finish, start_rank

from pytest_mlhpc.worker.data.errors import DataError
from pytest_mlhpc.worker.data.layout import Layout
from pytest_mlhpc.worker.data.make import make_set
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.quality import archives, staging
from pytest_mlhpc.worker.quality.place import Node

pytestmark = pytest.mark.servers  # ranks that stage

#: Most seconds that a test waits for another process, on a machine that is busy with others.
LIMIT_S = 600.0


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return what stands for node-local storage."""
    folder = tmp_path / "local"
    folder.mkdir()
    return folder


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    """Return a set of 16 + 8 samples of 8 voxels."""
    root = tmp_path / "set"
    make_set(Layout("cosmoflow", "tfrecord-gzip", {"edge": 8, "learnable": 1}, 16, 8, 0), root)
    return root


def staged(local: Path, root: Path | None = None, **fields):
    changes = {"data_path": str(root)} if root is not None else {}
    wanted = {"train_samples": 16, "eval_samples": 8, "target": 0.9, "staging": "files", **fields}
    return plan(changes=changes, staging_path=str(local), **wanted)


def gone(path: Path) -> bool:
    """Wait until *path* is not there any more."""
    end = time.monotonic() + LIMIT_S
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not path.exists()


@pytest.mark.servers
@pytest.mark.parametrize("how", ["files", "archives"])
def test_a_staged_run_tells_how_long_that_took_and_leaves_nothing(tmp_path, local, how):
    found = trained(staged(local, staging=how), tmp_path)

    keys = [event.key for event in found.per_rank[0].events]
    assert (
        keys.index("run_start")
        < keys.index("staging_start")
        < keys.index("staging_stop")
        < keys.index("epoch_start")
    )
    figure = figures(found)
    assert 0 < figure["staging_time"] < figure["time_to_train"]
    assert figure["staging_bandwidth"] > 0
    assert (told(found, "train_samples"), told(found, "eval_samples")) == ([16], [8])
    assert list(local.iterdir()) == []


@pytest.mark.servers
def test_staged_files_and_archives_train_as_the_source_does(tmp_path, local):
    runs = [plan(target=0.9, train_samples=16, eval_samples=8)]
    runs += [staged(local, staging=how) for how in ("files", "archives")]
    assert len({tuple(told(trained(run, tmp_path), "eval_error")) for run in runs}) == 1


@pytest.mark.servers
def test_text_is_staged_too(tmp_path, local):
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text("to be or not to be, that is the question\n" * 40)
    run = plan(
        "language_model", target=5.6, changes={"data_path": str(tmp_path / "text")}, train_samples=64, eval_samples=8,
        staging="files", staging_path=str(local),
    )  # fmt: skip
    assert figures(trained(run, tmp_path))["staging_bandwidth"] > 0
    assert list(local.iterdir()) == []


@pytest.mark.servers
@pytest.mark.parametrize("how", ["files", pytest.param("archives", marks=pytest.mark.slow)])
def test_each_node_gets_its_share_and_every_sample_is_used_once(tmp_path, ranks, how):
    """Two ranks that say they are of different agents are two nodes; each sees a folder of its own below the same path."""
    (tmp_path / "local").mkdir()
    variables = sabotaged(tmp_path, "import os\nos.environ['GROUP_RANK'] = os.environ.get('RANK', '0')\n")
    run = staged(tmp_path / "local", staging=how, staging_share="node", global_batch=4)

    found = ranks(dataclasses.replace(run, ranks=2), **variables).measurement

    assert (told(found, "train_samples"), told(found, "eval_samples")) == ([16], [8])
    assert found.samples == 16 * figures(found)["epochs"]
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.servers
def test_ranks_of_one_node_share_the_work_and_agree(tmp_path, ranks, local):
    run = staged(local, target=0.9)
    found = ranks(dataclasses.replace(run, ranks=2)).measurement
    assert found.ranks == 2
    assert len(told(found, "eval_error")) == figures(found)["epochs"]
    assert [len(report.events) > 0 for report in found.per_rank] == [True, False]
    assert list(local.iterdir()) == []


@pytest.mark.servers
def test_a_rank_that_is_killed_while_it_stages_leaves_nothing(tmp_path, local, small_set):
    slow = "import time\nfrom pytest_mlhpc.worker.quality import staging\nstaging.copy = lambda pair: time.sleep(600) or 1\n"
    variables = sabotaged(tmp_path, slow)
    with Batch(str(tmp_path / "channel")) as batch:
        process = start_rank(batch, staged(local, small_set), tmp_path, **variables)
        try:
            end = time.monotonic() + LIMIT_S
            while not any(local.iterdir()) and time.monotonic() < end:
                time.sleep(0.05)
            (folder,) = local.iterdir()
        finally:
            process.send_signal(signal.SIGKILL)
        finish(process)
        assert gone(folder)


def test_a_folder_that_a_killed_run_left_is_removed_by_the_next_one(local):
    left, young = local / f"{staging.PREFIX}old-0", local / f"{staging.PREFIX}new-0"
    left.mkdir()
    (left / "sample").write_text("x")
    young.mkdir()
    os.utime(left, (1, 1))
    with staging.held(staging.folder_of(local, "run-1", Node())) as folder:
        assert sorted(local.iterdir()) == sorted([young, folder])
        os.utime(folder, (1, 1))
        with staging.held(staging.folder_of(local, "run-2", Node())) as other:
            assert folder.is_dir()  # it is held, however old it looks
            assert other.is_dir()
    assert list(local.iterdir()) == [young]


def test_a_missing_source_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.tfrecord: cannot be read \(No such file") as caught:
        staging.copy((tmp_path / "gone.tfrecord", tmp_path / "local" / "gone.tfrecord"))
    assert caught.value.outcome == "data_unusable"


def test_an_empty_source_file_is_named(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty: is empty, expected a sample to stage"):
        staging.copy((tmp_path / "empty", tmp_path / "local" / "empty"))


@pytest.mark.servers
def test_a_set_of_which_a_file_is_cut_off_is_refused_before_the_clock_starts(tmp_path, local, small_set):
    sample = next((small_set / "train").iterdir())
    os.truncate(sample, 20)
    with pytest.raises(
        WorkerFailure, match=r"set: is damaged: 24 files of \d+ bytes, its manifest says 24 of"
    ):
        trained(staged(local, small_set), tmp_path)
    assert list(local.iterdir()) == []


@pytest.mark.servers
def test_a_foreign_set_of_which_a_file_is_cut_off_fails_when_it_is_read(tmp_path, local, small_set):
    (small_set / "manifest.json").unlink()
    for sample in (small_set / "train").iterdir():
        os.truncate(sample, 20)
    with pytest.raises(
        WorkerFailure,
        match=r"local/mlhpc-staged-run-1-0/train/synthetic_\d+\.tfrecord: gzip data is cut short",
    ):
        trained(staged(local, small_set), tmp_path)
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "bits"])
def test_a_damaged_archive_is_named(tmp_path, small_set, damage):
    packed = archives.pack(small_set, tmp_path / "packed", 2)
    archive = packed / "part-00000.tar.gz"
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2 :] = b"\0" * 64
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00000\.tar\.gz: (is damaged or cut off|cannot be read)"):
        archives.unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(tmp_path / "file", arcname="ok")
        member = tar.gettarinfo(tmp_path / "file")
        member.name = name
        with (tmp_path / "file").open("rb") as file:
            tar.addfile(member, file)
    with pytest.raises(DataError, match="which leads out of the folder that it is unpacked in: refused"):
        archives.unpack(tmp_path / "bad.tar", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ok"]


def test_links_in_an_archive_are_left_out(tmp_path):
    (tmp_path / "link").symlink_to("/etc")
    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        tar.add(tmp_path / "link", arcname="train")
    (tmp_path / "out").mkdir()
    assert archives.unpack(tmp_path / "links.tar", tmp_path / "out") > 0
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.servers
def test_archives_that_are_not_there_are_asked_for_by_name(tmp_path, local, small_set):
    with pytest.raises(
        WorkerFailure,
        match=r"set: holds no archives \(\.tar\.gz, \.tgz, \.tar\), as staging='archives' needs",
    ):
        trained(staged(local, small_set, staging="archives"), tmp_path)


def test_a_packed_set_unpacks_as_it_was(tmp_path, small_set):
    packed = archives.pack(small_set, tmp_path / "packed", 3)
    assert archives.pack(small_set, tmp_path / "packed", 3) == packed  # it is there already
    for archive in sorted(packed.glob("*.tar.gz")):
        archives.unpack(archive, tmp_path / "out")
    files = {path.relative_to(small_set): path.read_bytes() for path in small_set.rglob("*.tfrecord")}
    assert len(files) == 24
    assert files == {
        p.relative_to(tmp_path / "out"): p.read_bytes() for p in (tmp_path / "out").rglob("*.tfrecord")
    }


#: Copies or unpacks with files limited to argv[3] bytes, as a quota would, and prints what comes of it.
LIMITED = """
import resource, sys
from pathlib import Path
from pytest_mlhpc.worker.data.errors import DataError
from pytest_mlhpc.worker.quality import archives, staging
source, target, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    archives.unpack(source, target) if archives.is_archive(source) else staging.copy((source, target))
except DataError as error:
    print(f"{error.outcome}: {error}")
"""


@pytest.mark.parametrize("packed", [False, True])
def test_no_room_on_the_node_is_the_machines_fault_and_names_the_file(tmp_path, packed):
    source = tmp_path / "sample"
    source.write_bytes(os.urandom(1 << 16))
    if packed:
        with tarfile.open(tmp_path / "one.tar", "w") as tar:
            tar.add(source, arcname="sample")
        source = tmp_path / "one.tar"
    target = tmp_path / "out" if packed else tmp_path / "out" / "sample"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, source, target, str(resource.getpagesize())],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.stdout.startswith(f"disk_full: {tmp_path}/out/sample: no room to write it"), done.stderr


def test_a_small_file_system_fills_up_and_says_so(tmp_path):
    local = tmp_path / "tiny"
    local.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", local], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("needs the right to mount a small file system; a limit stands for it in the test above")
    try:
        (tmp_path / "sample").write_bytes(b"x" * (1 << 20))
        with pytest.raises(DataError, match=r"sample: no room to write it \(No space left on device\)"):
            staging.copy((tmp_path / "sample", local / "sample"))
    finally:
        subprocess.run(["umount", local], check=True)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "$NOWHERE/x",
            r"staging_path: NOWHERE is not set in the run's environment on .*name it in `variables:`",
        ),
        ("/not/here", "is no folder of this node"),
    ],
)
def test_node_local_storage_that_is_not_there_is_named(path, text):
    with pytest.raises(DataError, match=text):
        staging.base_of(path, {})


def test_variables_of_the_node_name_its_storage(tmp_path):
    assert staging.base_of("$SCRATCH/${USER}", {"SCRATCH": str(tmp_path), "USER": "."}) == tmp_path
    assert staging.base_of("$TMPDIR", {}).is_dir()


def test_the_first_failure_stops_the_rest():
    done = []

    def work(item: int) -> int:
        done.append(item)
        if item == 1:
            raise DataError("x", "broke")
        return item

    with pytest.raises(DataError, match="broke"):
        staging.each(work, range(1, 1000), 1)
    assert len(done) < 1000
    assert staging.each(lambda item: item, [1, 2, 3], 2) == 6
