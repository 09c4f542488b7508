"""`mlhpc papers ai500`: FLOPS and VFLOPS of recorded ensembles, and bagging beside plain data parallelism."""

import json
import re
from pathlib import Path

import pytest
from worlds import measurement

from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.papers.ai500 import GOALS, QualityGoal, vflops
from pytest_mlhpc.report.keys import Benchmark

SETTINGS = {
    "devices": 4, "bagging": None, "workload": "resnet50", "batch": 8, "quality": 0.6, "better": "higher", "failed": 0,
    "name": "test_scaling", "fields": "",
}  # fmt: skip


@pytest.fixture
def ran(recorded):
    """Store runs of ResNet-50 or another workload: plain, or with *bagging*."""

    def put(*rates, **settings):
        one = {**SETTINGS, **settings}
        devices, quality = one["devices"], one["quality"]
        more = []
        own = ""
        if one["bagging"]:
            own = " bagging=[{},{}]".format(*one["bagging"])
            more = [
                MetricValue("ensemble_quality", quality, "1", one["better"]),
                MetricValue("base_model_quality", quality - 0.1, "1", one["better"]),
                MetricValue("base_models_failed", float(one["failed"]), "1", "lower"),
                MetricValue("hpc_ai500_flop_per_sample", 24e9, "FLOP", "none"),
            ]
        inner = f"global_batch={one['batch'] * devices} precision=fp32{one['fields']}"
        computed = f"{one['workload']}{own} data=memory devices={devices} {inner} nodes=1 preset=smoke"
        for rate in rates:
            every = (MetricValue("achieved_flops", rate * 20e9, "FLOP/s", "higher"), *more)
            made = measurement(rate, name="effective_throughput", more=every, devices=devices)
            recorded(benchmark=Benchmark(one["name"], computed), measurement=made)

    return put


@pytest.fixture
def ai500(mlhpc):
    """Return what prints the report as text."""
    return lambda *words: mlhpc("papers", "ai500", "cirrus", *words).out


@pytest.fixture
def machine(ai500):
    """Return what reports the one machine as data."""
    return lambda *words: json.loads(ai500("--json", *words))["machines"][0]


def test_flops_and_vflops_are_by_our_rule_with_the_field_s_exponent(ran, machine):
    ran(90.0, 100.0, 110.0, bagging=(2, 2), quality=0.763 / 2)
    (found,) = machine()["ensembles"]
    figures = ("models", "each", "runs", "throughput", "flops", "vflops")
    expected = [2, 2, 3, 100.0, 100 * 20e9, 100 * 20e9 / 2**5]
    assert [found[name] for name in figures] == pytest.approx(expected)


def test_the_paper_s_rule_counts_by_its_own_operations(ran, machine):
    ran(100.0, bagging=(2, 2), quality=0.763)
    (found,) = machine("--rule", "hpc-ai500")["ensembles"]
    assert found["flops"] == found["vflops"] == pytest.approx(100 * 24e9)


def test_base_models_that_are_sharded_stand_beside_plain_trainings_and_those_that_are_not(ran, ai500):
    ran(80.0)
    ran(100.0, bagging=(2, 2))
    ran(90.0, bagging=(2, 2), fields=' parallel={"replicate":1,"shard":2}')
    ran(70.0, fields=' parallel={"replicate":1,"shard":4}')
    lines = {" ".join(line.split()) for line in ai500().splitlines()}
    wanted = {
        "plain data parallelism 4 80 100.0 % 1",
        "bagging 2 x 2 4 100 125.0 % 1.25",
        "bagging 2 x 2, 2 shards 4 90 112.5 % 1.12",
    }
    assert wanted - lines == set()


def test_bagging_stands_beside_plain_trainings_on_as_many_devices(ran, ai500):
    ran(30.0, devices=1)
    ran(80.0)
    ran(114.0, bagging=(4, 1))
    ran(100.0, bagging=(2, 2))
    ran(55.0, batch=16)  # another batch of a device: another group, without any ensemble
    text = ai500()
    plain = {"plain data parallelism 1 30 100.0 % 1", "plain data parallelism 4 80 66.7 % 1"}
    bagging = {"bagging 2 x 2 4 100 83.3 % 1.25", "bagging 4 x 1 4 114 95.0 % 1.43"}
    assert {*plain, *bagging} <= {" ".join(line.split()) for line in text.splitlines()}
    assert "55" not in text


def test_an_ensemble_without_a_plain_training_beside_it_has_no_ratio(ran, ai500):
    ran(100.0, bagging=(2, 2))
    (line,) = [line for line in ai500().splitlines() if line.startswith("bagging 2 x 2")]
    assert line.split()[-2:] == ["-", "-"]


