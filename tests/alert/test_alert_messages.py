"""What people read."""

import html
import html.parser
import json
from dataclasses import replace

import pytest
from alert_bads import bad, night, seen, series

from pytest_mlhpc.alert.channels.base import IncidentState, Kind, as_json
from pytest_mlhpc.alert.incidents import advance
from pytest_mlhpc.alert.messages import chance_text, message_of, short
from pytest_mlhpc.alert.model import Book, Subject
from pytest_mlhpc.node.protocol.schema import from_json, to_json

KEY = "suites/training/test_resnet50.py::test_resnet50[a::b-4]"
HOSTILE = "x</script><img src=x onerror=alert(1)>\x1b[31m\n.\n\"'é"


def message(*bads, state=IncidentState.NEW, at=30.0, **changes):
    book, told = advance(Book(last_ns=night(1)), seen(at, *bads, **changes))
    if state is IncidentState.RESOLVED:
        _book, told = advance(book, seen(at + 3, known=tuple(one.subject for one in bads)))
    return message_of(told[0].incident, told[0].state, night(at))


def test_one_benchmark_is_named_with_its_loss_and_night():
    found = message(bad(series(KEY), worse_by=0.061), bad(series(KEY, "compute_throughput"), worse_by=0.06))
    assert found.title == "new: cirrus: test_resnet50[a::b-4] 6.1 % slower since 2027-01-31"


def test_all_benchmarks_are_one_line_in_the_title():
    names = [f"{letter}[] name=x" for letter in "abcde"]
    measured = {"cirrus": frozenset(f"standard:{name}" for name in names)}
    found = message(*[bad(series(name)) for name in names], measured=measured)
    assert found.title == "new: cirrus: input and output of all 5 benchmarks 6.0 % slower since 2027-01-31"
    assert len(found.problems) == 5


def test_the_text_says_what_changed_and_what_to_type_next():
    text = message(bad(series(KEY), causes=("noted: driver 550 to 570", "driver 550 -> 570"))).text
    changed = "Changed then: noted: driver 550 to 570; driver 550 -> 570."
    texts = (changed, f"mlhpc history '{KEY}'", "mlhpc alert ack regr-cirrus-")
    assert [each for each in texts if each not in text] == []


def test_where_nothing_changed_the_system_is_suspected():
    assert "suspect the system, not the code" in message(bad()).text


@pytest.mark.parametrize(
    ("commits", "others", "suspected"),
    [(("a", "a"), 1, True), (("a", "b"), 1, False), (("a", "a"), 0, False), ((), 1, False)],
    ids=["at one commit", "at two commits", "all that was measured", "at no commit"],
)
def test_the_code_is_suspected_where_two_systems_moved_at_one_commit_and_another_benchmark_did_not(
    commits, others, suspected
):
    causes = [(f"commit {commit} -> c",) for commit in commits] or [(), ()]
    bads = [
        bad(series(KEY, system=name), causes=why)
        for name, why in zip(("alps", "cirrus"), causes, strict=True)
    ]
    measured = {name: frozenset([f"standard:{KEY}", *map(str, range(others))]) for name in ("alps", "cirrus")}
    found = message(*bads, measured=measured)
    assert found.title.endswith("on each of them: suspect the code" if suspected else "on each of them")
    assert "suspect the system" not in found.text


def test_a_node_that_all_runs_had_is_named():
    assert "on node n7" in message(bad(nodes=("n7",))).title


BY_OWNER = [
    bad(series(f"test_{number}"), owner=owner)
    for number, owner in enumerate(["ada", "bob", "ada", "", "cy", "dee"])
]


