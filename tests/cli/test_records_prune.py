"""`mlhpc records usage` and `prune`: what they say, what they refuse, and that other commands say the same as before."""

import dataclasses
import json
import os
import shlex
from pathlib import Path

import pytest
from nights_of import DAY, nights, quiet
from old_records import NOW_NS, OLD_DAYS, dated, newest, run_folder, sampled, stored
from roofline_records import kernels, peaks

from pytest_mlhpc.cli.options import moment
from pytest_mlhpc.store.text import iso, months_before, nanoseconds

OLD_NS = NOW_NS - OLD_DAYS * DAY
DROP = [*quiet(30), *quiet(10, 93.0, 2)]
DRIVERS = [{"driver": "570"}] * 30 + [{"driver": "580"}]
SINCE = ("--since", "2000-01-01")

#: All that says something of old records.
READERS = [
    ("records", "list", "--limit", "100"),
    ("records", "cost", *SINCE, "--by", "system"),
    ("records", "check"),
    ("history", "show", "test_a", *SINCE),
    ("history", "changes", *SINCE, "--all"),
    ("history", "sensitivity"),
    ("compare", "cirrus", "archer2", *SINCE),
    ("papers", "tables", "cirrus", "archer2", *SINCE),
    ("papers", "roofline", *SINCE),
    ("status",),
]


def with_samples(record):
    """Return the record of a night with the lists that a run reports."""
    rich = sampled(1, value=record.measurement.metrics[0].value).measurement
    return dataclasses.replace(
        record, measurement=dataclasses.replace(rich, environment=record.measurement.environment)
    )


@pytest.fixture
def years(state_dir):
    """Forty nights of two systems, which ended long ago, characterised then; and a session of a week ago."""
    for system in ("cirrus", "archer2"):
        made = nights(DROP, environments=DRIVERS, last_ns=OLD_NS, system=system)
        for number, record in enumerate(map(with_samples, made)):
            stored(state_dir, [record], f"{system}-{number}")
    characterised = [
        dataclasses.replace(one, created_ns=OLD_NS, system="cirrus") for one in (peaks(7001), kernels(7002))
    ]
    stored(state_dir, characterised, "roofline")
    newest(state_dir)
    return state_dir


def outputs(mlhpc):
    """Return what each prints; a list of records has their samples in JSON alone."""

    def output(line):
        form = () if line[:2] == ("records", "list") else ("--json",)
        return mlhpc(*line, *form, code=1 if line[:2] == ("history", "changes") else 0).out

    return {line[:2]: output(line) for line in READERS}


def test_whoever_reads_old_records_says_the_same_before_and_after(years, mlhpc):
    before = outputs(mlhpc)
    lists = {
        ("history", "changes"): "changes",
        ("compare", "cirrus"): "rows",
        ("papers", "roofline"): "devices",
    }
    assert all(json.loads(before[line])[name] for line, name in lists.items())
    said = mlhpc("records", "prune", "--older", "2y")
    assert said.out.startswith("pruned samples of 82 records of 81 sessions older than ")
    assert said.err == ""
    assert outputs(mlhpc) == before
    mlhpc("records", "check", "--rebuild-index")
    assert outputs(mlhpc) == before


def test_prune_says_what_it_did_with_numbers(state_dir, mlhpc):
    path = stored(state_dir, [sampled(number) for number in range(12)])
    (path.parent / "other.jsonl").symlink_to("/dev/zero")
    newest(state_dir)
    run_folder(state_dir, "gone")
    would = mlhpc("records", "prune", "--older", "2y", "--dry-run").out.splitlines()
    said = mlhpc("records", "prune", "--older", "2y").out.splitlines()
    day = iso(moment("2y", NOW_NS))[:10]
    start = f"samples of 12 records of 1 session and 1 run folder older than {day}: "
    assert would[0].startswith(f"would prune {start}")
    assert would[0].endswith(" kB would be freed")
    assert said[0].startswith(f"pruned {start}")
    assert said[0].endswith(" kB freed")
    assert said[1:] == ["1 place left as it is:", f"  {path.parent}/other.jsonl: it is no regular file"]
    again = mlhpc("records", "prune", "--older", "2y").out.splitlines()
    assert again == [f"nothing older than {day} is there to prune", *said[1:]]


