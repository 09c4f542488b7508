"""Comments of merge requests, against a stand-in for what GitLab's API does with them."""

import json
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

import pytest
from http_sink import HttpSink, Reply, json_reply

from pytest_mlhpc.alert.channels.base import DeliveryError
from pytest_mlhpc.ci.comparison import CommitComparison, MetricRow, marker
from pytest_mlhpc.ci.gitlab import MergeRequestNotes, NotesPlace, place_of, read, write
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.report.morning import Morning

TOKEN = "glpat-secret"  # noqa: S105 - of the stand-in
COMMIT = "c0ffee" * 6 + "c0ff"
_PATH = re.compile(
    r"/api/v4/projects/42/(?:repository/commits/(\w+)/merge_requests|merge_requests/(\d+)/notes(?:/(\d+))?)"
)


@dataclass
class Requests:
    """The merge requests of one project: number -> comments; which are of a commit; user 7 has the token."""

    of_commit: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {1: [], 2: []})

    def answer(self, request):  # noqa: PLR0911 - one for each kind of request
        url = urllib.parse.urlsplit(request.path)
        if request.headers.get("private-token") != TOKEN:
            return json_reply({"message": "401 Unauthorized"}, 401)
        if url.path == "/api/v4/user":
            return json_reply({"id": 7, "username": "bot"})
        commit, number, note = _PATH.fullmatch(url.path).groups()
        if commit:
            return json_reply(self.of_commit.get(commit, []))
        notes = self.notes[int(number)]
        if request.method == "GET":
            end = int(dict(urllib.parse.parse_qsl(url.query))["page"]) * 100
            return json_reply(notes[::-1][end - 100 : end])
        if note is None:
            return json_reply(self.add(int(number), request.json["body"], 7), 201)
        (changed,) = [one for one in notes if one["id"] == int(note)]
        if changed["author"]["id"] != 7:
            return json_reply({"message": "403 Forbidden"}, 403)
        changed["body"] = request.json["body"]
        return json_reply(changed)

    def add(self, number, body, author):
        note = {"id": 1000 * number + len(self.notes[number]), "body": body, "author": {"id": author}}
        self.notes[number].append(note)
        return note


@pytest.fixture
def requests():
    return Requests()


@pytest.fixture
def server(requests):
    with HttpSink(requests.answer) as sink:
        yield sink


def notes_of(server, *, request="1", commit=COMMIT, limit_s=300.0):
    return MergeRequestNotes(
        NotesPlace(f"{server.url}/api/v4", "42", TOKEN, request, commit), limit_s=limit_s
    )


def comparison(value=1.0, system="cirrus", commit=COMMIT):
    row = MetricRow("test_a", "rate", "samples/s", "passed", value)
    return CommitComparison(
        system, commit, (row,), (), Morning("change", "1 of 1 measured", counts={"passed": 1})
    )


def test_a_comparison_is_a_comment_of_its_merge_request(server, requests):
    assert notes_of(server).post(comparison()) == ["1"]
    assert ["1 passed" in note["body"] for note in requests.notes[1]] == [True]


def test_a_newer_one_is_written_over_it(server, requests):
    for value in (1.0, 2.0, 2.0):
        notes_of(server).post(comparison(value))
    assert ["2 samples/s" in note["body"] for note in requests.notes[1]] == [True]
    assert [one.method for one in server.requests].count("PUT") == 1


def test_each_system_has_a_comment_of_its_own(server, requests):
    for system in ("cirrus", "archer2", "cirrus"):
        notes_of(server).post(comparison(system=system))
    assert len(requests.notes[1]) == 2


def test_a_comment_of_somebody_else_with_our_mark_is_left_alone(server, requests):
    requests.add(1, marker("cirrus"), author=666)
    notes_of(server).post(comparison())
    assert requests.notes[1][0]["body"] == marker("cirrus")
    assert len(requests.notes[1]) == 2


def test_ours_is_found_behind_hundreds_of_others(server, requests):
    notes_of(server).post(comparison())
    for _ in range(250):
        requests.add(1, "discussion", author=666)
    notes_of(server).post(comparison(2.0))
    assert len(requests.notes[1]) == 251


def test_code_of_a_merge_request_cannot_speak_of_another_commit(server, requests):
    requests.of_commit["feed" * 10] = [{"iid": 2, "state": "opened"}]
    assert notes_of(server).post(comparison(commit="feed" * 10)) == []
    assert requests.notes == {1: [], 2: []}


