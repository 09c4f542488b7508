"""What schedulers would be given is shown by their hooks, third parties' like ours."""

from pathlib import Path

import pytest

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.cli.systems import previews
from pytest_mlhpc.config.systems import Systems, load_systems
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.hookspecs import Preview, hookimpl


class Pbs:
    """A third party's scheduler."""

    @hookimpl
    def mlhpc_preview(self, partition, environment):
        text = f"#PBS -N {partition.name}-{environment.name}\n"
        return Preview("pbs", text) if partition.scheduler == "pbs" else None


@pytest.fixture
def systems() -> Systems:
    schedulers = {"pbs": None, "quiet": None, "local": None}
    return load_systems(Path(__file__).with_name("previews.yaml"), schedulers=schedulers, environ={})


@pytest.fixture
def hook():
    manager = make_manager(entry_points=False)
    manager.register(Pbs())
    return manager.hook


def test_a_third_partys_scheduler_is_shown_too(systems: Systems, hook):
    shown = previews(systems, hook)
    texts = {f"mine.pbs.{name}": f"#PBS -N pbs-{name}\n" for name in ("default", "other")}
    assert {name: one.text for name, one in shown.found.items()} == texts
    assert shown.counted() == "2 .pbs files"


def test_what_needs_variables_is_left_out_with_the_reason(systems: Systems, hook):
    (note,) = previews(systems, hook).notes
    assert note == "mine:unknown: not rendered: it needs variables that are not set"


def test_what_nobody_shows_cannot_be_rendered(systems: Systems, hook):
    with pytest.raises(UsageError, match="'mine:quiet' has no partition to render"):
        previews(systems, hook, "mine:quiet")


def test_kinds_of_files_are_counted_apart(systems: Systems, hook):
    shown = previews(systems, hook)
    mixed = type(shown)({**shown.found, "a": Preview("sh", ""), "b": Preview("yaml", "")})
    assert mixed.counted() == "2 .pbs files, 1 job script, 1 manifest"
