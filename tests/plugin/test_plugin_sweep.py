"""--mlhpc-each-node, --mlhpc-set, mlhpc_here and maintenance without a Slurm: what is chosen, refused and shown, by a made-up client."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds

from pytest_mlhpc.config import overrides
from pytest_mlhpc.config.model import Environment, Maintenance, NodeType, Partition, Target
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.job import Attempt, Job, Outcome
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.spec import JobSpec, same_needs
from pytest_mlhpc.options import Settings
from pytest_mlhpc.provision.scheduler.client import (
    PartitionLimits,
    Reservation,
    SchedulerJob,
    SchedulerNode,
    SchedulerState,
    SchedulerUnavailable,
)
from pytest_mlhpc.provision.scheduler.script import render_script
from pytest_mlhpc.provision.slurm import inside_job
from pytest_mlhpc.provision.slurm.commands import expand_or_refuse
from pytest_mlhpc.provision.slurm.schema import SlurmOptions
from pytest_mlhpc.provision.slurm.script import SLURM
from pytest_mlhpc.session.bench import outliving
from pytest_mlhpc.session.each_node import (
    NothingToMeasureError,
    Sweep,
    choose,
    compare,
    expand,
    lines_of,
    not_measured,
    refuse,
    tables_of,
    write,
)
from pytest_mlhpc.session.preflight import maintenance_delay

HOUR = 3600 * 10**9
NOW = 1_800_000_000 * 10**9
NAMES = tuple(f"node{number}" for number in range(1, 6))
LIMITS = PartitionLimits("cpu", up=True, nodes=NAMES)


def target(**options: Any) -> Target:
    checked = SlurmOptions.model_validate({"partition": "cpu", **options}).model_dump()
    environment = Environment("default", "python3")
    nodes = NodeType(16, 2**34, max=8)
    partition = Partition("s", "p", "slurm", "srun", "cpu", nodes, (environment,), scheduler_options=checked)
    return Target(replace(partition, time_limit_s=600.0), environment)


def spec(place: Target | None = None, **changes: Any) -> JobSpec:
    place = place or target()
    command = {"name": "test_a", "workload": "command", "launcher": "plain", "argv": ("x",)}
    return worlds.spec(target=place, node=place.node, **{**command, "time_limit_s": 600.0, **changes})


def maint(name="maint42", starts_h=0.1, nodes=NAMES, flags=frozenset({"MAINT"})) -> Reservation:
    start = NOW + int(starts_h * HOUR)
    return Reservation(name, start, start + 4 * HOUR, nodes, flags=flags)


class MadeUpSlurm:
    """What the client protocol shows of a cluster of five nodes."""

    def __init__(self, nodes=None, reservations=(), jobs=(), limits=LIMITS) -> None:
        self._nodes = nodes or [SchedulerNode(name, "idle") for name in NAMES]
        self._reservations, self._jobs, self._limits = list(reservations), list(jobs), limits

    def nodes(self, names=()):
        return self._nodes

    def reservations(self):
        return self._reservations

    def partition(self, name):
        return self._limits

    def jobs(self, *, ids=(), names=(), user=""):
        return [job for job in self._jobs if job.id in ids]

    def expand(self, hostlist):
        return expand_or_refuse(hostlist)


# --- which nodes


def chosen(which: str, nodes=None, reservations=(), **options):
    return choose(
        which, LIMITS, nodes or [SchedulerNode(name, "idle") for name in NAMES], reservations,
        expand=expand_or_refuse, now_ns=NOW, longest_s=660.0, **options,
    )  # fmt: skip


def test_idle_means_free_now_and_all_means_in_service():
    nodes = [
        SchedulerNode("node1", "idle"),
        SchedulerNode("node2", "allocated"),
        SchedulerNode("node3", "idle", frozenset({"drain"}), reason="bad memory"),
        SchedulerNode("node4", "down", reason="not responding"),
        SchedulerNode("node5", "mixed", frozenset({"completing"})),
    ]
    idle = chosen("idle", nodes)
    assert idle.nodes == ("node1",)
    reasons = ["busy: allocated", "idle+drain: bad memory", "down: not responding", "busy: mixed+completing"]
    assert dict(idle.left_out) == dict(zip(NAMES[1:], reasons, strict=True))
    everything = chosen("all", nodes)
    assert everything.nodes == ("node1", "node2", "node5")
    assert [name for name, _ in everything.left_out] == ["node3", "node4"]


def test_a_host_list_is_taken_as_it_is_written_and_nodes_of_other_partitions_are_named():
    nodes = [*(SchedulerNode(name, "idle") for name in NAMES), SchedulerNode("gpu1", "idle")]
    found = chosen("node[2-3],gpu1", nodes)
    assert found.nodes == ("node2", "node3")
    assert found.left_out == (("gpu1", "not in Slurm's partition cpu"),)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("nod1", "'nod1' is neither idle, all, a reservation nor a node of Slurm (did you mean 'node1'?)"),
        ("idel", "(did you mean 'idle'?)"),
        ("maint4", "(did you mean 'maint42'?); reservations: maint42"),
        ("suites/", "Write tests behind it with --mlhpc-each-node=idle"),
        ("node[1-", "brackets do not match"),
    ],
)
def test_an_unknown_selection_is_refused_with_the_nearest(which, text):
    with pytest.raises(UsageError) as caught:
        chosen(which, reservations=[maint()])
    assert text in str(caught.value)


def test_nodes_that_go_into_maintenance_before_their_job_would_end_are_left_out():
    soon = maint(nodes=("node1",))
    late = maint("later", starts_h=5, nodes=("node2",))
    found = chosen("all", reservations=[soon, late])
    assert found.nodes == NAMES[1:]
    assert found.left_out[0][1].startswith("maintenance from ")
    assert found.left_out[0][1].endswith("(reservation maint42)")


def test_a_reservation_names_its_nodes_though_they_are_in_maintenance():
    flags = frozenset({"maintenance"})
    nodes = [
        SchedulerNode(name, "idle", flags if name in {"node1", "node2"} else frozenset()) for name in NAMES
    ]
    found = chosen("maint42", nodes, [maint(starts_h=-1, nodes=("node1", "node2"))])
    assert (found.nodes, found.reservation) == (("node1", "node2"), "maint42")
    assert chosen("all", nodes, [maint(starts_h=-1, nodes=("node1", "node2"))]).nodes == NAMES[2:]


def test_with_a_reservation_of_ours_only_its_nodes_can_be_had():
    found = chosen("all", reservations=[maint(starts_h=-1, nodes=("node1", "node2"))], own="maint42")
    assert found.nodes == ("node1", "node2")
    assert dict(found.left_out)["node3"] == "not in reservation maint42"


def test_a_target_for_each_node_with_the_node_in_its_id():
    targets, sweep = expand([target()], "node[1-2]", lambda _: MadeUpSlurm())
    assert [one.id for one in targets] == ["s:p-node1", "s:p-node2"]
    assert sweep.nodes == {"s:p": ("node1", "node2")}


def test_a_swept_reservation_becomes_the_jobs_own():
    targets, sweep = expand(
        [target()], "maint42", lambda _: MadeUpSlurm(reservations=[maint(nodes=("node1",))])
    )
    assert [one.partition.scheduler_options["reservation"] for one in targets] == ["maint42"]
    assert sweep.reservation == "maint42"
    with pytest.raises(UsageError, match=r"slurm\.reservation is 'other'; leave one out"):
        expand([target(reservation="other")], "maint42", lambda _: MadeUpSlurm(reservations=[maint()]))


def test_without_a_node_there_is_nothing_to_do():
    with pytest.raises(NothingToMeasureError, match="no node can be measured now: node1: down"):
        expand([target()], "all", lambda _: MadeUpSlurm([SchedulerNode(name, "down") for name in NAMES]))


LOCAL = Target(
    replace(target().partition, scheduler="local", scheduler_options={}), Environment("d", "python3")
)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (target(nodelist="node1"), "write --mlhpc-each-node=node1 instead"),
        (target(partition=None), "does not say which partition of Slurm it is"),
        (LOCAL, "s:p has scheduler local; only Slurm's nodes can be chosen"),
    ],
    ids=["nodelist", "no-partition", "local"],
)
def test_targets_whose_nodes_cannot_be_chosen_are_refused(place, text):
    with pytest.raises(UsageError) as caught:
        expand([place], "all", lambda _: MadeUpSlurm())
    assert text in str(caught.value)


SETTINGS = Settings(
    systems=("s:p",), systems_file=None, environment=None, preset=None, max_jobs=None, baseline="record",
    baselines_dir=Path("b"), state_dir=Path("s"), reruns=0, infra_exit_code=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "option"), [({"baseline": "update"}, "--mlhpc-baseline=update"), ({"here": True}, "mlhpc_here")]
)
def test_a_sweep_makes_no_baseline_and_submits(asked, option):
    with pytest.raises(UsageError, match=f"--mlhpc-each-node and {option}"):
        refuse(replace(SETTINGS, each_node="idle", **asked))


# --- what becomes of the node


def test_tests_of_one_node_share_an_allocation_those_of_two_do_not():
    one, same, other = (spec(replace(target(), node=node)) for node in ("node1", "node1", "node2"))
    assert same_needs(one, same)
    assert not same_needs(one, other)


def test_the_job_script_asks_for_the_node_and_for_nothing_else(tmp_path):
    place = replace(target(), node="node17")
    plan = plan_of([(spec(place), 1)], tmp_path, "", ["node17", "node3"])
    script = render_script(
        plan, place.partition, place.environment, SLURM, name="mlhpc-x", lines_dir="/l", payload=None
    )
    assert "#SBATCH --nodelist=node17\n" in script
    assert "--exclude" not in script  # a re-run of a sweep goes to the same node


# --- the table


def test_a_node_far_from_its_peers_is_marked_and_worst_comes_first():
    values = {f"n{number:03}": 100.0 + number % 3 for number in range(300)} | {"slow": 60.0, "fast": 150.0}
    found = compare("rate", "items/s", "higher", values)
    assert (found.nodes[0].node, found.nodes[0].mark) == ("slow", "worse")
    assert (found.nodes[-1].node, found.nodes[-1].mark) == ("fast", "better")
    assert [one.node for one in found.nodes if one.mark] == ["slow", "fast"]
    assert found.nodes[0].deviation == pytest.approx(60 / 101 - 1)


def test_lower_is_better_turns_the_order_round():
    found = compare("time", "s", "lower", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.5})
    assert [(one.node, one.mark) for one in found.nodes][0:1] == [("d", "worse")]


@pytest.mark.parametrize(
    ("values", "mark"),
    [
        ((100.0,) * 4 + (97.1,), ""),
        ((100.0,) * 4 + (96.9,), "worse"),
        ((100.0, 50.0, 100.0), ""),
    ],
    ids=["2.9 percent", "3.1 percent", "fewer than four nodes"],
)
def test_nodes_are_marked_beyond_three_percent_of_their_peers(values, mark):
    found = compare("rate", "items/s", "higher", dict(zip("abcde", values, strict=False)))
    assert found.nodes[0].mark == mark
    assert {one.mark for one in found.nodes[1:]} == {""}
    assert found.note == ("fewer than 4 nodes: none is marked" if len(values) < 4 else "")


def test_many_nodes_apart_are_reported_as_a_question():
    values = {**{f"a{n}": 100.0 + n / 10 for n in range(6)}, **{f"b{n}": 70.0 for n in range(4)}}
    note = compare("r", "", "higher", values).note
    assert "4 of 10 nodes are far from the median: who is right is not known" in note


def test_a_median_of_zero_compares_with_nothing():
    found = compare("loss", "", "lower", {"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0})
    assert {one.deviation for one in found.nodes} == {None}


def ended(node: str, *values: float, failure: str = "") -> Job:
    job = Job(spec(replace(target(), node=node)))
    for number, value in enumerate(values):
        run = plan_of([(job.spec, number)], Path("x"), "").runs[0]
        attempt = Attempt(run, number)
        attempt.measurement = worlds.measurement(
            value, run_id=run.run_id, nonce=run.nonce, attempt=number, workload=run.workload
        )
        job.attempts.append(attempt)
    if failure:
        job.fail("never_scheduled", failure)
    return job


def test_the_terminal_shows_every_marked_node_and_only_so_many_others():
    jobs = [ended(f"n{number:03}", 100.0) for number in range(200)] + [ended("bad", 50.0, 52.0)]
    lines = lines_of(tables_of(jobs), ())
    assert lines[0] == "test_a on s:p, each node against the median of all:"
    assert lines[2].split() == ["bad", "51", "-49.0%", "rate:", "worse"]  # the median of its attempts
    assert lines[-2] == "  ... and 161 more nodes within the bound"
    assert len(lines) < 50


def test_nodes_without_a_figure_are_listed_with_why(tmp_path):
    sweep = Sweep("all", {"s:p": ("n1", "n2")}, ())
    jobs = [ended("n1", 100.0), ended("n2", failure="job 12 is pending: Resources")]
    missing = not_measured(sweep, jobs)
    reason = "test_a: never_scheduled: job 12 is pending: Resources"
    assert [(one.node, one.reason) for one in missing] == [("n2", reason)]
    changed = {"slurm.qos": "q"}
    folder = tmp_path / "runs" / "x"
    path = write(folder, sweep, tables_of(jobs), state_dir=tmp_path, missing=missing, overrides=changed)
    content = json.loads(path.read_text())
    assert (content["schema"], content["overrides"]) == (1, {"slurm.qos": "q"})
    assert content["not_measured"][0]["node"] == "n2"
    (node,) = content["tests"][0]["metrics"][0]["nodes"]
    assert node == {"node": "n1", "value": 100.0, "deviation": 0.0, "mark": ""}


def test_a_test_with_an_allocation_alone_is_not_missing():
    job = ended("n1")
    job.conclude(Outcome(job.spec.node_id, job.spec.benchmark))
    assert not_measured(Sweep("all", {"s:p": ("n1",)}, ()), [job]) == ()


# --- --mlhpc-set


MODELS = {"slurm": SlurmOptions, "local": None}


def test_overrides_replace_what_the_file_says_and_nothing_else():
    (changed,) = overrides.apply(
        [target(qos="standard", exclusive=True)],
        overrides.parse(["slurm.reservation=maint42", "slurm.time=20m", "slurm.sbatch=--hint=nomultithread"]),
        MODELS,
    )
    options = changed.partition.scheduler_options
    assert (options["reservation"], options["qos"], options["exclusive"]) == ("maint42", "standard", True)
    assert options["sbatch"] == ["--hint=nomultithread"]
    assert changed.partition.time_limit_s == 1200.0


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (
            ["slurm.reservatoin=x"],
            ["--mlhpc-set slurm.reservatoin=x: slurm has no such option (did you mean 'reservation'?)"],
        ),
        (["slurm.exclusive=treu"], ["'treu' is not true, false or multi-node"]),
        (["slurm.gpus=gress"], ["(did you mean 'gres'?)"]),
        (["slurm.time=soon"], ["--mlhpc-set slurm.time=soon: 'soon' is not a duration"]),
        (["slrm.qos=x"], ["no selected partition has scheduler 'slrm' (did you mean 'slurm'?)"]),
        (["local.qos=x"], ["no selected partition has scheduler 'local'; selected: slurm"]),
        (["qos=x"], ["write it like --mlhpc-set slurm.reservation=maint42"]),
        (["slurm.qos=a\nb"], ["control character"]),
        (["slurm.qos=a", "slurm.qos=b"], ["slurm.qos is set to 'a' already"]),
        (
            ["slurm.qoss=x", "slurm.accont=y", "slurm.time=z"],
            ["slurm.qoss=x: ", "slurm.accont=y: ", "slurm.time=z: "],
        ),
    ],
)
def test_wrong_overrides_are_refused_by_name_all_at_once(given, texts):
    with pytest.raises(UsageError) as caught:
        overrides.apply([target()], overrides.parse(given), MODELS)
    assert [text for text in texts if text not in str(caught.value)] == []


def test_who_pays_and_when_changes_no_figure_how_it_runs_may():
    names = ("reservation", "account", "qos", "time", "nodelist")
    assert overrides.neutral([f"slurm.{name}" for name in names])
    assert not overrides.neutral(["slurm.qos", "slurm.exclusive"])
    assert overrides.neutral(["kubernetes.namespace", "kubernetes.keep"])
    assert not overrides.neutral(["kubernetes.image"])


# --- maintenance


def delay(*reservations, nodes=1, own=None) -> str:
    specs = [spec(target(reservation=own), nodes=nodes), spec(time_limit_s=60.0)]
    return maintenance_delay(specs, lambda _: MadeUpSlurm(reservations=reservations), NOW)[0]


def test_a_maintenance_of_the_whole_partition_is_reported_with_its_end():
    assert delay(maint()).startswith(
        "maintenance until 2027-01-15 12:06 UTC (reservation maint42): it begins at"
    )
    assert "it began at" in delay(maint(starts_h=-1))


@pytest.mark.parametrize(
    "reservation",
    [
        pytest.param(maint(starts_h=3), id="later"),
        pytest.param(maint(starts_h=-9), id="over"),
        pytest.param(maint(flags=frozenset()), id="no maintenance"),
        pytest.param(maint(nodes=NAMES[:4]), id="a node is left"),
        pytest.param(maint(nodes=("gpu1",)), id="elsewhere"),
    ],
)
def test_a_reservation_that_holds_nobody_up_is_no_matter(reservation):
    assert delay(reservation) == ""


def test_too_few_nodes_left_for_the_largest_job_hold_it_up():
    assert delay(maint(nodes=NAMES[:3]), nodes=2) == ""
    assert delay(maint(nodes=NAMES[:4]), nodes=2) != ""
    assert "(reservation b)" in delay(maint("a", nodes=NAMES[:3]), maint("b", starts_h=0.15, nodes=NAMES[3:]))


def test_who_is_in_the_reservation_need_not_wait_for_it():
    assert delay(maint(), own="maint42") == ""
    assert delay(maint(), own="other") != ""


def test_a_slurm_that_does_not_answer_holds_nobody_up():
    class Silent(MadeUpSlurm):
        def reservations(self):
            raise SchedulerUnavailable("no answer")

    assert maintenance_delay([spec()], lambda _: Silent(), NOW) == ("", [])


def test_a_maintenance_is_announced_before_it_holds_anybody_up():
    slurm = MadeUpSlurm(reservations=[maint(starts_h=30), maint("half", starts_h=30, nodes=NAMES[:4])])
    delay, (found,) = maintenance_delay([spec()], lambda _: slurm, NOW)
    assert delay == ""
    assert (found.system, found.partition, found.text) == ("s", "p", "reservation maint42")
    assert (found.at_ns, found.until_ns) == (NOW + 30 * HOUR, NOW + 34 * HOUR)


@pytest.mark.parametrize(
    ("purpose", "starts_h", "delay", "announced"),
    [
        (
            "nightly",
            0.1,
            "maintenance until 2027-01-15 12:06 UTC (new pumps): it begins at 2027-01-15 08:06",
            1,
        ),
        ("nightly", 30, "", 1),
        ("nightly", -9, "", 0),
        ("manual", 0.1, "", 0),
    ],
)
def test_a_maintenance_of_the_systems_file_holds_up_nights_alone(
    monkeypatch, purpose, starts_h, delay, announced
):
    monkeypatch.setenv("MLHPC_PURPOSE", purpose)
    start = NOW + int(starts_h * HOUR)
    place = target()
    partition = replace(place.partition, maintenance=(Maintenance(start, start + 4 * HOUR, "new pumps"),))
    found = maintenance_delay([spec(replace(place, partition=partition))], lambda _: MadeUpSlurm(), NOW)
    assert (found[0].startswith(delay), bool(found[0]), len(found[1])) == (True, bool(delay), announced)


# --- mlhpc_here


ON_TWO = {"partition": "cpu", "nodes": ("node1", "node2"), "node_count": 2}
RUNNING = SchedulerJob("12", "salloc", "me", SchedulerState.RUNNING, end_ns=NOW + HOUR, **ON_TWO)


def placed(job: SchedulerJob | None = RUNNING, place: Target | None = None, environ=None, **settings: Any):
    asked = replace(SETTINGS, here=True, **settings)
    return inside_job.select_own_partition(
        [place or target()],
        {"SLURM_JOB_ID": "12"} if environ is None else environ,
        lambda _: MadeUpSlurm(jobs=[job] if job else []),
        asked.systems,
        outliving(asked),
    )


def test_the_job_around_us_becomes_part_of_the_partition():
    (found,) = placed()
    inside = {"job": "12", "nodes": ["node1", "node2"], "until_ns": NOW + HOUR}
    assert found.partition.scheduler_options["here"] == inside


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"environ": {}}, "SLURM_JOB_ID is not set"),
        ({"job": None}, "job 12 (SLURM_JOB_ID) is unknown to Slurm; it has to be running"),
        ({"job": replace(RUNNING, state=SchedulerState.COMPLETED)}, "is completed; it has to be running"),
        ({"place": target(partition="gpu")}, "job 12 is in Slurm's partition 'cpu', but s:p is 'gpu'"),
        ({"wait_s": 0.0}, "mlhpc_here and --mlhpc-wait"),
        ({"wait_s": 5.0}, "mlhpc_here and --mlhpc-wait"),
        ({"resume": ""}, "mlhpc_here and --mlhpc-resume"),
    ],
    ids=["no job", "unknown", "ended", "partition", "detach", "wait", "resume"],
)
def test_here_is_refused_where_it_cannot_be(given, text):
    with pytest.raises(UsageError) as caught:
        placed(**given)
    assert text in str(caught.value)


def test_what_the_job_cannot_give_is_reported_before_anything_starts():
    job = inside_job.with_job(target().partition, RUNNING).scheduler_options["here"]
    assert inside_job.beyond_job(spec(), job, NOW) == ""
    assert (
        inside_job.beyond_job(spec(nodes=3), job, NOW) == "3 nodes are asked for, job 12 has 2 (mlhpc_here)"
    )
    late = inside_job.beyond_job(spec(), job, NOW + HOUR - 300 * 10**9)
    assert late.startswith("660 s are needed (time_limit and margin), but job 12 ends in 300 s (mlhpc_here)")
