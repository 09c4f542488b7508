"""The client that a definition makes, by what real commands of Grid Engine printed, and by commands that fail in every way."""

import os
import shlex
from pathlib import Path

import pytest

from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.scheduler.commands import DefinitionClient
from pytest_mlhpc.provision.scheduler.definition import SHIPPED, read_definition

OUTPUTS = Path(__file__).parent / "outputs"
JOB = "mlhpc-a"


class World:
    """Commands that print what a scheduler printed, before all others on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.environ = {"PATH": f"{self.folder}:{os.environ['PATH']}"}

    def script(self, command: str, text: str) -> None:
        """Let a command be a shell's script."""
        path = self.folder / command
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def prints(self, command: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Let a command print this."""
        quoted = shlex.quote(out), shlex.quote(err)
        self.script(command, f"printf %s {quoted[0]}; printf %s {quoted[1]} >&2; exit {code}")

    def real(self, command: str, name: str) -> None:
        """Let a command print what the real one printed."""
        head, _, rest = (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8").partition("--stdout\n")
        out, _, err = rest.partition("--stderr\n")
        self.prints(command, out, err, int(head.rpartition("rc=")[2]))

    def client(self, name: str = "gridengine", limit_s: float = 30.0) -> DefinitionClient:
        """Return the client of a definition that is shipped."""
        return DefinitionClient(read_definition(SHIPPED / f"{name}.yaml", {}), self.environ, limit_s)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def submission(tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    return JobSubmission(JOB, tmp_path / "job.sh", tmp_path)


def test_a_submission_returns_the_id(world, submission):
    world.real("qsub", "qsub-terse")
    assert world.client().submit(submission) == "2"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("qsub-refused-no-queue", 'job requests unknown queue "nosuch.q"'),
        ("qsub-refused-unknown-option", 'qsub: invalid option argument "--nosuch"'),
        ("qsub-refused-no-script", "Unable to read script file"),
    ],
)
def test_a_refusal_has_the_schedulers_own_words(world, submission, output, words):
    world.real("qsub", output)
    with pytest.raises(SchedulerRefused, match=words):
        world.client().submit(submission)


@pytest.mark.parametrize("command", ["qsub", "qstat", "qdel"])
def test_a_master_that_is_away_is_no_answer(world, submission, command):
    name = {"qsub": "qsub_-terse_job_sh", "qstat": "qstat", "qdel": "qdel_1"}[command]
    world.real(command, f"master-unreachable-{name}")
    client = world.client()
    call = {
        "qsub": lambda: client.submit(submission),
        "qstat": lambda: client.jobs(ids=["1"]),
        "qdel": lambda: client.cancel(["1"]),
    }
    with pytest.raises(SchedulerUnavailable, match="unable to send message to qmaster"):
        call[command]()


def test_jobs_are_found_by_id_and_by_whole_name(world):
    world.real("qstat", "qstat-u-all-r-xml")
    found = world.client().jobs(ids=["15", "99"], names=["deaf"])
    assert [(job.id, job.name, job.state, job.reason) for job in found] == [
        ("19", "deaf", SchedulerState.RUNNING, "state r"),
        ("15", "toomany", SchedulerState.PENDING, "state qw"),
    ]


def test_an_empty_queue_is_an_answer(world):
    world.real("qstat", "qstat-empty-xml")
    assert world.client().jobs(ids=["1"]) == []


def test_a_job_in_error_is_stuck(world):
    world.real("qstat", "qstat-Eqw-xml")
    (job,) = world.client().jobs(names=["badout"])
    assert (job.state.pending, job.stuck) == (True, True)


@pytest.mark.parametrize(
    ("output", "state", "code", "signal"),
    [
        ("qacct-j-ok", SchedulerState.COMPLETED, 0, 0),
        ("qacct-j-exit3", SchedulerState.FAILED, 3, 0),
        ("qacct-j-h_rt", SchedulerState.TIMEOUT, 137, 9),
        ("qacct-j-qdel-running", SchedulerState.CANCELLED, 137, 9),
        ("qacct-j-segv", SchedulerState.FAILED, 139, 11),
    ],
)
def test_the_accounting_tells_how_a_job_ended(world, output, state, code, signal):
    world.real("qacct", output)
    (job,) = world.client().accounting(["1"])
    assert (job.state, job.exit_code, job.signal) == (state, code, signal)


def test_of_several_entries_of_the_accounting_the_last_one_counts(world):
    first, last = (
        (OUTPUTS / f"qacct-j-{name}.txt").read_text().partition("--stdout\n")[2] for name in ("exit3", "ok")
    )
    world.prints("qacct", first.partition("--stderr")[0] + last.partition("--stderr")[0])
    (job,) = world.client().accounting(["1"])
    assert job.state is SchedulerState.COMPLETED


def test_a_job_that_the_accounting_does_not_know_yet_is_not_in_the_answer(world):
    world.real("qacct", "qacct-j-unknown")
    assert world.client().accounting(["99999"]) == []


@pytest.mark.parametrize("output", ["qdel-running", "qdel-ended"])
def test_cancelling_is_done_where_the_job_has_ended(world, output):
    world.real("qdel", output)
    client = world.client()
    client.cancel(["2"])
    assert client.calls == {"qdel": 1}


def test_cancelling_anothers_job_fails_with_the_schedulers_words(world):
    world.real("qdel", "qdel-anothers-job")
    with pytest.raises(SchedulerUnavailable, match="you do not have the necessary privileges"):
        world.client().cancel(["21"])


def test_a_missing_command_was_never_accepted(tmp_path, submission):
    client = DefinitionClient(read_definition(SHIPPED / "gridengine.yaml", {}), {"PATH": str(tmp_path)})
    with pytest.raises(
        SchedulerUnusable, match="cannot start 'qsub' of the definition of Grid Engine: No such file"
    ):
        client.submit(submission)


def test_a_command_that_hangs_is_ended_at_its_limit(world, submission):
    world.script("qsub", "exec sleep 600")
    with pytest.raises(SchedulerUnavailable, match=r"qsub .* did not end within 0\.2 s"):
        world.client(limit_s=0.2).submit(submission)


@pytest.mark.parametrize(
    ("command", "words"),
    [("qsub", "submit.id"), ("qstat", "query.job or query.none"), ("qacct", "result.name")],
)
def test_a_pattern_that_matches_nothing_shows_the_last_lines(world, submission, command, words):
    world.prints(command, "Welcome to the cluster\nof another kind\n")
    client = world.client()
    call = {
        "qsub": lambda: client.submit(submission),
        "qstat": lambda: client.jobs(ids=["1"]),
        "qacct": lambda: client.accounting(["1"]),
    }
    with pytest.raises(SchedulerUnavailable, match="of another kind") as caught:
        call[command]()
    assert f"printed nothing that {words} matches" in str(caught.value)


def test_an_output_of_megabytes_is_searched(world):
    world.script(
        "qstat", "head -c 20000000 /dev/zero | tr '\\0' x; echo; " + f"cat {OUTPUTS}/qstat-u-all-r-xml.txt"
    )
    assert [job.id for job in world.client().jobs(names=["deaf"])] == ["19"]


def test_bytes_that_are_no_text_are_searched_too(world):
    world.script("qstat", f"printf '\\377\\000'; cat {OUTPUTS}/qstat-u-all-r-xml.txt")
    assert [job.id for job in world.client().jobs(names=["deaf"])] == ["19"]


def test_an_unknown_exit_code_of_submit_is_no_answer(world, submission):
    world.prints("qsub", err="something odd", code=77)
    with pytest.raises(SchedulerUnavailable, match="ended with exit code 77; its last lines:\nsomething odd"):
        world.client().submit(submission)


PUBLISHED = {
    "lsf": ("bsub", "Job <473713> is submitted to queue <pub.1h>.\n", "473713"),
    "pbspro": ("qsub", "1234.server\n", "1234.server"),
    "pjm": ("pjsub", "[INFO] PJM 0000 pjsub Job 238 submitted.\n", "238"),
}
QUEUES = {
    "lsf": ("bjobs", f"7|RUN|{JOB}\n8|PEND|other\n", "7"),
    "pbspro": (
        "qstat",
        f"Job Id: 7.server|Job_Name={JOB}|Job_Owner=me@login|job_state=R|queue=workq\n",
        "7.server",
    ),
    "pjm": ("pjstat", f"H,JOB_ID,JOB_NAME,ST\n,238,{JOB},RUN\n", "238"),
}
ENDS = {
    "lsf": ("bjobs", f"7|EXIT|{JOB}|130|TERM_RUNLIMIT: job killed after reaching LSF run time limit\n"),
    "pbspro": ("qstat", f"Job Id: 7.server|Job_Name={JOB}|job_state=F|Exit_status=-29|queue=workq\n"),
    "pjm": ("pjstat", f"H,JOB_ID,JOB_NAME,ST,EC,SN,PC\n,238,{JOB},EXT,0,0,11\n"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_outputs_of_the_untested_ones_are_understood(world, submission, name):
    command, printed, job_id = PUBLISHED[name]
    world.prints(command, printed)
    assert world.client(name).submit(submission) == job_id
    command, printed, job_id = QUEUES[name]
    world.prints(command, printed)
    (job,) = world.client(name).jobs(names=[JOB])
    assert (job.id, job.state) == (job_id, SchedulerState.RUNNING)
    command, printed = ENDS[name]
    world.prints(command, printed)
    (ended,) = world.client(name).accounting([job_id])
    assert ended.state is SchedulerState.TIMEOUT


def test_a_script_goes_to_standard_input_where_the_scheduler_reads_it_there(world, submission, tmp_path):
    world.script("bsub", f"cat > {tmp_path}/got; echo 'Job <5> is submitted to default queue <normal>.'")
    assert world.client("lsf").submit(submission) == "5"
    assert (tmp_path / "got").read_text() == "#!/bin/bash\n"
