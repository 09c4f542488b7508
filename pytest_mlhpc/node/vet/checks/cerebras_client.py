"""PAYLOAD. Cerebras: the devices are an appliance of its own, so all that a host can show is that its client gets an answer."""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine

COMMAND = ("csctl", "get", "cluster", "--system-only")

#: An appliance that takes longer does not answer, in seconds.
TIMEOUT_S = 6.0


class CerebrasClient:
    """Asks the appliance for its systems."""

    name = "cerebras_client"
    level = "quick"
    cost_s = 2.0
    reads: Tuple[str, ...] = (" ".join(COMMAND),)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look, and say what was seen."""
        accelerator = context.wanted.accelerator
        if accelerator not in ("auto", "wse"):
            return Outcome()
        try:
            done = machine.command(COMMAND, TIMEOUT_S)
        except Absent:
            if accelerator == "auto":
                return Outcome()
            raise
        bound = context.policy["cerebras.client"]
        words = " ".join((done.errors if done.code else done.output).split())[:300]
        if bound.reached(done.code != 0, bound.fail):
            reason = f"the appliance does not answer csctl (exit code {done.code}): {words or 'no words'}; ask its operators"
            return Outcome((Finding(self.name, Severity.CRITICAL, reason, rule=bound.key),))
        return Outcome((Finding(self.name, Severity.PASS, f"the appliance answers: {words}"),))


CHECKS: Tuple[Check, ...] = (CerebrasClient(),)
