"""Every bound of comparison matters: moved by a quarter in either direction, or taken out, it changes some verdict."""

import functools
from dataclasses import replace

import pytest
from judge_worlds import KEY, POLICY, UNNAMED, drawn, exchanged, measured, names, node, severities, verdict_on

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.finding import Reading, Report
from pytest_mlhpc.node.vet.judge import ClockOffset, compare_clocks


def of_figures(values, learned=0, host="", mad=1.0):
    """What is said of these figures, with a history of *learned* figures, of *host* alone, that says 100 and differs by *mad*."""
    past = Learned(KEY, UNNAMED, 100e12, mad * 1e12, learned, host)
    settings = VetSettings(learned=(past,) if learned else ())
    return lambda policy: severities(verdict_on(measured(values), settings, policy))


def of_storage(check, values):
    """What is said of nodes whose folder is so fast, in MB/s."""
    readings = [Reading(check, "write", "write", "xfs", value * 1e6, "B/s") for value in values]
    report = Report(tuple(node(f"n{i}", reading) for i, reading in enumerate(readings)))
    return lambda policy: severities(verdict_on(report, policy=policy), check)


def of_pairs(hosts, slow, value, spread=0.0):
    """What is said of nodes of which *slow* exchange at *value* of the usual rate; the noise is always the same."""
    speed = dict.fromkeys(slow, value)
    made = functools.cache(
        lambda: exchanged(names(hosts), speed, draw=drawn(1), spread=spread, confirm=False)
    )
    return lambda policy: severities(verdict_on(made(), policy=policy), "pairs")


def of_clocks(ahead_s):
    """What is said of three nodes of which one's clock is so far ahead."""
    clocks = [ClockOffset("n0", 0.0), ClockOffset("n1", 0.0), ClockOffset("n2", ahead_s)]
    return lambda policy: [finding.severity for _, finding in compare_clocks(clocks, policy)]


#: MAD (1.4826 x) of 2 around 100, for all but the figures in question.
WIDE = [100 - 2 / 1.4826, 100 + 2 / 1.4826] * 6 + [100.0] * 3


def steps(low, high, step):
    return [low + step * i for i in range(int((high - low) / step) + 1)]


#: By key, judgements of which one must change.
SCENES = {
    "peers.mads": [of_figures([*WIDE, value]) for value in steps(86.0, 96.0, 0.25)],
    "peers.share": [of_figures([100.0] * 9 + [value]) for value in steps(92.0, 98.0, 0.25)],
    "peers.nodes": [of_figures([100.0] * count) for count in (3, 4)],
    "peers.low_share": [of_figures([100.0] * 5 + [value] * 3) for value in steps(90.0, 95.5, 0.25)],
    "peers.low_mads": [of_figures([100, 101, 102, 103] + [value] * 3) for value in steps(70.0, 96.0, 1.0)],
    "peers.low_part": [of_figures([100.0] * (12 - low) + [80.0] * low) for low in (2, 3, 4, 5)],
    "peers.blind": [of_figures([100 + width * i for i in range(-6, 7)]) for width in steps(1.0, 2.6, 0.05)],
    "history.count": [of_figures([100.0], learned=count) for count in (14, 15, 16, 19, 20, 24)],
    "history.own": [of_figures([value], 1, "n0") for value in (80.0, 83.0, 87.0, 90.0)],
    "history.own_count": [of_figures([90.0], count, "n0") for count in (5, 6, 7, 8, 9, 10)],
    "history.own_mads": [of_figures([value], 9, "n0", mad=4.0) for value in steps(80.0, 96.0, 1.0)],
    "history.own_least": [of_figures([value], 9, "n0") for value in steps(92.0, 98.0, 0.25)],
    "pairs.mads": [of_pairs(16, ["n0"], value, 0.03) for value in steps(0.8, 1.0, 0.005)],
    "pairs.share": [of_pairs(8, ["n0"], value) for value in steps(0.92, 0.98, 0.0025)],
    "pairs.low_share": [of_pairs(8, names(4), value) for value in steps(0.88, 0.96, 0.005)],
    "clocks.apart": [of_clocks(value) for value in (0.7, 0.8, 1.1, 1.3, 220.0, 290.0, 310.0, 380.0)],
    "pairs.most": [of_pairs(16, ["n0"], value, 0.06) for value in steps(0.6, 1.0, 0.01)],
} | {
    f"{key}.{check}": scenes
    for check in ("storage", "checkpoint")
    for key, scenes in {
        "peers.share": [of_storage(check, [100.0] * 9 + [value]) for value in steps(2.0, 90.0, 2.0)],
        "peers.low_share": [of_storage(check, [100.0] * 6 + [value] * 4) for value in steps(30.0, 70.0, 2.0)],
        "peers.blind": [of_storage(check, steps(40.0, 160.0, 10.0))],
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    return {key: [scene(POLICY) for scene in scenes] for key, scenes in SCENES.items()}


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        (bound.key, stage)
        for bound in POLICY.bounds.values()
        if bound.key.partition(".")[0] in {"peers", "history", "pairs", "clocks"}
        for stage in ("warn", "fail")
        if getattr(bound, stage) is not None
    ],
)
@pytest.mark.parametrize("factor", [0.75, 1.25, None])
def test_a_moved_bound_changes_a_verdict(key, stage, factor, plain):
    bound = POLICY[key]
    moved = replace(bound, **{stage: None if factor is None else getattr(bound, stage) * factor})
    policy = POLICY.changed([moved])
    assert [scene(policy) for scene in SCENES[key]] != plain[key]


@pytest.mark.parametrize("check", ["storage", "checkpoint"])
def test_storage_that_differs_much_is_still_compared(check, plain):
    scene = SCENES[f"peers.blind.{check}"][0]
    assert set(scene(POLICY).values()) <= {"PASS", "WARNING"}
    strict = POLICY.changed([replace(POLICY[f"peers.blind.{check}"], fail=0.4)])
    assert set(scene(strict).values()) == {"UNKNOWN"}
