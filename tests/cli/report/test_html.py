"""`mlhpc report html`: from the store to a file; what it says, and how it ends."""

import time

import pytest
from nights_of import DAY, store
from page_content import content_of
from worlds import entry, measurement, record

from pytest_mlhpc.judge.baselines import BaselineBook


@pytest.fixture
def stored(state_dir):
    """Twelve nightly runs of one benchmark, and a broken one."""
    now = time.time_ns()
    nights = [
        record(number, created_ns=now - (13 - number) * DAY, measurement=measurement(100.0 + number % 3))
        for number in range(1, 13)
    ]
    failure = {"verdict": "out_of_memory", "failure": "out_of_memory: rank 1", "measurement": None}
    store(state_dir, [*nights, record(90, created_ns=now - DAY // 2, **failure)])


@pytest.fixture
def report(tmp_path, monkeypatch, mlhpc):
    monkeypatch.chdir(tmp_path)
    return lambda *words, code=0: mlhpc("report", "html", "--output", "out.html", *words, code=code)


@pytest.fixture
def page(tmp_path):
    return tmp_path / "out.html"


def test_a_page_is_made_of_what_was_recorded(stored, report, page):
    assert report().out.startswith("out.html: 1 benchmark, 1 row, ")
    (bench,) = content_of(page.read_text())["benches"]
    assert bench["kind"].count("3") == 1  # broken
    assert [row["metric"] for row in bench["rows"]] == ["rate"]


def test_it_can_be_written_to_standard_output(stored, mlhpc):
    assert content_of(mlhpc("report", "html", "--output", "-").out)["benches"]


def test_accepted_values_and_events_are_on_it(stored, report, page, state_dir, mlhpc):
    book = BaselineBook(page.with_name("baselines"), state_dir)
    made = record()
    book.put(made.series("rate"), entry(101.0))
    book.save()
    mlhpc("history", "event", "add", "--system", "cirrus", "driver 570 to 580")
    report()
    found = content_of(page.read_text())
    assert found["benches"][0]["rows"][0]["band"][0] == 101
    assert [mark[3] for mark in found["marks"]] == ["driver 570 to 580"]


GITLAB = {"CI_PROJECT_URL": "https://git.example.org/hpc"}
GITHUB = {"GITHUB_SERVER_URL": "https://github.example.org", "GITHUB_REPOSITORY": "hpc/bench"}


@pytest.mark.parametrize(
    ("environ", "options", "links"),
    [
        pytest.param({}, (), {}, id="nowhere"),
        pytest.param(
            GITLAB,
            (),
            {
                "commit": "https://git.example.org/hpc/-/commit/{commit}",
                "pipeline": "https://git.example.org/hpc/-/pipelines/{pipeline}",
            },
            id="gitlab",
        ),
        pytest.param(
            GITHUB,
            ("--link", "commit=http://x/{commit}", "--link", "job=http://x/?j={job}"),
            {
                "commit": "http://x/{commit}",
                "pipeline": "https://github.example.org/hpc/bench/actions/runs/{pipeline}",
                "job": "http://x/?j={job}",
            },
            id="github, and what is given",
        ),
    ],
)
def test_links_are_those_of_the_project_and_those_that_are_given(  # noqa: PLR0917 - a row
    stored, report, page, monkeypatch, environ, options, links
):
    for name in ("CI_PROJECT_URL", "GITHUB_REPOSITORY", "GITHUB_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    report(*options)
    assert content_of(page.read_text())["links"] == links


def test_a_maintenance_is_marked_as_one(stored, report, page, mlhpc):
    mlhpc("history", "event", "add", "--system", "cirrus", "--until", "2099-01-01", "new pumps")
    report()
    assert [mark[3] for mark in content_of(page.read_text())["marks"]] == ["maintenance: new pumps"]


def test_nothing_recorded_or_nothing_of_the_chosen_system_leaves_an_older_page_alone(report, page, request):
    page.write_text("older")
    assert "no page was written; see `mlhpc records list`" in report().err
    request.getfixturevalue("stored")
    report("--system", "elsewhere")
    assert page.read_text() == "older"


def test_a_page_that_cannot_be_written_is_named(stored, report, page):
    page.mkdir()
    assert "out.html: cannot be written: Is a directory" in report(code=4).err
    assert not list(page.parent.glob(".out.html.*"))


def test_a_damaged_baseline_file_is_a_usage_error_that_names_the_line(stored, report, tmp_path):
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/cirrus.yaml").write_text("schema: 1\nsystem: [\n")
    assert "cirrus.yaml:" in report(code=2).err
