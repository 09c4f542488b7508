"""Many faults in one session: a test of the suite for each, all at once, each with options, words and an outcome of its own."""

from __future__ import annotations

import re
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


#: Name of a test, and what is printed of the error at its set-up.
_SETUP = re.compile(
    r"^_+ ERROR at setup of test_(\w+)\[.*?\] _+$\n(.*?)(?=^-{20}|^_{20}|^={20})", re.MULTILINE | re.DOTALL
)


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
    said = {name: " ".join(text.split()) for name, text in _SETUP.findall(result.text)}
    verdicts = {_name(record): record["verdict"] for record in result.records}
    wrong = {}
    for fault in faults:
        text = said.get(fault.name, "")
        missing = [words for words in (f"{fault.outcome}: ", *fault.texts) if words not in text]
        # What can never run is refused before anything is submitted, and has no record.
        if missing or verdicts.get(fault.name, fault.outcome) != fault.outcome:
            wrong[fault.name] = (verdicts.get(fault.name), text, missing)
    assert wrong == {}, f"{wrong}\n{result.text}"
    return result


def _name(record: Mapping[str, Any]) -> str:
    return str(record["node_id"].partition("::test_")[2].partition("[")[0])


def _test(fault: Fault) -> str:
    words = {"kubernetes": dict(fault.options), **fault.spec}
    given = "".join(f", {name}={value!r}" for name, value in words.items() if value)
    return (
        f'@script("echo rate: 4"{given})\ndef test_{fault.name}(run):\n    assert run["rate"].value == 4\n\n'
    )
