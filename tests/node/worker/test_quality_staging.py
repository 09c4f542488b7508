"""Samples on their way to node-local storage: whole or shared, as files or archives, and nothing is left of them."""

import dataclasses
import gzip
import os
import tarfile
from pathlib import Path

import pytest
from full_disk import small_disk
from probe_ranks import sabotaged
from quality_runs import figures, make_small_set, plan, trained, values
from running_suites import wait_for

from pytest_mlhpc.node.worker.data.dataset_files import DataError
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.quality import staging
from pytest_mlhpc.node.worker.quality.staging import RankNode

pytestmark = pytest.mark.servers  # ranks that stage


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return what stands for node-local storage."""
    folder = tmp_path / "local"
    folder.mkdir()
    return folder


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    return make_small_set(tmp_path / "set", 16, 8)


def staged(local: Path, root: Path | None = None, **fields):
    changes = {"data_path": str(root)} if root is not None else {}
    sizes = {"train_samples": 16, "eval_samples": 8, "target": 0.9}
    return plan(changes=changes, **{**sizes, "staging": "files", "staging_path": str(local), **fields})


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Return the records of one training by how its samples are staged, and the folder below which that happens."""
    folder = tmp_path_factory.mktemp("staged")
    (folder / "local").mkdir()
    runs = {how: staged(folder / "local", staging=how) for how in ("files", "archives")}
    runs["source"] = staged(folder / "local", staging=None, staging_path=None)
    return {how: trained(run, folder) for how, run in runs.items()}, folder / "local"


@pytest.mark.parametrize("how", ["files", "archives"])
def test_a_staged_run_tells_how_long_that_took_and_leaves_nothing(records, how):
    found, local = records[0][how], records[1]
    keys = [event.key for event in found.per_rank[0].events]
    places = [keys.index(key) for key in ("run_start", "staging_start", "staging_stop", "epoch_start")]
    assert places == sorted(places)
    figure = figures(found)
    assert 0 < figure["staging_time"] < figure["time_to_train"]
    assert figure["staging_bandwidth"] > 0
    assert (values(found, "train_samples"), values(found, "eval_samples")) == ([16], [8])
    assert list(local.iterdir()) == []


def test_staged_files_and_archives_train_as_the_source_does(records):
    assert len({tuple(values(record, "eval_error")) for record in records[0].values()}) == 1


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


@pytest.mark.parametrize("how", ["files", pytest.param("archives", marks=pytest.mark.slow)])
def test_each_node_gets_its_share_and_every_sample_is_used_once(tmp_path, ranks, local, how):
    """Two ranks that say they are of different agents are two nodes; each sees a folder of its own below the same path."""
    variables = sabotaged(tmp_path, "import os\nos.environ['GROUP_RANK'] = os.environ.get('RANK', '0')\n")
    run = staged(local, staging=how, staging_share="node", global_batch=4)

    found = ranks(dataclasses.replace(run, ranks=2), **variables).measurement

    assert (values(found, "train_samples"), values(found, "eval_samples")) == ([16], [8])
    assert found.samples == 16 * figures(found)["epochs"]
    assert list(local.iterdir()) == []


def test_ranks_of_one_node_share_the_work_and_agree(ranks, local):
    found = ranks(dataclasses.replace(staged(local), ranks=2)).measurement
    assert found.ranks == 2
    assert len(values(found, "eval_error")) == figures(found)["epochs"]
    assert [len(report.events) > 0 for report in found.per_rank] == [True, False]
    assert list(local.iterdir()) == []


#: A rank that is killed when it begins to copy samples into its folder.
KILLED = """
import os, signal
from pytest_mlhpc.node.worker.quality import staging

def copy(pair):
    print(*os.listdir("local"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

staging.copy = copy
"""


def test_a_rank_that_is_killed_while_it_stages_leaves_nothing(tmp_path, ranks, local, small_set):
    ((code, output),) = ranks(staged(local, small_set), **sabotaged(tmp_path, KILLED)).ended
    assert (code, output.split()[-1]) == (-9, "mlhpc-staged-run-1-0")
    wait_for(lambda: not list(local.iterdir()))


def test_a_folder_that_a_killed_run_left_is_removed_by_the_next_one(local):
    left, young = local / f"{staging.PREFIX}old-0", local / f"{staging.PREFIX}new-0"
    left.mkdir()
    (left / "sample").write_text("x")
    young.mkdir()
    os.utime(left, (1, 1))
    os.utime(young, (2**32, 2**32))
    with staging.staging_folder(staging.folder_of(local, "run-1", RankNode())) as folder:
        assert sorted(local.iterdir()) == sorted([young, folder])
        os.utime(folder, (1, 1))
        with staging.staging_folder(staging.folder_of(local, "run-2", RankNode())) as other:
            assert folder.is_dir()  # it is locked, however old it seems
            assert other.is_dir()
    assert list(local.iterdir()) == [young]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone", r"cannot be read \(No such file"),
        ("empty", "is empty, expected a sample to stage"),
    ],
)
def test_a_source_file_that_cannot_be_staged_is_named(tmp_path, name, text):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=f"{name}: {text}") as caught:
        staging.copy((tmp_path / name, tmp_path / "local" / name))
    assert caught.value.outcome == "data_unusable"