def test_what_a_schedule_collected_goes_to_the_open_merge_requests_of_its_commit(server, requests):
    requests.of_commit[COMMIT] = [{"iid": 1, "state": "merged"}, {"iid": 2, "state": "opened"}]
    assert notes_of(server, request="", commit="another").post(comparison()) == ["2"]
    assert len(requests.notes[2]) == 1


@pytest.mark.parametrize("commit", ["", "../../user", "main"])
def test_what_is_no_commit_is_never_put_into_an_address(server, commit):
    assert notes_of(server, request="").post(comparison(commit=commit)) == []
    assert not server.requests


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (json_reply({"message": "401 Unauthorized"}, 401), "401"),
        (json_reply({"message": "no"}, 503), "503"),
        (json_reply({"message": "slow down"}, 429), "429"),
        (Reply(302, b"", {"Location": "http://evil.example/"}), "redirect"),
        (Reply(200, b"<html>login</html>"), "not answer with JSON"),
        (json_reply(["a"]), "not GitLab's"),
        (Reply(fault="reset"), ""),
        (Reply(fault="hang"), "no answer within"),
    ],
)
def test_what_gitlab_refuses_is_reported_without_the_token(server, reply, text):
    server.then(reply)
    with pytest.raises(DeliveryError) as error:
        notes_of(server, limit_s=0.5 if reply.fault == "hang" else 300.0).post(comparison())
    assert text in str(error.value)
    assert TOKEN not in str(error.value)


def test_files_are_read_as_they_were_written(tmp_path):
    comparisons = [comparison(), comparison(system="../ü x", commit="")]
    paths = write(tmp_path / "notes", comparisons)
    assert all(path.parent == tmp_path / "notes" for path in paths)
    assert sorted(read(tmp_path / "notes"), key=str) == sorted(comparisons, key=str)


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"system": 1, "commit": ""}', '{"system": "a", "commit": "", "more": 1}', "[" * 100_000,
        '{"system": "a", "commit": "", "schema": 99}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_refused_by_name(tmp_path, content):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    with pytest.raises(StoreError, match=r"a\.json"):
        read(tmp_path)


ENVIRON = {"CI_API_V4_URL": "https://gitlab.example.org/api/v4", "CI_PROJECT_ID": "42"}


def test_a_missing_token_is_a_usage_error():
    with pytest.raises(UsageError, match="MLHPC_GITLAB_TOKEN is not set"):
        place_of(ENVIRON)


def test_a_token_with_a_line_break_in_it_is_refused_and_not_shown():
    with pytest.raises(UsageError) as error:
        place_of({**ENVIRON, "MLHPC_GITLAB_TOKEN": "glpat\nX-Evil: 1"})
    assert "glpat" not in str(error.value)
    assert place_of({**ENVIRON, "MLHPC_GITLAB_TOKEN": f"{TOKEN}\n"}).token == TOKEN


@pytest.fixture
def post(server, tmp_path, monkeypatch, mlhpc):
    """Return what posts a folder with one comparison, in a job of a merge request."""
    job = {**ENVIRON, "CI_API_V4_URL": f"{server.url}/api/v4", "MLHPC_GITLAB_TOKEN": TOKEN}
    for name, value in {**job, "CI_MERGE_REQUEST_IID": "1", "CI_COMMIT_SHA": COMMIT}.items():
        monkeypatch.setenv(name, value)
    write(tmp_path, [comparison()])
    return lambda code=0: mlhpc("ci", "note", "--post", tmp_path, code=code)


def test_the_command_posts_what_lies_in_a_folder(post):
    assert post().out == "cirrus, commit c0ffeec0ffee: !1\n"


@pytest.mark.parametrize("status", [503, 403])
def test_what_gitlab_does_not_take_is_tried_by_the_next_pipeline(post, server, status):
    server.then(Reply(status, json.dumps({"message": TOKEN}).encode()))
    printed = post(code=75)
    assert f"answered {status}" in printed.err
    assert TOKEN not in printed.out + printed.err


def test_nothing_to_post_is_no_error(tmp_path, mlhpc):
    assert "nothing to post" in mlhpc("ci", "note", "--post", tmp_path / "none").out
