"""Published figures: that they are ours to compare with, and of one piece."""

import pytest
from worlds import spec

from pytest_mlhpc.jobs.spec import definition_of
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.papers.throughput import BEST, PUBLISHED, SAME, SOURCES, SharedTerms, terms_of
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import RecordedRun

WORKLOAD = {workload.name: workload for workload in WORKLOADS}
FIRST = next(one for one in PUBLISHED if one.source == "hpdc24" and one.workload == "resnet50")
FIELDS = {"global_batch": "32", "image_size": "224", "precision": "fp32", "stem": "epcc"}


def terms(data_kind="real", cache="unknown", **changes):
    """What our figures share; a field that is None is unset."""
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if value is not None}
    return SharedTerms("resnet50", tuple(fields.items()), data_kind, cache)


def name_of(one):
    return f"{one.source}-{one.workload}-{one.system}"


def test_every_figure_has_a_source_that_is_named():
    assert {one.source for one in PUBLISHED} == set(SOURCES)


@pytest.mark.parametrize("one", PUBLISHED, ids=name_of)
def test_models_are_those_of_the_reference_preset_but_for_what_papers_varied(one):
    ours = parameters_of(WORKLOAD[one.workload], "reference")
    for name, value in one.model.items():
        if name in {"kernel_size", "stem"}:
            assert value in {str(choice) for choice in WORKLOAD[one.workload].fields[name].choices}
        else:
            assert float(value) == ours[name]


@pytest.mark.parametrize("one", [one for one in PUBLISHED if one.compute is not None], ids=name_of)
def test_the_paper_s_three_figures_agree_within_their_rounding(one):
    assert one.compute * one.fraction == pytest.approx(one.effective, rel=0.01, abs=0.1)


@pytest.mark.parametrize("one", [one for one in PUBLISHED if one.source == "hpdc24"], ids=name_of)
def test_a_run_that_is_declared_as_the_paper_s_stands_beside_its_figures(one):
    workload = WORKLOAD[one.workload]
    changes = {"stem": "epcc"} if one.workload == "resnet50" else {}
    half = {"precision": one.tuning["precision"]}
    parameters = parameters_of(workload, "reference", global_batch=32, **changes, **half)
    declared = spec(workload=one.workload, parameters=parameters, preset="reference", ranks=4)
    key = keys.parse(keys.Benchmark("t", definition_of(declared, workload)))
    run = RecordedRun(
        keys.Benchmark("t", ""), {}, (), data_kind="real", cache="unknown", devices=4, created_ns=0
    )
    assert one.apart(terms_of(key, run, SAME), SAME) == []


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (terms(), None),
        (terms(data_kind="synthetic"), "real data (not synthetic)"),
        (terms(cache="warm"), "state of the cache not stated (not warm)"),
        (terms(global_batch="64"), "global_batch=32 (not 64)"),
        (terms(precision="bf16"), "precision=fp32 (not bf16)"),
        (terms(stem="v1.5"), "stem=epcc (not v1.5)"),
        (terms(stem=None), "stem=epcc (not unset)"),
    ],
)
def test_what_differs_keeps_it_apart_and_is_named(ours, why):
    assert FIRST.apart(ours, SAME) == ([why] if why else [])


def test_at_its_best_the_batch_is_free_and_the_model_is_not():
    assert FIRST.apart(terms(global_batch=None, precision=None), BEST) == []
    assert FIRST.apart(terms(global_batch=None, precision=None, image_size="64"), BEST)


def test_a_figure_whose_batch_is_not_stated_never_has_the_same_parameters():
    one = next(one for one in PUBLISHED if one.source == "mlperf-hpc" and one.workload == "cosmoflow")
    ours = SharedTerms("cosmoflow", tuple(sorted(one.model.items())), "real", "unknown")
    assert one.apart(ours, SAME) == ["global_batch not stated"]
    assert one.apart(ours, BEST) == []
