"""What the other views of the report are made of: last nights, time, scaling, nodes."""

import pytest
from made_nights import DAY_NS, FIRST_NS, benchmark, night, series
from page_content import nights, page_of

# --- the last night


def last_night(*series_, more=(), **wanted):
    (system,) = page_of(*series_, more=more, **wanted).systems
    return system


def ran(count):
    """Nights of a benchmark that passed, and their figures."""
    return series(nights(count), [1.0] * count)


def of_another(number, **changes):
    """A night of another benchmark."""
    return night(number, id=f"o{number}", benchmark=benchmark("test_b"), **changes)


def another_ran(count, *more):
    made = [*map(of_another, range(count)), *more]
    return series(made, [1.0] * len(made))


def test_the_last_night_counts_each_benchmark_once_by_its_newest_verdict():
    slow = of_another(4, verdict="regressed", failure="regressed: 7 % slower\n  more")
    system = last_night(ran(5), another_ran(4, slow))
    assert system.counts == {"ok": 1, "slow": 1}
    (trouble,) = system.troubles
    assert (trouble.verdict, trouble.text) == ("regressed", "regressed: 7 % slower")
    assert system.node_hours == 1.0


def test_a_benchmark_that_ran_last_week_and_not_last_night_is_missing():
    system = last_night(ran(9), another_ran(7))
    assert system.counts == {"ok": 1, "missing": 1}
    assert system.troubles[0].text == "not recorded since 2026-06-07"


def test_a_benchmark_that_was_given_up_is_not_missing():
    assert last_night(ran(30), another_ran(3)).counts == {"ok": 1}


@pytest.mark.parametrize(("late_ns", "stale"), [(0, False), (1, True)])
def test_a_system_is_stale_after_26_hours(late_ns, stale):
    now_ns = FIRST_NS + 2 * DAY_NS + 26 * 3600 * 10**9 + late_ns
    assert last_night(ran(3), now_ns=now_ns).stale == stale


@pytest.mark.parametrize(
    ("verdicts", "counts"),
    [(["image_pull", "out_of_memory"], {"broken": 1, "machine": 1}), (["of_a_newer_version"], {"unsure": 1})],
    ids=[
        "trouble of the machine is told apart from broken runs",
        "a verdict that nobody here knows is not ok",
    ],
)
def test_verdicts_are_counted_by_kind(verdicts, counts):
    more = [night(5, id=name, benchmark=benchmark(name), verdict=name) for name in verdicts]
    assert last_night(more=more).counts == counts


def test_nodes_that_vetting_left_out_last_night_are_named():
    made = [night(0), night(1, unfit={"n7": "ECC errors"})]
    assert last_night(series(made, [1.0, 1.0])).unfit == {"n7": "ECC errors"}


# --- time


def splits(**seconds):
    """Shares of time of a page with these figures: one list for each metric."""
    made = nights(len(seconds["epoch_time"]))
    return page_of(*(series(made, values, name, "s", "lower") for name, values in seconds.items())).splits


def test_shares_of_time_add_up_and_communication_is_that_of_a_step():
    steps = {"step_time": [0.5, 0.5], "exposed_communication_time": [0.05, 0.05]}
    (split,) = splits(epoch_time=[100.0, 100.0], io_time=[20.0, 30.0], **steps)
    assert split.io == (0.2, 0.3)
    assert split.communication == pytest.approx((0.1, 0.1))
    assert split.compute == pytest.approx((0.7, 0.6))


def test_without_communication_it_is_part_of_compute_and_said_so():
    (split,) = splits(epoch_time=[100.0], io_time=[20.0])
    assert (split.told, split.compute) == (False, (0.8,))


def test_communication_is_never_more_than_io_leaves():
    (split,) = splits(epoch_time=[100.0], io_time=[90.0], step_time=[1.0], exposed_communication_time=[0.5])
    assert split.communication == pytest.approx((0.1,))


