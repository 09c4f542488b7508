"""A site's own bounds: only what is in the schema, and every problem with its key and the nearest valid word."""

import re
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.config.policy import read_policy
from pytest_mlhpc.errors import ConfigError
from pytest_mlhpc.node.vet.policy import Bound, Policy, built_in

POLICY = Policy(
    [
        Bound("nvidia.dram_corrected", "corrected errors", "Azure", warn=20e6, fail=None, unit="1"),
        Bound("host.free", "free memory", "us", warn=0.5, fail=0.2, better="higher"),
    ]
)
PROBLEMS = yaml.safe_load(Path(__file__).with_name("data").joinpath("policy_problems.yaml").read_text())
WHOLE = 'source = "ticket 4711"\ndate = 2026-11-21\n'


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "policy.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def problems(path):
    with pytest.raises(ConfigError) as caught:
        read_policy(path, POLICY)
    assert all(problem.where == str(path) for problem in caught.value.problems)
    return [(problem.key, problem.message, problem.suggestion) for problem in caught.value.problems]


def test_a_changed_bound_keeps_what_the_file_does_not_say(file):
    (bound,) = read_policy(file(f'[bounds."nvidia.dram_corrected"]\nwarn = 50e6\n{WHOLE}'), POLICY)
    assert bound == Bound(
        "nvidia.dram_corrected", "corrected errors", "ticket 4711", 50e6, None, "1", "lower", "2026-11-21"
    )


def test_it_takes_the_place_of_ours(file):
    (changed,) = read_policy(file(f'[bounds."host.free"]\nfail = 0.1\n{WHOLE}'), POLICY)
    assert POLICY.changed([changed])["host.free"] == changed
    assert (changed.warn, changed.fail) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("text", "fail"),
    [('[bounds."host.free"]\nfail = "off"\n', None), ("[bounds.host.free]\nfail = 0.1\n", 0.1)],
    ids=["a stage can be taken away", "a key without quotes means the same"],
)
def test_one_stage_is_changed(file, text, fail):
    (bound,) = read_policy(file(text + WHOLE), POLICY)
    assert (bound.key, bound.warn, bound.fail) == ("host.free", 0.5, fail)


def test_an_empty_file_changes_nothing(file):
    assert read_policy(file(""), POLICY) == ()


def test_every_bound_of_ours_can_be_written_down_and_read_again(file):
    ours, text = built_in().bounds, ""
    for key, bound in ours.items():
        warn, fail = ('"off"' if stage is None else float(stage) for stage in (bound.warn, bound.fail))
        text += f'[bounds."{key}"]\nwarn = {warn}\nfail = {fail}\n{WHOLE}'
    assert {bound.key for bound in read_policy(file(text))} == set(ours)


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda case: f"{case['key']} {case['message']}")
def test_what_is_wrong_is_named_with_its_key_and_the_nearest_name(file, case):
    path = file(case["file"].replace("WHOLE\n", WHOLE))
    assert problems(path) == [(case["key"], case["message"], case["suggestion"])]


@pytest.mark.parametrize("value", ["true", "nan", "inf", '"12"', "[1]"])
def test_a_bound_is_a_finite_number_or_off(file, value):
    ((key, message, _),) = problems(file(f'[bounds."host.free"]\nwarn = {value}\n{WHOLE}'))
    assert key == 'bounds."host.free".warn'
    assert message.endswith('is neither a finite number nor "off"')


def test_all_problems_are_listed_at_once(file):
    text = '[bounds."host.free"]\nwarn = nan\n[bounds.x]\nwarn = 1\n[floors]\n'
    assert len(problems(file(text))) == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[bounds\n", "is no TOML: Expected ']' at the end of a table declaration (at line 1, column 8)"),
        (b"\xff", "is no TOML: 'utf-8' codec can't decode"),
        (b"#" * (1 << 20) + b"#", "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_toml_is_named(file, content, said):
    path = file(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {said}')}"):
        read_policy(path, POLICY)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file or directory"):
        read_policy(tmp_path / "none.toml", POLICY)