def test_many_places_are_cut_short_for_people_and_whole_for_programs(state_dir, mlhpc):
    path = stored(state_dir, [sampled(1)])
    for number in range(20):
        os.mkfifo(path.parent / f"{number}.jsonl")
    newest(state_dir)
    assert mlhpc("records", "prune", "--older", "2y", "--dry-run").out.endswith(
        "  and 8 more; --json has them all\n"
    )
    data = json.loads(mlhpc("records", "prune", "--older", "2y", "--json").out)
    assert (len(data["left"]), data["records"], data["schema"]) == (20, 1, "mlhpc/records-prune/1")


def test_what_cannot_be_done_is_named_with_exit_code_1(state_dir, mlhpc):
    stored(state_dir, [sampled(1)])
    (state_dir / "ledger").write_text("no folder")
    said = mlhpc("records", "prune", "--older", "2y", code=1).out.splitlines()
    assert said[1:2] == ["1 failure:"]
    assert "Not a directory" in said[2]


def test_usage_shows_kinds_months_and_what_pruning_would_free(years, mlhpc):
    run_folder(years, "gone")
    lines = mlhpc("records", "usage").out.splitlines()
    assert lines[0].split() == ["kind", "files", "on", "disk", "length"]
    assert lines[1].split()[:2] == ["records", "82"]
    assert "total" in [line.split()[0] for line in lines if line]
    assert lines[-1].startswith("`mlhpc records prune --older 2y`: would prune samples of 82 records")
    dated(years / "records", OLD_DAYS)
    data = json.loads(mlhpc("records", "usage", "--older", "90d", "--json").out)
    assert data["schema"] == "mlhpc/records-usage/1"
    assert (data["total"]["files"], data["prune"]["folders"]) == (83, 1)


@pytest.mark.parametrize("verb", [("usage",), ("prune", "--older", "2y")], ids=" ".join)
def test_where_nothing_is_recorded_nothing_is_made(state_dir, mlhpc, verb):
    assert mlhpc("records", *verb).out.startswith(("there is no ", "nothing older than "))
    assert not state_dir.exists()


@pytest.mark.parametrize(
    "older", ["", "two years", "-1y", "0y", "101y", "1201 months", "2y 3 months", "1.5y", "2026-13-01"]
)
def test_a_time_that_is_none_is_refused_with_an_example(mlhpc, older):
    err = mlhpc("records", "prune", f"--older={older}", code=2).err
    assert f"--older {older!r} is neither a time like 2y, 18 months or 90d nor a date like 2026-11-21" in err


@pytest.mark.parametrize("older", ["5m", "23h", "2100-01-01"])
def test_a_time_that_is_too_near_is_refused_with_an_example(mlhpc, older):
    err = mlhpc("records", "prune", "--older", older, code=2).err
    assert f"--older {older!r} is less than a day ago; write for example: --older 2y" in err


def test_prune_needs_an_age(mlhpc):
    assert "Missing option '--older'" in mlhpc("records", "prune", code=2).err


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("2y", "2024-11-27T10:00:00Z"),
        ("18 months", "2025-05-27T10:00:00Z"),
        ("18months", "2025-05-27T10:00:00Z"),
        ("1 year", "2025-11-27T10:00:00Z"),
        ("730d", "2024-11-27T10:00:00Z"),
        ("2024-11-27", "2024-11-27T00:00:00Z"),
    ],
)
def test_years_and_months_are_those_of_the_calendar(text, date):
    assert iso(moment(text, nanoseconds("2026-11-27T10:00:00Z"))) == date


def test_the_page_shows_commands_that_run_on_a_state_directory_of_years(years, mlhpc):
    page = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")
    section = page.partition("## Retention")[2].partition("\n## ")[0]
    block = section.partition("```console\n")[2].partition("```")[0]
    usage, dry, prune = (shlex.split(line, comments=True)[2:] for line in block.splitlines())
    assert "would prune samples of 82 records" in mlhpc(*usage).out
    assert mlhpc(*dry).out.startswith("would prune samples of 82 records")
    assert mlhpc(*prune).out.startswith("pruned samples of 82 records")
    assert mlhpc(*usage).out.splitlines()[-1].endswith(" is there to prune")


def test_a_month_that_is_shorter_ends_on_its_last_day():
    assert iso(months_before(nanoseconds("2024-02-29T01:00:00Z"), 12)) == "2023-02-28T01:00:00Z"
    assert iso(months_before(nanoseconds("2026-05-31"), 3)) == "2026-02-28T00:00:00Z"
