"""The secret of a vetting's processes, which nobody has to set where they share a folder."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running_suites import wait_for
from vet_agents import Vetting

from pytest_mlhpc.node.files import UnsafeDirectoryError
from pytest_mlhpc.node.vet import place
from pytest_mlhpc.node.vet.place import key_of

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def shared_key(out, environ=STEP, kind="lustre"):
    return place.shared_key(environ, str(out), lambda _folder, _mounts: kind)


def test_all_processes_of_a_step_have_the_key_of_whoever_came_first(tmp_path):
    with ThreadPoolExecutor(8) as nodes:
        found = list(nodes.map(lambda _: shared_key(tmp_path / "vet"), range(8)))
    (path, secret), *others = found
    assert all(other == (path, secret) for other in others)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert key_of({**STEP, **secret}) != key_of(STEP)


def test_each_step_has_a_key_of_its_own(tmp_path):
    assert shared_key(tmp_path) != shared_key(tmp_path, {**STEP, "SLURM_STEP_ID": "1"})


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        pytest.param({**STEP, "MLHPC_VET_KEY": "mine"}, "lustre", id="a key that is set counts"),
        pytest.param({}, "lustre", id="nothing tells one job from another"),
        pytest.param(STEP, "ext4", id="a disk of the node's own"),
        pytest.param(STEP, "9p", id="the root of a container"),
    ],
)
def test_where_no_key_is_wanted_or_can_be_shared_none_is_made(tmp_path, environ, kind):
    assert shared_key(tmp_path, environ, kind) == ("", {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_can_be_made_has_no_key(tmp_path):
    (tmp_path / "file").touch()
    assert shared_key(tmp_path / "file")[1] == {}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(lambda path: path.chmod(0o660), "may change it", id="open to a group"),
        pytest.param(
            lambda path: os.chown(path, 65501, 0), "it belongs to user 65501", id="another user's",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away"),
        ),
    ],
)  # fmt: skip
def test_a_key_that_another_user_may_know_is_refused(tmp_path, spoil, text):
    spoil(Path(shared_key(tmp_path)[0]))
    with pytest.raises(UnsafeDirectoryError, match=text):
        shared_key(tmp_path)


def test_a_file_that_stays_empty_is_no_key(tmp_path, monkeypatch):
    Path(shared_key(tmp_path)[0]).write_text("")
    monkeypatch.setattr(place, "WRITE_S", 0.0)
    with pytest.raises(OSError, match="it holds no key; remove it, or set MLHPC_VET_KEY"):
        shared_key(tmp_path)


def test_nodes_meet_by_the_key_that_they_have_made_and_it_is_gone_afterwards(tmp_path):
    (tmp_path / "mounts").write_text("1 0 0:1 / / rw - nfs server:/ rw\n")
    environ = {"MLHPC_VET_KEY": "", "PALS_APID": "7", "MLHPC_SCRIPT_MOUNTS": str(tmp_path / "mounts")}
    with Vetting(tmp_path, 2, settings={"no_load": True}, environ=environ) as vetting:
        vetting.start(1)
        wait_for(lambda: list(vetting.out.glob(".mlhpc-vet-*.key")))
        vetting.start(0)
        ended = vetting.end()
    assert ended.fitness() == {"node0": "fit", "node1": "fit"}
    assert list(vetting.out.glob(".mlhpc-vet-*")) == []


def test_what_a_killed_vetting_left_goes_when_the_next_one_begins(tmp_path):
    left, young, other = (tmp_path / name for name in (".mlhpc-vet-00.key", ".mlhpc-vet-01.key", "notes.key"))
    for path in (left, young, other):
        path.write_text("secret")
        os.utime(path, (1, 1))
    os.utime(young)
    ours, _ = shared_key(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, other, Path(ours)])
