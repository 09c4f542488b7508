"""Parsers against what real commands printed (outputs/VERSION/, marks fixed to ``<m>``), and against hostile names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.provision.slurm import entities, text
from pytest_mlhpc.provision.slurm.client import State

OUTPUTS = Path(__file__).parent / "outputs"
VERSIONS = sorted(path.name for path in OUTPUTS.iterdir() if path.is_dir())
MARK = "<m>"


def reader(version):
    return lambda name: (OUTPUTS / version / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture(params=VERSIONS)
def said(request):
    return reader(request.param)


@pytest.fixture(params=[version for version in VERSIONS if (OUTPUTS / version / "sacct.txt").exists()])
def accounted(request):
    """Versions that were run with slurmdbd."""
    return reader(request.param)


def test_outputs_of_the_versions_that_sites_have_are_kept():
    assert {"22.05", "24.11", "26.05"} <= set(VERSIONS)


def test_a_failed_job_has_its_exit_code_and_nodes(said):
    job = {job.id: job for job in text.parse_jobs(said("squeue_jobs"), MARK)}["1000"]
    assert (job.state, job.exit_code, job.signal, job.nodes) == (State.FAILED, 7, 0, ("node1",))
    assert (job.user, job.partition, job.account, job.time_limit_s) == ("root", "cpu", "bench", 600.0)
    assert job.name == 'a | b "q" é'


def test_a_killed_batch_script_has_its_signal(said):
    job = {job.id: job for job in text.parse_jobs(said("squeue_jobs"), MARK)}["1002"]
    assert (job.state, job.exit_code, job.signal) == (State.FAILED, 0, 9)


def test_a_name_with_newline_tab_and_escape_breaks_no_record(said):
    jobs = {job.id: job for job in text.parse_jobs(said("squeue_jobs"), MARK)}
    assert jobs["1001"].name == "evil\nname\t\x1b[31m|x|"
    assert len(jobs) == 9


def test_pending_jobs_tell_why_they_wait(said):
    jobs = {job.id: job for job in text.parse_jobs(said("squeue_jobs"), MARK)}
    assert (jobs["1005"].state, jobs["1005"].reason, jobs["1005"].nodes) == (State.PENDING, "JobHeldUser", ())
    assert (jobs["1006"].reason, jobs["1006"].start_ns) == ("PartitionNodeLimit", 0)
    assert jobs["1006"].node_count > 1
    assert jobs["1007"].state is State.CANCELLED
    assert jobs["1003"].reason == ""


def test_steps_belong_to_their_jobs(said):
    steps = text.parse_steps(said("squeue_steps"), MARK)
    step, batch = steps["1003"]
    assert (step.id, step.name, step.state, step.nodes) == (
        "0",
        "step | one",
        State.RUNNING,
        ("node1", "node2"),
    )
    assert (batch.id, batch.nodes) == ("batch", ("node1",))


def test_the_queue_is_in_order_of_priority(said):
    queue = text.parse_queue(said("squeue_queue"), MARK)
    assert [job.id for job in queue] == ["1006", "1008", "1005"]
    assert queue[0].user == "root"


def test_accounting_has_jobs_with_their_steps(accounted):
    jobs = {job.id: job for job in text.parse_accounting(accounted("sacct"), text.ACCOUNTING_FIELDS, MARK)}
    failed, killed, ended = jobs["1000"], jobs["1002"], jobs["1004"]
    assert (failed.state, failed.exit_code, [step.id for step in failed.steps]) == (
        State.FAILED,
        7,
        ["batch", "0"],
    )
    assert (killed.exit_code, killed.signal) == (0, 9)
    assert ended.steps[1].state is State.CANCELLED
    assert ended.steps[1].signal == 15
    assert ended.time_limit_s == 600.0
    assert text.NS < ended.end_ns - ended.start_ns < 60 * text.NS
    assert jobs["1001"].name == "evil\nname\t\x1b[31m|x|"


def test_energy_of_zero_is_no_energy(accounted):
    jobs = text.parse_accounting(accounted("sacct"), text.ACCOUNTING_FIELDS, MARK)
    assert {step.energy_j for job in jobs for step in job.steps} == {None}


def test_nodes_have_state_flags_memory_and_gres(said):
    nodes = {node.name: node for node in entities.parse_nodes(said("scontrol_nodes"))}
    assert list(nodes) == ["gpu1", "gpu2", "node1", "node2", "node3", "node4"]
    assert (nodes["node1"].state, nodes["node1"].usable, nodes["node1"].memory) == ("mixed", True, 2000 << 20)
    assert nodes["gpu1"].gres == "gpu:h100:4"
    assert nodes["gpu1"].features == {"gpu", "h100"}
    assert nodes["node4"].partitions == {"cpu", "low"}
    assert nodes["node4"].cpus == 4


def test_a_reason_that_looks_like_fields_is_a_reason(said):
    node = entities.parse_nodes(said("scontrol_nodes"))[-1]
    assert (node.state, node.flags, node.usable) == ("idle", {"drain"}, False)
    assert node.reason == """it's "bad": a=b State=DOWN"""


