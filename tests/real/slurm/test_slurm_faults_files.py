"""Shared folders, clocks, names and output that are not as they should be, end to end on the real cluster."""

import contextlib
import subprocess
from pathlib import Path

import pytest
from faults import ONE, gate


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB that fills up; unmounted afterwards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"this user may mount nothing: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("full", [True, False], ids=["full", "read-only"])
def test_a_state_directory_that_cannot_be_written_is_named_before_anything_is_submitted(
    slurm, make_suite, small_disk, full
):
    suite = make_suite(slurm, state=small_disk / "state")
    suite.tests(ONE)
    if full:
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    result = suite.run("-o", "mlhpc_infra_exit_code=75")
    if full:
        result.expect(75, "disk_full:", str(small_disk), "No space left on device", error=1)
    else:
        result.expect(4, "the state directory ", f"{small_disk} is on a read-only file system")
    assert suite.jobs() == []


def test_a_folder_that_nodes_do_not_see_is_named_by_the_job_itself(slurm, make_suite, small_disk):
    # The nodes have mounts of their own since before this one was made.
    suite = make_suite(slurm, state=small_disk / "state")
    suite.tests(ONE)
    result = suite.run()
    (job,) = suite.jobs()
    text = "it printed nothing: look whether its nodes see the state directory (if not, set shared_directory"
    result.expect(1, "launch_failed:", f"Slurm job {job.id} FAILED", text, error=1)


def test_a_disk_that_fills_up_under_a_run_is_the_infrastructures_fault(small_disk, own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.partition(shared_directory=str(small_disk))
    program = gate(suite.folder, "one", then="head -c 3000000 /dev/zero; echo rate: 4")
    suite.tests(f"@script({program!r})\ndef test_one(run): pass\n")
    session = suite.begin("one", options=["-o", "mlhpc_infra_exit_code=75"])
    fill(small_disk)
    suite.go()
    result = session.end()
    result.expect(75, "disk_full:", "No space left on device", error=1)
    assert result.verdicts() == ["disk_full"]


def cut(suite, session) -> None:
    (path,) = session.until(
        "a line", lambda: [path for path in suite.lines("jsonl") if path.stat().st_size > 50]
    )
    with path.open("rb+") as file:
        file.truncate(40)


@pytest.mark.slow
def test_a_results_file_cut_under_a_run_is_noticed_and_the_job_cancelled(suite):
    session = suite.begin_gated("one")
    session.until("a word that it was read", lambda: "test_one: running" in session.text)
    cut(suite, session)
    result = session.end()
    result.expect(
        1, "channel_broken: the results file", "was cut to 40 bytes", "the job was cancelled", error=1
    )
    assert result.verdicts() == ["channel_broken"]
    assert [job.state for job in suite.jobs()] == ["CANCELLED"]


def test_a_run_whose_results_file_was_cut_never_passes(suite):
    session = suite.begin_gated("one")
    cut(suite, session)
    suite.go()
    result = session.end()
    result.expect(1, "results file", passed=0) if "channel_broken" in result.text else result.expect(
        1, "truncated_result:"
    )
    assert result.verdicts() in (["channel_broken"], ["truncated_result"])


def test_a_job_that_prints_200_mb_before_its_batch_costs_the_session_nothing(suite):
    suite.partition(setup="head -c 200000000 /dev/zero | tr '\\0' x")
    suite.tests(ONE)
    # Not ru_maxrss: that of a process counts what its parent had when it was forked (getrusage(2), Linux).
    (suite.folder / "conftest.py").write_text(
        "def pytest_unconfigure():\n"
        "    (peak,) = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "    print('MEMORY', peak.split()[1])\n"
    )
    result = suite.run()
    assert result.code == 0, result.text
    (output,) = suite.state.glob("runs/*/*/slurm.out")
    assert output.stat().st_size >= 200_000_000
    output.unlink()
    kilobytes = int(result.text.split("MEMORY")[1].split()[0])
    assert kilobytes < 150_000
    assert result.verdicts() == ["unjudged"]


@pytest.mark.parametrize("offset", ["+9000s", pytest.param("-9000s", marks=pytest.mark.slow)])
def test_a_nodes_clock_that_is_off_is_reported_and_no_time_is_nonsense(suite, offset):
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip("needs libfaketime (apt-get install faketime)")
    suite.partition(setup=f"export LD_PRELOAD={library} FAKETIME={offset}")
    suite.tests(f"{ONE}    assert False\n")
    result = suite.run()
    (record,) = result.records
    assert 0 <= record["queue_s"] < 9000
    assert 0 <= record["run_s"] < 9000
    how = {"+": "9000 s ahead of the file system's", "-": "9000 s behind the file system's"}[offset[0]]
    result.expect(1, "the clock of node", how, failed=1)


def test_folders_may_have_any_name(slurm, make_suite, tmp_path):
    name = 'it\'s "quoted", préparé 50% été $(touch pwned) `id`; # back\\slash'
    suite = make_suite(slurm, folder=name, state=tmp_path / f"state {name}")
    suite.tests("""\
        @pytest.mark.parametrize("name", ["a b", "it's", "né", "[x]"])
        @script("pwd; echo rate: 4")
        def test_one(run, name): pass
    """)
    suite.run("--mlhpc-pack").expect(0, passed=4)
    assert [job.state for job in suite.jobs()] == ["COMPLETED"]
    assert not list(tmp_path.rglob("pwned"))
