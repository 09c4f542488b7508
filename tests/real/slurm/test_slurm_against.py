"""A against B on a real cluster: both sides in one job on the same nodes, each with software of its own, nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from git_checkouts import Checkout
from running_suites import wait_for

#: A side's set-up says how fast its program is.
FAST, SLOW = ("export SPEED=100 ONLY_NEW=1", "export SPEED=80")

TEST = """\
COUNT = "import os, random, time; folder = os.environ['FOLDER']; runs = open(folder + '/runs', 'a'); print(file=runs, flush=True)"
SPEED = "; print('rate:', float(os.environ['SPEED']) * random.Random(runs.tell()).gauss(1, 0.004))"
SIDE = "; print('only:', os.environ.get('ONLY_NEW'))"
WAIT = "; open(folder + '/begun-speed', 'w').close(); [time.sleep(0.2) for _ in iter(lambda: os.path.exists(folder + '/wait'), False)]"

@program([sys.executable, "-c", COUNT + SPEED + SIDE + WAIT], RATE, nodes=1, env={"FOLDER": "%s"})
def test_speed(run):
    assert "only: 1" in run.output
"""


@pytest.fixture
def sides(suite):
    """A suite of one test on a partition with two environments, whose job scripts would be set up differently."""
    suite.partition(setup=FAST, time_limit="1m")
    path = suite.folder / "systems.yaml"
    systems = json.loads(path.read_text())
    environments = systems["systems"]["cluster"]["partitions"]["part"]["environments"]
    environments["old"] = {**environments["default"], "setup": SLOW}
    path.write_text(json.dumps(systems))
    suite.tests(TEST % suite.folder)
    return suite


def outputs(state: Path) -> dict[str, set[str]]:
    """Return what runs of A and B printed of the variable that A alone sets."""
    found: dict[str, set[str]] = {"A": set(), "B": set()}
    (path,) = state.glob("runs/*/*/plan.json")
    for number, run in enumerate(json.loads(path.read_text())["runs"], 1):
        log = path.parent / run["run_id"] / "rank0.log"
        if log.exists():
            side = "A" if number % 4 in (0, 1) else "B"
            found[side] |= {line for line in log.read_text().splitlines() if line.startswith("only:")}
    return found


def test_both_sides_run_in_turns_in_one_job_each_with_its_own_software(sides):
    result = sides.run("--mlhpc-against", "environment=old")
    result.expect(0, "rate", "8", "better", "8 to 30 runs", passed=1)
    (job,) = sides.jobs()
    assert job.state in {"CANCELLED", "COMPLETED"}
    records = result.records
    assert {record["job_id"] for record in records} == {job.id}
    assert len({tuple(record["nodes"]) for record in records}) == 1
    measured = sorted(
        (record for record in records if record["measurement"]), key=lambda record: record["attempt"]
    )
    assert [record["environment"] for record in measured][:8] == [
        *("default", "old", "old", "default") * 2
    ]  # fmt: skip
    assert {record["purpose"] for record in records} == {"against"}
    assert outputs(sides.state) == {"A": {"only: 1"}, "B": {"only: None"}}
    assert sides.ledgers() == []


def test_half_a_comparison_of_a_killed_session_is_ended_by_the_next_and_adopted_by_none(sides):
    (sides.folder / "wait").touch()
    first = sides.start("--mlhpc-against", "variables.SPEED=90")
    first.begun("speed")
    sides.accepted(first)
    first.kill()
    (job,) = sides.jobs()
    session = sides.start()
    session.until("the end of the job", lambda: f"cancelled job {job.id}" in session.text)
    (sides.folder / "wait").unlink()
    second = session.end()
    assert "going on with" not in second.text
    second.expect(0, passed=1)
    wait_for(lambda: all(one.ended for one in sides.jobs()))
    assert sides.ledgers() == []
    assert {record["purpose"] for record in second.records} == {"manual"}


def test_a_runner_that_ends_the_session_leaves_no_half_comparison_queued(sides):
    (sides.folder / "wait").touch()
    session = sides.start("--mlhpc-against", "variables.SPEED=90")
    session.begun("speed")
    session.signal(signal.SIGTERM)
    assert session.end().code == 2
    wait_for(lambda: [job.state for job in sides.jobs()] == ["CANCELLED"])
    assert sides.ledgers() == []


def test_a_time_limit_that_leaves_too_few_runs_is_named_with_what_would_do(sides):
    result = sides.run("--mlhpc-against", "environment=old", "--mlhpc-set", "slurm.max_time=9m")
    result.expect(1, "needs 8 runs in one allocation", "set time_limit=", error=1)


OF_CHECKOUT = """\
from pytest_mlhpc import build
made = build("cp rate.txt built.txt", files=["rate.txt"])

