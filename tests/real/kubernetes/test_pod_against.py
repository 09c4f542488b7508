"""A against B on a real Kubernetes: both sides in the pods of one workload, whose image they share."""

import json

from git_checkouts import Checkout

TEST = """\
COUNT = "import os, random; runs = open('%s/runs', 'a'); print(file=runs, flush=True)"
SPEED = "; print('rate:', float(os.environ['SPEED']) * random.Random(runs.tell()).gauss(1, 0.004))"

@program(["python3", "-c", COUNT + SPEED], RATE, time_limit=600, env={"SPEED": "100"})
def test_speed(run): pass
"""


def test_both_sides_run_in_turns_in_one_pod(pod_suite):
    pod_suite.tests(TEST % pod_suite.folder)
    result = pod_suite.run("--mlhpc-against", "variables.SPEED=80")
    result.expect(0, "8 to 30 runs", "better", passed=1)
    assert len({record["job_id"] for record in result.records}) == 1
    measured = sorted(
        (one for one in result.records if one["measurement"]), key=lambda record: record["attempt"]
    )
    assert [", " in record["environment"] for record in measured][:8] == [False, True, True, False] * 2
    assert {record["purpose"] for record in result.records} == {"against"}
    assert pod_suite.ledgers() == []


def test_another_environment_is_another_image_and_refused(pod_suite):
    pod_suite.tests(TEST % pod_suite.folder)
    path = pod_suite.folder / "systems.yaml"
    systems = json.loads(path.read_text())
    (partition,) = next(iter(systems["systems"].values()))["partitions"].values()
    (environment,) = partition["environments"].values()
    partition["environments"]["old"] = {**environment, "variables": {"X": "1"}}
    path.write_text(json.dumps(systems))
    pod_suite.run("--mlhpc-against", "environment=old").expect(4, "have one image for both sides")


OF_CHECKOUT = """\
from pytest_mlhpc import build
made = build("cp rate.txt built.txt", files=["rate.txt"])

@program("cat rate.txt", RATE, time_limit=600, files=["rate.txt"])
def test_files(run): pass

@program("cat {made}/built.txt", RATE, time_limit=600)
def test_build(run, made): pass

@program("sh /nowhere/of/the/checkout.sh", RATE, time_limit=600)
def test_image(run): pass
"""


def test_another_revision_has_its_own_files_and_builds_in_the_same_pod(pod_suite):
    pod_suite.tests(OF_CHECKOUT)
    checkout = Checkout.made(pod_suite.folder)
    for rate, tag in ((50, "old"), (100, "new")):
        checkout.write("rate.txt", f"rate: {rate}\n")
        checkout.commit(tag)
    result = pod_suite.run("--mlhpc-against", "rev=old")
    result.expect(0, "test_files", "test_build", "100 items/s", "50 items/s", "better", passed=2)
    assert "nothing that it runs comes from the checkout" in " ".join(result.text.split())
    assert len({record["job_id"] for record in result.records}) == 2
    assert checkout.worktrees() == []
    assert pod_suite.ledgers() == []
