"""`mlhpc papers tables`: the three tables of throughput, what stands in one section, and what is refused."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.cells import cell_len
from worlds import measurement

from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.report.keys import Benchmark

MODELS = {
    "resnet50": "image_size=224 stem=epcc",
    "cosmoflow": "base_channels=32 input_size=128 kernel_size=3 layers=5",
}


SETTINGS = {
    "workload": "resnet50", "fraction": 0.5, "batch": 32, "precision": "fp32", "model": "", "name": "", "data": "real-set",
    "data_kind": "real", "cache": "unknown", "nodes": 1, "devices": 4, "watts": 0.0,
}  # fmt: skip


@pytest.fixture
def ran(recorded):
    """Store runs of a workload on a machine: compute throughput, a compute fraction, and what follows of both."""

    def put(machine, *rates, **fields):
        one = {name: fields.pop(name, usual) for name, usual in SETTINGS.items()}
        workload, nodes, devices = one["workload"], one["nodes"], one["devices"]
        model = one["model"] or MODELS.get(workload, "size=1")
        inner = f"global_batch={one['batch']} {model} precision={one['precision']}"
        computed = f"{workload} data={one['data']} devices={devices} {inner} nodes={nodes} preset=reference"
        benchmark = Benchmark(one["name"] or f"test_{workload}", computed)
        values = {name: one[name] for name in ("data_kind", "cache", "devices")}
        values |= {"nodes": tuple(f"n{n}" for n in range(nodes)), "samples": 6400}
        for rate in rates:
            effective = rate * one["fraction"]
            more = [MetricValue("compute_fraction", one["fraction"], "1", "higher")]
            more.append(MetricValue("effective_throughput", effective, "samples/s", "higher"))
            if one["watts"]:
                more.append(MetricValue("energy_efficiency", effective / one["watts"], "samples/J", "higher"))
            made = measurement(rate, name="compute_throughput", more=tuple(more), **values)
            run = {"benchmark": benchmark, "measurement": made}
            recorded(machine, **{**run, **fields})

    return put


@pytest.fixture
def tables(mlhpc):
    """Return what prints the tables."""
    return lambda *words, code=0: mlhpc("papers", "tables", *words, code=code).out


@pytest.fixture
def data(tables):
    """Return what gives the tables as data."""
    return lambda *words, code=0: json.loads(tables(*words, "--json", code=code))


def lines(made, metric="effective_throughput", **parameters):
    """Return the lines of a table, by system; of sections with these parameters."""
    every = made["tables"][metric]
    return {line["system"]: line for line in every if parameters.items() <= line["parameters"].items()}


def test_three_tables_set_systems_beside_the_paper_s_figures(ran, tables):
    ran("cirrus:standard", *[60.0] * 6, nodes=2, devices=32, fraction=0.9)
    ran("eidf:h100", *[400.0] * 6, fraction=0.8)
    text = tables("cirrus", "eidf")
    titles = [line for line in text.splitlines() if re.match(r"(compute|effective) \w+.*: ", line)]
    shown = [title.split(" [")[0].split(":")[0] for title in titles]
    assert shown == ["compute throughput", "compute fraction", "effective throughput"]
    ours = {"cirrus:standard 2 32 60 [60, 60] 1.875 30 6", "eidf:h100 1 4 0.8 [0.8, 0.8] 6"}
    published = "ARCHER2, MI210 [1] 1 4 293.2 published 73.3 293.2 -"
    assert {*ours, published} <= {" ".join(line.split()) for line in text.splitlines()}
    assert "[1] Rae, Lee, Richings, Weiland" in text


def test_figures_are_by_device_and_node(ran, data):
    ran("a:x", 80.0, nodes=2, devices=8, fraction=0.5)
    line = lines(data("a"))["a:x"]
    assert (line["median"], line["per_device"], line["per_node"]) == (40.0, 5.0, 20.0)


@pytest.mark.parametrize(("fields", "of"), [({"watts": 400.0}, "devices"), ({"energy_j": 64_000.0}, "job")])
def test_figures_are_by_joule_and_those_of_the_scheduler_are_marked_as_the_whole_job_s(
    ran, tables, data, fields, of
):
    ran("a:x", 80.0, **fields)
    line = lines(data("a"))["a:x"]
    assert (line["samples_per_joule"], line["energy_of"]) == (0.1, of)
    text = " ".join(tables("a").split())
    assert ("0.1*" in text, "The two are not comparable" in text) == (of == "job", of == "job")


def test_six_runs_have_an_interval_and_fewer_their_range(ran, data):
    ran("a:x", *[98.0, 99.0, 100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 1.0])
    ran("b:x", 98.0, 104.0)
    found = lines(data("a", "b"), "compute_throughput")
    for system, sure in (("a:x", True), ("b:x", False)):
        assert [found[system][name] for name in ("low", "high", "sure")] == [98.0, 104.0, sure]


APART = yaml.safe_load(Path(__file__).with_name("apart.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("fields", "why"), APART)
def test_what_is_not_comparable_stands_in_a_section_of_its_own_with_the_reason(ran, tables, fields, why):
    ran("a:x", 100.0)
    ran("b:x", 100.0)
    ran("c:x", 300.0, **fields)
    text = " ".join(tables("a", "b", "c", "--no-published").split())
    first, second = text.partition("effective throughput")[2].split("apart from the first: ")
    assert re.search("a:x.*b:x", first)
    assert re.search(f"{re.escape(why)}.*c:x 1 4 150", second)


def test_another_kernel_size_is_never_in_one_section(ran, data):
    ran("a:x", 100.0, workload="cosmoflow")
    smaller = MODELS["cosmoflow"].replace("kernel_size=3", "kernel_size=2")
    ran("b:x", 300.0, workload="cosmoflow", model=smaller)
    for parity in ("same", "best"):
        made = data("a", "b", "--parity", parity, "--no-published")
        assert {line["system"] for line in made["tables"]["compute_throughput"]} == {"a:x", "b:x"}
        assert set(lines(made, kernel_size="3")) == {"a:x"}


def test_scale_and_the_test_s_name_put_nothing_apart(ran, data):
    ran("a:x", 100.0, devices=4)
    ran("b:x", 500.0, devices=32, nodes=2, name="test_with_ranks")
    assert set(lines(data("a", "b", "--no-published"), global_batch="32")) == {"a:x", "b:x"}


def test_two_tests_of_one_scale_keep_their_names(ran, data):
    ran("a:x", 100.0)
    ran("a:x", 200.0, name="test_pinned")
    found = lines(data("a", "--no-published"))
    medians = {name: line["median"] for name, line in found.items()}
    assert medians == {"a:x test_resnet50": 50.0, "a:x test_pinned": 100.0}


def test_each_at_its_best_shows_the_fastest_settings_and_names_them(ran, tables, data):
    ran("a:x", 100.0)
    ran("a:x", 300.0, batch=256, precision="bf16")
    ran("b:x", 150.0)
    found = lines(data("a", "b", "--parity", "best", "--no-published"))
    assert {name: line["median"] for name, line in found.items()} == {"a:x": 150.0, "b:x": 75.0}
    assert found["a:x"]["chosen"] == {"global_batch": "256", "precision": "bf16"}
    text = tables("a", "b", "--parity", "best", "--no-published")
    assert "a:x, resnet50 on 4 devices: global_batch=256 precision=bf16 (best of 2 settings)" in text


def test_each_at_its_best_stands_beside_rates_per_device_of_large_machines(ran, data):
    ran("a:x", 400.0, workload="cosmoflow")
    same = lines(data("a"))
    best = lines(data("a", "--parity", "best"))
    assert "H100, v3.0" not in same
    assert best["H100, v3.0"]["per_device"] == 221.8
    assert best["Fugaku, A64FX node"]["median"] is None


def test_published_figures_that_are_not_comparable_are_refused_with_the_reason(ran, tables, data):
    ran("a:x", 100.0, data="memory", data_kind="synthetic")
    made = data("a")
    assert [line["source"] for line in made["tables"]["effective_throughput"]] == [None]
    why = {one["why"] for one in made["refused"] if one["source"] == "hpdc24"}
    assert why == {"real data (not synthetic)"}
    assert "Cirrus, V100" in " ".join(tables("a").partition("not comparable")[2].split())


def test_a_figure_that_contradicts_itself_in_print_is_left_out_and_says_why(ran, data):
    ran("a:x", 20.0, workload="deepcam", model="height=768 middle_blocks=16 width=1152 width_multiplier=1")
    made = data("a")
    assert "Cirrus, V100" not in lines(made, "compute_throughput")
    assert "54.1 %" in lines(made)["Cirrus, V100"]["note"]


@pytest.mark.parametrize(
    ("rates", "fields", "why"),
    [
        ([], {}, "never run"),
        ([1.0], {"verdict": "worker_exit", "measurement": None, "device_model": ""}, "only failed: 1 run, the last worker_exit on 20"),
        ([1.0], {"days": 60}, "not run since then; the last on 20"),
        ([1.0], {"overrides": {"slurm.exclusive": "false"}}, "only runs with other settings (--mlhpc-set)"),
    ],
)  # fmt: skip
def test_a_machine_without_figures_is_named_with_the_reason(ran, data, rates, fields, why):
    ran("a:x", 100.0)
    ran("b:x", 100.0, workload="cosmoflow")
    ran("b:x", *rates, **fields)
    made = data("a", "b", "--no-published")
    (found,) = [one for one in made["refused"] if one["who"] == ["b:x"] and one["workload"] == "resnet50"]
    assert found["why"].startswith(why)


def test_benchmarks_without_throughput_are_no_part_of_it(ran, recorded, data):
    ran("a:x", 100.0)
    recorded("a:x", benchmark=Benchmark("t", "storage nodes=1"))
    shown = data("a", "--no-published")["tables"]["compute_fraction"]
    assert {line["workload"] for line in shown} == {"resnet50"}


def test_where_no_training_was_accepted_it_says_so(ran, tables):
    ran("a:x", 100.0, verdict="worker_exit", measurement=None)
    assert "No training with these figures was accepted" in tables("a")


EVIL = '\x1b[2J\u202e=evil\n| <b>`x` \\end{table} 50% $a_b$ & #1 ~^ "q"'


@pytest.fixture
def evil(ran):
    for system in ("=cmd", "b"):
        ran(f"{system}:{EVIL}", 100.0, environment=EVIL, device_model=EVIL, name=EVIL)


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "latex"])
def test_hostile_names_are_shown_and_obeyed_by_nothing(evil, tables, form):
    out = tables("=cmd", "b", "--format", form)
    assert "\x1b" not in out
    if form == "text":
        assert max(map(cell_len, out.splitlines())) <= 110
    if form == "csv":
        systems = {row["system"] for row in csv.DictReader(io.StringIO(out)) if not row["source"]}
        assert all(system.startswith(("'=cmd", "b:")) for system in systems)
    if form == "markdown":
        heights = {line.replace("\\|", "").count("|") for line in out.splitlines() if line.startswith("|")}
        assert len(heights) == 2  # effective throughput has columns of its own
        assert "<b>" not in out


def test_latex_has_whole_rows_and_obeys_no_name(evil, tables):
    out = tables("=cmd", "b", "--format", "latex")
    shown = "\n".join(line for line in out.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\[\\{}$&#_%]", "", shown)
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"[$#_%^~]", bare)
    assert out.count(r"\end{table}") == out.count(r"\begin{table}") == 3
    for tabular in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end\{tabular\}", out, re.DOTALL):
        columns = len(tabular[0])
        for line in tabular[1].splitlines():
            if line.endswith(r"\\") and not line.startswith(r"\multicolumn"):
                assert line.replace(r"\&", "").count("&") == columns - 1


def test_tables_are_at_most_100_columns_wide(ran, tables):
    ran("a-system-with-a-long-name:and-a-partition-with-another", *[60.0, 61.0] * 3, nodes=2, devices=32)
    ran("b:x", *[412.345, 413.456] * 3, watts=1234.0)
    assert max(map(cell_len, tables("a-system-with-a-long-name", "b").splitlines())) <= 100
