"""What the other views of the report are made of: last nights, time, scaling, nodes."""

import pytest
from made_nights import DAY_NS, FIRST_NS, benchmark, definition, night, series
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
    assert (system.counts, system.node_hours) == ({"ok": 1, "slow": 1}, 1.0)
    assert [(one.verdict, one.text) for one in system.troubles] == [("regressed", "regressed: 7 % slower")]


@pytest.mark.parametrize(
    ("nights_", "counts"),
    [((9, 7), {"ok": 1, "missing": 1}), ((30, 3), {"ok": 1})],
    ids=["is missing if it ran last week", "was given up if it did not"],
)
def test_a_benchmark_that_did_not_run_last_night(nights_, counts):
    system = last_night(ran(nights_[0]), another_ran(nights_[1]))
    assert system.counts == counts
    assert [one.text for one in system.troubles] == ["not recorded since 2026-06-07"] * (len(counts) - 1)


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


STEPS = {"step_time": [0.5, 0.5], "exposed_communication_time": [0.05, 0.05]}


@pytest.mark.parametrize(
    ("seconds", "io", "communication", "compute"),
    [
        ({"epoch_time": [100.0, 100.0], "io_time": [20.0, 30.0], **STEPS}, (0.2, 0.3), (0.1, 0.1), (0.7, 0.6)),
        ({"epoch_time": [100.0], "io_time": [90.0], "step_time": [1.0], "exposed_communication_time": [0.5]},
         (0.9,), (0.1,), (0.0,)),
    ],
    ids=["and communication is that of a step", "and communication is no more than I/O leaves"],
)  # fmt: skip
def test_shares_of_time_add_up(seconds, io, communication, compute):
    (split,) = splits(**seconds)
    found = [*split.io, *split.communication, *split.compute]
    assert found == pytest.approx([*io, *communication, *compute])


def test_without_communication_it_is_part_of_compute_and_said_so():
    (split,) = splits(epoch_time=[100.0], io_time=[20.0])
    assert (split.communication_measured, split.compute) == (False, (0.8,))


# --- scaling


def of_devices(devices, rate, *, batch, count=3, system="cirrus"):
    what = {
        "benchmark": benchmark(devices=devices),
        "definition": definition(devices=devices, batch=batch),
        "system": system,
    }
    made = [night(n, id=f"{system}{devices}-{batch}-{n}", **what) for n in range(count)]
    return series(made, [rate] * count)


@pytest.mark.parametrize(
    ("how", "batch", "rates", "efficiency"),
    [
        ("weak", 16, {1: 100.0, 2: 190.0, 4: 340.0}, [1.0, 0.95, 0.85]),
        ("strong", 0, {1: 100.0, 4: 300.0}, [1.0, 0.75]),
    ],
    ids=["equal batch per device", "one batch for all"],
)
def test_scaling_is_of(how, batch, rates, efficiency):
    (plot,) = page_of(*(of_devices(n, rate, batch=batch * n or 64) for n, rate in rates.items())).scaling
    steps = plot.curves[0].steps
    assert (plot.how, plot.label) == (how, "test_cosmoflow")
    assert [(step.devices, step.value, step.runs) for step in steps] == [(n, rates[n], 3) for n in rates]
    assert [step.efficiency for step in steps] == pytest.approx(efficiency)


def test_machines_are_curves_of_one_plot_and_one_number_of_devices_is_none():
    made = [of_devices(n, 100.0, batch=16 * n, system=one) for n in (1, 2) for one in ("cirrus", "eidf")]
    machines = [curve.machine.partition(":")[0] for curve in page_of(*made).scaling[0].curves]
    assert machines == ["cirrus", "eidf"]
    assert page_of(*made[:2]).scaling == ()


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
    hosts = page_of(series(made, rates)).hosts
    assert all(abs(host.deviation) < 0.01 for host in hosts)
    assert {kind for host in hosts for _date, kind in host.days} == {"ok"}


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
    (host,) = [host for host in page_of(more=made).hosts if host.name == "n7"]
    assert (host.unfit, host.reason, host.runs, host.days) == (1, "ECC", 0, (("2026-06-01", "unfit"),))
