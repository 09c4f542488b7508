"""Notes of what is kept in a cluster: found when its time is over, whatever has become of the note or of the cluster."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes.keeping import clear_kept, kept_too_long, note
from pytest_mlhpc.provision.kubernetes.kinds.files import shipped
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.where import FILE, to_text, where_of

SERVER = "https://here:6443"
UNTIL = "it was kept until 1970-01-01 00:16:40 UTC"


@pytest.fixture
def directory(tmp_path):
    """The directory of an allocation that was made in a cluster."""
    found = tmp_path / "runs" / "session" / "a1"
    found.mkdir(parents=True)
    (found / FILE).write_text(to_text(where_of(KubernetesSettings(), "mine", server(), shipped("job"))))
    return found


def server(url=SERVER):
    """Return what stands for a connection; what it is asked is up to the test's `end`."""
    return Mock(server=url, authority="")


@pytest.fixture
def clear(tmp_path):
    """Clear what was kept for too long; return what came of it, what was deleted, and the connection."""

    def go(now, end=lambda *_: "deleted jobs.batch mine/x", url=SERVER):
        deleted, connection = [], server(url)

        def ending(api, where, allocation):
            deleted.append((where.namespace, allocation))
            return end()

        found = list(clear_kept(tmp_path, ending, lambda _where: connection, now))
        return SimpleNamespace(found=found, deleted=deleted, connection=connection)

    return go


def test_what_is_kept_stays_until_its_time_is_over(tmp_path, directory, clear):
    note(directory, 1000)
    early = clear(999.0)
    assert (early.found, early.deleted, kept_too_long(tmp_path, 999.0)) == ([], [], [])


def test_what_is_kept_is_deleted_once_its_time_is_over(tmp_path, directory, clear):
    note(directory, 1000)
    assert kept_too_long(tmp_path, 1000.0) == [f"kept allocation a1: {UNTIL}: would be deleted"]
    cleared = clear(1000.0)
    (one,) = cleared.found
    assert (cleared.deleted, cleared.connection.close.called, one.done) == ([("mine", "a1")], True, True)
    assert str(one) == f"kept allocation a1: deleted jobs.batch mine/x; {UNTIL}"
    assert clear(2000.0).found == []


def test_nothing_is_kept_where_nothing_was_noted(clear):
    assert clear(1.0).found == []


def test_a_cluster_that_does_not_answer_keeps_the_note_for_another_time(directory, clear):
    note(directory, 1)
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
    note(directory, 1)
    if gone:
        (directory / FILE).unlink()
    cleared = clear(2.0, url=url)
    (one,) = cleared.found
    assert (one.done, cleared.deleted, text in one.text) == (False, [], True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"until": 1}', '{"until": "x", "directory": "/a"}', "\xff\xfe"]
)
def test_a_damaged_note_is_told_and_hinders_no_other(tmp_path, directory, clear, text):
    note(directory, 1)
    (tmp_path / "kept" / "a0.json").write_text(text, encoding="latin-1")
    bad, good = clear(2.0).found
    assert (bad.done, good.done, "a0.json" in bad.text) == (False, True, True)


def test_a_note_that_another_session_took_is_no_error(tmp_path, directory, clear):
    def end():
        next((tmp_path / "kept").glob("*.json")).unlink()
        return "deleted"

    note(directory, 1)
    (one,) = clear(2.0, end).found
    assert one.done
