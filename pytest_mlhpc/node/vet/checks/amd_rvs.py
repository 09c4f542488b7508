"""PAYLOAD. AMD, deep only and where it is installed: the ROCm Validation Suite's tests of level 2."""

from __future__ import annotations

import re
from typing import List, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import said, sight, wanted
from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Done, Machine

#: Levels are 1 to 5; 2 takes minutes (ROCm Validation Suite, README: ``rvs -r``).
LEVEL = "2"

#: The suite's place when it is not on the path.
PROGRAMS = ("rvs", "/opt/rocm/bin/rvs")

TIMEOUT_S = 300.0

#: How a line of ``[RESULT]`` says whether a test passed, or met its target.
RESULT = re.compile(r"\b(?:pass|met): *(TRUE|FALSE)\b")


class AmdRvs:
    """Runs the suite, and believes it only when it says what it has tested."""

    name = "amd_rvs"
    level = "deep"
    cost_s = 150.0
    reads: Tuple[str, ...] = (f"rvs -r {LEVEL}",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look, and say what was seen."""
        if not wanted(context):
            return Outcome()
        seen = sight(machine, context.wanted.accelerator)
        seen.close()
        if not seen.devices:
            return Outcome()
        for program in PROGRAMS:
            try:
                done = machine.command([program, "-r", LEVEL], TIMEOUT_S)
            except Absent:
                continue
            return Outcome(tuple(self._judge(context, done)))
        return Outcome(
            (Finding(self.name, Severity.INFO, "the ROCm Validation Suite (rvs) is not installed"),)
        )

    def _judge(self, context: Context, done: Done) -> List[Finding]:
        results = [line.strip() for line in done.output.splitlines() if RESULT.search(line)]
        failed = [line for line in results if "FALSE" in RESULT.findall(line)]
        reason = f"rvs: {len(failed)} of {len(results)} tests failed, first: {''.join(failed[:1])[:200]}"
        findings = said(context, self.name, "amd.rvs", len(failed), reason, metric="tests")
        if findings:
            return findings
        if done.code or not results:
            last = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1]
            reason = f"rvs tested nothing (exit code {done.code}), it says: {last[:200]}"
            return [Finding(self.name, Severity.UNKNOWN, reason, rule="amd.rvs")]
        return [Finding(self.name, Severity.PASS, f"rvs passed {len(results)} tests")]


CHECKS: Tuple[Check, ...] = (AmdRvs(),)