def test_long_titles_come_whole(ran, ai500, machine):
    name = "test_resnet50_" + "_".join(["of_a_team"] * 20)
    stem = "stem=" + "x" * 200
    ran(30.0, devices=1, fields=f" {stem}", name=name)
    ran(100.0, bagging=(2, 2), fields=f" {stem}", quality=0.71, failed=1, name=name)
    text = ai500()
    label = f"{name} preset=smoke"
    assert len(label) > 160
    lines = text.splitlines()
    assert lines[lines.index(f"{label} (1)") + 1].split()[:4] == ["2", "x", "2", "100"]
    assert f"  {label}, 2 x 2: 1 of 2 base models failed, the rest counts" in lines
    group = f"resnet50 data=memory device_batch=8 precision=fp32 preset=smoke {stem}"
    assert group in lines
    assert "..." not in text
    data = machine()
    assert data["ensembles"][0]["label"] == label
    assert {one["group"] for one in data["scaling"]} == {group}


def test_a_workload_without_an_exponent_says_what_to_give(ran, ai500, machine):
    ran(100.0, workload="cosmoflow", bagging=(2, 2), quality=0.248, better="lower")
    assert "cosmoflow has no exponent in HPC AI500: give --target and --exponent" in ai500()
    (found,) = machine("--target", "0.124", "--exponent", "2")["ensembles"]
    assert found["vflops"] == pytest.approx(100 * 20e9 / 4)


@pytest.mark.parametrize(("bagging", "words"), [((2, 2), ["--benchmark", "nowhere"]), (None, [])])
def test_without_ensembles_there_is_nothing_to_report(ran, mlhpc, bagging, words):
    ran(100.0, bagging=bagging)
    assert "no accepted run with bagging=(M, P) since" in mlhpc("papers", "ai500", "cirrus", *words).out


def test_an_empty_state_folder_is_left_empty(state_dir, mlhpc):
    assert "nothing is recorded" in mlhpc("papers", "ai500", "cirrus").out
    assert not (state_dir / "records").exists()


@pytest.mark.parametrize(
    ("better", "expected"),
    [
        ("higher", {0.5: 1.0, 0.25: 0.5**5, 0.0: 0.0, -1.0: 0.0}),
        ("lower", {1.0: 0.5**5, 0.0: float("inf")}),
    ],
)
def test_vflops_weigh_with_the_power_of_the_share_of_the_target(better, expected):
    goal = QualityGoal("any", target=0.5, exponent=5)
    assert {quality: vflops(1.0, quality, goal, better) for quality in expected} == pytest.approx(expected)


def test_exponents_are_the_paper_s():
    assert (GOALS["resnet50"].exponent, GOALS["deepcam"].exponent) == (5, 10)


def test_an_exponent_beyond_floats_gives_no_vflops(ran, machine):
    ran(100.0, bagging=(2, 2), quality=0.9)
    assert machine("--exponent", "1e6")["ensembles"][0]["vflops"] is None


def test_the_page_names_every_column():
    page = " ".join((Path(__file__).parents[2] / "docs/ai500.md").read_text(encoding="utf-8").split())
    columns = {
        word
        for line in OURS.splitlines()
        for word in re.findall(r"M x P|samples/s|[V]?FLOPS|efficiency|over plain", line)
    }
    assert len(columns) == 6
    assert [name for name in sorted(columns) if name not in page] == []


OURS = """\
cirrus:standard, FLOPS by the rule ours

                                                  M x P   samples/s       FLOPS    ensemble base models      VFLOPS
test_resnet50_in_ensembles preset=smoke (1)       2 x 2         110       2.2 T        0.71        0.61     1.535 T
test_resnet50_in_ensembles preset=smoke (1)       4 x 1         121      2.42 T        0.66        0.56     1.172 T

resnet50 data=memory device_batch=8 precision=fp32 preset=smoke
                           devices   samples/s  efficiency  over plain
plain data parallelism           1          31     100.0 %           1
plain data parallelism           4          96      77.4 %           1
bagging 2 x 2                    4         110      88.7 %        1.15
bagging 4 x 1                    4         121      97.6 %        1.26
"""
THEIRS = """\
cirrus:standard, FLOPS by the rule hpc-ai500

                                                  M x P   samples/s       FLOPS    ensemble base models      VFLOPS
test_resnet50_in_ensembles preset=smoke (1)       2 x 2         110      2.64 T        0.71        0.61     1.842 T
test_resnet50_in_ensembles preset=smoke (1)       4 x 1         121     2.904 T        0.66        0.56     1.406 T

resnet50 data=memory device_batch=8 precision=fp32 preset=smoke
                           devices   samples/s  efficiency  over plain
plain data parallelism           1          31     100.0 %           1
plain data parallelism           4          96      77.4 %           1
bagging 2 x 2                    4         110      88.7 %        1.15
bagging 4 x 1                    4         121      97.6 %        1.26
"""


@pytest.mark.parametrize(
    ("words", "text"), [((), OURS), (("--rule", "hpc-ai500"), THEIRS)], ids=["ours", "the paper's"]
)
def test_the_command_prints_ensembles_and_scaling_by_each_rule(ran, ai500, words, text):
    name = "test_resnet50_in_ensembles"
    ran(31.0, devices=1, name=name)
    ran(96.0, name=name)
    ran(110.0, bagging=(2, 2), quality=0.71, name=name)
    ran(121.0, bagging=(4, 1), quality=0.66, name=name)
    assert ai500(*words) == text
