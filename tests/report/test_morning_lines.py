"""The lines of any morning page: how many, how long, and that nothing in them is obeyed."""

import html.parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.report.morning import (
    MOST_LINES,
    Morning,
    MorningItem,
    NodeOut,
    OpenAlert,
    as_html,
    message_of_morning,
    system_target,
)
from pytest_mlhpc.store.record import SeriesKey

#: Hypothesis prints no page that is longer than 30 kB without this.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

SHORT = st.text(max_size=4)
#: Short to make, and some of it longer than any terminal.
TEXT = st.builds(str.__mul__, st.text(max_size=8), st.sampled_from([1, 1, 1, 40]))
SERIES = st.builds(SeriesKey, SHORT, SHORT, SHORT, SHORT, SHORT, st.just(""))
OWNERS = st.lists(SHORT, max_size=4).map(tuple)
ITEMS = st.lists(
    st.builds(
        MorningItem,
        what=TEXT,
        why=TEXT,
        command=TEXT,
        alert=TEXT,
        name=TEXT,
        series=st.lists(SERIES, max_size=2).map(tuple),
        owners=OWNERS,
    ),
    max_size=7,
).map(tuple)
ALERTS = st.lists(st.builds(OpenAlert, TEXT, st.integers(0, 10**18), TEXT, TEXT, OWNERS), max_size=4).map(
    tuple
)
PAGES = st.builds(
    Morning, st.just("night"), head=TEXT, notes=st.lists(TEXT, max_size=3).map(tuple), act_now=ITEMS, did_not_run=ITEMS,
    nodes_out=st.lists(st.builds(NodeOut, TEXT, TEXT, TEXT, TEXT), max_size=9).map(tuple), watching=ITEMS,
    still_open=ALERTS, recovered=ALERTS, improved=ITEMS, waiting=ITEMS, more=TEXT, accept_new=TEXT, report=TEXT,
)  # fmt: skip


def test_a_page_on_which_everything_happened_at_once_shows_one_incident_less():
    item = MorningItem(
        what="test_a 9 % slower", why="on node n7", command="mlhpc history test_a", name="test_a"
    )
    alert, node = OpenAlert("a", 1, "test_b slower"), NodeOut("alps", "gpu", "n1", "clock")
    everything = dict.fromkeys(("act_now", "did_not_run", "watching", "improved", "waiting"), (item,) * 6)
    page = Morning(
        "night", "night of today", notes=("a clock is wrong",), nodes_out=(node,), still_open=(alert,),
        recovered=(alert,), report="https://bench", more="mlhpc records list", **everything,
    )  # fmt: skip
    lines = page.lines()
    assert len(lines) == 23
    assert (lines.count("test_a 9 % slower"), lines.count("and 2 more: mlhpc records list")) == (4, 1)
    assert "did not run or broke: 6 causes: mlhpc records list" in lines


@given(PAGES, st.integers(40, 300))
def test_whatever_comes_a_page_has_25_printable_lines_at_most_and_text_no_longer_than_the_terminal(
    page, width
):
    lines = page.page(width)
    assert len(lines) <= MOST_LINES
    assert [line.text for line in lines if not line.text.isprintable()] == []
    copied = {"next", "more", "report"}
    assert [line for line in lines if line.style not in copied and len(line.text) > width] == []


class _Names(html.parser.HTMLParser):
    """Collects the tags of a document."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found |= {tag, *(name for name, _ in attrs)}


@given(PAGES)
def test_whatever_comes_is_text_in_html(page):
    text = as_html(page.page(), lambda _target: "#<here>")
    assert _Names(text).found <= {"p", "class", "code", "a", "href"}


def test_a_command_is_never_cut():
    command = "mlhpc history " + "x" * 500
    lines = Morning("night", "head", act_now=(MorningItem("what", "why", command),)).lines(40)
    assert lines[-1] == f"  next: {command}"


def test_the_owner_stands_before_the_command_and_in_html_outside_of_it():
    page = Morning(
        "night", "head", act_now=(MorningItem("what", "why", "do it", owners=("next: x", "", "<b>")),)
    )
    assert page.lines()[-1] == "  owner <b> (1), next: x (1); next: do it"
    end = '<p class="next">owner &lt;b&gt; (1), next: x (1); next: <code>do it</code></p>'
    assert as_html(page.page()).endswith(end)


def test_the_oldest_open_alert_is_named_with_its_owner():
    alerts = (
        OpenAlert("b", 2, "later"),
        OpenAlert("a", 1, "first", "joan", ("ada",), 10**18, "https://x.example/7"),
    )
    page = Morning("night", "head", still_open=alerts)
    known = "acknowledged by joan until 2001-09-09, ticket https://x.example/7"
    line = f"still open: 2 alerts, the oldest owned by ada, {known}: first: mlhpc alert list"
    assert page.lines()[-1] == line
    assert '<a href="https://x.example/7">https://x.example/7</a>: first' in message_of_morning(page, 0).html
    assert message_of_morning(page, 0).owners == ("ada",)


def test_the_line_of_the_next_command_names_the_ticket_and_links_it():
    item = MorningItem("what", command="mlhpc x", owners=("ada",), ticket="http://x.example/7")
    page = Morning("night", "head", act_now=(item,))
    assert page.lines()[-1] == "  owner ada; ticket http://x.example/7; next: mlhpc x"
    link = '<a href="http://x.example/7">http://x.example/7</a>'
    assert f"owner ada; ticket {link}; next: <code>mlhpc x</code>" in message_of_morning(page, 0).html


def test_causes_that_find_no_room_are_counted():
    urgent = tuple(MorningItem(f"a{number}", "why", "next", alert="x") for number in range(9))
    causes = tuple(MorningItem(f"c{number}") for number in range(9))
    lines = Morning("night", "head", act_now=urgent, did_not_run=causes, more="list them").lines()
    assert (len(lines), lines[16], lines[-1]) == (25, "and 4 more: mlhpc alert list", "and 2 more: list them")


@pytest.mark.parametrize(
    ("series", "target"),
    [
        ((SeriesKey("a", "p", "e", "", "b", ""),), SeriesKey("a", "p", "e", "", "b", "")),
        ((SeriesKey("a", "p", "e", "", "b", ""), SeriesKey("a", "p", "e", "", "c", "")), system_target("a")),
        ((SeriesKey("a", "p", "e", "", "b", ""), SeriesKey("z", "p", "e", "", "b", "")), None),
    ],
    ids=["its benchmark", "its system where it has several", "nothing where it has several systems"],
)
def test_an_item_is_linked_to(series, target):
    links = MorningItem("what", name="name", series=series).links()
    assert links == ((("name", target),) if target else ())


def test_the_mail_of_a_page_says_in_its_subject_how_much_was_measured_and_how_much_to_do():
    page = Morning("night", "night of 2025-02-15: 3 of 5 measured, 1 system", act_now=(MorningItem("x"),))
    assert message_of_morning(page, 0).title == "night of 2025-02-15: 3 of 5 measured; act now: 1"
