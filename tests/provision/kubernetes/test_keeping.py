"""Notes of what is kept in a cluster: found when its time is over, whatever has become of the note or of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes.keeping import clear_kept, kept_too_long, note
from pytest_mlhpc.provision.kubernetes.kinds.files import shipped
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.where import FILE, to_text, where_of

SERVER = "https://here:6443"


class Server:
    """Stands for a connection; what it is asked is up to the test's `end`."""

    authority = ""

    def __init__(self, server: str = SERVER) -> None:
        self.server, self.closed = server, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of an allocation that was made in a cluster."""
    found = tmp_path / "runs" / "session" / "a1"
    found.mkdir(parents=True)
    (found / FILE).write_text(to_text(where_of(KubernetesSettings(), "mine", Server(), shipped("job"))))
    return found


def clear(state: Path, now: float, end=None, server: Server | None = None):
    asked: list[tuple[str, str]] = []

    def ending(_api, where, allocation):
        asked.append((where.namespace, allocation))
        return "deleted jobs.batch mine/x"

    connection = server or Server()
    found = list(clear_kept(state, end or ending, lambda _where: connection, now))
    return found, asked, connection


def test_what_is_kept_stays_until_its_time_is_over(tmp_path, directory):
    note(directory, 1000)
    assert clear(tmp_path, 999.0)[:2] == ([], [])
    assert kept_too_long(tmp_path, 999.0) == []
    assert kept_too_long(tmp_path, 1000.0) == [
        "kept allocation a1: it was kept until 1970-01-01 00:16:40 UTC: would be deleted"
    ]
    (one,), asked, connection = clear(tmp_path, 1000.0)
    assert (asked, connection.closed, one.done) == ([("mine", "a1")], True, True)
    assert (
        str(one) == "kept allocation a1: deleted jobs.batch mine/x; it was kept until 1970-01-01 00:16:40 UTC"
    )
    assert clear(tmp_path, 2000.0)[:2] == ([], [])


def test_nothing_is_kept_where_nothing_was_noted(tmp_path):
    assert clear(tmp_path, 1.0)[0] == []


def test_a_cluster_that_does_not_answer_keeps_the_note_for_another_time(tmp_path, directory):
    def end(*_):
        raise MlhpcError("nobody answers")

    note(directory, 1)
    (one,), _, _ = clear(tmp_path, 2.0, end)
    assert not one.done
    assert str(one).startswith("kept allocation a1: not deleted, stays noted in ")
    assert str(one).endswith(": nobody answers")
    assert len(clear(tmp_path, 2.0)[0]) == 1


def test_objects_of_another_server_are_left_alone(tmp_path, directory):
    note(directory, 1)
    (one,), asked, _ = clear(tmp_path, 2.0, server=Server("https://there:6443"))
    assert (one.done, asked) == (False, [])
    assert f"it is in {SERVER}, and the kubeconfig leads to https://there:6443 now" in one.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"until": 1}', '{"until": "x", "directory": "/a"}', "\xff\xfe"]
)
def test_a_damaged_note_is_told_and_hinders_no_other(tmp_path, directory, text):
    note(directory, 1)
    (tmp_path / "kept" / "a0.json").write_text(text, encoding="latin-1")
    bad, good = clear(tmp_path, 2.0)[0]
    assert (bad.done, good.done) == (False, True)
    assert "a0.json" in bad.text


def test_a_note_whose_directory_is_gone_says_that_nobody_knows_where_it_is(tmp_path, directory):
    note(directory, 1)
    (directory / FILE).unlink()
    (one,), asked, _ = clear(tmp_path, 2.0)
    assert (one.done, asked) == (False, [])
    assert "does not say in which cluster it is" in one.text


def test_a_note_that_another_session_took_is_no_error(tmp_path, directory):
    def end(*_):
        next((tmp_path / "kept").glob("*.json")).unlink()
        return "deleted"

    note(directory, 1)
    (one,), _, _ = clear(tmp_path, 2.0, end)
    assert one.done
