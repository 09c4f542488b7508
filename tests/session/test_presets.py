"""What a session says of the presets of its trainings. A whole session is in tests/plugin/test_plugin_extensions.py."""

from dataclasses import replace

import pytest
from job_specs import command, declare, target  # noqa: F401 - fixtures

from pytest_mlhpc.session.terminal import presets

CHOSEN = {"preset": "smoke", "preset_is_default": False}
DEFAULT = {"preset": "reference", "preset_is_default": True}
ON_SLURM = {**DEFAULT, "scheduler": "slurm"}


@pytest.fixture
def said(declare, target):
    """Return what a session of two equal trainings on a partition says."""

    def say(partition, asked=None, **params):
        on = replace(target, partition=replace(target.partition, **{"scheduler": "local", **partition}))
        return presets([declare(preset=asked, on=on, params=params)] * 2, asked)

    return say


def test_a_session_names_the_preset_and_what_chose_it(said):
    assert said(CHOSEN) == ["preset: smoke (systems file)"]
    assert said(DEFAULT, "small") == ["preset: small (--mlhpc-preset)"]
    assert said(DEFAULT, "small", preset="smoke") == ["preset: smoke (test)"]


def test_a_default_is_warned_of_once_on_this_machine_alone(said):
    line, warning = said(DEFAULT)
    assert [line] == said(ON_SLURM) == ["preset: reference (default)"]
    assert warning.startswith("sys:part: ")
    assert warning.endswith("write `preset: smoke` in the partition, or give --mlhpc-preset smoke")


def test_presets_that_differ_are_one_line(declare):
    specs = [declare(), declare(preset="smoke", params={"preset": "small"}), declare()]
    assert presets(specs, None) == ["preset: smoke (systems file), small (test)"]


def test_programs_and_probes_have_no_preset_to_name(declare, command):
    assert presets([command(), declare("peaks"), declare("collective")], None) == []