@pytest.mark.parametrize(
    ("how", "manifest", "text"),
    [
        ("files", True, r"set: is damaged: 24 files of \d+ bytes, its manifest says 24 of"),
        ("files", False, r"local/mlhpc-staged-run-1-0/train/synthetic_\d+\.tfrecord: gzip data is cut short"),
        (
            "archives",
            True,
            r"set: holds no archives \(\.tar\.gz, \.tgz, \.tar\), as staging='archives' needs",
        ),
    ],
    ids=["before the clock starts", "when a set without a manifest is read", "where archives are asked for"],
)
def test_a_set_of_which_files_are_cut_off_is_refused(local, small_set, how, manifest, text):
    if not manifest:
        (small_set / "manifest.json").unlink()
    for sample in (small_set / "train").iterdir():
        os.truncate(sample, 20)
    with pytest.raises(WorkerFailure, match=text):
        trained(staged(local, small_set, staging=how), local.parent)
    assert list(local.iterdir()) == []


def damaged(archive, how):
    """Damage *archive*, repacked as a plain tar file where *how* says so; return it."""
    content = archive.read_bytes()
    if how.startswith("plain"):
        archive = archive.with_name("part.tar")
        with tarfile.open(archive.with_name("part-00000.tar.gz")) as tar:
            second = tar.getmembers()[1].offset
        content = gzip.decompress(content)[:second]
    changed = {"cut off": content[: len(content) // 2], "other bytes": content[: len(content) // 2] + b"\0" * 64,
               "wrong checksum": content[:-8] + b"\1" * 4 + content[-4:], "plain, cut between two files": content}  # fmt: skip
    archive.write_bytes(changed[how])
    return archive


@pytest.mark.parametrize("how", ["cut off", "other bytes", "wrong checksum", "plain, cut between two files"])
def test_a_damaged_archive_is_named(tmp_path, small_set, how):
    archive = damaged(staging.pack(small_set, tmp_path / "packed", 2) / "part-00000.tar.gz", how)
    with pytest.raises(DataError, match=rf"{archive.name}: (is damaged or cut off|cannot be read)"):
        staging.unpack(archive, tmp_path / "out")


@pytest.fixture
def archive_of(tmp_path):
    """Return what makes an archive of members with these names; `to` makes the second a link."""

    def make(*names, to=""):
        with tarfile.open(tmp_path / "made.tar", "w") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                if to and name is names[-1]:
                    member.type, member.linkname = tarfile.SYMTYPE, to
                tar.addfile(member)
        return tmp_path / "made.tar"

    return make


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path, archive_of, name):
    with pytest.raises(DataError, match="which leads out of the folder that it is unpacked in: refused"):
        staging.unpack(archive_of("ok", name), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ok"]


def test_links_in_an_archive_are_left_out(tmp_path, archive_of):
    assert staging.unpack(archive_of("ok", "train", to="/etc"), tmp_path / "out") > 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ok"]


def test_a_packed_set_unpacks_as_it_was(tmp_path, small_set):
    packed = staging.pack(small_set, tmp_path / "packed", 3)
    assert staging.pack(small_set, tmp_path / "packed", 3) == packed  # it is there already
    for archive in sorted(packed.glob("*.tar.gz")):
        staging.unpack(archive, tmp_path / "out")
    before, after = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.tfrecord")}
        for folder in (small_set, tmp_path / "out")
    )
    assert before == after
    assert len(before) == 24


@pytest.mark.parametrize("mounted", [True, False], ids=["a small disk", "a limit on files"])
@pytest.mark.parametrize("packed", [True, False], ids=["unpacked", "copied"])
def test_no_room_on_the_node_is_the_machines_fault_and_names_the_file(tmp_path, packed, mounted):
    sample, archive, target = tmp_path / "sample", tmp_path / "one.tar", tmp_path / "out"
    sample.write_bytes(os.urandom(1 << 16))
    with tarfile.open(archive, "w") as tar:
        tar.add(sample, arcname="sample")
    with (
        small_disk(target, mounted=mounted) as disk,
        disk.full(left=4096),
        pytest.raises(DataError, match=rf"out/sample: no room to write it \({disk.words}") as caught,
    ):
        staging.unpack(archive, target) if packed else staging.copy((sample, target / "sample"))
    assert caught.value.outcome == "disk_full"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("$NOWHERE/x", r"staging_path: NOWHERE is not set in the run's environment on .*name it in `variables:`"),
        ("/not/here", "is no folder of this node"),
    ],
)  # fmt: skip
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
