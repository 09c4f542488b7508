"""The second side of a test, and what is said over all tests. Whole sessions are in tests/plugin/test_plugin_against.py."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from job_specs import command, declare, target  # noqa: F401 - fixtures

from pytest_mlhpc.config.overrides import Against
from pytest_mlhpc.jobs.builds import rebuilt
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.software import SoftwareError
from pytest_mlhpc.judge.paired import PairedResult, PairedVerdict
from pytest_mlhpc.node.protocol.plan import BuildPlan
from pytest_mlhpc.provision.scheduler.submit import differing_software, with_launch_options
from pytest_mlhpc.provision.slurm.script import SLURM
from pytest_mlhpc.session.against import over_all, second_side

_PATH = Path("/tmp/none")
OLD = Against(environment="old")


@pytest.fixture
def on_slurm(target, command):
    """Return a job on Slurm whose partition has the environment *default*, changed, and another one called *old*."""

    def make(old, default=None, scheduler="slurm", **fields):
        usual = replace(target.partition.environments[0], **(default or {}))
        other = replace(usual, name="old", **old)
        partition = replace(target.partition, scheduler=scheduler, environments=(usual, other))
        spec = command(1, on=replace(target, partition=partition, environment=usual))
        return replace(spec, **fields)

    return make


def test_b_is_a_with_another_environment(on_slurm):
    spec = on_slurm({"python": "/old/python"})
    other = second_side(spec, OLD)
    assert other.target.environment.python == "/old/python"
    assert replace(other, target=spec.target) == spec


def test_a_variable_wins_over_that_of_the_test(on_slurm):
    spec = on_slurm({}, env={"X": "1", "Y": "1"})
    assert second_side(spec, Against(variables={"X": "2"})).env == {"X": "2", "Y": "1"}


@pytest.mark.parametrize(
    ("old", "fields", "against", "reason"),
    [
        ({}, {}, OLD, "both sides are the same"),
        ({}, {"env": {"X": "1"}}, Against(variables={"X": "1"}), "both sides are the same"),
        ({"modules": ("gcc/12",)}, {"launcher": "mpirun"}, OLD, "mpirun is started before"),
        ({"extra": {"uenv": {"image": "x"}}}, {}, OLD, "a uenv is mounted for a whole job"),
        ({"python": "/x"}, {"scheduler": "kubernetes"}, OLD, "have one image for both sides"),
        ({"python": "/x"}, {"judged": ()}, OLD, "no metric of it is judged"),
        ({}, {}, Against(image="b.sif"), "has no container whose image could be another"),
        ({}, {"scheduler": "kubernetes"}, Against(image="b:1"), "have one image for both sides"),
        ({"python": "/x"}, {}, Against(environment="older"), "did you mean 'old'?"),
    ],
)
def test_a_test_without_a_second_side_says_why(on_slurm, old, fields, against, reason):
    with pytest.raises(SoftwareError, match=reason.replace("?", r"\?")):
        second_side(on_slurm(old, **fields), against)


def test_pods_take_another_variable(on_slurm):
    spec = on_slurm({}, scheduler="kubernetes")
    assert second_side(spec, Against(variables={"X": "2"})).env["X"] == "2"


def test_each_side_of_a_job_sets_up_its_own_software(on_slurm, tmp_path):
    spec = on_slurm({"modules": ("gcc/12",)}, default={"modules": ("gcc/14",)})
    plan = plan_of([(spec, 1), (second_side(spec, OLD), 2)], tmp_path, "")
    partition = spec.target.partition
    assert differing_software(plan, partition)
    first, second = (" ".join(run.wrapper) for run in with_launch_options(plan, partition, None, SLURM).runs)
    assert ("gcc/14" in first, "gcc/12" in first) == (True, False)
    assert ("gcc/14" in second, "gcc/12" in second) == (False, True)


def test_sides_with_the_same_software_share_the_job_scripts(on_slurm, tmp_path):
    spec = on_slurm({"python": "/x"}, default={"modules": ("gcc/14",)})
    plan = plan_of([(spec, 1), (second_side(spec, OLD), 2)], tmp_path, "")
    assert not differing_software(plan, spec.target.partition)
    assert [run.wrapper for run in with_launch_options(plan, spec.target.partition, None, SLURM).runs] == [
        (),
        (),
    ]


def test_sides_of_other_containers_are_started_in_their_own(on_slurm, tmp_path):
    images = [{"container": {"runtime": "apptainer", "image": name}} for name in ("new.sif", "old.sif")]
    spec = on_slurm({"extra": images[1]}, default={"extra": images[0]})
    plan = plan_of([(spec, 1), (second_side(spec, OLD), 2)], tmp_path, "")
    runs = with_launch_options(plan, spec.target.partition, None, SLURM).runs
    assert [run.wrapper[-1] for run in runs] == ["new.sif", "old.sif"]


def test_another_image_is_that_of_b_alone(on_slurm, tmp_path):
    container = {"container": {"runtime": "apptainer", "image": "a.sif"}}
    spec = on_slurm({}, default={"extra": container})
    plan = plan_of([(spec, 1), (second_side(spec, Against(image="b.sif")), 2)], tmp_path, "")
    runs = with_launch_options(plan, spec.target.partition, None, SLURM).runs
    assert [run.wrapper[-1] for run in runs] == ["a.sif", "b.sif"]


def test_an_image_that_a_test_has_already_is_no_other_side(on_slurm):
    container = {"container": {"runtime": "apptainer", "image": "a.sif"}}
    spec = on_slurm({}, default={"extra": container})
    with pytest.raises(SoftwareError, match=r"both sides are the same: image=a.sif is what it has"):
        second_side(spec, Against(image="a.sif"))


def test_a_build_of_another_environment_is_another_build(on_slurm):
    build = BuildPlan("made", "key", ("make",))
    spec = on_slurm({"modules": ("gcc/12",)}, builds=(build,))
    first, second = (rebuilt(build, side.target).key for side in (spec, second_side(spec, OLD)))
    assert first != second
    assert second_side(spec, OLD).builds[0].key == second


def test_packages_of_a_revision_keep_ranks_from_a_warm_process(declare, target):
    there = replace(target.partition, scheduler="local", warm=True)
    spec = declare("cosmoflow", on=replace(target, partition=there))
    runs = plan_of([(spec, 1), (replace(spec, packages=("/tree",)), 2)], _PATH, "").runs
    assert [(run.warm, run.packages) for run in runs] == [(False, ()), (False, ("/tree",))]


def test_no_rank_of_two_sides_is_forked_by_a_process_that_has_imported_torch_for_one(declare, target):
    there = replace(target.partition, scheduler="local", warm=True)
    spec = declare("cosmoflow", on=replace(target, partition=there))
    other = replace(spec, env={"X": "1"})
    assert [run.warm for run in plan_of([(spec, 1), (other, 2)], _PATH, "").runs] == [False, False]
    assert [run.warm for run in plan_of([(spec, 0)], _PATH, "").runs] == [True]


def result(verdict, change=0.0, low=-math.inf, high=math.inf):
    return PairedResult(PairedVerdict(verdict), change, low, high, 8, 1.0, 1.0, 0.01)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("equal", "equal"), "equal"),
        (("equal", "unclear"), "unclear"),
        (("better", "unclear"), "better"),
        (("better", "worse"), "worse"),
    ],
)
def test_over_all_the_worst_certain_verdict_counts(verdicts, expected):
    assert over_all([result(one) for one in verdicts])[0] == expected


def test_the_mean_change_over_all_has_the_mean_bounds():
    _, change, low, high = over_all([result("better", 0.1, 0.05, 0.15), result("worse", -0.1, -0.15, -0.05)])
    assert low < change < high
    assert change == pytest.approx(math.sqrt(1.1 * 0.9) - 1)


def test_without_all_intervals_there_is_none_over_all():
    _, _, low, high = over_all([result("unclear"), result("better", 0.1, 0.05, 0.15)])
    assert math.isnan(low)
    assert math.isnan(high)
