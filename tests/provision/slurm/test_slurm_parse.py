"""Parsers against the output of real commands (outputs/VERSION/, marks fixed to ``<m>``), hostile names, and host lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.provision.scheduler.client import SchedulerState
from pytest_mlhpc.provision.slurm import parse
from pytest_mlhpc.provision.slurm.parse import nodes_of

OUTPUTS = Path(__file__).parent / "outputs"
VERSIONS = sorted(path.name for path in OUTPUTS.iterdir() if path.is_dir())
MARK = "<m>"


def reader(version):
    return lambda name: (OUTPUTS / version / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture(params=VERSIONS)
def output(request):
    return reader(request.param)


@pytest.fixture(params=[version for version in VERSIONS if (OUTPUTS / version / "sacct.txt").exists()])
def accounting(request):
    """Outputs of versions that were run with slurmdbd."""
    return reader(request.param)


def attributes(thing, names):
    return {name: getattr(thing, name) for name in names}


def test_outputs_of_the_versions_that_sites_have_are_there():
    assert {"22.05", "24.11", "26.05"} <= set(VERSIONS)


EVIL = "evil\nname\t\x1b[31m|x|"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(
            "1000",
            {
                "state": SchedulerState.FAILED, "exit_code": 7, "signal": 0, "nodes": ("node1",), "user": "root", "partition": "cpu",
                "account": "bench", "time_limit_s": 600.0, "name": 'a | b "q" é',
            },
            id="a failed job has its exit code and nodes",
        ),
        pytest.param("1001", {"name": EVIL}, id="a name with newline, tab and escape breaks no record"),
        pytest.param("1002", {"state": SchedulerState.FAILED, "exit_code": 0, "signal": 9}, id="a killed batch has its signal"),
        pytest.param("1003", {"reason": ""}, id="a running job waits for nothing"),
        pytest.param("1005", {"state": SchedulerState.PENDING, "reason": "JobHeldUser", "nodes": ()}, id="a held job says so"),
        pytest.param("1006", {"reason": "PartitionNodeLimit", "start_ns": 0}, id="a pending job tells why it waits"),
        pytest.param("1007", {"state": SchedulerState.CANCELLED}, id="a cancelled job"),
    ],
)  # fmt: skip
def test_a_job_is_read_whole(output, number, expected):
    jobs = {job.id: job for job in parse.parse_jobs(output("squeue_jobs"), MARK)}
    assert len(jobs) == 9
    assert attributes(jobs[number], expected) == expected
    assert jobs["1006"].node_count > 1


def test_steps_belong_to_their_jobs(output):
    step, batch = parse.parse_steps(output("squeue_steps"), MARK)["1003"]
    assert (step.id, step.name, step.state) == ("0", "step | one", SchedulerState.RUNNING)
    assert (step.nodes, batch.id, batch.nodes) == (("node1", "node2"), "batch", ("node1",))


def test_the_queue_is_in_order_of_priority(output):
    queue = parse.parse_queue(output("squeue_queue"), MARK)
    assert [job.id for job in queue] == ["1006", "1008", "1005"]
    assert queue[0].user == "root"


def test_accounting_has_jobs_with_their_steps(accounting):
    jobs = {job.id: job for job in parse.parse_accounting(accounting("sacct"), parse.ACCOUNTING_FIELDS, MARK)}
    failed, killed, ended = jobs["1000"], jobs["1002"], jobs["1004"]
    assert [step.id for step in failed.steps] == ["batch", "0"]
    codes = (failed.state, failed.exit_code, killed.exit_code, killed.signal)
    assert codes == (SchedulerState.FAILED, 7, 0, 9)
    assert (ended.steps[1].state, ended.steps[1].signal) == (SchedulerState.CANCELLED, 15)
    assert (ended.time_limit_s, jobs["1001"].name) == (600.0, EVIL)
    assert parse.NS < ended.end_ns - ended.start_ns < 60 * parse.NS
    assert {step.energy_j for job in jobs.values() for step in job.steps} == {None}, "0 is no energy"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("node1", {"state": "mixed", "usable": True, "memory": 2000 << 20}),
        ("gpu1", {"gres": "gpu:h100:4", "features": {"gpu", "h100"}}),
        pytest.param(
            "node4",
            {
                "partitions": {"cpu", "low"}, "cpus": 4, "state": "idle", "flags": {"drain"}, "usable": False,
                "reason": """it's "bad": a=b State=DOWN""",
            },
            id="a reason that looks like fields is a reason",
        ),
    ],
)  # fmt: skip
def test_nodes_have_state_flags_memory_and_gres(output, name, expected):
    nodes = {node.name: node for node in parse.parse_nodes(output("scontrol_nodes"))}
    assert list(nodes) == ["gpu1", "gpu2", "node1", "node2", "node3", "node4"]
    assert attributes(nodes[name], expected) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "cpu",
            {
                "up": True, "max_time_s": 3600.0, "max_nodes": None, "total_nodes": 4, "allow_accounts": frozenset(),
                "allow_qos": frozenset(), "qos": "",
            },
        ),
        ("small", {"max_time_s": 60.0, "max_nodes": 1, "nodes": ("node1", "node2")}),
    ],
)  # fmt: skip
def test_partitions_have_limits_or_none(output, name, expected):
    assert attributes(parse.parse_partition(output(f"scontrol_partition_{name}")), expected) == expected


