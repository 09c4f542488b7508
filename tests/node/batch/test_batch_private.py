"""What is obeyed is this user's alone: folders and files are made so, and what is not so is refused by name."""

import os

import pytest

from pytest_mlhpc.node.batch.main import main
from pytest_mlhpc.node.files import (
    EXIT_UNSAFE,
    UnsafeDirectoryError,
    make_private,
    open_private,
    read_private,
)

OTHER = 65501

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def plan(tmp_path):
    """Return a plan in a folder of a run, as they are made where a group shares the state directory."""
    tmp_path.chmod(0o2775)
    mask = os.umask(0o002)
    try:
        make_private(tmp_path / "run")
        with os.fdopen(open_private(tmp_path / "run/plan.json", os.O_WRONLY | os.O_CREAT), "w") as file:
            file.write("{}")
    finally:
        os.umask(mask)
    return tmp_path / "run/plan.json"


def test_a_folder_and_its_files_are_closed_to_all_others_whatever_umask_and_setgid_say(plan):
    assert [path.stat().st_mode & 0o7777 for path in (plan.parent, plan)] == [0o700, 0o600]
    assert read_private(plan) == b"{}"


def test_a_folder_of_ours_that_was_open_is_closed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2777)
    make_private(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o700


def renamed(plan):
    """Let another folder stand behind a link in its place."""
    plan.parent.rename(plan.parent.with_name("away"))
    plan.parent.symlink_to("away")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda plan: plan.chmod(0o660), "group 0 may change it (mode 0660)", id="a file open to a group"),
        pytest.param(lambda plan: plan.chmod(0o602), "everybody may change it (mode 0602)", id="a file open to all"),
        pytest.param(
            lambda plan: plan.parent.chmod(0o2770), "group 0 may change it (mode 2770)", id="a folder open to a group"
        ),
        pytest.param(lambda plan: os.chown(plan, OTHER, 0), "it belongs to user 65501", id="a file", marks=as_root),
        pytest.param(
            lambda plan: os.chown(plan.parent, OTHER, 0), "it belongs to user 65501", id="a folder", marks=as_root
        ),
        pytest.param(
            lambda plan: (plan.rename(plan.with_name("own")), plan.symlink_to("own")), "it is a link", id="a link"
        ),
        pytest.param(renamed, "it is a link, not the folder", id="a link to a folder"),
        pytest.param(lambda plan: (plan.unlink(), os.mkfifo(plan)), "it is no regular file", id="a FIFO"),
    ],
)  # fmt: skip
def test_what_another_user_may_have_changed_is_refused(plan, capsys, change, text):
    change(plan)
    with pytest.raises(UnsafeDirectoryError) as raised:
        read_private(plan)
    assert raised.value.strerror.startswith(text)
    assert raised.value.filename in (str(plan), str(plan.parent))
    assert main([str(plan)]) == EXIT_UNSAFE
    assert f"{text}" in capsys.readouterr().err


@as_root
@pytest.mark.parametrize(
    "make", [lambda run: os.chown(run, OTHER, 0), lambda run: renamed(run / "plan.json")]
)
def test_a_folder_that_is_not_ours_is_not_taken_for_one(plan, make):
    make(plan.parent)
    with pytest.raises(UnsafeDirectoryError, match="a state directory that is yours alone"):
        make_private(plan.parent)


def test_in_a_sticky_folder_our_own_file_is_obeyed(plan):
    plan.parent.chmod(0o1777)
    assert read_private(plan) == b"{}"
