"""Checks for jobs on the machine that runs the tests, and the readers beneath them."""

import os
import re
import select
import subprocess
import sys
from unittest.mock import Mock

import pytest

from pytest_mlhpc.node.vet import main
from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.checks.job_environment import MOST_NAMES, PREFIXES, left_by_squeue
from pytest_mlhpc.node.vet.checks.job_processes import parse, processes
from pytest_mlhpc.node.vet.checks.storage import parse_quota, space
from pytest_mlhpc.node.vet.finding import Origin, Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Done, Machine, Unreadable, numbers, size
from pytest_mlhpc.node.vet.main import stay
from pytest_mlhpc.node.vet.policy import ExpectedNode, built_in

JOB = {check.name: check for check in all_checks()[0] if check.purpose == "job"}


def context(**wanted):
    about = ExpectedNode(purpose="job", accelerator="cpu", **wanted)
    return Context(built_in(), about, host="n1", hosts=("n1",), python=sys.executable)


def examine(name, machine, **wanted):
    return JOB[name].examine(machine, context(**wanted))


@pytest.mark.parametrize("name", sorted(JOB))
def test_each_check_has_an_answer_on_a_real_machine(name, tmp_path):
    (tmp_path / "part-0").write_text("x")
    paths = {"checkpoint": str(tmp_path), "data": str(tmp_path)}
    machine = Machine(environ={"PATH": os.environ["PATH"], "MASTER_ADDR": "localhost"})
    outcome = examine(name, machine, hours=1.0, ranks=1, paths=paths)
    assert outcome.findings
    assert all(finding.reason and finding.origin is Origin.USER for finding in outcome.findings)
    assert Severity.UNKNOWN not in {finding.severity for finding in outcome.findings}
    assert [entry.name for entry in tmp_path.iterdir()] == ["part-0"], "nothing is left behind"


@pytest.mark.parametrize(
    "folder",
    [
        "/proc/self",
        pytest.param("", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")),
    ],
    ids=["a folder without files", "a folder of others"],
)
def test_a_folder_that_cannot_be_written_is_critical(tmp_path, folder):
    tmp_path.chmod(0o555)
    [finding] = examine("job_space", Machine(), paths={"checkpoint": folder or str(tmp_path)}).findings
    assert (finding.severity, finding.rule) == (Severity.CRITICAL, "job.checkpoint_path")
    assert "no file can be written" in finding.reason


def listing(folder, count):
    """Return what is said of so many files in a new folder."""
    folder.mkdir()
    for number in range(count):
        (folder / f"part-{number}").write_text("x")
    [fact] = examine("job_data", Machine(), paths={"data": str(folder)}).facts
    return fact.value


def test_equal_folders_have_equal_listings_and_others_not(tmp_path):
    assert listing(tmp_path / "a", 1) == listing(tmp_path / "b", 1)
    assert listing(tmp_path / "c", 2).startswith("2 names, ")


def test_other_paths_are_no_data(tmp_path):
    """An empty folder of the storage check is as it should be."""
    outcome = examine("job_data", Machine(), paths={"storage": str(tmp_path), "checkpoint": "/none"})
    assert [finding.severity for finding in outcome.findings] == [Severity.PASS]
    assert outcome.facts == ()


def test_a_folder_of_very_many_files_is_not_read_to_its_end(tmp_path, monkeypatch):
    assert MOST_NAMES >= 10_000
    monkeypatch.setattr("pytest_mlhpc.node.vet.checks.job_environment.MOST_NAMES", 3)
    assert listing(tmp_path / "many", 6) == "more than 3 names"


def test_packages_are_named_without_importing_them(tmp_path):
    facts = {fact.name: fact.value for fact in examine("job_software", Machine()).facts}
    assert facts["software.python"] == sys.version.split()[0]
    assert " packages, " in facts["software.packages"]


def test_secrets_never_leave_the_node():
    secrets = dict.fromkeys(("NCCL_API_KEY", "UCX_PASSWORD", "AWS_SECRET"), "hunter2")
    outcome = examine("job_environment", Machine(environ={**secrets, "NCCL_DEBUG": "INFO"}))
    assert not [word for word in ("hunter2", "AWS") if word in repr(outcome)]
    facts = {fact.name: fact.value for fact in outcome.facts}
    assert set(facts) == {f"environment.{prefix}" for prefix in PREFIXES}
    assert re.fullmatch("NCCL_API_KEY=sha256:.*NCCL_DEBUG=INFO", facts["environment.NCCL_"])


def test_a_process_s_name_may_hold_blanks_and_brackets():
    found = parse("77 (a) R (b)) S 1 77 77 0 -1 0 0 0 0 0 250 50 0 0 20 0 1 0 4200 0 0")
    assert (found.pid, found.name, found.state, found.parent) == (77, "a) R (b)", "S", 1)
    assert found.cpu_s == pytest.approx(300 / os.sysconf("SC_CLK_TCK"))


def test_processes_of_this_machine_include_this_one():
    assert os.getpid() in processes(Machine())


def test_what_this_job_started_is_no_leftover():
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    argv = [sys.executable, "-c", busy]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        outcome = examine("job_processes", Machine())
        started.communicate(b"\n")
    assert not [finding for finding in outcome.findings if f"{started.pid} " in finding.reason]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("0:00", 0.0), ("UNLIMITED", None), ("NOT_SET", None)],
)  # fmt: skip
def test_slurm_s_time_left_is_understood(text, seconds):
    assert left_by_squeue(text) == seconds


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (left_by_squeue, "soon"),
        (parse, "no process"),
        *((numbers, text) for text in ("a", "1-", "0-99999999999", "-1")),
    ],
)
def test_other_formats_than_those_of_slurm_or_the_kernel_are_unreadable(read, text):
    with pytest.raises(Unreadable, match=text):
        read(text)