def test_reservations_have_times_nodes_and_flags(output):
    (found,) = parse.parse_reservations(output("scontrol_reservations"))
    expected = {"name": "maint42", "nodes": ("node1", "node2"), "users": {"root"}, "partition": ""}
    assert attributes(found, expected) == expected
    assert found.end_ns - found.start_ns == 3600 * parse.NS
    assert "MAINT" in found.flags


def test_no_reservations_are_none(output):
    assert parse.parse_reservations(output("scontrol_reservations_none")) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("short", {"max_time_s": 93600.0, "max_nodes": 3, "usage_factor": 0.5}),
        ("normal", {"max_time_s": None, "max_nodes": None}),
        ("gone", None),
    ],
)
def test_a_qos_has_its_limits_for_one_job_or_does_not_exist(accounting, name, expected):
    found = parse.parse_qos(accounting("sacctmgr_qos"), name)
    assert (found and attributes(found, expected)) == expected


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 0", SchedulerState.CANCELLED),
        ("CANCELLED+", SchedulerState.CANCELLED),
        ("OUT_OF_MEMORY", SchedulerState.OUT_OF_MEMORY),
        ("SOMETHING_NEW", SchedulerState.UNKNOWN),
        ("", SchedulerState.UNKNOWN),
    ],
)
def test_states_are_known_by_their_first_word(word, state):
    assert parse.parse_state(word) is state


@pytest.mark.parametrize(
    ("word", "base", "flags"),
    [
        ("IDLE+DRAIN", "idle", {"drain"}),
        ("DOWN*", "down", {"not_responding"}),
        ("DOWN*+DRAIN", "down", {"not_responding", "drain"}),
        ("DOWN+NOT_RESPONDING", "down", {"not_responding"}),
        ("IDLE+CLOUD+POWERED_DOWN", "idle", {"cloud", "powered_down"}),
        ("idle~", "idle", {"powered_down"}),
        ("IDLE*~", "idle", {"not_responding", "powered_down"}),
        ("MIXED+MAINT", "mixed", {"maintenance"}),
        ("", "unknown", set()),
    ],
)
def test_node_states_come_apart_in_base_and_flags(word, base, flags):
    assert parse.parse_node_state(word) == (base, flags)


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("UNLIMITED", None), ("", None), ("INVALID", None), ("NONE", None),
        ("1:00", 60.0), ("10:00", 600.0), ("01:00:00", 3600.0), ("1-02:03:04", 93784.0), ("2-00", 172800.0), ("60", 3600.0),
    ],
)  # fmt: skip
def test_durations_are_seconds(word, seconds):
    assert parse.parse_duration_s(word) == seconds


@pytest.mark.parametrize(
    ("word", "joules"),
    [("", None), ("0", None), ("1234", 1234.0), ("18446744073709551614", None), ("1.2K", None)],
)
def test_energy_is_joules_or_none(word, joules):
    assert parse.parse_energy_j(word) == joules


def test_of_a_requeued_job_the_last_start_counts():
    def row(job, state, start):
        values = dict.fromkeys(parse.ACCOUNTING_FIELDS, "") | {"JobID": job, "State": state, "Start": start}
        return "".join(value + MARK for value in values.values()) + "\n"

    first = row("7", "NODE_FAIL", "1") + row("7.0", "CANCELLED", "1")
    second = row("7", "COMPLETED", "5") + row("7.0", "COMPLETED", "5")
    (job,) = parse.parse_accounting(first + second, parse.ACCOUNTING_FIELDS, MARK)
    assert (job.state, [step.state for step in job.steps]) == (
        SchedulerState.COMPLETED,
        [SchedulerState.COMPLETED],
    )


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_job_name_can_touch_another_record(first, second):
    mark = "<0123456789abcdef>"  # nobody could know it, so no name holds it
    names = [name.replace(mark, "") for name in (first, second)]
    rows = [
        dict.fromkeys(parse.JOB_FIELDS, "") | {"JobID": str(at), "State": "RUNNING", "Name": name}
        for at, name in enumerate(names)
    ]
    printed = "".join("|".join(row.values()) + mark + "\n" for row in rows)
    assert [(job.id, job.name) for job in parse.parse_jobs(printed, mark)] == [
        ("0", names[0]),
        ("1", names[1]),
    ]


@given(st.text(max_size=200))
def test_parsers_stand_any_text(printed):
    parse.parse_jobs(printed, "|")
    parse.parse_steps(printed, "|")
    parse.parse_queue(printed, "|")
    parse.parse_accounting(printed, parse.ACCOUNTING_FIELDS, "|")
    parse.parse_nodes("NodeName=" + printed)
    parse.parse_partition("PartitionName=" + printed)
    parse.parse_reservations("ReservationName=" + printed)
    parse.parse_qos(printed, "x")


def test_a_text_that_is_no_host_list_counts_as_one_name():
    assert nodes_of("n[1-2],x") == ("n1", "n2", "x")
    assert nodes_of("n[3-1]") == ("n[3-1]",)
