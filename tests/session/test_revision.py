"""What another revision gives to a test, on real checkouts. Whole sessions are in tests/plugin/test_plugin_revision.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from git_checkouts import Checkout

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.software import SoftwareError
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.session import revision as revisions
from pytest_mlhpc.session.revision import Paths, check_out, find_revision, remove_left, remove_own


@pytest.fixture
def checkout(tmp_path):
    made = Checkout.made(tmp_path / "checkout")
    made.write(".gitignore", "/venv\n/data\n")
    made.write("suites/bench/run.sh", "old\n")
    made.write("suites/my file", "old\n")
    made.commit("old")
    made.write("suites/new.sh", "new\n")
    made.write("venv/bin/python", "")
    made.commit("new")
    return made


def found(checkout: Checkout, name: str = "old", *, only: bool = True):
    return find_revision(checkout.folder, name, only=only)


@pytest.fixture
def paths(checkout, tmp_path):
    """Return paths of the checkout in a worktree of *old*, and that worktree."""
    revision = check_out(found(checkout), [tmp_path], uuid7())
    (tree,) = revision.trees.values()
    return Paths(revision, tree), tree


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TOP/suites/bench/run.sh", "TREE/suites/bench/run.sh"),
        ("TOP", "TREE"),
        ("TOP/suites/my file", "TREE/suites/my file"),
        ("--input=TOP/suites/bench", "--input=TREE/suites/bench"),
        ("TOP/suites:/usr/lib:TOP/suites/bench", "TREE/suites:/usr/lib:TREE/suites/bench"),
        ("cat 'TOP/suites/bench/run.sh'", "cat 'TREE/suites/bench/run.sh'"),
        ("TOP/suites/bench/*.sh", "TREE/suites/bench/*.sh"),
        ("TOP/venv/bin/python", "TOP/venv/bin/python"),
        ("TOP/data/to/be/made", "TOP/data/to/be/made"),
        ("TOP-other/suites", "TOP-other/suites"),
        ("/x/TOP/suites", "/x/TOP/suites"),
        ("suites/bench", "suites/bench"),
    ],
)
def test_paths_of_the_checkout_are_those_of_the_worktree(paths, checkout, text, expected):
    moved, tree = paths
    here = text.replace("/TOP", "TOP").replace("TOP", str(checkout.folder))
    wanted = expected.replace("/TOP", "TOP").replace("TOP", str(checkout.folder)).replace("TREE", tree)
    assert moved.text(here) == wanted


def test_a_file_that_the_revision_has_not_is_named(paths, checkout):
    with pytest.raises(SoftwareError, match=r"old \(\w{12}\) has no suites/new.sh"):
        paths[0].text(f"{checkout.folder}/suites/new.sh")


def test_values_within_lists_and_mappings_are_moved_and_others_left(paths, checkout):
    moved, tree = paths
    values = {"a": [checkout.folder / "suites", 4, None], "b": ("x", {"c": f"{checkout.folder}/suites"})}
    assert moved.values(values) == {"a": [Path(tree, "suites"), 4, None], "b": ("x", {"c": f"{tree}/suites"})}


def test_a_checkout_that_is_reached_through_a_link_is_the_same(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout.folder)
    revision = find_revision(tmp_path / "link" / "suites", "old", only=True)
    revision = check_out(revision, [tmp_path], uuid7())
    (tree,) = revision.trees.values()
    assert Paths(revision, tree).text(f"{tmp_path}/link/suites/bench") == f"{tree}/suites/bench"


def test_a_test_outside_of_the_checkout_has_no_revision(paths, tmp_path):
    with pytest.raises(SoftwareError, match="outside the checkout"):
        paths[0].folder(str(tmp_path / "elsewhere"))


def test_a_checkout_whose_path_is_no_text_is_refused(tmp_path):
    made = Checkout.made(tmp_path / "a\nb")
    made.commit("old")
    with pytest.raises(UsageError, match="is no printable text; move the checkout"):
        found(made)


def test_a_path_is_of_the_checkout_or_not(paths, checkout, tmp_path):
    there = [checkout.folder, checkout.folder / "suites", tmp_path, Path(f"{checkout.folder}-other")]
    assert [paths[0].has(str(one)) for one in there] == [True, True, False, False]


def test_no_checkout_is_named(tmp_path):
    with pytest.raises(UsageError, match="is in no git checkout"):
        find_revision(tmp_path, "main", only=True)


def test_a_folder_without_git_is_distinguished_from_a_machine_without_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout.folder))
    with pytest.raises(UsageError, match="cannot start git: No such file"):
        found(checkout)


def test_a_hook_of_git_that_starts_pytest_does_not_name_another_repository(checkout, tmp_path, monkeypatch):
    other = Checkout.made(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    assert found(checkout).top == str(checkout.folder)


def test_a_shallow_clone_says_how_to_get_the_revision(checkout, tmp_path):
    checkout.git("clone", "-q", "--depth", "1", f"file://{checkout.folder}", str(tmp_path / "shallow"))
    with pytest.raises(UsageError, match="the clone is shallow: run `git fetch --unshallow`"):
        found(Checkout(tmp_path / "shallow"), "old")


def test_submodules_are_named(checkout, tmp_path):
    part = Checkout.made(tmp_path / "part")
    part.commit("part")
    checkout.git("submodule", "--quiet", "add", str(part.folder), "lib/part")
    checkout.commit("with")
    checkout.git("rm", "-q", "-r", "lib/part")
    checkout.commit("without")
    with pytest.raises(UsageError, match=r"has submodules \(lib/part\), which a worktree leaves empty"):
        found(checkout, "with")


def test_a_new_file_is_no_change_until_it_is_added(checkout):
    checkout.write("suites/more.sh", "")
    with pytest.raises(UsageError, match="both sides are the same"):
        found(checkout, "HEAD")
    checkout.git("add", "suites/more.sh")
    assert found(checkout, "HEAD").dirty


def test_the_same_commit_may_be_compared_if_something_else_differs(checkout):
    assert found(checkout, "HEAD", only=False).commit == checkout.git("rev-parse", "HEAD")


def test_no_hook_of_the_checkout_runs(checkout, tmp_path):
    hook = checkout.write(".git/hooks/post-checkout", f"#!/bin/sh\ntouch {tmp_path}/hooked\n", 0o755)
    assert hook.exists()
    remove_own(check_out(found(checkout), [tmp_path], uuid7()))
    assert not (tmp_path / "hooked").exists()
    assert checkout.worktrees() == []


def test_each_folder_of_runs_has_a_worktree(checkout, tmp_path):
    roots = [tmp_path / "state", tmp_path / "shared"]
    revision = check_out(found(checkout), roots, uuid7())
    assert {Path(tree, "suites/my file").read_text() for tree in revision.trees.values()} == {"old\n"}
    assert list(revision.trees) == [str(root) for root in roots]
    assert remove_own(revision) == []
    assert checkout.worktrees() == []


def test_a_worktree_that_cannot_be_written_is_named_and_no_other_is_left(checkout, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"it cannot be checked out: .*file"):
        check_out(found(checkout), [tmp_path / "state", tmp_path / "file"], uuid7())
    assert checkout.worktrees() == []
    assert not list(tmp_path.glob("state/worktrees/*"))


def test_a_commit_that_git_cannot_write_out_is_refused_with_its_own_message(checkout, tmp_path):
    gone = replace(found(checkout), commit="0" * 40)
    with pytest.raises(UsageError, match=r"it cannot be checked out: .*(invalid reference|not a valid)"):
        check_out(gone, [tmp_path], uuid7())
    assert not list(tmp_path.glob("worktrees/*"))


def test_a_worktree_goes_though_its_repository_is_gone(checkout, tmp_path):
    revision = check_out(found(checkout), [tmp_path], uuid7())
    checkout.folder.rename(tmp_path / "moved")
    assert remove_own(revision) == []
    assert not list(tmp_path.glob("worktrees/*"))


def test_the_worktree_of_a_session_that_died_before_it_was_whole_goes(checkout, tmp_path):
    revision = check_out(found(checkout), [tmp_path], uuid7())
    (tree,) = revision.trees.values()
    Path(tree, ".git").unlink()
    (tmp_path / "worktrees" / uuid7()).mkdir()
    assert remove_left([tmp_path], tmp_path, uuid7()) == []
    assert not list(tmp_path.glob("worktrees/*"))


def test_worktrees_of_living_sessions_and_own_ones_stay(checkout, tmp_path):
    living, own = uuid7(), uuid7()
    ledger = Ledger(tmp_path, living)
    ledger.start()
    for session in (living, own, uuid7()):
        check_out(found(checkout), [tmp_path], session)
    assert remove_left([tmp_path], tmp_path, own) == []
    assert {path.name for path in tmp_path.glob("worktrees/*")} == {living, own}
    ledger.close()


def test_what_no_session_has_made_is_left_alone(checkout, tmp_path):
    other = tmp_path / "worktrees" / "mine"
    checkout.git("worktree", "add", "--detach", str(other), "old")
    assert remove_left([tmp_path], tmp_path, uuid7()) == []
    assert other.exists()


def test_packages_are_found_where_finders_of_editable_installs_say(tmp_path):
    """Setuptools installs a package of another layout by a finder with a mapping of names to folders."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "__editable___solver_finder.py").write_text(
        f"MAPPING = {{'solver': '{tmp_path}/src/solver'}}\nclass F: pass\n"
    )
    start = tmp_path / "python"
    code = "import sys, __editable___solver_finder as m; sys.meta_path.append(m.F)"
    (site / "sitecustomize.py").write_text(code)
    start.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    start.chmod(0o755)
    assert f"{tmp_path}/src" in revisions.imported_from(str(start))


def test_an_interpreter_that_is_not_here_imports_from_nowhere():
    assert revisions.imported_from("/nowhere/python") == ()
