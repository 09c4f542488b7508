"""The morning page of twelve nights: what it says, word for word, the same in terminal, mail and HTML."""

import html
import json
import re
from pathlib import Path

import pytest
from twelve_nights import NIGHTS, REPORT, TONIGHT, night_world, nothing, stop_clocks  # noqa: F401 - a fixture

from pytest_mlhpc.report.morning import MOST_LINES

FOLDER = Path(__file__).with_name("mornings")


@pytest.fixture(params=NIGHTS)
def night(request, night_world, monkeypatch):  # noqa: F811 - the fixture
    """One of the nights, and the text of its page."""
    stop_clocks(monkeypatch, 49 if request.param == "commit-slows-two-systems" else TONIGHT)
    NIGHTS[request.param](night_world)
    return night_world, (FOLDER / f"{request.param}.txt").read_text(encoding="utf-8")


def printed(world, *words):
    return world.mlhpc("status", "--night", *words).out


def of_mail(world):
    """The lines of the newest mail."""
    return world.sink.mails[-1].content.get_body("plain").get_content().replace("\r\n", "\n")


def of_html(text):
    """The lines of a page of HTML, as they are read."""
    (section,) = re.findall(r'<section id="morning"[^>]*>(.*?)</section>', text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in re.findall(r"<p .*?</p>", section, re.DOTALL)]


def test_the_page_of_a_night_reads_as_it_was_written_and_mail_and_html_say_the_same(night, tmp_path):
    world, page = night
    assert printed(world, *world.status).replace(str(world.state_dir), "STATE") == page
    local = printed(world)
    assert of_mail(world) == local
    world.mlhpc("report", "html", "--output", tmp_path / "out.html")
    assert of_html((tmp_path / "out.html").read_text()) == [line.strip() for line in local.splitlines()]
