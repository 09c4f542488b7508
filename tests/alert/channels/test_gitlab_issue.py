"""Issues of GitLab: one for each incident, whatever is repeated, lost or done by people."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from alert_messages import HOSTILE, NEW, RESOLVED, STARTED_NS, WORSE
from gitlab_api import GitLab, gitlab_sink
from http_sink import RESET, Reply
from refusals import refusal

from pytest_mlhpc.alert.channels import gitlab_issue

pytestmark = pytest.mark.servers


@pytest.fixture
def gitlab():
    return GitLab(now=datetime.fromtimestamp(STARTED_NS // 1_000_000_000, UTC) + timedelta(hours=2))


@pytest.fixture
def server(gitlab):
    with gitlab_sink(gitlab) as sink:
        yield sink


@pytest.fixture
def channel(server):
    return open_issues(server)


def open_issues(server, project="hpc/bench", **more):
    token = "glpat-secret\n"  # noqa: S105 - as a file has it, with the end of its line
    settings = gitlab_issue.Settings(url=server.url, project=project, token=token, limit_s=300.0, **more)
    (channel,) = gitlab_issue.open_channels("issues", settings)
    return channel


def writes(server):
    return [request.method for request in server.requests if request.method != "GET"]


def comments(gitlab, iid=1):
    return [note["body"] for note in gitlab.notes[iid] if not note["system"]]


def said_of(issue):
    return issue["labels"], issue["state"], issue["confidential"]


def test_opens_an_issue_with_the_message_for_people_and_labels_for_lists(channel, gitlab):
    channel.send(NEW)

    (issue,) = gitlab.issues
    assert (issue["title"], NEW.text in issue["description"]) == (NEW.title, True)
    assert said_of(issue) == (["mlhpc"], "opened", False)


def test_opens_a_confidential_issue_in_a_project_that_is_named_by_its_number(server, gitlab):
    open_issues(server, "42", confidential=True, labels=("perf", "nightly")).send(NEW)

    assert said_of(gitlab.issues[0]) == (["perf", "nightly"], "opened", True)


def state_and_comments(gitlab):
    """Return what became of the only issue."""
    (issue,) = gitlab.issues
    return issue["state"], len(comments(gitlab))


def test_comments_on_a_change_and_closes_what_is_resolved_and_does_nothing_twice(channel, gitlab, server):
    for message in (NEW, WORSE, RESOLVED):
        channel.send(message)
        before = writes(server)
        channel.send(message)
        assert writes(server) == before

    assert state_and_comments(gitlab) == ("closed", 2)


def test_another_incident_gets_an_issue_of_its_own(channel, gitlab):
    channel.send(NEW)
    channel.send(dataclasses.replace(NEW, id="other-1", incident="cirrus-4f2a1"))

    assert len(gitlab.issues) == 2


def test_a_lost_answer_to_an_opening_does_not_open_two(channel, gitlab, server):
    opens = server.answer

    def take_and_break(request):
        opens(request)
        return Reply(fault=RESET) if request.method == "POST" else opens(request)

    server.answer = take_and_break
    assert refusal(channel.send, NEW, match="no answer").retry
    server.answer = opens

    channel.send(NEW)

    assert state_and_comments(gitlab) == ("opened", 0)


def test_goes_on_with_closing_after_a_comment_whose_process_died(channel, gitlab, server):
    channel.send(NEW)
    answers = server.answer
    down = Reply(503, b"GitLab is not responding")
    server.answer = lambda request: down if request.method == "PUT" else answers(request)
    assert refusal(channel.send, RESOLVED, match="answered 503: GitLab is not responding").retry
    server.answer = answers

    channel.send(RESOLVED)

    assert state_and_comments(gitlab) == ("closed", 1)


def test_comments_on_an_issue_that_a_person_closed_and_leaves_it_closed(channel, gitlab):
    channel.send(NEW)
    gitlab.issues[0]["state"] = "closed"

    channel.send(WORSE)

    assert state_and_comments(gitlab) == ("closed", 1)


@pytest.mark.parametrize(("first", "titles"), [(RESOLVED, []), (WORSE, [WORSE.title])])
def test_opens_an_issue_late_only_for_what_is_not_over(first, titles, channel, gitlab):
    channel.send(first)
    assert [issue["title"] for issue in gitlab.issues] == titles


def test_takes_no_mark_from_anybody_else(channel, gitlab):
    channel.send(NEW)
    mine = gitlab.issues.pop()
    forged = gitlab.add_issue("forged", mine["description"], author=99)

    channel.send(NEW)

    assert len(gitlab.issues) == 2
    gitlab.add_note(gitlab.issues[1], f"<!-- mlhpc-message {WORSE.id} -->", author=99)
    channel.send(WORSE)
    assert len(comments(gitlab, gitlab.issues[1]["iid"])) == 2
    assert comments(gitlab, forged["iid"]) == []


def test_finds_its_issue_and_its_comment_behind_hundreds_of_others(channel, gitlab):
    for number in range(230):
        gitlab.add_issue(f"another {number}", "", author=gitlab.me)
    channel.send(NEW)
    issue = gitlab.issues[-1]
    channel.send(WORSE)
    for number in range(230):
        gitlab.add_note(issue, f"words {number}", author=99)

    channel.send(WORSE)

    assert (len(gitlab.issues), len(comments(gitlab, issue["iid"]))) == (231, 231)


def test_text_from_outside_runs_no_command_names_nobody_and_makes_no_mark(channel, gitlab):
    channel.send(HOSTILE)

    (issue,) = gitlab.issues
    assert (issue["state"], "\n/close" in issue["description"]) == ("opened", True)
    assert "<!-- mlhpc-incident other-1 -->" not in issue["description"]
    channel.send(dataclasses.replace(NEW, id="other-1", incident="other-1"))
    assert len(gitlab.issues) == 2


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        ({"token": "another"}, "answered 401: .*401 Unauthorized"),
        ({"project": "a/b", "number": 1}, "answered 404: .*404 Project Not Found"),
        ({"may_write": False}, "answered 403: .*insufficient_scope"),
    ],
)
def test_says_in_gitlabs_words_why_it_refuses_and_shows_no_token(break_it, words, channel, gitlab):
    for name, value in break_it.items():
        setattr(gitlab, name, value)

    error = refusal(channel.send, NEW, match=f"^issues: http://127.0.0.1:[0-9]+: {words}")
    assert error.retry
    assert "glpat" not in str(error)


def test_hides_a_token_that_an_answer_repeats(channel, server):
    server.then(Reply(500, b"invalid token glpat-secret in header"))
    refusal(channel.send, NEW, match=r"answered 500: invalid token \*\*\* in header")


@pytest.mark.parametrize("body", [b"<html>Sign in</html>", b'{"issues": []}', b"[1, 2]"])
def test_says_that_the_address_is_wrong_when_something_else_answers(body, channel, server):
    server.then(Reply(200, body))

    assert refusal(channel.send, NEW, match="check url").retry
    assert writes(server) == []


def test_reads_no_list_without_end(channel, server):
    server.answer = lambda _request: Reply(200, b"[" + b",".join([b"{}"] * 100) + b"]")

    assert not refusal(channel.send, NEW, match="more than 5000 issues").retry


def test_does_nothing_when_all_open_incidents_are_told_again(channel, server):
    channel.resend_open([NEW, WORSE])

    assert server.requests == []
