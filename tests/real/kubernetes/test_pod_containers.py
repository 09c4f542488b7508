"""Programs that are the command of their container: any image, without Python and without our agent."""

import json

import pytest

BARE = {"image": "mlhpc.test/busybox:1", "agent": False, "kind": "pods"}

PROGRAMS = """
    RATE = Metric("rate", r"rate: (\\S+)", "MB/s")
    COPIED = Metric("copied", r"^(\\d+)\\+0 records out", "1", better="none")

    @program("dd if=/dev/zero of=/data/file bs=1024 count=64", COPIED)
    def test_dd_on_a_volume(run):
        assert run["copied"].value == 64
        assert run.log.read_text() == run.output
        with pytest.raises(Exception, match="standard output and error in one"):
            run.errors

    @program(["echo", "rate:", "4", "$(HOME)", "$$", "a b", "$HOME"], RATE, env={"TOKEN": "not for manifests"},
        sanity=lambda run: "$(HOME) $$ a b $HOME" in run.output)
    def test_words_are_given_as_they_are(run):
        assert run["rate"].value == 4e6

    @program(["sh", "-c", "echo rate: $RANK of $WORLD_SIZE, $TOKEN; pwd; touch here"], Metric("rank", r"rate: (\\S+)", "1", better="none", reduce="max"),
        nodes=2, ranks_per_node=1, env={"TOKEN": "it"})
    def test_one_in_each_of_two_pods(run):
        assert run["rank"].samples == (0, 1)
        assert run.output.splitlines() == ["rate: 0 of 2, it", "/mlhpc/work", "rate: 1 of 2, it", "/mlhpc/work"]
"""

#: In the form of EPCC's check of its GPU service: a vendor's image (nvcr.io/nvidia/k8s/cuda-sample:nbody) whose program prints
#: its rate, on one GPU. No registry is reached from these tests: a bare image prints what the vendor's does.
N_BODY = """
    @program(
        ["echo", "number of bodies = 512000\\n512000 bodies, total time for 10 iterations: 10570.778 ms\\n"
         "= 247.989 billion interactions per second\\n= 4959.774 single-precision GFLOP/s at 20 flops per interaction"],
        Metric("compute", r"= (\\S+) single-precision GFLOP/s at", "GFLOP/s"),
        image="mlhpc.test/busybox:1", kubernetes={"agent": False, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        sanity=["number of bodies = 512000", "GFLOP/s"], reference={"cluster": (4900, -0.05, None)}, time_limit="5m",
    )
    def test_n_body(run):
        assert run["compute"].to("GFLOP/s") == pytest.approx(4959.774)
"""

BROKEN = """
    RATE = Metric("rate", r"rate: (\\S+)", "MB/s")

    @program("sh -c 'echo its last word >&2; exit 3'", RATE)
    def test_exit(run): pass

    # One stream: a log has no order between two, and a shell tells of what was killed on standard error.
    @program("sh -c 'exec 2>&1; echo its last step; sleep 9 & kill -9 $!; wait $!'", RATE)
    def test_killed(run): pass

    @program("nosuch", RATE)
    def test_missing(run): pass

    @program("sleep 600", RATE, time_limit="5s")
    def test_late(run): pass

    @program("echo nothing", RATE)
    def test_silent(run): pass

    @program("sh -c 'test $RANK = 1 && exit 4; sleep 600'", nodes=2, ranks_per_node=1)
    def test_one_of_two_fails(run): pass
"""

pytestmark = pytest.mark.servers


@pytest.fixture
def bare_suite(pod_suite):
    """A suite on a partition whose pods have no agent, an image without Python, and a volume."""
    volume = {"name": "data", "mount": "/data", "empty_dir": {}}
    pod_suite.partition({"vet": {"level": "quick"}}, **BARE, volumes=[volume])
    return pod_suite


def test_a_program_of_an_image_without_python_is_measured(bare_suite):
    bare_suite.tests(PROGRAMS)
    bare_suite.run("--mlhpc-pack").expect(0, passed=3)
    assert len(bare_suite.records()) == 3
    for record in bare_suite.records():
        assert record["explanation"][-1].startswith("no agent was in its pod: its node was not vetted")
        assert record.get("vetting") is None
        assert record["measurement"]["ended_ns"] >= record["measurement"]["started_ns"] > 0
    sent = [json.loads(path.read_text()) for path in bare_suite.state.glob("runs/*/*/manifests.json")]
    pods = [one for listed in sent for one in listed["items"] if one["kind"] == "Pod"]
    assert len(pods) == 4
    assert "not for manifests" not in str(pods)
    assert all("initContainers" not in pod["spec"] and pod["spec"]["activeDeadlineSeconds"] for pod in pods)


def test_a_vendors_program_on_a_gpu_is_measured_in_its_own_image(pod_suite):
    pod_suite.partition(kind="job", volumes=[])
    pod_suite.tests(N_BODY)
    pod_suite.run().expect(0, passed=1)
    (record,) = pod_suite.records()
    assert record["measurement"]["metrics"][0]["unit"] == "FLOP/s"
    (sent,) = [json.loads(path.read_text()) for path in pod_suite.state.glob("runs/*/*/manifests.json")]
    assert '"nvidia.com/gpu": "1"' in json.dumps(sent)


def test_how_a_program_without_agent_ends_is_what_its_container_says(bare_suite):
    bare_suite.tests(BROKEN)
    result = bare_suite.run()
    result.expect(
        1,
        "worker_exit: the program ended with exit code 3; its last lines: its last word",
        "worker_killed: the program was killed by SIGKILL (the kernel does that when memory runs out); its last lines: its last step",
        "command_not_found",
        "time_limit: the program did not end within 5 s",
        "metric_missing: the program's output has no metric rate",
        "worker_exit: the program ended with exit code 4",
        failed=6,
    )


def test_a_program_without_agent_is_left_to_a_later_session(pod_suite):
    pod_suite.partition(**{**BARE, "kind": "job", "volumes": []})
    pod_suite.gated("one")
    pod_suite.run("--mlhpc-wait=0").expect(75, skipped=1)
    pod_suite.go()
    pod_suite.run("--mlhpc-resume").expect(0, "going on with 1 run", passed=1)
