"""`mlhpc compare`: what is compared, what is not and why, and how it ends."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.cells import cell_len
from worlds import measurement

from pytest_mlhpc.cli import main
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.report.keys import Benchmark


def key(name="test_a", *, workload="cosmoflow", kernel=3, devices=1, batch=16, preset="smoke", more=""):
    computed = (
        f"{workload} {more}data=memory devices={devices} global_batch={batch} kernel_size={kernel} nodes=1"
    )
    return Benchmark(name, f"{computed} preset={preset}")


@pytest.fixture
def ran(recorded):
    """Store runs of a benchmark on a machine, with these rates."""

    def put(machine, *rates, more=(), measured=None, **fields):
        for rate in rates:
            made = measurement(rate, more=tuple(more), **(measured or {}))
            recorded(machine, **{"benchmark": key(), "measurement": made, **fields})

    return put


@pytest.fixture
def compare(mlhpc):
    """Return what prints a comparison."""
    return lambda *words, code=0: mlhpc("compare", *words, code=code).out


@pytest.fixture
def table(compare):
    """Return what compares as data."""
    return lambda *words, code=0: json.loads(compare(*words, "--json", code=code))


def cells(table, metric="rate"):
    """Return the cells of the one row of a metric, by column."""
    (row,) = [row for row in table["rows"] if row["metric"] == metric]
    return {column["name"]: cell for column, cell in zip(table["columns"], row["cells"], strict=True)}


def joined(text):
    return " ".join(text.split())


def test_three_systems_give_one_table_of_medians_spreads_runs_and_ratios(ran, compare):
    ran("local:cpu", 99.0, 100.0, 101.0, fingerprint="f1")
    ran("testslurm:debug", 90.0, 91.0)
    ran("testkubernetes:cpu", 120.0)
    text = compare("local", "testslurm", "testkubernetes")
    assert "ratios are to local:cpu" in joined(text)
    (line,) = [line for line in text.splitlines() if "rate [samples/s]" in line]
    expected = "100 ±1.0% (3)  90.5 ±0.6% (2)  0.905x worse  120 (1)  1.2x better"
    assert line.endswith(f"rate [samples/s]  {expected}")


def test_lower_is_better_where_the_metric_says_so(ran, table):
    for machine, seconds in (("a:x", 2.0), ("b:x", 1.0)):
        more = [MetricValue("step_time", seconds, "s", "lower"), MetricValue("loss", seconds, "1", "none")]
        ran(machine, 100.0, more=more, judged=("rate", "step_time", "loss"))
    found = table("a", "b")
    words = {"rate": "equal", "step_time": "better", "loss": ""}
    assert {name: cells(found, name)["b:x"]["word"] for name in words} == words
    assert cells(found, "step_time")["b:x"]["ratio"] == 0.5


def test_overlapping_ranges_are_called_unclear(ran, table):
    ran("a:x", 90.0, 100.0, 110.0)
    ran("b:x", 85.0, 95.0, 105.0)
    assert cells(table("a", "b"))["b:x"]["word"] == "unclear"


@pytest.mark.parametrize(("busy", "word"), [(1, "better"), (2, "unclear")])
def test_figures_of_a_machine_that_was_busy_prove_nothing(ran, table, compare, busy, word):
    ran("a:x", 100.0)
    ran("b:x", *[231.0] * (3 - busy))
    ran("b:x", *[231.0] * busy, measured={"contention": {"busy_cores": 3.4, "other_cores": 1.4}})
    cell = cells(table("a", "b"))["b:x"]
    assert (cell["word"], cell["busy_runs"]) == (word, busy)
    note = f"b:x was busy with something else in {busy} of 3 runs (other programs used 1.4 cores beside the run's 2): repeat"
    assert note in joined(compare("a", "b"))


def test_the_last_n_accepted_first_attempts_count_and_no_others(ran, table):
    ran("a:x", 1.0, 2.0, 98.0, 99.0, 100.0, 101.0, 102.0)
    ran("a:x", 500.0, attempt=1)
    ran("a:x", 500.0, verdict="regressed")
    ran("a:x", 500.0, overrides={"slurm.constraint": "fast"})
    ran("a:x", 102.0, overrides={"slurm.reservation": "maint"})
    ran("a:x", 500.0, days=40)
    ran("b:x", 100.0)
    cell = cells(table("a", "b"))["a:x"]
    assert (cell["median"], cell["runs"]) == (101.0, 5)
    assert cells(table("a", "b", "--runs", "1"))["a:x"]["runs"] == 1


def test_a_record_that_lies_there_twice_counts_once(ran, table, state_dir):
    ran("a:x", 100.0, 104.0)
    ran("b:x", 100.0)
    (path,) = state_dir.glob("records/*/*.jsonl")
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert cells(table("a", "b"))["a:x"]["runs"] == 2


def test_environments_and_device_models_of_a_partition_are_columns_of_their_own(ran, table, compare):
    ran("a:x", 100.0, environment="old")
    assert "100 (1)" in compare("a")  # one alone is nothing to compare
    ran("a:x", 110.0, environment="new")
    ran("a:x", 120.0, environment="new", device_model="EPYC 9")
    ran("a:y", 100.0)
    names = [column["name"] for column in table("a")["columns"]]
    assert names == ["a:x new EPYC", "a:x new EPYC 9", "a:x old", "a:y"]


def test_a_program_that_names_no_device_shares_the_column_of_its_partition(ran, table):
    ran("a:x", 100.0)
    ran(
        "a:x", 5.0, benchmark=Benchmark("cmd", 'program command=["./cmd"] devices=1 nodes=1'), device_model=""
    )
    ran("b:x", 100.0)
    found = table("a", "b")
    assert [column["name"] for column in found["columns"]] == ["a:x", "b:x"]
    assert sorted(row["cells"][0]["median"] for row in found["rows"]) == [5.0, 100.0]


MISSING = yaml.safe_load(Path(__file__).with_name("missing_cells.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("fields", "kind", "text"), MISSING)
def test_a_missing_cell_is_counted_with_why(ran, table, compare, fields, kind, text):  # noqa: PLR0917
    ran("a:x", 100.0)
    for machine in ("a:x", "b:x"):
        ran(machine, 7.0, benchmark=key("test_other"))
    fields = {"rates": [50.0], "benchmark": key(**fields.get("key", {})), **fields}
    ran("b:x", *fields.pop("rates"), **{name: one for name, one in fields.items() if name != "key"})
    rows = [
        row
        for row in table("a", "b")["rows"]
        if (row["benchmark"], row["definition"], row["metric"]) == (*key(), "rate")
    ]
    (cell,) = [row["cells"][1] for row in rows if row["cells"][0]["median"]]
    assert (cell["median"], cell.get("ratio"), cell["missing"]) == (None, None, kind)
    assert cell["why"].startswith(text)
    shown = joined(compare("a", "b"))
    assert f" {kind}" in shown.partition("empty:")[2]
    assert f"b:x: {text}" in shown


LARGER, PRESET = key(devices=8, batch=64, kernel=2), key(preset="small")
NEAREST = "only with devices=8 (not 1), global_batch=64 (not 16), kernel_size=2 (not 3)"


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([{"benchmark": LARGER}, {"benchmark": PRESET}], "only with preset=small (not smoke)"),
        ([{"benchmark": LARGER}, {"benchmark": PRESET, "verdict": "loss_nan"}], NEAREST),
        ([{"benchmark": LARGER}, {"benchmark": LARGER, "verdict": "drifted", "days": 60}], NEAREST),
        ([{"days": 60}], "not run since then; the last on 20"),
    ],
    ids=["of several the nearest", "only what was measured", "only what counts", "long ago"],
)
def test_where_another_machine_ran_something_else_the_nearest_is_named(ran, compare, others, text):
    ran("a:x", 100.0)
    for fields in others:
        ran("b:x", 1.0, **fields)
    assert f"b:x: {text}" in joined(compare("a", "b"))


def test_a_benchmark_that_failed_everywhere_is_listed(ran, compare):
    ran("a:x", 100.0)
    ran("b:x", 100.0)
    ran("a:x", 1.0, benchmark=key("test_broken"), verdict="loss_nan")
    assert "test_broken\n  (no run that counts)" in compare("a", "b")


def test_per_device_sets_the_nearest_scale_beside_and_says_so(ran, table, compare):
    ran("a:x", 100.0)
    for devices in (2, 8):
        other = key(devices=devices, batch=16 * devices)
        ran("b:x", 90.0 * devices, benchmark=other, measured={"devices": devices})
    step_time = MetricValue("step_time", 1.0, "s", "lower")
    ran("a:x", 100.0, benchmark=key("t"), more=[step_time], judged=("step_time",))
    found = cells(table("a", "b", "--per-device"))["b:x"]
    assert (found["median"], found["devices"], found["ratio"]) == (90.0, 2, 0.9)
    text = joined(compare("a", "b", "--per-device"))
    assert re.search(r"Runs of different scale are different benchmarks.*90 \(1\) on 2", text)
    assert "step_time" not in text


def test_an_unjudged_benchmark_is_shown_by_its_metric_and_said_so_before(ran, compare):
    for machine in ("a:x", "b:x"):
        ran(machine, 100.0, judged=(), verdict="unjudged")
    assert "1 benchmark judges no metric; name one by --metric" in compare("a", "b")
    assert "equal" in compare("a", "b", "--metric", "rate")


@pytest.mark.parametrize("words", [["compare"], ["papers", "tables"]])
def test_where_nothing_is_recorded_no_files_are_made(state_dir, mlhpc, words):
    assert "nothing is recorded in" in mlhpc(*words, "a", "b").out
    assert not state_dir.exists()
    (state_dir / "records").mkdir(parents=True)
    assert "nothing is recorded in" in mlhpc(*words, "a", "b").out


def test_a_damaged_line_is_named_and_the_rest_compared(ran, state_dir, mlhpc):
    ran("a:x", 100.0)
    ran("b:x", 100.0)
    (path,) = state_dir.glob("records/*/*.jsonl")
    path.with_name("broken.jsonl").write_bytes(b'{"half": \n\xff\xfe\n' + b"[" * 9000 + b"\ntorn")
    printed = mlhpc("compare", "a", "b")
    assert "1x equal" in printed.out
    assert printed.err.count("broken.jsonl: byte") == 3


EVIL = '\x1b[2J\u202eevil\n| <b>`x` "q"'


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_hostile_names_are_shown_and_obeyed_by_nothing(ran, compare, form):
    name = Benchmark(EVIL, "w devices=1")
    for system in ("=cmd", "b"):
        ran(f"{system}:{EVIL}", 100.0, benchmark=name, environment=EVIL, device_model=EVIL)
    out = compare("=cmd", "b", "--format", form, *(["--keys"] if form == "text" else []))
    assert not {"\x1b", "\u202e"} & set(out)
    if form == "csv":
        assert [row["system"] for row in csv.DictReader(io.StringIO(out))] == ["'=cmd", "b"]
    if form == "markdown":
        rows = [line for line in out.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
        assert "<b>" not in out


def test_figures_at_the_edge_of_floats_break_nothing(ran, compare):
    edges = {"a:x": (1e308, 1.7e308), "b:x": (5e-324, 5e-324), "c:x": (-1.0, 1.0), "d:x": (0.0,)}
    for machine, rates in edges.items():
        ran(machine, *rates)
    assert not re.search("inf|nan", compare("a", "b", "c", "d"))
    compare("d", "a", "--json")


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


def test_letters_that_a_terminal_cannot_show_do_not_end_it(ran, monkeypatch):
    ran("a:x", 100.0, 101.0)
    ran("b:x", 100.0, 101.0)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["compare", "a", "b"]) == 0
    out.seek(0)
    assert "100.5 ?0.5% (2)" in out.read()


def test_a_hundred_benchmarks_of_one_test_keep_labels_of_their_own(ran, compare):
    for batch in range(100):
        ran("a:x", 100.0, benchmark=key(batch=batch))
        ran("b:x", 100.0, benchmark=key(batch=batch))
    labels = [line for line in compare("a", "b").splitlines() if line.startswith("test_a global_batch=")]
    assert labels == [f"test_a global_batch={batch}" for batch in range(100)]