@program("./rate.sh", RATE, nodes=1)
def test_script(run): pass

@program("cat {made}/built.txt", RATE, nodes=1)
def test_build(run, made): pass
"""


@pytest.fixture
def checkout(suite):
    """The suite as a checkout, whose tag *old* is half as fast."""
    suite.partition(time_limit="1m")
    suite.tests(OF_CHECKOUT)
    made = Checkout.made(suite.folder)
    for rate, tag in ((50, "old"), (100, "new")):
        made.write("rate.sh", f"#!/bin/sh\necho rate: {rate}\n", 0o755)
        made.write("rate.txt", f"rate: {rate}\n")
        made.commit(tag)
    return made


def test_another_revision_has_its_own_programs_and_builds_in_the_same_job(suite, checkout):
    result = suite.run("--mlhpc-against", "rev=old")
    result.expect(0, "test_script", "test_build", "100 items/s", "50 items/s", "better", passed=2)
    assert len(suite.jobs()) == 2
    of_side = {(record["job_id"], record["commit"]) for record in result.records}
    commits = {checkout.git("rev-parse", tag) for tag in ("old", "new")}
    assert of_side == {(job.id, commit) for job in suite.jobs() for commit in commits}
    assert checkout.worktrees() == []
    assert suite.ledgers() == []


def test_the_worktree_of_a_killed_session_goes_with_its_job(suite, checkout):
    suite.tests(
        """\
@program("sh -c 'touch {0}/begun-it; cat rate.txt; exec sleep 600'", RATE, nodes=1, files=["rate.txt"])
def test_it(run): pass
""".replace("{0}", str(suite.folder))
    )
    first = suite.start("--mlhpc-against", "rev=old")
    first.begun("it")
    suite.accepted(first)
    first.kill()
    (job,) = suite.jobs()
    assert len(checkout.worktrees()) == 1
    suite.tests(OF_CHECKOUT)
    suite.run("-k", "test_script").expect(0, f"cancelled job {job.id}", passed=1)
    assert checkout.worktrees() == []
    assert suite.ledgers() == []


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Two images with a file that differs, by podman, which is asked for limits that this user may set."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not here")
    limits = tmp_path / "containers.conf"
    limits.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n')
    monkeypatch.setenv("CONTAINERS_CONF", str(limits))
    root = tmp_path / "root"
    for folder in ("bin", "etc", "tmp"):
        (root / folder).mkdir(parents=True)
    linked = subprocess.run(["ldd", "/bin/cat"], capture_output=True, text=True, check=True).stdout
    for library in {Path(word) for word in linked.split() if word.startswith("/")}:
        (root / library.relative_to("/").parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.relative_to("/"))
    shutil.copy("/bin/cat", root / "bin/cat")
    names = []
    for rate in (100, 50):
        (root / "etc/rate").write_text(f"rate: {rate}\n")
        names.append(f"localhost/mlhpc-against:{rate}-{os.getpid()}")
        subprocess.run(["tar", "-C", str(root), "-cf", str(tmp_path / "root.tar"), "."], check=True)
        subprocess.run(["podman", "import", "-q", str(tmp_path / "root.tar"), names[-1]], check=True)
    yield names
    subprocess.run(["podman", "rmi", "-f", *names], check=True)


def test_another_image_runs_in_turns_in_the_same_job(suite, images):
    new, old = images
    suite.partition(time_limit="1m", batch_python=sys.executable)
    path = suite.folder / "systems.yaml"
    systems = json.loads(path.read_text())
    environments = systems["systems"]["cluster"]["partitions"]["part"]["environments"]
    environments["default"]["container"] = {"runtime": "podman", "image": new}
    path.write_text(json.dumps(systems))
    suite.tests('@program("/bin/cat /etc/rate", RATE, nodes=1)\ndef test_image(run): pass\n')
    result = suite.run("--mlhpc-against", f"image={old}")
    result.expect(0, "test_image", "100 items/s", "50 items/s", "better", passed=1)
    assert len(suite.jobs()) == 1
    assert {record["environment"] for record in result.records} == {"default", f"default, image={old}"}