def test_quota_of_long_file_systems_stands_on_two_lines():
    text = """Disk quotas for usr me (uid 1000):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/a/very/long/name/of/a/file/system
                [2048]*   1000    4096   6d23h     10*      5      20       -
"""
    [row] = parse_quota(text)
    assert (row.whose, row.files_left, row.passed) == ("usr me (uid 1000)", 10, 2)
    assert (row.used, row.hard, row.left) == (2048 << 10, 4096 << 10, 2048 << 10)
    assert parse_quota("quota: no such thing\n") == ()


@pytest.mark.parametrize(
    ("path", "kind"), [("/data/set", "lustre"), ("/data22", "ext4"), ("/with blank/x", "xfs")]
)
def test_the_last_of_the_longest_mounts_is_the_one_on_top(tmp_path, path, kind):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        "a / ext4 rw 0 0\nb /data nfs rw 0 0\nc /data lustre ro 0 0\nd /data2 tmpfs rw 0 0\ne /with\\040blank xfs rw 0 0\n"
    )
    assert Machine(root=tmp_path).mount_of(path)[0] == kind


def test_space_of_a_real_folder_is_that_of_the_system(tmp_path):
    found, real = space(Machine(), str(tmp_path)), os.statvfs(tmp_path)
    assert found.size == real.f_blocks * real.f_frsize
    assert 0 < found.free <= found.size
    with pytest.raises(Absent):
        space(Machine(), str(tmp_path / "none"))
    with pytest.raises(Unreadable, match="exit code 1"):
        space(Machine(commands={"stat": Done(1, "", "")}), "/")


def test_lists_of_processors_are_understood():
    assert (numbers("0-3,8"), numbers("")) == ({0, 1, 2, 3, 8}, frozenset())


def test_sizes_have_units():
    sizes = [size(number) for number in (0, 64 << 20, float("inf"), 3 << 50)]
    assert sizes == ["0 B", "64 MiB", "unlimited", "3 PiB"]


def test_a_further_task_stays_until_the_first_has_ended(monkeypatch):
    environ = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "7", "SLURM_LOCALID": "0"}
    with subprocess.Popen(["sleep", "600"], env=environ) as first:
        wait_for = Mock(side_effect=lambda *given: first.kill() or select.select(*given))
        monkeypatch.setattr(main, "select", Mock(select=wait_for))
        try:
            assert stay({**environ, "SLURM_LOCALID": "1"}, 300.0)
            assert first.poll() is not None
        finally:
            first.kill()


def test_without_a_first_task_nobody_stays(tmp_path):
    ours = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "7", "SLURM_LOCALID": "1"}
    assert not stay(ours, 0.0, Machine(root=tmp_path, environ=ours))
    assert not stay({}, 60.0)
