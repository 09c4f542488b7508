"""Many faults in one session: a test of the suite for each, all at once, each with options, texts and an outcome of its own."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from running_suites import LIMIT_S, Result, Suite, text_of, wait_for

from pytest_mlhpc.jobs.ledger_files import DEAD_S

#: Options of pytest with two workers.
XDIST = ("-p", "xdist", "-n", "2")

#: A test that passes.
ONE = """\
@script("echo rate: 4")
def test_one(run):
    assert run["rate"].value == 4
"""

#: Name of a test, and what is printed of its failure or of the error at its set-up.
_REPORT = re.compile(
    r"^_+ (?:ERROR at setup of )?test_(\w+)\[.*?\] _+$\n(.*?)(?=^-{20}|^_{20}|^={20})",
    re.MULTILINE | re.DOTALL,
)


#: pytest's exit code where no test ran.
_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Fault:
    """One test of the suite, put over the partition's options, and what has to become of it."""

    name: str
    outcome: str
    texts: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)  #: under the scheduler's name
    spec: Mapping[str, Any] = field(default_factory=dict)  #: other arguments of the test's marker


def read_faults(test_file: str, group: str, **places: str) -> list[Fault]:
    """Return a group of the faults in faults.yaml beside a test, with *places* as of `text_of`."""
    found = yaml.safe_load(text_of(test_file, "faults.yaml", **places))[group]
    return [Fault(name, **fault) for name, fault in found.items()]


def run_faults(suite: Suite, faults: Sequence[Fault], *options: str, scheduler: str = "kubernetes") -> None:
    """Run them all in one session, and assert what became of each and of the session.

    Args:
        suite: Where they are written.
        faults: One test each.
        options: Of pytest.
        scheduler: Under this name a test's marker has the fault's options; empty: they are said elsewhere.
    """
    suite.tests("".join(_test(scheduler, fault) for fault in faults))
    result = suite.run("-o", "mlhpc_infra_exit_code=75", *options)
    check_faults(result, faults)
    result.expect(75, error=len(faults))


def check_faults(result: Result, faults: Sequence[Fault]) -> None:
    """Assert what became of each."""
    reports, verdicts = reports_of(result), verdicts_of(result)
    wrong = {}
    for fault in faults:
        text = reports.get(fault.name, "")
        missing = [words for words in (f"{fault.outcome}: ", *fault.texts) if words not in text]
        # What can never run is refused before anything is submitted, and has no record.
        if missing or verdicts.get(fault.name, fault.outcome) != fault.outcome:
            wrong[fault.name] = (verdicts.get(fault.name), text, missing)
    assert wrong == {}, f"{wrong}\n{result.text}"


def reports_of(result: Result) -> dict[str, str]:
    """Return test -> what was printed of its error, in one line."""
    return {name: " ".join(text.split()) for name, text in _REPORT.findall(result.text)}


def verdicts_of(result: Result) -> dict[str, str]:
    """Return test -> verdict of its last record."""
    return {
        str(record["node_id"].partition("::test_")[2].partition("[")[0]): record["verdict"]
        for record in result.records
    }


def gate(folder: object, name: str, then: str = "echo rate: 4") -> str:
    """Return a script that says that it has begun, and waits for the file `go` in *folder*."""
    return f"touch {folder}/begun-{name}; while [ ! -e {folder}/go ]; do sleep 0.2; done; {then}"


def _test(scheduler: str, fault: Fault) -> str:
    arguments = {**({scheduler: dict(fault.options)} if scheduler else {}), **fault.spec}
    given = "".join(f", {name}={value!r}" for name, value in arguments.items() if value)
    return (
        f'@script("echo rate: 4"{given})\ndef test_{fault.name}(run):\n    assert run["rate"].value == 4\n\n'
    )


def killed_at_each_change(suite: Suite, owner: str, step: str, *options: str) -> int:
    """Run sessions of which the first is killed before the first change of the disk in a step, the second before the second ...

    The last one is killed right after the step, or finds nothing left to resume. Return how many were killed.

    Args:
        suite: Where the sessions run.
        owner: ``ledger`` (the module) or ``Ledger``, which has the step.
        step: Its function.
        options: Of pytest.
    """
    through = suite.folder / "through"
    number = 0
    while not through.exists():
        places = repr((owner, step, number, str(through)))
        suite.tests(text_of(__file__, "ledger_killing_conftest.py.txt", PLACES=places), "conftest.py")
        session = suite.start(*options)
        if (code := session.process.wait(LIMIT_S)) == _NOTHING_COLLECTED:
            break
        assert code == -signal.SIGKILL, session.text
        number += 1
    through.unlink(missing_ok=True)
    (suite.folder / "conftest.py").unlink()
    return number


def killed_at_every_step_of_the_ledger(suite: Suite) -> None:
    """Kill sessions at every change of claim, detaching, end and close, one after the other, while two jobs run.

    Assert that each gave its result once, and that nothing is left in the ledger.
    """
    suite.begin_gated("one", "two").kill()
    assert killed_at_each_change(suite, "ledger", "adopt") > 8
    assert killed_at_each_change(suite, "Ledger", "detach", "--mlhpc-wait=0") > 4
    suite.go()
    assert killed_at_each_change(suite, "Ledger", "ended", "--mlhpc-resume", "-k", "one") >= 1
    assert killed_at_each_change(suite, "Ledger", "close", "--mlhpc-resume", "-k", "two") >= 1
    suite.run("--mlhpc-resume").expect(5, "no earlier session left anything of it")
    assert [record["verdict"] for record in suite.records()] == ["unjudged"] * 2
    for path in suite.ledgers():
        if not path.read_bytes():  # of a session that was killed before it had written its owner
            os.utime(path, (time.time() - DEAD_S - 5,) * 2)

    def all_ended() -> bool:
        suite.reap(code=None)  # what is being deleted stays until it is gone
        return not suite.ledgers()

    wait_for(all_ended)
