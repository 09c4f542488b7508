"""Retained allocations: deleted when their time is over, whatever became of the note or the cluster."""

import os
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes import log_parser
from pytest_mlhpc.provision.kubernetes.reap import (
    LOCATION_FILE,
    delete_overdue,
    location_json,
    location_of,
    note_retained,
    overdue_retained,
)
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, builtin_kind

SERVER = "https://here:6443"
UNTIL = "it was kept until 1970-01-01 00:16:40 UTC"


@pytest.fixture
def directory(tmp_path):
    """The directory of an allocation that was made in a cluster."""
    found = tmp_path / "runs" / "session" / "a1"
    found.mkdir(parents=True)
    (found / LOCATION_FILE).write_text(
        location_json(location_of(KubernetesSettings(), "mine", server(), builtin_kind("job")))
    )
    return found


def server(url=SERVER):
    """Return what stands for a connection; what it is asked is up to the test's `end`."""
    return Mock(server=url, authority="")


@pytest.fixture
def clear(tmp_path):
    """Delete what is overdue; return the results, what was deleted, and the connection."""

    def go(now, end=lambda *_: "deleted jobs.batch mine/x", url=SERVER):
        deleted, connection = [], server(url)

        def ending(api, where, allocation):
            deleted.append((where.namespace, allocation))
            return end()

        found = list(delete_overdue(tmp_path, ending, lambda _where: connection, now))
        return SimpleNamespace(found=found, deleted=deleted, connection=connection)

    return go


def test_a_retained_allocation_stays_until_its_time_is_over(tmp_path, directory, clear):
    note_retained(directory, 1000)
    early = clear(999.0)
    assert (early.found, early.deleted, overdue_retained(tmp_path, 999.0)) == ([], [], [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_users_who_share_a_state_directory_have_notes_of_their_own(tmp_path, directory, clear):
    (tmp_path / "kept").mkdir()
    os.chown(tmp_path / "kept", 65501, 0)
    (tmp_path / "kept/a1.json").write_text(f'{{"until": 0, "directory": "{directory}"}}')
    note_retained(directory, 1000)
    assert (clear(999.0).deleted, clear(1000.0).deleted) == ([], [("mine", "a1")])
    assert (tmp_path / "kept/a1.json").exists()


def test_a_note_that_others_could_have_written_deletes_nothing(tmp_path, directory, clear):
    note_retained(directory, 1000)
    (tmp_path / "kept/a1.json").chmod(0o660)
    late = clear(1000.0)
    assert late.deleted == []
    assert "may change it (mode 0660)" in late.found[0].text


def test_saved_output_is_read_again_whatever_the_umask(directory):
    mask = os.umask(0o002)
    try:
        log_parser.save_output(directory, ["n1"], b"lines")
    finally:
        os.umask(mask)
    assert log_parser.read_saved_output(directory) == log_parser.SavedOutput(("n1",), b"lines")


def test_a_retained_allocation_is_deleted_once_its_time_is_over(tmp_path, directory, clear):
    note_retained(directory, 1000)
    assert overdue_retained(tmp_path, 1000.0) == [f"kept allocation a1: {UNTIL}: would be deleted"]
    cleared = clear(1000.0)
    (one,) = cleared.found
    assert (cleared.deleted, cleared.connection.close.called, one.done) == ([("mine", "a1")], True, True)
    assert str(one) == f"kept allocation a1: deleted jobs.batch mine/x; {UNTIL}"
    assert clear(2000.0).found == []


def test_without_a_note_nothing_is_retained(clear):
    assert clear(1.0).found == []


def test_a_cluster_that_does_not_answer_keeps_the_note_for_another_time(directory, clear):
    note_retained(directory, 1)
    (one,) = clear(2.0, Mock(side_effect=MlhpcError("nobody answers"))).found
    text = "kept allocation a1: not deleted, stays noted in .*: nobody answers"
    assert (one.done, bool(re.fullmatch(text, str(one)))) == (False, True)
    assert len(clear(2.0).found) == 1


@pytest.mark.parametrize(
    ("url", "gone", "text"),
    [
        pytest.param(
            "https://there:6443",
            False,
            f"it is in {SERVER}, and the kubeconfig leads to https://there:6443 now",
            id="they are another server's",
        ),
        pytest.param(SERVER, True, "does not say in which cluster it is", id="nobody knows where they are"),
    ],
)
def test_objects_are_left_alone(directory, clear, url, gone, text):
    note_retained(directory, 1)
    if gone:
        (directory / LOCATION_FILE).unlink()
    cleared = clear(2.0, url=url)
    (one,) = cleared.found
    assert (one.done, cleared.deleted, text in one.text) == (False, [], True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"until": 1}', '{"until": "x", "directory": "/a"}', "\xff\xfe"]
)
def test_a_damaged_note_is_reported_and_hinders_no_other(tmp_path, directory, clear, text):
    note_retained(directory, 1)
    (tmp_path / "kept" / "a0.json").write_text(text, encoding="latin-1")
    bad, good = clear(2.0).found
    assert (bad.done, good.done, "a0.json" in bad.text) == (False, True, True)


def test_a_note_that_another_session_took_is_no_error(tmp_path, directory, clear):
    def end():
        next((tmp_path / "kept").glob("*.json")).unlink()
        return "deleted"

    note_retained(directory, 1)
    (one,) = clear(2.0, end).found
    assert one.done
