"""Baseline files: read strictly, written stable, never damaged by us."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import entry, spec

from pytest_mlhpc.errors import ConfigError, StoreError
from pytest_mlhpc.judge import baseline_files
from pytest_mlhpc.judge.baseline_files import BaselineFile, Entry, render, series_of
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.store.record import Epoch, SeriesKey


def key(metric="rate", **changes):
    benchmark = "suites/test_a.py::test_a"
    return replace(SeriesKey("cirrus", "standard", "default", "", benchmark, metric), **changes)


def book_of(tmp_path):
    return BaselineBook(tmp_path / "baselines", tmp_path / "state")


def written(tmp_path, *entries):
    book = book_of(tmp_path)
    for one, value in entries:
        book.put(one, value)
    (path,) = book.save()
    return path


def parsed(data):
    return baseline_files.parse(data, "baselines/cirrus.yaml", "cirrus")


def problems_of(data):
    with pytest.raises(ConfigError) as caught:
        parsed(data)
    return str(caught.value)


def test_an_entry_comes_back_as_it_was_put(tmp_path):
    full = entry(
        123.456, spread=0.01, runs=5, accepted_by="me", reason='a "new" compiler: faster\n# not a comment',
        date="2026-11-21T09:00:00Z", environment="sha256:0", device_model="EPYC", calibration=50.5,
    )  # fmt: skip
    written(tmp_path, (key(), full))
    assert (book_of(tmp_path).lookup(key()), book_of(tmp_path).lookup(key("other"))) == (full, None)
    assert book_of(tmp_path).for_spec(spec(("rate", "other")), "EPYC") == {"rate": full}


@pytest.mark.parametrize(
    ("changes", "parameters", "expected"),
    [
        ({}, {"global_batch": 8}, 10 * 8 / 40.0),
        ({"definition": "w a=2"}, {"global_batch": 8}, None),
        ({}, {"global_batch": 8, "until": "quality"}, None),
        ({}, {"global_batch": 8, "bagging": {}}, 10 * 8 / 40.0),
        ({}, {"global_batch": 8, "bagging": {"models": 2}}, None),
        ({}, {}, None),
    ],
    ids=[
        "known",
        "computes something else",
        "as many steps as it takes",
        "no ensemble",
        "an ensemble",
        "no batch",
    ],
)
def test_a_baseline_tells_how_long_the_steps_of_a_training_usually_take(
    tmp_path, changes, parameters, expected
):
    one = replace(spec(("effective_throughput",)), steps=10, parameters=parameters)
    book = book_of(tmp_path)
    book.put(series_of(one, "effective_throughput"), entry(40.0, **{"definition": one.definition, **changes}))
    assert book.usual_s(one) == expected
    assert book.usual_s(replace(one, judged=())) is None
    assert not book_of(tmp_path).usual_s(one)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


@given(
    names=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=4, unique=True),
    value=st.floats(1e-9, 1e15),
    reason=TEXT,
)
def test_any_text_survives_the_round_trip(names, value, reason):
    value = float(f"{value:.6g}")
    entries = {
        key(benchmark=benchmark, partition=partition, metric=metric or "m"): entry(value, reason=reason)
        for benchmark, partition, metric in names
    }
    text = render(BaselineFile("cirrus", entries))
    back = parsed(text.encode())
    assert back.entries == entries
    assert render(back) == text


def test_files_are_sorted_whatever_the_order_of_putting(tmp_path):
    entries = (key("a"), entry()), (key("b", benchmark="z"), entry()), (key("b"), entry())
    first, second = written(tmp_path / "1", *entries), written(tmp_path / "2", *reversed(entries))
    assert first.read_text() == second.read_text()


def test_a_change_of_one_entry_changes_its_lines_only(tmp_path):
    path = written(tmp_path, *((key(f"m{number}"), entry(100.0 + number)) for number in range(9)))
    before = path.read_text().splitlines()
    written(tmp_path, (key("m4"), entry(55.0)))
    after = path.read_text().splitlines()
    assert [line for line in after if line not in before] == ["      value: 55.0"]
    assert len(after) == len(before)


def test_putting_what_is_there_already_writes_nothing(tmp_path):
    path = written(tmp_path, (key(), entry()))
    before = path.stat()
    book = book_of(tmp_path)
    book.put(key(), entry())
    assert book.save() == ()
    assert path.stat().st_ino == before.st_ino


def test_comments_of_the_user_stay_where_they_stood(tmp_path):
    path = written(tmp_path, (key("a"), entry()), (key("b"), entry()), (key("c", benchmark="z"), entry()))
    lines = path.read_text().splitlines()
    lines.insert(2, "# about this file")
    at = lines.index("    b:")
    lines.insert(at, "    # about b")
    lines[at + 2] += "  # inside b"
    (at,) = (number for number, line in enumerate(lines) if line.startswith("- benchmark: z"))
    lines.insert(at, "# about z")
    path.write_text("\n".join([*lines, "# the end"]) + "\n")
    written(tmp_path, (key("b"), entry(50.0)), (key("aa"), entry()))
    text = path.read_text()
    assert "# about this file\nschema: 2" in text
    assert "    # about b\n    # inside b\n    b:\n      value: 50.0" in text
    assert "# about z\n- benchmark: z" in text
    assert text.endswith("# the end\n")
    written(tmp_path, (key("b"), entry(51.0)))
    assert path.read_text() == text.replace("50.0", "51.0")


def test_writing_takes_in_what_another_process_wrote_meanwhile(tmp_path):
    mine = book_of(tmp_path)
    mine.put(key("a"), entry())
    written(tmp_path, (key("b"), entry()))
    mine.save()
    assert {one.metric for one in book_of(tmp_path).entries("cirrus")} == {"a", "b"}


def test_a_reviewed_entry_wins_over_a_provisional_one(tmp_path):
    book = book_of(tmp_path)
    local = key(system="local", fingerprint="EPYC 9825 / 2 cores, 8 GiB")
    book.put(local, entry(1.0), provisional=True)
    assert book.lookup(local) == entry(1.0)
    (path,) = book.save()
    assert path.parent == tmp_path / "state" / "provisional"
    assert book_of(tmp_path).lookup(local) == entry(1.0)
    assert book_of(tmp_path).lookup(replace(local, fingerprint="another")) is None
    book.put(local, entry(2.0))
    book.save()
    assert book_of(tmp_path).lookup(local) == entry(2.0)


def test_a_provisional_entry_of_the_tests_epoch_wins_over_a_reviewed_one_of_another(tmp_path):
    book = book_of(tmp_path)
    local = key(system="local", fingerprint="f")
    changed = entry(2.0, definition="resnet50 steps=20")
    book.put(local, entry(1.0))
    book.put(local, changed, provisional=True)
    assert book.lookup(local, changed.epoch) == changed
    assert book.lookup(local, entry().epoch) == entry(1.0)
    assert book.lookup(local, Epoch("resnet50 steps=30", "")) == entry(1.0)
    assert book.lookup(local, changed.epoch, provisional=False) == entry(1.0)


def test_two_systems_of_one_machine_have_a_provisional_file_each(tmp_path):
    book = book_of(tmp_path)
    one, other = key(system="local", fingerprint="EPYC"), key(system="local_gpu", fingerprint="EPYC")
    book.put(one, entry(1.0), provisional=True)
    book.put(other, entry(2.0), provisional=True)
    assert len(book.save()) == 2
    later = book_of(tmp_path)
    assert (later.lookup(one), later.lookup(other)) == (entry(1.0), entry(2.0))
    later.put(other, entry(3.0), provisional=True)
    later.save()
    assert book_of(tmp_path).lookup(other) == entry(3.0)


def test_entries_that_nobody_asked_for_are_unused_on_machines_that_ran(tmp_path):
    other_machine = key(environment="another")
    written(tmp_path, (key("a"), entry()), (key("b"), entry()), (other_machine, entry()))
    book = book_of(tmp_path)
    book.lookup(key("a"))
    assert book.unused() == (key("b"),)


def test_a_removed_entry_is_gone(tmp_path):
    path = written(tmp_path, (key("a"), entry()), (key("b"), entry()))
    book = book_of(tmp_path)
    book.remove(key("a"))
    assert book.save() == (path,)
    assert list(book_of(tmp_path).entries("cirrus")) == [key("b")]


GOOD = render(BaselineFile("cirrus", {key(): entry()}))


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("value: 100.0", "value: fast", 11, "must be a number, found 'fast'"),
        ("value: 100.0", "value: .nan", 11, "must be a number"),
        ("value: 100.0", "value: nan", 11, "value must be a positive number, found nan"),
        ("value: 100.0", "value: -1", 11, "value must be a positive number"),
        ("value: 100.0", "value: [1]", 11, "must be a single value"),
        ("value: 100.0", "vale: 100.0", 11, "is not known (did you mean 'value'?)"),
        ("value: 100.0", "value: 1\n      value: 2", 12, "is here twice, first on line 11"),
        ("value: 100.0", "value: !!python/name:os.system 1", 11, "tag"),
        ("unit: samples/s", "", 11, "unit missing"),
        ("unit: samples/s", "unit: sample/s", 12, "did you mean 'samples/s'?"),
        ("better: higher", "better: none", 13, "'none' is not one of higher, lower"),
        ("tolerance: 0.05", "tolerance: 5", 11, "tolerance must lie between 0 and 1, found 5.0"),
        ("runs: 1", "runs: 1\n      date: yesterday", 17, "is no date"),
        ("schema: 2", "schema: 3", 3, "3 is newer than 2, the newest this version reads"),
        ("schema: 2", "schema: 1", 3, "1 is older than 2, the oldest this version reads"),
        ("schema: 2", "schema: one", 3, "must be a whole number"),
        ("system: cirrus", "system: archer", 4, "is 'archer' in the file of 'cirrus'"),
        ("partition: standard", "", 6, "partition missing"),
    ],
)
def test_each_damage_is_named_with_its_line(old, new, line, said):
    assert old in GOOD
    text = problems_of(GOOD.replace(old, new).encode())
    assert f"baselines/cirrus.yaml:{line}: " in text
    assert said in text


def test_an_anchor_without_an_alias_does_no_harm():
    assert parsed(GOOD.replace("    rate:\n", "    rate: &a\n").encode()).entries


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"- 1", "must be a mapping"),
        (b"a: [", "is not YAML"),
        (b"\ta: 1", "is not YAML"),
        (b"a: \xff", "baselines/cirrus.yaml:1: is not UTF-8"),
        (b"[" * 5000, "nested deeper than 40 levels"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nschema: 2\nsystem: cirrus\nseries: [*b]", "is not known"),
        (b"x" * (baseline_files.MAX_BYTES + 1), "is longer than"),
        (b"schema: 2\nsystem: cirrus\nseries: 7", "must be a list"),
        (b"--- 1\n--- 2", "is not YAML"),
        (
            (
                b"schema: 2\nsystem: cirrus\n"
                b"series: [&a {benchmark: b, partition: p, environment: e, metrics: {}}, *a, *a]"
            ),
            "aliases are not allowed here",
        ),
    ],
)
def test_hostile_files_are_refused(data, said):
    assert said in problems_of(data)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
    ids=["a pipe", "a folder", "an endless device", "a circle of links"],
)
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path, make):
    make(path := tmp_path / "cirrus.yaml")
    with pytest.raises(
        StoreError, match=r"cirrus\.yaml: cannot be read: (it is no regular file|Too many levels)"
    ):
        baseline_files.read(path, "cirrus")


@given(cut=st.integers(0, len(GOOD)), length=st.integers(0, 30), junk=st.binary(max_size=8))
def test_a_mutated_file_is_read_or_refused_but_never_crashes(cut, length, junk):
    data = GOOD.encode()
    try:
        content = baseline_files.parse(data[:cut] + junk + data[cut + length :], "f", "cirrus")
    except ConfigError:  # anything else would be a crash
        return
    assert all(one.value > 0 for one in content.entries.values())


def test_a_damaged_file_is_told_and_left_as_it_is_though_it_was_damaged_meanwhile(tmp_path):
    path = written(tmp_path, (key(), entry()))
    early, late = book_of(tmp_path), book_of(tmp_path)
    early.put(key("b"), entry())
    path.write_text("broken: [")
    for use in (early.save, partial(late.lookup, key()), partial(late.problems, ["cirrus", "archer"])):
        with pytest.raises(ConfigError, match=r"cirrus.yaml:[12]: is not YAML"):
            use()
    assert path.read_text() == "broken: ["


def test_a_damaged_provisional_file_is_found_before_anything_starts(tmp_path):
    book = book_of(tmp_path)
    book.put(key(system="local", fingerprint="f"), entry(), provisional=True)
    (path,) = book.save()
    book_of(tmp_path).problems(["cirrus"])
    path.write_text(path.read_text().replace("value: 100.0", "value: x"))
    with pytest.raises(ConfigError, match=r"provisional/local-f-[0-9a-f]{12}.yaml:12: .*must be a number"):
        book_of(tmp_path).problems(["cirrus"])


def test_a_system_name_cannot_leave_the_directory(tmp_path):
    with pytest.raises(ConfigError, match="cannot be a file name"):
        book_of(tmp_path).lookup(key(system="../evil"))


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / "baselines" / "cirrus.yaml").mkdir(parents=True)
    with pytest.raises((StoreError, ConfigError), match=r"cirrus.yaml"):
        book_of(tmp_path).lookup(key())


@pytest.mark.parametrize(
    "changes",
    [
        {"value": float("nan")},
        {"value": 0.0},
        {"tolerance": 1.0},
        {"better": "none"},
        {"runs": 0},
        {"spread": -1.0},
        {"definition": ""},
    ],
)
def test_an_entry_that_nothing_can_be_compared_with_cannot_be_made(changes):
    with pytest.raises(ValueError, match=r"must|start"):
        Entry(
            **{"value": 1.0, "unit": "s", "better": "lower", "tolerance": 0.1, "definition": "w", **changes}
        )