# --- scaling


def of_devices(devices, rate, *, batch, count=3, system="cirrus"):
    key = benchmark(devices=devices, batch=batch)
    made = [night(n, id=f"{system}{devices}-{batch}-{n}", benchmark=key, system=system) for n in range(count)]
    return series(made, [rate] * count)


def test_weak_scaling_is_of_equal_batch_per_device_with_efficiency():
    rates = {1: 100.0, 2: 190.0, 4: 340.0}
    (plot,) = page_of(*(of_devices(n, rate, batch=16 * n) for n, rate in rates.items())).scaling
    assert (plot.how, plot.label) == ("weak", "test_cosmoflow")
    steps = plot.curves[0].steps
    assert [(step.devices, step.value, step.runs) for step in steps] == [(n, rates[n], 3) for n in rates]
    assert [step.efficiency for step in steps] == pytest.approx([1.0, 0.95, 0.85])


def test_strong_scaling_is_of_one_batch_for_all():
    page = page_of(of_devices(1, 100.0, batch=64), of_devices(4, 300.0, batch=64))
    assert [(plot.how, plot.curves[0].steps[1].efficiency) for plot in page.scaling] == [("strong", 0.75)]


def test_machines_are_curves_of_one_plot():
    systems = ("cirrus", "eidf")
    page = page_of(*(of_devices(n, 100.0 * n, batch=16 * n, system=one) for n in (1, 2) for one in systems))
    assert [curve.machine.partition(":")[0] for curve in page.scaling[0].curves] == ["cirrus", "eidf"]


def test_one_number_of_devices_is_no_scaling():
    assert page_of(of_devices(4, 100.0, batch=16)).scaling == ()


# --- nodes


def test_a_slow_node_stands_out_against_its_peers():
    made = [night(number, nodes=("bad" if number % 5 == 0 else f"n{number % 4}",)) for number in range(40)]
    page = page_of(series(made, [90.0 if number % 5 == 0 else 100.0 for number in range(40)]))
    deviations = {host.name: host.deviation for host in page.hosts}
    assert deviations.pop("bad") == pytest.approx(-0.1)
    assert all(abs(deviation) < 1e-9 for deviation in deviations.values())


def test_a_system_that_became_slower_makes_no_node_slow():
    made = [night(number, nodes=(f"n{number % 4}",)) for number in range(80)]
    rates = [(100.0 if number < 40 else 80.0) + number % 3 * 0.1 for number in range(80)]
    page = page_of(series(made, rates))
    assert all(abs(host.deviation) < 0.01 for host in page.hosts)
    assert {kind for host in page.hosts for _date, kind in host.days} == {"ok"}


def test_lower_is_better_where_the_metric_says_so():
    made = [night(n, nodes=("slow" if n == 0 else "n1",), judged=("step_time",)) for n in range(9)]
    page = page_of(series(made, [2.0] + [1.0] * 8, "step_time", "s", "lower"))
    assert {host.name: host.deviation for host in page.hosts} == {"slow": -1.0, "n1": 0.0}


def test_runs_on_several_nodes_blame_none_of_them():
    made = [night(n, nodes=("n1", "n2")) for n in range(9)]
    page = page_of(series(made, [50.0] + [100.0] * 8))
    assert [(host.runs, host.deviation) for host in page.hosts] == [(9, None), (9, None)]


def test_a_vetting_that_several_records_tell_counts_once():
    one = {"session": "one", "unfit": {"n7": "ECC"}}
    made = [night(0, id=f"r{n}", benchmark=benchmark(f"test_{n}"), **one) for n in range(3)]
    hosts = {host.name: host for host in page_of(more=made).hosts}
    assert (hosts["n7"].unfit, hosts["n7"].reason, hosts["n7"].runs) == (1, "ECC", 0)
    assert hosts["n7"].days == (("2026-06-01", "unfit"),)
