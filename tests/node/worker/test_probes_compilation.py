"""A training compiled for IPUs that are not here, with a stand-in for poptorch: no Poplar compiler has seen this."""

import sys

import poptorch_stand_in
import pytest
from probe_ranks import alone, contradictions, place_of, plan

from pytest_mlhpc.node.worker.probes import compilation, measure

MODEL = {"of": "language_model", "size": "smoke"}


@pytest.fixture
def poptorch(monkeypatch):
    module = poptorch_stand_in.poptorch(ipus=0)  # no IPU is here
    monkeypatch.setitem(sys.modules, "poptorch", module)
    return module


def test_a_host_without_ipus_compiles_for_them_and_trains_nothing(poptorch, tmp_path):
    fields = {"ipus_per_replica": 2, "ipu_execution": "sharded", "device_iterations": 3}
    run = plan("compilation", parameters={**MODEL, "batch": 8, "fields": fields}, steps=2, warmup_steps=0)
    report = alone(measure.measure, run, tmp_path)
    assert len(poptorch.executors) == 2
    for one in poptorch.executors:
        assert (one.options.offline, one.destroyed) == (2, True)
        assert type(one.options.strategy) is poptorch.ShardedExecution
        assert [shape[0] for shape in one.shapes] == [24, 24]  # three steps of eight samples in one call
    assert [(one.times, len(one.seconds)) for one in report.timed] == [(("compile_time",), 2)]
    assert [(one.name, one.value, one.unit) for one in report.figures] == [("executable_bytes", 4096.0, "B")]
    assert report.losses == ()
    assert report.environment["compiled_for"] == "2 IPUs Mk2 that are not here"
    assert list((tmp_path / "data").iterdir()) == []


def test_a_program_for_ipus_that_are_not_here_cannot_be_called(poptorch, tmp_path):
    one = compilation.probe(place_of("compilation", tmp_path, **MODEL))
    one.repeat()
    one.close()
    (executor,) = poptorch.executors
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        executor()


OTHERS = "compilation is for Graphcore's IPUs, from a host with them (ipu) or without (cpu); not cuda"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"accelerator": "ipu"}, {}),
        ({"accelerator": "cuda"}, {"": OTHERS}),
        ({"devices": 2}, {"devices": "one process compiles; more would do the same again"}),
        (
            {"fields": {"optimizer": "lamb"}},
            {"fields": "poptorch has no lamb that computes as ours does; it takes sgd, adam, adamw"},
        ),
    ],
)
def test_it_is_for_hosts_with_ipus_or_with_none_and_for_one_process(changes, found):
    assert contradictions("compilation", **{"size": "smoke", "accelerator": "cpu", **changes}) == found
