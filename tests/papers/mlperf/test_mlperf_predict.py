"""Epochs times epoch time: predictions at scales not run, and how far off they are."""

from dataclasses import replace
from unittest.mock import ANY

import pytest
from trained_runs import events, record

from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.papers.mlperf import predict
from pytest_mlhpc.papers.mlperf.predict import (
    FITTED,
    MEASURED,
    ScalePlace,
    leave_one_out,
    points,
    predictions,
)
from pytest_mlhpc.papers.mlperf.trained import sort_out

#: A machine that is as the model says: a step takes so long, plus so long for each sample of a device.
OVERHEAD_S, EACH_S = 0.01, 0.001
SAMPLES, EVALUATED = 1024, 64


def epoch_s(devices, batch):
    return SAMPLES / batch * (OVERHEAD_S + EACH_S * batch / devices)


def run_at(number, devices, batch, *, epochs=4, reached=True, **changes):
    times = {"epoch_s": epoch_s(devices, batch), "eval_s": 2.0 / devices}
    told = events(epochs=epochs, counts=(SAMPLES, EVALUATED), reached=reached, **times)
    return record(number, devices=devices, parameters={"global_batch": batch}, told=told, **changes)


def model_of(*records):
    found = sort_out(records)
    return predict.model_of(found.runs, points(found.runs, found.windows))


def predicted(model, devices, batch, machine="cirrus:standard"):
    training = next(one.place.training for one in model.points if one.place.machine == machine)
    return model.predict(ScalePlace(machine, training, devices, batch))


def test_a_scale_not_run_is_predicted_from_two_others():
    model = model_of(run_at(1, 1, 32), run_at(2, 4, 32))
    found = predicted(model, 16, 32)
    assert (found.epochs, found.epochs_from, found.epoch_from) == (4, MEASURED, FITTED)
    assert found.epoch_s == pytest.approx(epoch_s(16, 32), rel=1e-6)
    assert found.seconds == pytest.approx(5.0 + 4 * epoch_s(16, 32) + 4 * 2.0 / 16, rel=1e-6)


def test_epochs_of_a_batch_come_from_any_machine_and_its_epoch_time_from_this_one():
    other = run_at(1, 4, 64, epochs=6, system="archer2")
    model = model_of(run_at(2, 1, 32), run_at(3, 4, 32), other)
    found = predicted(model, 4, 64)
    assert (found.epochs, found.epochs_from) == (6, MEASURED)
    assert found.epoch_s == pytest.approx(epoch_s(4, 64), rel=1e-6)


def test_epochs_of_a_batch_never_run_come_from_a_line_in_the_batch():
    model = model_of(run_at(1, 1, 32, epochs=4), run_at(2, 1, 64, epochs=6))
    found = predicted(model, 1, 128)
    assert (found.epochs, found.epochs_from) == (10, FITTED)


def test_a_window_of_steps_gives_the_epoch_time_of_a_scale():
    rate = SAMPLES / epoch_s(8, 32) * 2  # another machine than the model's: what is measured wins
    run = record(3, devices=8, parameters={"global_batch": 32, "until": None}, told=())
    throughput = MetricValue("effective_throughput", rate, "samples/s", "higher")
    measured = replace(run.measurement, metrics=(throughput,))
    window = replace(run, measurement=measured)
    model = model_of(run_at(1, 1, 32), run_at(2, 4, 32), window)
    sources = {point.place.devices: point.source for point in model.points}
    assert sources == {1: "run", 4: "run", 8: "window"}
    found = predicted(model, 8, 32)
    assert (found.epoch_from, found.epoch_s) == (MEASURED, pytest.approx(SAMPLES / rate))


def test_a_scale_held_back_is_predicted_by_the_others_alone():
    model = model_of(*(run_at(number, devices, 32) for number, devices in enumerate((1, 2, 4, 8))))
    found = leave_one_out(model)
    assert [one.place.devices for one in found] == [1, 2, 4, 8]
    assert all(one.error == pytest.approx(0.0, abs=1e-6) for one in found)


def test_the_error_of_a_machine_that_scales_otherwise_is_shown():
    told = events(epochs=4, epoch_s=2 * epoch_s(8, 32), eval_s=0.25, counts=(SAMPLES, EVALUATED))
    slow = record(3, devices=8, parameters={"global_batch": 32}, told=told)
    last = leave_one_out(model_of(run_at(1, 1, 32), run_at(2, 4, 32), slow))[-1]
    measured = 5.0 + 4 * (2 * epoch_s(8, 32) + 0.25)
    assert last.measured == pytest.approx(measured)
    assert last.error == pytest.approx((5.0 + 4 * (epoch_s(8, 32) + 0.25)) / measured - 1, rel=1e-6)


def test_too_few_scales_predict_nothing():
    model = model_of(run_at(1, 4, 32))
    assert predictions(model) == ()
    assert [one.error for one in leave_one_out(model)] == [None]


def test_runs_that_did_not_converge_tell_the_epoch_time_but_no_epochs():
    model = model_of(run_at(1, 1, 32, reached=False), run_at(2, 4, 32))
    assert len(model.points) == 2
    assert [one.place.devices for one in leave_one_out(model)] == [4]


@pytest.mark.parametrize(("asked", "predicted_at"), [({}, [8, 16]), ({"devices": (2, 3, 4, 64)}, [2])])
def test_scales_that_were_run_or_do_not_share_the_batch_are_not_predicted(asked, predicted_at):
    found = predictions(model_of(run_at(1, 1, 32), run_at(2, 4, 32)), **asked)
    assert [one.place.devices for one in found] == predicted_at


def test_another_model_is_another_training():
    other = record(2, devices=4, parameters={"global_batch": 32, "kernel_size": 2})
    model = model_of(run_at(1, 1, 32), other)
    assert len({one.place.training for one in model.points}) == 2
    assert predictions(model) == ()


def test_how_a_machine_computes_changes_the_epoch_time_and_not_the_epochs():
    told = events(epochs=6, epoch_s=1.0, counts=(SAMPLES, EVALUATED))
    tuned = {"global_batch": 64, "channels_last": True}
    other = record(1, devices=1, parameters=tuned, system="archer2", told=told)
    model = model_of(other, run_at(2, 1, 32), run_at(3, 4, 32))
    assert len({point.place.training for point in model.points}) == 2
    assert predicted(model, 4, 64).epochs == 6


def test_learning_rate_and_seed_are_free():
    other = record(2, devices=4, parameters={"global_batch": 32, "seed": 9, "learning_rate": 0.5})
    model = model_of(run_at(1, 1, 32), other)
    assert len({one.place.training for one in model.points}) == 1


@pytest.mark.parametrize(
    ("points_", "constant", "slope"),
    [
        ([(1, 3.0), (2, 5.0), (4, 9.0)], pytest.approx(1.0), pytest.approx(2.0)),
        ([(1, 4.0), (2, 2.0)], ANY, 0.0),
        ([(1, 1.0), (2, 4.0)], 0.0, ANY),
    ],
)
def test_a_line_is_found_and_has_no_negative_part(points_, constant, slope):
    found = predict.line(points_)
    assert (found.constant, found.slope) == (constant, slope)


@pytest.mark.parametrize(
    "points_", [[], [(1, 1.0)], [(2, 1.0), (2, 3.0)], [(1, 0.0), (2, 1.0)], [(0, 1.0), (2, 1.0)]]
)
def test_no_line_goes_through_one_scale_or_through_nothing(points_):
    assert predict.line(points_) is None
