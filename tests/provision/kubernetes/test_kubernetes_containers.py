"""Pods without an agent: what is created, what becomes of a container's end, and how its log is joined."""

from dataclasses import replace
from pathlib import Path

import manifest_schemas
import pytest
from manifests import IDENTITY, partition
from pod_worlds import ID

from pytest_mlhpc.errors import ProvisionError, RunFailure
from pytest_mlhpc.jobs.provisioner import LineArrived
from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.provision.kubernetes.log_follower import LogLine
from pytest_mlhpc.provision.kubernetes.manifest import preview_plan, render
from pytest_mlhpc.provision.kubernetes.settings import settings_of
from pytest_mlhpc.provision.kubernetes.verdict import exit_code


def made(nodes=1, kind="job", **run):
    where = partition(agent=False, kind=kind)
    plan = preview_plan(where, nodes, nodes)
    plan = replace(plan, runs=(replace(plan.runs[0], argv=("dd", "of=$(A)/x", "$$"), **run),))
    return render(settings_of(where), where, where.environments[0], plan, b"zip", IDENTITY)


def container_of(found):
    """Return the first container of the first pod template in an object, wherever it is."""
    if isinstance(found, dict) and "containers" in found:
        return found["containers"][0]
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return next((one for one in map(container_of, inner) if one), None)


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
def test_the_program_is_the_containers_own_command(kind):
    found = made(2, kind, variables={"MY_TOKEN": "secret"})
    for one in found.workloads:
        assert manifest_schemas.complaints(one) == []
        assert "secret" not in str(one).replace("secretRef", "")
    container = container_of(found.workloads[0])
    assert container["command"] == ["dd", "of=$$(A)/x", "$$$$"]
    assert container["envFrom"] == [{"secretRef": {"name": found.secret["metadata"]["name"]}}]
    assert list(found.secret["data"]) == ["MY_TOKEN"]
    assert {one["name"] for one in container["env"]} | {"RANK"} == {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/mlhpc/work", "/dev/shm"]


def test_a_pod_without_agent_has_no_probe_a_deadline_and_the_folder_that_the_test_says():
    spec = made(cwd="/data").workloads[0]["spec"]["template"]["spec"]
    assert "initContainers" not in spec
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["containers"][0]["workingDir"] == "/data"
    assert "env" not in spec["containers"][0] or spec["containers"][0]["env"] == []


@pytest.mark.parametrize(("code", "found"), [(0, 0), (3, 3), (127, 127), (137, -9), (143, -15), (255, 255)])
def test_an_exit_code_beyond_128_is_a_signal(code, found):
    assert exit_code(code) == found


@pytest.fixture
def bare(world_of):
    """A world with an allocation of one program on so many pods without an agent, all of them known."""

    def begin(nodes=1, launcher="plain", **run):
        world = world_of(agent=False, kind="job")
        plan = world.plan()
        rate = MetricPattern("items/s", "higher", r"rate: (\S+)", reduce="sum")
        program = replace(
            plan.runs[0], workload="command", argv=("x",), metrics={"rate": rate}, processes=nodes, nodes=nodes,
            ranks=nodes, launcher=launcher, **run,
        )  # fmt: skip
        world.plan = lambda: replace(plan, runs=(program,), nodes=nodes)
        return world.submitted()

    return begin


def prints(world, *lines, uid="pod-1"):
    world.put(*(LogLine(world._ref(uid), "worker", line.encode()) for line in lines))


def messages(world):
    return {event.message.kind: event.message.body for event in world.all_of(LineArrived)}


def test_the_log_is_the_output_and_the_exit_code_the_outcome(bare):
    world = bare()
    world.pod(running=True)
    world.follow(1)
    prints(world, "rate: 3", '\x1e{"n":0,"kind":"end"}', "rate: 4")
    world.pod(exit=0)
    world.follow(1)
    assert world.lines() == ["started"]  # its log is not read yet
    world.log_over()
    assert world.end(3).error is None
    assert world.lines() == ["started", "measurement", "end"]
    (metric,) = messages(world)["measurement"]["metrics"]
    assert metric["samples"] == [3.0, 4.0]
    (log,) = Path(world.plan().directory).glob("*/container.log")
    assert log.read_text().count("\n") == 3


def test_outputs_of_several_pods_are_one_after_the_other(bare):
    world = bare(2, "podrun")
    for rank, uid in enumerate(("pod-1", "pod-2")):
        found = world.pod(uid, f"-{rank}-x", running=True)
        found["metadata"]["labels"]["pytest-mlhpc/rank"] = str(rank)
    world.follow(1)
    prints(world, "rate: 2", uid="pod-2")
    prints(world, "rate: 1", uid="pod-1")
    for rank, uid in enumerate(("pod-1", "pod-2")):
        found = world.pod(uid, f"-{rank}-x", exit=0)
        found["metadata"]["labels"]["pytest-mlhpc/rank"] = str(rank)
        world.log_over(uid)
    world.end(3)
    assert messages(world)["measurement"]["metrics"][0]["samples"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("exit_", "outcome", "text"),
    [
        ({"exit": 3}, "worker_exit", "the program ended with exit code 3; its last lines:\nrate: 1"),
        ({"exit": 137}, "worker_killed", "the program was killed by SIGKILL"),
    ],
)
def test_a_bad_exit_is_the_programs(bare, exit_, outcome, text):
    world = bare()
    world.pod(running=True)
    world.follow(1)
    prints(world, "rate: 1")
    world.pod(**exit_)
    world.log_over()
    assert world.end(12).error is None
    assert messages(world)["failed"]["outcome"] == outcome
    assert messages(world)["failed"]["text"].startswith(text)


@pytest.mark.parametrize(
    ("why", "error", "outcome"),
    [("OOMKilled", RunFailure, "out_of_memory"), ("StartError", RunFailure, "command_not_found"), ("DeadlineExceeded", RunFailure, "time_limit")],
)  # fmt: skip
def test_an_end_that_the_cluster_explains_is_not_the_programs(bare, why, error, outcome):
    world = bare()
    world.pod(running=True)
    world.follow(1)
    world.pod(exit=137, why=why)
    world.log_over()
    found = world.end(3).error
    assert isinstance(found, error)
    assert found.outcome == outcome
    assert "end" not in messages(world)


def test_a_log_with_a_hole_measures_nothing(bare):
    world = bare()
    world.pod(running=True)
    world.follow(1)
    prints(world, "rate: 1")
    world.pod(exit=0)
    world.log_over(complete=False)
    world.end(3)
    assert messages(world)["failed"]["outcome"] == "truncated_result"
    assert "is incomplete: it was rotated, or may have been" in messages(world)["failed"]["text"]
    assert "measurement" not in messages(world)


def test_a_program_that_does_not_end_is_ended_at_its_limit(bare):
    world = bare()
    world.pod(running=True)
    world.end(12)
    assert messages(world)["failed"] == {
        "outcome": "time_limit", "text": "the program did not end within 9 s", "log": "",
    }  # fmt: skip


def test_a_later_session_reads_the_log_again_and_measures_the_same(bare):
    world = bare()
    world.pod(running=True)
    world.follow(1)
    prints(world, "rate: 1")
    world.follow(1)
    world.adopt(world.plan())
    world.sync()
    world.job()
    world.pod(running=True)
    world.follow(1)
    prints(world, "rate: 1", "rate: 6")
    world.pod(exit=0)
    world.log_over()
    world.follow(3)
    assert messages(world)["measurement"]["metrics"][0]["samples"] == [1.0, 6.0]
    assert f"mlhpc-{ID}" in str(world.api.calls) or world.ends


def test_an_image_that_cannot_be_had_is_an_error_of_the_allocation(bare):
    world = bare()
    found = world.pod()
    found["status"]["containerStatuses"][0]["state"] = {
        "waiting": {"reason": "ErrImageNeverPull", "message": "absent"}
    }
    error = world.end(3).error
    assert isinstance(error, ProvisionError)
    assert error.outcome == "image_pull"