@pytest.mark.parametrize(
    ("bads", "line", "owners"),
    [
        (BY_OWNER[:1], "Owner: ada", ("ada",)),
        ([BY_OWNER[0], bad(series("test_0", "compute_throughput"), owner="ada")], "Owner: ada", ("ada",)),
        (BY_OWNER[1:3], "Owner: ada (1), bob (1)", ("ada", "bob")),
        (BY_OWNER, "Owner: ada (2), bob (1), cy (1) and 1 more", ("ada", "bob", "cy", "dee")),
        (BY_OWNER[3:4], "", ()),
        ([bad(owner="<b>, ada")], "Owner: <b>, ada", ("<b>", "ada")),
    ],
    ids=["of one", "of one with two metrics", "of two", "of many", "without owner", "of two for one test"],
)
def test_the_owners_are_named_with_the_number_of_their_benchmarks(bads, line, owners):
    found = message(*bads)
    named = [text for text in found.text.splitlines() if text.startswith("Owner")]
    assert (named, found.owners) == ([line] if line else [], owners)
    assert (f"<p>{html.escape(line)}</p>" in found.html) == bool(line)
    assert {one["owner"] for one in as_json(found)["problems"]} == {one.owner for one in bads}
    assert message(*bads, state=IncidentState.RESOLVED).owners == owners


def test_what_is_over_says_so_and_asks_for_nothing():
    found = message(bad(), state=IncidentState.RESOLVED)
    assert found.title.startswith("resolved: cirrus: ")
    assert ["Over: the figures are back." in found.text, "mlhpc alert ack" in found.text] == [True, False]
    assert found.ended_ns > found.started_ns


@pytest.mark.parametrize(
    ("kind", "fields", "title"),
    [
        (Kind.STALE, {"benchmark": KEY}, "not recorded, though expected every night"),
        (Kind.FAILURE, {"benchmark": KEY}, "failed: its reason"),
        (Kind.NODES, {"node": "n7"}, "1 node unfit: n7"),
    ],
)
def test_every_kind_has_words_of_its_own(kind, fields, title):
    found = message(bad(Subject(kind, "cirrus", "standard", **fields), worse_by=0.0, reason="its reason"))
    assert title in found.title
    assert [words for words in ("its reason", "mlhpc alert ack") if words not in found.text] == []


def test_hostile_names_stay_text():
    found = message(bad(series(HOSTILE), causes=(HOSTILE,)))
    assert found.title.isprintable()
    assert "\x1b" not in found.text
    assert "<img" not in found.html
    html.parser.HTMLParser().feed(found.html)


def test_titles_and_texts_have_a_length_that_can_be_sent():
    found = message(*(bad(series(f"{number}{'x' * 500}")) for number in range(500)))
    assert len(found.title) <= 160
    assert "and 460 more" in found.text
    assert len(found.text) < 30_000


def test_a_message_survives_the_outbox_and_is_json_for_programs():
    found = message(bad())
    assert from_json(type(found), json.loads(json.dumps(to_json(found)))) == found
    assert json.loads(json.dumps(as_json(found)))["kind"] == "regression"


def test_labels_are_those_that_all_members_share():
    found = message(bad(series(KEY)), bad(series(KEY, "compute_throughput")))
    where = {"system": "cirrus", "partition": "standard", "benchmark": KEY}
    assert found.labels == {"kind": "regression", "scope": "benchmarks", **where}


def test_a_key_that_is_none_of_ours_is_shown_as_it_is():
    assert short("my own benchmark") == "my own benchmark"


@pytest.mark.parametrize(
    ("chance", "text"),
    [
        (0.0, "chance less than 1 in 1,000 times: suspect one cause."),
        (0.25, "chance in 1 of 4 cases: each may have its own cause."),
        (None, ""),
    ],
)
def test_what_is_told_together_says_how_likely_that_is_chance(chance, text):
    incident = advance(Book(last_ns=night(20)), seen(30, bad()))[1][0].incident
    found = chance_text(replace(incident, chance=chance))
    assert found.endswith(text)
    assert (
        found in message_of(replace(incident, chance=chance), IncidentState.NEW, night(30)).text
    ) or not text
