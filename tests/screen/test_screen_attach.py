"""Watchers on other nodes: what comes back is put together, and what cannot be looked at is refused by name."""

import io
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from itertools import pairwise

import pytest
from polling import ended, poll
from screen_samples import process, samples

from pytest_mlhpc import cli
from pytest_mlhpc.errors import InfrastructureError, UsageError
from pytest_mlhpc.node.telemetry.sampler import PIECE, pieces
from pytest_mlhpc.screen import watchers
from pytest_mlhpc.screen.usage import LEAST_OF_NODE, SampleBuffer

pytestmark = pytest.mark.servers  # watchers and programs that they watch


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No machine is too slow for a watcher that looks for a second."""
    monkeypatch.setattr(watchers, "PATIENCE_S", 600.0)


def one_process(seconds, **node):
    return samples(lambda second: [process(10, second)], seconds=seconds, **node)


def assembled(lines):
    """Put lines of watchers together."""
    assembly = watchers.Assembly()
    for line in lines:
        assembly.feed(line)
    return assembly


def test_a_sample_survives_being_cut_into_short_lines_that_come_in_any_order():
    looks = samples(lambda second: [process(n, second, name=f"p{n * 7919}") for n in range(200)], seconds=3)
    lines = [line for number, look in enumerate(looks) for line in pieces("n1", number, look)]
    assert max(map(len, lines)) < PIECE + 60
    assert len(lines) > len(looks)
    assembly = assembled([*lines[1::2], "srun: a word of its own\n", *lines[::2]])
    assert sorted(assembly.buffer.samples(), key=lambda one: one.time_s) == looks
    assert assembly.damaged == 0


def test_of_a_job_that_is_sampled_for_long_as_many_samples_stay_as_memory_takes():
    looks = samples(lambda second: [process(pid, second) for pid in range(10)], seconds=1001)
    few = replace(looks[0], node=replace(looks[0].node, host="n2"))
    kept = SampleBuffer(most=400)
    for look in [few, *looks]:
        kept.add(look)
    mine = [one for one in kept.samples() if one.node.host == "n1"]
    assert [one for one in kept.samples() if one.node.host == "n2"] == [few]
    assert LEAST_OF_NODE <= len(mine) <= 40
    assert mine[0] == looks[0]
    gaps = {after.time_s - before.time_s for before, after in pairwise(mine)}
    assert max(gaps) <= 2 * min(gaps)
    assert looks[-1].time_s - mine[-1].time_s <= max(gaps)
    cost = sum(one.cost_s for one in looks)
    assert cost - max(gaps) * 0.001 <= sum(one.cost_s for one in mine) <= cost + 1e-9


def test_a_thousand_nodes_keep_what_tells_them_apart():
    kept = SampleBuffer(most=1)
    for look in one_process(100):
        kept.add(look)
    assert LEAST_OF_NODE <= len(kept.samples()) < 2 * LEAST_OF_NODE


def test_times_of_nodes_whose_clocks_differ_are_reported_on_our_clock(monkeypatch):
    taken = {host: one_process(4, host=host) for host in ("n1", "n2")}
    # It booted earlier, and came late.
    taken["n2"] = [replace(one, time_s=one.time_s + 5000.0) for one in taken["n2"][1:]]
    assembly = watchers.Assembly()
    for host, behind in (("n1", 900.0), ("n2", -4100.0)):
        for number, look in enumerate(taken[host]):
            late = (2.5, 0.01, 0.8, 0.3)[number]  # on its way
            monkeypatch.setattr(watchers.time, "monotonic", lambda: look.time_s + behind + late)  # noqa: B023 - used at once
            for line in pieces(host, number, look):
                assembly.feed(line)
    found = {host: [one.time_s for one in assembly.on_our_clock() if one.node.host == host] for host in taken}
    assert found["n1"] == pytest.approx([1000.01, 1001.01, 1002.01, 1003.01])
    assert found["n2"] == pytest.approx([1001.01, 1002.01, 1003.01])


@pytest.mark.parametrize(
    "words", ["0 0 1 %%%", "0 1 1 eA==", "0 0 999999999 eA==", "0 x 1 eA==", "0 0 1 eJyrrgUAAXUA+Q=="]
)
def test_damaged_lines_are_counted_and_left_out(words):
    assembly = assembled([f"mlhpc-screen n1 {words}"])
    assert (assembly.buffer.samples(), assembly.damaged) == ([], 1)


def test_the_code_that_travels_is_small_and_whole():
    content = watchers.code()
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert len(content) < 300_000
    assert "pytest_mlhpc/node/telemetry/sampler.py" in names
    assert not [name for name in names if "/judge" in name or "/vet/" in name]


def boot(*words, size=None):
    """What is run on a node: the code comes on standard input."""
    return [sys.executable, "-I", "-c", watchers.BOOT, str(size or len(watchers.code())), *words]


def test_the_watcher_runs_from_what_travels_alone(tmp_path):
    argv = boot("--seconds", "1", "--interval", "0.2")
    done = subprocess.run(argv, input=watchers.code(), capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assembly = assembled(done.stdout.decode().splitlines())
    assert assembly.buffer.samples()
    assert assembly.damaged == 0
    assert list(tmp_path.iterdir()) == []


def test_a_watcher_whose_code_is_cut_short_says_so():
    done = subprocess.run(boot("--seconds", "1", size=1000), input=b"short", capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"the watcher's code did not arrive\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_watcher_that_is_ended_leaves_nothing_on_its_node(number, tmp_path):
    streams = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": {**os.environ, "TMPDIR": str(tmp_path)},
    }
    with subprocess.Popen(boot("--seconds", "600"), **streams) as watcher:
        watcher.stdin.write(watchers.code())
        watcher.stdin.flush()
        assert watcher.stdout.readline().startswith(b"mlhpc-screen ")
        watcher.send_signal(number)
    assert watcher.returncode == -number
    assert list(tmp_path.iterdir()) == []


#: Screens a job by a program that writes down its number, as srun would never end by itself.
LOOKING = """
import sys
from pytest_mlhpc.screen import watchers
srun = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
watchers.watch([[sys.executable, "-c", srun, sys.argv[1]]], 600.0, 0.5)
"""


def pid_in(path):
    return int(poll(lambda: path.exists() and path.read_text()))


def test_srun_does_not_outlive_screening_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", LOOKING, tmp_path / "pid"]) as looking:
        pid = pid_in(tmp_path / "pid")
        looking.kill()
    poll(lambda: ended(pid))


#: What is put before LOOKING: it writes down that it waits for a program, and would wait for ever for that to end.
PATIENT = """
import pathlib, sys
from pytest_mlhpc.screen import watchers
join, watchers.END_S = watchers._Watcher.join, 1e6
watchers._Watcher.join = lambda one, until: (pathlib.Path(sys.argv[1] + ".waits").write_text("1"), join(one, until))
"""


def test_who_presses_ctrl_c_again_does_not_wait_for_an_srun_that_does_not_end(tmp_path):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import os, "
    code = PATIENT + LOOKING.replace("import os, ", deaf)
    argv = ["env", "--default-signal=INT", sys.executable, "-c", code, tmp_path / "pid"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as looking:
        pid = pid_in(tmp_path / "pid")
        pid_in(tmp_path / "pid.waits")
        poll(lambda: looking.send_signal(signal.SIGINT) or looking.poll() is not None)
        assert b"KeyboardInterrupt" in looking.stderr.read()  # the command line says `interrupted`
    poll(lambda: ended(pid))


def failing(words):
    """A watcher that ends with a word of why."""
    return [sys.executable, "-c", f"import sys; sys.exit({words!r})"]


LOG = 'E1123 11:35:06.131909   24321 memcache.go:265] "Unhandled Error" ' + "x" * 400


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("no such pod", "no such pod"),
        (f"{LOG}\n{LOG}\nThe connection was refused", "The connection was refused"),
    ],
    ids=["a word", "behind its log"],
)
def test_samples_of_several_watchers_are_merged_and_failures_have_messages(words, why):
    found, wrong = watchers.watch([boot(), failing(words)], 1.0, 0.2)
    assert found
    assert wrong == [f"{sys.executable} ended with 1: {why}"]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put programs of a cluster's on PATH, which say what real ones say."""

    def put(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_a_running_job_is_entered_by_an_overlapping_step_on_all_its_nodes(programs, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "own")  # with which squeue begins by a headline
    programs(squeue="[ -z $SLURM_CLUSTERS ] || echo CLUSTER: own; echo 'RUNNING|4|4711'", srun="")
    argv = watchers.slurm_argv("4711", "python3")
    assert argv[:6] == ["srun", "--overlap", "--jobid=4711", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"]
    assert argv[-5:] == ["-c", watchers.BOOT, str(len(watchers.code())), "--job", "4711"]


@pytest.mark.parametrize(
    ("job", "squeue", "error", "why"),
    [
        ("7; rm -rf /", "", UsageError, r"--job '7; rm -rf /' is no id of a Slurm job"),
        ("7", "echo 'PENDING|1|7'", UsageError, r"job 7 is PENDING: only a running job can be screened"),
        ("7", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", UsageError, r"Slurm knows no job 7 .*Invalid job id"),
        ("7", "", UsageError, r"Slurm knows no job 7 that has not ended: squeue shows nothing"),
        ("7", "echo 'squeue: error: no route to host' >&2; exit 1", InfrastructureError,
         r"Slurm does not answer: squeue: error: no route to host \(exit code 1 of squeue "),
        ("7", "echo 'squeue: fatal: Unable to process configuration file' >&2; exit 1", UsageError, "configuration file .*: run it on a login node"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be_looked_at_are_refused(programs, job, squeue, error, why):
    programs(squeue=squeue, srun="")
    with pytest.raises(error, match=why):
        watchers.slurm_argv(job, "python3")


def test_without_slurm_it_is_said_where_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"--job needs srun and squeue: run it where jobs are submitted"):
        watchers.slurm_argv("7", "python3")


def test_a_pod_is_entered_by_kubectl_with_a_list_of_arguments(programs):
    programs(kubectl="")
    argv = watchers.pod_argv("train-0", "ml", "main", "python3")
    assert argv[:4] == ["kubectl", "exec", "--stdin", "train-0"]
    assert argv[4:9] == ["--namespace", "ml", "--container", "main", "--"]
    with pytest.raises(UsageError, match=r"--pod '-n' is no name of Kubernetes"):
        watchers.pod_argv("-n", "", "", "python3")


def test_a_job_without_any_sample_is_no_success(programs, mlhpc):
    programs(squeue="echo 'RUNNING|1|7'", srun="echo 'srun: error: Unable to create step' >&2; exit 1")
    err = mlhpc("screen", "--seconds", "1", "--job", "7", code=cli.INTERNAL).err
    assert "nothing_seen: job 7: srun ended with 1: srun: error: Unable to create step" in err
