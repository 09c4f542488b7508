"""From night to night: what is announced, once, and what is not."""

import re
from dataclasses import replace

import pytest
from alert_bads import bad, night, seen, series

from pytest_mlhpc.alert.channels.base import IncidentState, Kind
from pytest_mlhpc.alert.incidents import advance
from pytest_mlhpc.alert.messages import message_of
from pytest_mlhpc.alert.model import AcceptedSubject, Ack, Book, KnownIssue, Mute, Subject

#: A book that was advanced before: not a new one.
KEPT = Book(last_ns=night(20))
A, B = series("unet[] name=a"), series("resnet50[] name=b")


def told(book, *observations):
    """Advance over nights; return the book and the states that were told, by night."""
    states = []
    for observation in observations:
        book, changes = advance(book, observation)
        states.append([change.state.value for change in changes])
    return book, states


MORE = [bad(series(f"{name}[] name=x"), since=30) for name in "bcd"]


@pytest.mark.parametrize(
    ("observations", "states"),
    [
        pytest.param([seen(30, bad(A)), seen(31, bad(A)), seen(32, known=(A,)), seen(33, known=(A,))],
                     [["new"], [], ["resolved"], []], id="a regression is told when it comes and when it goes"),
        pytest.param([seen(30, bad(A)), seen(30, bad(A))], [["new"], []],
                     id="the same night twice tells nothing twice"),
        pytest.param([seen(30, bad(A)), seen(12, bad(A)), seen(31, bad(A))], [["new"], [], []],
                     id="a clock that was set back tells nothing twice"),
        pytest.param([seen(30 + at, bad(A, worse_by=loss)) for at, loss in enumerate((0.06, 0.08, 0.10, 0.11, 0.06))],
                     [["new"], [], ["worse"], [], []], id="a loss that grows by half is told as worse and once"),
        pytest.param([seen(30, bad(A)), seen(31, bad(A), *MORE), seen(32, bad(A), *MORE)], [["new"], ["worse"], []],
                     id="much more of the same cause is told once"),
        pytest.param([seen(30, bad(A), bad(B)), seen(31, bad(A), known=(B,)), seen(32, known=(A, B))],
                     [["new"], [], ["resolved"]], id="an incident is over when all of it is"),
    ],
)  # fmt: skip
def test_what_is_told_from_night_to_night(observations, states):
    assert told(KEPT, *observations)[1] == states


def test_a_series_without_a_figure_stays_as_it_was():
    book, states = told(KEPT, seen(30, bad(A)), seen(31))
    assert (states, book.incidents[0].open) == ([["new"], []], True)


@pytest.mark.parametrize(
    ("benchmarks", "since", "loss", "states", "incidents"),
    [
        ("a", 31, 0.06, [["new"], ["worse"]], 1),
        ("abc", 31, 0.06, [["new"], ["worse"]], 1),
        ("a", 32, 0.06, [["new"], ["new"]], 2),
    ],
    ids=["one more", "one more of many", "another cause"],
)
def test_what_is_found_later_is_told_as(benchmarks, since, loss, states, incidents):
    first = [bad(series(f"{name}[] name=x")) for name in benchmarks]
    late = bad(B, since=since, worse_by=loss)
    book, found = told(KEPT, seen(30, *first), seen(32, *first, late))
    assert (found, len(book.incidents)) == (states, incidents)


def test_the_same_series_months_later_is_another_incident_with_another_id(opened):
    book, states = told(opened, seen(31, known=(A,)), seen(32, bad(A, since=30)))
    assert states == [["resolved"], ["new"]]
    assert book.incidents[0].id not in {opened.incidents[0].id, ""}


def test_every_message_has_an_id_of_its_own_and_its_incident_one_that_stays():
    book, incidents = KEPT, []
    for observation in (seen(30, bad(A)), seen(31, bad(A, worse_by=0.2)), seen(32, known=(A,))):
        book, changes = advance(book, observation)
        incidents += [change.incident for change in changes]
    ids = {one.message_id for one in incidents}
    assert (len(ids), len({one.id for one in incidents})) == (3, 1)
    assert all(re.fullmatch("[a-z0-9-]{1,64}", name) for name in ids)


def test_a_new_book_announces_what_is_of_this_night():
    _book, states = told(Book(), seen(30.2, bad(A, since=30)))
    assert states == [["new"]]


def test_a_lost_book_announces_nothing_older_than_a_night_but_keeps_it_and_tells_its_end():
    _book, states = told(Book(), seen(32, bad(A, since=30)), seen(33, bad(A, since=30)), seen(34, known=(A,)))
    assert states == [[], [], ["resolved"]]


def test_an_incident_has_the_same_id_after_the_book_was_lost(opened):
    lost, _ = advance(Book(), seen(32, bad(A, since=30)))
    assert lost.incidents[0].id == opened.incidents[0].id


@pytest.fixture
def opened():
    """A book with one open incident."""
    return advance(KEPT, seen(30, bad(A)))[0]


def acknowledged(book, until):
    ack = Ack(night(until), "known", "me", night(30))
    return replace(book, incidents=(replace(book.incidents[0], ack=ack),))


def muted(book, until):
    return replace(book, mutes={"cirrus": Mute(night(until), "maintenance", "me")})


