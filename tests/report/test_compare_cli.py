"""`mlhpc compare`: what is compared, what is not and why, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import time

import pytest
from rich.cells import cell_len
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.results.schema import Metric
from pytest_mlhpc.results.store import Store

DAY_NS = 86_400 * 10**9


def key(name="test_a", *, workload="cosmoflow", kernel=3, devices=1, batch=16, preset="smoke", more=""):
    inner = f"global_batch={batch} kernel_size={kernel}"
    return f"{workload}[{inner}] {more}data=memory devices={devices} name={name} nodes=1 preset={preset}"


@pytest.fixture
def ran(state_dir):
    """Store runs of a benchmark on a machine, with these rates; one minute apart, the last one just now."""
    store, numbers = Store(state_dir, "s1"), iter(range(1, 10_000))

    def put(machine, *rates, benchmark=None, days=0.0, more=(), measured=None, **fields):
        system, _, partition = machine.partition(":")
        for place, rate in enumerate(rates):
            number = next(numbers)
            made = time.time_ns() - int(days * DAY_NS) - (len(rates) - place) * 60 * 10**9
            values = {
                "system": system,
                "partition": partition,
                "benchmark": benchmark or key(),
                "created_ns": made,
            }
            values["measurement"] = measurement(rate, more=tuple(more), **(measured or {}))
            store.append(record(number, **{**values, **fields}))

    yield put
    store.close()


@pytest.fixture
def compare(capsys):
    """Compare, expect an exit code, return the text, the JSON or the rows of the CSV, and what was complained about."""

    def call(*words, code=0, form="text"):
        capsys.readouterr()
        found = main(["compare", *words, "--format", form])
        told = capsys.readouterr()
        assert found == code, told.err
        if form == "json":
            return json.loads(told.out)
        return told.err if code == 4 else told.out

    return call


def cells(table, metric="rate"):
    """Return the cells of the one row of a metric, by column."""
    (row,) = [row for row in table["rows"] if row["metric"] == metric]
    return {column["name"]: cell for column, cell in zip(table["columns"], row["cells"], strict=True)}


def test_three_systems_give_one_table_of_medians_spreads_runs_and_ratios(ran, compare):
    ran("local:cpu", 99.0, 100.0, 101.0, fingerprint="f1")
    ran("testslurm:debug", 90.0, 91.0)
    ran("testkubernetes:cpu", 120.0)
    text = compare("local", "testslurm", "testkubernetes")
    assert "ratios are to local:cpu" in text.replace("\n", " ")
    line = next(line for line in text.splitlines() if "rate [samples/s]" in line)
    assert line.split("  ")[1:] == ["rate [samples/s]", "100 ±1.0% (3)", "90.5 ±0.6% (2)", "0.905x worse", "120 (1)", "1.2x better"]  # fmt: skip


def test_lower_is_better_where_the_metric_says_so(ran, compare):
    for machine, seconds in (("a:x", 2.0), ("b:x", 1.0)):
        more = [Metric("step_time", seconds, "s", "lower"), Metric("loss", seconds, "1", "none")]
        ran(machine, 100.0, more=more, judged=("rate", "step_time", "loss"))
    table = compare("a", "b", form="json")
    assert {name: cells(table, name)["b:x"]["word"] for name in ("rate", "step_time", "loss")} == {
        "rate": "equal",
        "step_time": "better",
        "loss": "",
    }
    assert cells(table, "step_time")["b:x"]["ratio"] == 0.5


def test_overlapping_ranges_are_called_unclear(ran, compare):
    ran("a:x", 90.0, 100.0, 110.0)
    ran("b:x", 85.0, 95.0, 105.0)
    assert cells(compare("a", "b", form="json"))["b:x"]["word"] == "unclear"


def test_the_last_n_accepted_first_attempts_count_and_no_others(ran, compare):
    ran("a:x", 1.0, 2.0, 98.0, 99.0, 100.0, 101.0, 102.0)
    ran("a:x", 500.0, attempt=1)
    ran("a:x", 500.0, verdict="regressed")
    ran("a:x", 500.0, overrides={"slurm.constraint": "fast"})
    ran("a:x", 102.0, overrides={"slurm.reservation": "maint"})
    ran("a:x", 500.0, days=40)
    ran("b:x", 100.0)
    cell = cells(compare("a", "b", form="json"))["a:x"]
    assert (cell["median"], cell["runs"]) == (101.0, 5)
    assert cells(compare("a", "b", "--runs", "1", form="json"))["a:x"]["runs"] == 1


def test_a_record_that_lies_there_twice_counts_once(ran, compare, state_dir):
    ran("a:x", 100.0, 104.0)
    ran("b:x", 100.0)
    (path,) = state_dir.glob("records/*/*.jsonl")
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert cells(compare("a", "b", form="json"))["a:x"]["runs"] == 2


def test_environments_and_device_models_of_a_partition_are_columns_of_their_own(ran, compare):
    ran("a:x", 100.0, environment="old")
    ran("a:x", 110.0, environment="new")
    ran("a:x", 120.0, environment="new", device_model="EPYC 9")
    ran("a:y", 100.0)
    names = [column["name"] for column in compare("a", form="json")["columns"]]
    assert names == ["a:x new EPYC", "a:x new EPYC 9", "a:x old", "a:y"]


def test_a_program_that_names_no_device_shares_the_column_of_its_partition(ran, compare):
    ran("a:x", 100.0)
    ran("a:x", 5.0, benchmark="command[] devices=1 name=cmd nodes=1 preset=smoke", device_model="")
    ran("b:x", 100.0)
    table = compare("a", "b", form="json")
    assert [column["name"] for column in table["columns"]] == ["a:x", "b:x"]
    assert sorted(row["cells"][0]["median"] for row in table["rows"]) == [5.0, 100.0]


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({"benchmark": key(kernel=2)}, {}),
        ({"benchmark": key(more="cache=cold ")}, {}),
        ({"benchmark": key(devices=4, batch=64)}, {"devices": 4}),
        ({"benchmark": key(preset="small")}, {}),
        ({}, {"cache": "warm"}),
        ({}, {"data_kind": "real"}),
    ],
)
def test_what_is_not_comparable_is_not_compared(ran, compare, fields, measured):
    ran("a:x", 100.0)
    ran("b:x", 50.0, measured=measured, **fields)
    table = compare("a", "b", code=5, form="json")
    assert len(table["rows"]) == 2
    assert all(cell.get("ratio") is None for row in table["rows"] for cell in row["cells"])


def test_another_unit_or_direction_is_another_row(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 50.0, measured={"unit": "items/s"})
    table = compare("a", "b", code=5, form="json")
    assert {row["unit"] for row in table["rows"]} == {"samples/s", "items/s"}


WHY = [
    ({"rates": []}, "never run", "never run"),
    ({"verdict": "worker_exit", "device_model": "", "measurement": None}, "only failed", "only failed: 1 run, the last worker_exit on 20"),
    ({"benchmark": key(devices=4, batch=64)}, "only other scale or preset", "only with devices=4 (not 1), global_batch=64 (not 16)"),
    ({"benchmark": key(preset="small")}, "only other scale or preset", "only with preset=small (not smoke)"),
    ({"days": 60}, "not since", "not run since then; the last on 20"),
    ({"measured": {"cache": "warm"}}, "only other cache or data", "only with warm cache (not unknown)"),
    ({"measured": {"data_kind": "real"}}, "only other cache or data", "only with real data (not synthetic)"),
    ({"measured": {"unit": "items/s"}}, "another unit", "only in items/s, better higher"),
    ({"measured": {"name": "speed"}, "judged": ("speed",)}, "not reported", "rate is not reported"),
    ({"overrides": {"slurm.exclusive": "false"}}, "no run that counts", "only runs with other settings (--set)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind", "text"), WHY, ids=[kind + str(n) for n, (_, kind, _t) in enumerate(WHY)]
)
def test_a_missing_cell_is_counted_with_why(ran, compare, fields, kind, text):
    ran("a:x", 100.0)
    ran("b:x", 7.0, benchmark=key("test_other"))
    ran("a:x", 7.0, benchmark=key("test_other"))
    ran("b:x", *fields.pop("rates", [50.0]), **fields)
    table = compare("a", "b", form="json")
    (row,) = [
        r
        for r in table["rows"]
        if r["benchmark"] == key() and r["metric"] == "rate" and r["cells"][0]["median"]
    ]
    cell = row["cells"][1]
    assert cell["median"] is None
    assert cell["missing"] == kind
    assert cell["why"].startswith(text)
    shown = " ".join(compare("a", "b").split())
    assert f" {kind}" in shown.partition("empty:")[2]
    assert f"b:x: {text}" in shown


def test_the_nearest_of_several_scales_is_named(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 1.0, benchmark=key(devices=8, batch=64, kernel=2))
    ran("b:x", 1.0, benchmark=key(preset="small"))
    assert "only with preset=small (not smoke)" in " ".join(compare("a", "b", code=5).split())


def test_what_is_nearest_was_measured(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 1.0, benchmark=key(devices=8, batch=64, kernel=2))
    ran("b:x", 1.0, benchmark=key(devices=8, batch=64, kernel=2), verdict="drifted", days=60)
    ran("b:x", 1.0, benchmark=key(preset="small"), verdict="loss_nan")
    text = " ".join(compare("a", "b", code=5).split())
    assert "b:x: only with devices=8 (not 1), global_batch=64 (not 16), kernel_size=2 (not 3)" in text


def test_a_benchmark_that_failed_everywhere_is_listed(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 100.0)
    ran("a:x", 1.0, benchmark=key("test_broken"), verdict="loss_nan")
    assert "test_broken\n  (no run that counts)" in compare("a", "b")


def test_per_device_sets_the_nearest_scale_beside_and_says_so(ran, compare):
    ran("a:x", 100.0)
    for devices in (2, 8):
        ran(
            "b:x",
            90.0 * devices,
            benchmark=key(devices=devices, batch=16 * devices),
            measured={"devices": devices},
        )
    more = [Metric("step_time", 1.0, "s", "lower")]
    ran("a:x", 100.0, benchmark=key("t"), more=more, judged=("step_time",))
    table = compare("a", "b", "--per-device", form="json")
    found = cells(table)["b:x"]
    assert (found["median"], found["devices"], found["ratio"]) == (90.0, 2, 0.9)
    text = compare("a", "b", "--per-device")
    assert "90 (1) on 2" in text
    assert "Runs of different scale are different benchmarks" in text.replace("\n", " ")
    assert "step_time" not in text


def test_an_unjudged_benchmark_is_shown_by_its_metric_and_said_so_before(ran, compare):
    for machine in ("a:x", "b:x"):
        ran(machine, 100.0, judged=(), verdict="unjudged")
    assert "1 benchmark judges no metric; name one by --metric" in compare("a", "b", code=5)
    assert "equal" in compare("a", "b", "--metric", "rate")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["alpa"], "did you mean 'alpha'?"),
        (["alpha", "alpha:y"], "did you mean 'alpha:x'?"),
        (["alpha", "alpha"], "named twice"),
        (["alpha", "--metric", "rat"], "did you mean 'rate'?"),
        (["alpha", "--benchmark", "cosmoflo_"], "did you mean 'cosmoflow'?"),
        (["alpha", "--runs", "0"], "from 1 to 1000"),
        (["alpha", "--since", "yesterday"], "neither a time"),
    ],
)
def test_a_usage_error_exits_with_4_and_the_nearest_word(ran, compare, words, said):
    ran("alpha:x", 100.0)
    assert said in compare(*words, code=4)


def test_nothing_recorded_exits_with_5_and_makes_no_files(state_dir, compare, capsys):
    assert compare("a", "b", code=5) == ""
    assert not state_dir.exists()
    (state_dir / "records").mkdir(parents=True)
    assert main(["compare", "a", "b"]) == 5
    assert "nothing is recorded in" in capsys.readouterr().err


def test_one_machine_alone_is_nothing_to_compare(ran, compare):
    ran("a:x", 100.0)
    assert "100 (1)" in compare("a", code=5)


def test_a_damaged_line_is_told_and_the_rest_compared(ran, state_dir, capsys):
    ran("a:x", 100.0)
    ran("b:x", 100.0)
    (path,) = state_dir.glob("records/*/*.jsonl")
    path.with_name("broken.jsonl").write_bytes(b'{"half": \n\xff\xfe\n' + b"[" * 9000 + b"\ntorn")
    assert main(["compare", "a", "b"]) == 0
    told = capsys.readouterr()
    assert "1x equal" in told.out
    assert told.err.count("broken.jsonl: byte") == 3


EVIL = '\x1b[2J\u202eevil\n| <b>`x` "q"'


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "json"])
def test_hostile_names_are_shown_and_obeyed_by_nothing(ran, capsys, form):
    name = json.dumps(EVIL)
    for system in ("=cmd", "b"):
        ran(
            f"{system}:{EVIL}",
            100.0,
            benchmark=f"w[] devices=1 name={name}",
            environment=EVIL,
            device_model=EVIL,
        )
    assert main(["compare", "=cmd", "b", "--format", form, *(["--keys"] if form == "text" else [])]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    if form == "csv":
        assert [row["system"] for row in csv.DictReader(io.StringIO(out))] == ["'=cmd", "b"]
    if form == "markdown":
        rows = [line for line in out.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
        assert "<b>" not in out


def test_figures_at_the_edge_of_floats_break_nothing(ran, compare):
    for machine, rates in (
        ("a:x", (1e308, 1.7e308)),
        ("b:x", (5e-324, 5e-324)),
        ("c:x", (-1.0, 1.0)),
        ("d:x", (0.0,)),
    ):
        ran(machine, *rates)
    text = compare("a", "b", "c", "d")
    assert "inf" not in text
    assert "nan" not in text
    compare("d", "a", form="json")


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_tables_are_at_most_100_columns_wide_and_name_the_first_machine_again(ran, compare, count):
    systems = [f"system{n}" for n in range(count)]
    for system in systems:
        ran(f"{system}:partition", 100.0, 101.0, benchmark=key("test_\u6f22\u5b57\u6f22\u5b57"))
        ran(f"{system}:partition", 100.0, benchmark=key("test_long" + "_\u6f22" * 80))
    text = compare(*systems, "--keys")
    assert max(map(cell_len, text.splitlines())) <= 100
    headings = [line for line in text.splitlines() if "system0:partition" in line and "ratios" not in line]
    assert len(headings) >= (1 if count < 4 else 2)
    assert all(f"{system}:partition" in text for system in systems)


def test_letters_that_a_terminal_cannot_show_do_not_end_it(ran, monkeypatch, state_dir):
    ran("a:x", 100.0, 101.0)
    ran("b:x", 100.0, 101.0)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["compare", "a", "b"]) == 0
    out.seek(0)
    assert "100.5 ?0.5% (2)" in out.read()


def test_a_machine_that_only_ran_long_ago_has_a_column_that_says_when(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 100.0, days=60)
    text = compare("a", "b", code=5)
    assert "b:x: not run since then; the last on 20" in " ".join(text.split())


def test_a_hundred_benchmarks_of_one_test_keep_labels_of_their_own(ran, compare):
    for batch in range(100):
        ran("a:x", 100.0, benchmark=key(batch=batch))
        ran("b:x", 100.0, benchmark=key(batch=batch))
    text = compare("a", "b")
    labels = [line for line in text.splitlines() if line.startswith("test_a global_batch=")]
    assert labels == [f"test_a global_batch={batch}" for batch in range(100)]