def test_partitions_have_limits_or_none(said):
    cpu = entities.parse_partition(said("scontrol_partition_cpu"))
    small = entities.parse_partition(said("scontrol_partition_small"))
    assert (cpu.up, cpu.max_time_s, cpu.max_nodes, cpu.total_nodes) == (True, 3600.0, None, 4)
    assert (small.max_time_s, small.max_nodes, small.nodes) == (60.0, 1, ("node1", "node2"))
    assert (cpu.allow_accounts, cpu.allow_qos, cpu.qos) == (frozenset(), frozenset(), "")


def test_reservations_have_times_nodes_and_flags(said):
    (found,) = entities.parse_reservations(said("scontrol_reservations"))
    assert (found.name, found.nodes, found.users) == ("maint42", ("node1", "node2"), {"root"})
    assert found.end_ns - found.start_ns == 3600 * text.NS
    assert "MAINT" in found.flags
    assert found.partition == ""


def test_no_reservations_are_none(said):
    assert entities.parse_reservations(said("scontrol_reservations_none")) == []


def test_a_qos_has_its_limits_for_one_job(accounted):
    found = entities.parse_qos(accounted("sacctmgr_qos"), "short")
    assert (found.max_time_s, found.max_nodes, found.usage_factor) == (93600.0, 3, 0.5)
    normal = entities.parse_qos(accounted("sacctmgr_qos"), "normal")
    assert (normal.max_time_s, normal.max_nodes) == (None, None)
    assert entities.parse_qos(accounted("sacctmgr_qos"), "gone") is None


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 0", State.CANCELLED),
        ("CANCELLED+", State.CANCELLED),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY),
        ("SOMETHING_NEW", State.UNKNOWN),
        ("", State.UNKNOWN),
    ],
)
def test_states_are_known_by_their_first_word(word, state):
    assert text.state(word) is state


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
    assert entities.node_state(word) == (base, flags)


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("UNLIMITED", None), ("", None), ("INVALID", None), ("NONE", None),
        ("1:00", 60.0), ("10:00", 600.0), ("01:00:00", 3600.0), ("1-02:03:04", 93784.0), ("2-00", 172800.0), ("60", 3600.0),
    ],
)  # fmt: skip
def test_durations_are_seconds(word, seconds):
    assert text.duration_s(word) == seconds


@pytest.mark.parametrize(
    ("word", "joules"),
    [("", None), ("0", None), ("1234", 1234.0), ("18446744073709551614", None), ("1.2K", None)],
)
def test_energy_is_joules_or_none(word, joules):
    assert text.energy_j(word) == joules


def test_of_a_requeued_job_the_last_start_counts():
    def row(job, state, start):
        values = dict.fromkeys(text.ACCOUNTING_FIELDS, "") | {"JobID": job, "State": state, "Start": start}
        return "".join(value + MARK for value in values.values()) + "\n"

    said = (
        row("7", "NODE_FAIL", "1")
        + row("7.0", "CANCELLED", "1")
        + row("7", "COMPLETED", "5")
        + row("7.0", "COMPLETED", "5")
    )
    (job,) = text.parse_accounting(said, text.ACCOUNTING_FIELDS, MARK)
    assert (job.state, [step.state for step in job.steps]) == (State.COMPLETED, [State.COMPLETED])


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_job_name_can_touch_another_record(first, second):
    mark = "<0123456789abcdef>"  # nobody could know it, so no name holds it
    names = [name.replace(mark, "") for name in (first, second)]
    values = dict.fromkeys(text.JOB_FIELDS, "")
    said = "".join(
        "|".join((values | {"JobID": str(at), "State": "RUNNING", "Name": name}).values()) + mark + "\n"
        for at, name in enumerate(names)
    )
    assert [(job.id, job.name) for job in text.parse_jobs(said, mark)] == [("0", names[0]), ("1", names[1])]


@given(st.text(max_size=200))
def test_parsers_stand_any_text(said):
    text.parse_jobs(said, "|")
    text.parse_steps(said, "|")
    text.parse_queue(said, "|")
    text.parse_accounting(said, text.ACCOUNTING_FIELDS, "|")
    entities.parse_nodes("NodeName=" + said)
    entities.parse_partition("PartitionName=" + said)
    entities.parse_reservations("ReservationName=" + said)
    entities.parse_qos(said, "x")