def test_an_acknowledged_one_is_silent_also_when_it_becomes_worse(opened):
    book, states = told(acknowledged(opened, 40), seen(31, bad(A, worse_by=0.3)))
    assert (states, book.incidents[0].state) == ([[]], IncidentState.ACKNOWLEDGED)


def test_when_the_acknowledgement_ends_before_the_problem_it_is_told_again_once(opened):
    nights = [seen(number, bad(A)) for number in (31, 32, 33)]
    assert told(acknowledged(opened, 31.5), *nights)[1] == [[], ["continuing"], []]


@pytest.mark.parametrize("silenced", [acknowledged, muted])
def test_what_was_announced_ends_aloud_though_it_was_silenced(opened, silenced):
    assert told(silenced(opened, 40), seen(31, known=(A,)))[1] == [["resolved"]]


def test_of_a_muted_system_nothing_is_told_that_began_and_ended_meanwhile():
    assert told(muted(KEPT, 40), seen(30, bad(A)), seen(31, known=(A,)), seen(41))[1] == [[], [], []]


def test_what_is_still_bad_when_the_mute_ends_is_new_then():
    book, states = told(muted(KEPT, 31.5), *(seen(number, bad(A)) for number in (30, 31, 32)))
    assert (states, book.mutes) == ([[], [], ["new"]], {})


def test_what_is_gone_is_over_with_its_reason(opened):
    _book, changes = advance(opened, seen(31, gone={A: "no longer expected"}))
    assert [change.incident.members[0].reason for change in changes] == ["no longer expected"]


def test_nodes_and_regressions_of_one_night_are_different_incidents():
    node = Subject(Kind.NODES, "cirrus", "standard", node="n7")
    _book, changes = advance(KEPT, seen(30, bad(A), bad(node)))
    assert sorted(change.incident.kind.value for change in changes) == ["nodes", "regression"]


def test_weak_evidence_elsewhere_tells_the_code_from_the_system_but_is_not_named_and_begins_no_incident():
    weak = bad(series("unet[] name=a", system="alps"))
    book, changes = advance(KEPT, seen(30, bad(A)), lambda _bads: [weak])
    assert (changes[0].incident.scope, changes[0].incident.systems) == ("code", ("alps", "cirrus"))
    assert [member.now.subject for member in book.incidents[0].members] == [A]
    assert changes[0].incident.named == ("cirrus:standard:unet[] name=a",)
    _book, changes = advance(KEPT, seen(30), lambda _bads: [weak])
    assert not changes


def test_a_benchmark_that_joins_an_incident_is_named_first_in_its_next_message():
    many = [bad(series(f"many_{number}"), worse_by=0.2) for number in range(60)]
    late = bad(series("late"), since=31, worse_by=0.02)
    _book, changes = advance(advance(KEPT, seen(30, *many))[0], seen(31, *many, late))
    (change,) = changes
    lines = message_of(change.incident, change.state, night(31)).text.splitlines()
    assert "New in it: late." in lines
    assert "late: " in next(line for line in lines if line.startswith("  "))


def test_old_acceptances_are_forgotten():
    accepted = (
        AcceptedSubject(A, night(-500), night(-500), "r", "me"),
        AcceptedSubject(B, night(1), night(1), "r", "me"),
    )
    book, _ = advance(replace(KEPT, accepted=accepted), seen(30))
    assert [one.subject for one in book.accepted] == [B]


def living_with(book, until, *subjects):
    """Return the book with a known issue of these series."""
    ack = Ack(night(until), "known", "me", night(20))
    bads = tuple(bad(one).subject for one in subjects)
    return replace(book, issues=(KnownIssue("x", bads, ack, "HPC-7"),))


def test_what_comes_back_of_a_known_issue_begins_acknowledged_with_its_ticket_and_ends_in_silence():
    nights = [seen(30, bad(A)), seen(31, bad(A)), seen(32, known=(A,)), seen(33, bad(A, since=33))]
    book, states = told(living_with(KEPT, 40, A), *nights)
    assert states == [[], [], [], []]
    (incident,) = book.incidents
    assert (incident.state, incident.ticket, incident.ack.by) == (IncidentState.ACKNOWLEDGED, "HPC-7", "me")


def test_what_fell_in_the_same_night_as_a_known_issue_is_told_by_itself():
    book, states = told(living_with(KEPT, 40, A), seen(30, bad(A), bad(B)))
    assert states == [["new"]]
    assert sorted((one.announced, len(one.members), one.messages) for one in book.incidents) == [
        (True, 1, 0), (True, 1, 1),
    ]  # fmt: skip


def test_a_known_issue_ends_at_its_date_and_is_told_then():
    nights = [seen(30, bad(A)), seen(31, bad(A)), seen(32, bad(A))]
    book, states = told(living_with(KEPT, 30.5, A), *nights)
    assert (states, book.issues) == ([[], ["continuing"], []], ())


def test_another_metric_of_the_same_test_is_the_same_known_issue():
    issue = living_with(KEPT, 40, A)
    subject = replace(bad(A).subject, metric="io_time", environment="other")
    assert issue.issue_of(subject, night(30)) is not None
    assert issue.issue_of(replace(subject, partition="elsewhere"), night(30)) is None
