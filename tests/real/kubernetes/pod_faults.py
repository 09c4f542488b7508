"""Many faults in one session: a test of the suite for each, all at once, each with options, words and an outcome of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pod_suites import Suite
from running_suites import Result

ONE = """\
@script("echo rate: 4")
def test_one(run):
    assert run["rate"].value == 4
"""


@dataclass(frozen=True)
class Fault:
    """One test of the suite, put over the partition's options, and what has to become of it."""

    name: str
    outcome: str
    texts: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)  #: under ``kubernetes=``
    spec: Mapping[str, Any] = field(default_factory=dict)  #: other arguments of the test's marker


def run_faults(suite: Suite, faults: Sequence[Fault], *options: str) -> Result:
    """Run them all in one session, assert what became of each, and return what is left to look at."""
    suite.tests("".join(map(_test, faults)))
    result = suite.run("--infra-exit-code", "75", *options)
    found = {record["node_id"].partition("::test_")[2].partition("[")[0]: record for record in result.records}
    wrong = {}
    for fault in faults:
        record = found.get(fault.name, {})
        said = " ".join(str(record.get("failure", "")).split())
        missing = [text for text in fault.texts if text not in said]
        if record.get("verdict") != fault.outcome or missing:
            wrong[fault.name] = (record.get("verdict"), said, missing)
    assert wrong == {}, result.text
    return result


def _test(fault: Fault) -> str:
    words = {"kubernetes": dict(fault.options), **fault.spec}
    given = "".join(f", {name}={value!r}" for name, value in words.items() if value)
    return (
        f'@script("echo rate: 4"{given})\ndef test_{fault.name}(run):\n    assert run["rate"].value == 4\n\n'
    )
