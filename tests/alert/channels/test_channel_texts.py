"""Texts between us and peers: shown safely, sent readably."""

import json
import math

import pytest
from alert_messages import NEW, message

from pytest_mlhpc.alert.channels import base


def test_shows_an_answer_as_one_short_line_without_control_characters():
    shown = base.quoted(b"first\r\n\x1b[31msecond\xff\x00 " + b"x" * 1000)

    assert shown.startswith("first [31msecond� xxx")
    assert len(shown) == base.MOST_SAID
    assert shown.isprintable()


def test_hides_a_secret_before_it_cuts():
    answer = "x" * (base.MOST_SAID - 8) + "s3cr3t-token"
    assert "s3cr" not in base.quoted(answer, ["s3cr3t-token"])


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        ("at a%2Fb%20c and a/b c", ["a/b c"], "at *** and ***"),
        ("tokentoken1", ["token", "tokentoken1"], "***"),
    ],
    ids=["also as it stands in an address", "the longer of two first"],
)
def test_hides_a_secret(text, secrets, shown):
    assert base.hidden(text, secrets) == shown


def test_all_behind_the_host_of_an_address_is_secret():
    found = base.secrets_of("https://me:p%40ss@hooks.example.org/T0AAA/B0BBB?key=k3y-value")

    assert {"me", "p%40ss", "p@ss", "T0AAA", "B0BBB", "k3y-value"} <= set(found)
    assert "hooks.example.org" not in found


def test_takes_the_line_break_off_a_secret_of_a_file():
    assert base.secret(" token\n", "token") == "token"


@pytest.mark.parametrize("value", ["s3\ncr3t", "s3\rcr3t", "s3\x00cr3t", "s3cré7"])
def test_refuses_a_secret_that_would_break_a_header_and_does_not_show_it(value):
    with pytest.raises(
        ValueError, match=r"^password contains a character that a header cannot contain"
    ) as caught:
        base.secret(value, "password")
    assert "s3" not in str(caught.value)


def test_makes_data_that_every_reader_of_json_takes():
    made = base.plain({"a": (math.nan, -math.inf, 1.5, True, None), "b\ud800": "x\ud800é"})
    assert json.loads(json.dumps(made, allow_nan=False)) == {"a": [None, None, 1.5, True, None], "b?": "x?é"}


@pytest.mark.parametrize(
    ("length", "end"),
    [(101, "[cut: too long for this channel]"), (100, "x" * 100)],
    ids=["too long", "it fits"],
)
def test_says_where_something_was_cut(length, end):
    cut = base.cut("x" * length, 100)
    assert (len(cut), cut.endswith(end)) == (100, True)


def test_no_fence_ends_before_the_text_does():
    assert base.fenced("a\n````\nb") == "`````text\na\n````\nb\n`````"


def test_says_a_title_once():
    assert base.whole(message(title="t", text="t\n\nmore")) == "t\n\nmore"
    assert base.whole(NEW) == f"{NEW.title}\n\n{NEW.text}"
