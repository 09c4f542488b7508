"""Records as OpenMetrics text."""

import re

import pytest
from worlds import measurement, record

from pytest_mlhpc.ci.comparison import openmetrics
from pytest_mlhpc.node.protocol.schema import UNITS, MetricValue

#: A sample of the exposition format, as the specification's ABNF has it.
SAMPLE = re.compile(r'[a-z_][a-z0-9_]*\{([a-z]+="([^"\\\n]|\\["\\n])*",?)+\} \S+')


@pytest.mark.parametrize(
    "line",
    [
        "# TYPE mlhpc_rate_samples_per_second gauge",
        "# UNIT mlhpc_rate_samples_per_second samples_per_second",
        "# HELP mlhpc_rate_samples_per_second better: higher; judged",
        'mlhpc_rate_samples_per_second{system="cirrus",partition="standard"',
        'verdict="regressed"} 1',
    ],
)
def test_each_metric_is_a_gauge_with_its_unit_in_the_name_and_the_verdict_a_label(line):
    assert line in openmetrics([record(verdict="regressed")])


def test_the_file_ends_as_the_specification_wants_it():
    assert openmetrics([]) == "# EOF\n"
    assert openmetrics([record()]).endswith("\n# EOF\n")


def test_every_unit_that_a_measurement_may_have_gives_a_valid_name():
    metrics = tuple(MetricValue(f"m{at}", 1.5, unit, "none") for at, unit in enumerate(UNITS))
    text = openmetrics([record(measurement=measurement(more=metrics))])
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


def test_names_with_quotes_and_line_breaks_stay_in_their_label():
    hostile = 'a"} 1\nmlhpc_rate 99 \\ ü \ud800 \r'
    lines = openmetrics([record(node_id=hostile)]).splitlines()
    assert not [line for line in lines if line.startswith("mlhpc_rate 99")]
    assert all(SAMPLE.fullmatch(line) for line in lines if not line.startswith("#"))


def test_a_series_that_was_measured_twice_stands_there_once_with_its_last_figure():
    text = openmetrics([record(1), record(2, measurement=measurement(90.0), verdict="regressed")])
    counts = [text.count(words) for words in ("mlhpc_rate_samples_per_second{", "} 90.0\n", "mlhpc_verdict{")]
    assert counts == [1, 1, 1]


def test_labels_say_nothing_that_differs_from_run_to_run():
    assert openmetrics([record(1, id="a", commit="x")]) == openmetrics([record(1, id="b", commit="y")])


def test_a_run_that_broke_has_a_verdict_and_no_figure():
    text = openmetrics([record(verdict="out_of_memory", measurement=None)])
    assert ['verdict="out_of_memory"' in text, "mlhpc_rate" in text] == [True, False]
