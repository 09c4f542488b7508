"""PAYLOAD. What the ranks of one run said and how they ended, and what went wrong first. No input or output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.batch.processes import describe_exit
from pytest_mlhpc.results.schema import RankReport, SchemaError, from_json

#: Number that stands for the launcher where a rank's is meant.
LAUNCHER = -1

#: Least time between two progress lines of a run, in seconds.
PROGRESS_EVERY_S = 1.0

#: A rank in the table that torch.distributed.run prints when a rank failed (torch 1.13 to 2.13).
_TORCHRUN_TABLE = re.compile(r"rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)")


@dataclass
class Rank:
    """What is known of one rank."""

    pid: int = 0
    report: Optional[RankReport] = None
    closed: bool = False
    exit: Optional[int] = None
    step: int = 0
    samples_per_s: float = 0.0


@dataclass(frozen=True)
class Trouble:
    """Why a run failed. ``rank`` is whose log shows it; ``quote`` whether its last lines belong to the text."""

    outcome: str
    text: str
    rank: Optional[int] = None
    quote: bool = False


class RankBook:
    """The ranks of one run. Only the first trouble counts; what follows is its consequence."""

    def __init__(self, run: RunPlan) -> None:
        self.run = run
        self.ranks: Dict[int, Rank] = {}
        self.trouble: Optional[Trouble] = None
        self._started = False
        self._next_progress = 0.0

    def fail(self, outcome: str, text: str, rank: Optional[int] = None, *, quote: bool = False) -> None:
        """Note what went wrong, unless something went wrong before."""
        if self.trouble is None:
            self.trouble = Trouble(outcome, text, rank, quote)

    def greet(self, body: Mapping[str, Any], pid: int) -> bool:
        """Take the greeting of a rank's message connection; return whether it is one of ours."""
        number = body["rank"]
        if (body["run"], body["nonce"]) != (self.run.run_id, self.run.nonce):
            self.fail("foreign_result", f"a process of another run connected: {body['run'][:80]!r}")
        elif not 0 <= number < self.run.ranks:
            self.fail("foreign_result", f"rank {number} connected, but the run has {self.run.ranks} ranks")
        elif body["purpose"] == "messages" and number in self.ranks:
            self.fail("duplicate_result", f"two processes say that they are rank {number}")
        else:
            if body["purpose"] == "messages":
                self.ranks[number] = Rank(pid=pid)
            return True
        return False

    def say(self, number: int, kind: str, body: Any, now: float) -> Optional[Tuple[str, Mapping[str, Any]]]:
        """Take one message of a rank; return the kind and body of the line that the controller is to get, if any."""
        if self.trouble is not None or number not in self.ranks:
            return None
        rank = self.ranks[number]
        if kind == "progress":
            return self._progress(rank, body, now)
        if kind == "started" and not self._started:
            self._started = True
            return "started", body
        if kind == "report":
            self._report(number, rank, body)
        elif kind == "failed":
            self.fail(str(body.get("outcome")), f"rank {number}: {body.get('text')}", number)
        elif kind == "close":
            rank.closed = True
        elif kind == "damaged":
            self.fail("truncated_result", f"rank {number} sent something that is no message: {body}", number)
        return None

    def _progress(
        self, rank: Rank, body: Mapping[str, Any], now: float
    ) -> Optional[Tuple[str, Mapping[str, Any]]]:
        step, rate, steps = body.get("step"), body.get("samples_per_s"), body.get("steps")
        if not (isinstance(step, int) and isinstance(steps, int) and isinstance(rate, (int, float))):
            return None  # a courtesy to people, not worth a run
        rank.step, rank.samples_per_s = step, float(rate)
        if now < self._next_progress:
            return None
        self._next_progress = now + PROGRESS_EVERY_S
        total = sum(other.samples_per_s for other in self.ranks.values())
        if not 0 <= total < float("inf"):
            return None
        slowest = min(other.step for other in self.ranks.values())
        return "progress", {"step": slowest, "steps": steps, "samples_per_s": total}

    def _report(self, number: int, rank: Rank, body: Any) -> None:
        if rank.report is not None:
            self.fail("duplicate_result", f"rank {number} reported twice", number)
            return
        try:
            report = from_json(RankReport, body, f"rank {number}")
        except (SchemaError, TypeError, RecursionError) as error:
            outcome = "metric_invalid" if "finite" in str(error) else "truncated_result"
            self.fail(outcome, f"the report cannot be used: {error}", number)
            return
        if report.rank != number:
            self.fail("foreign_result", f"rank {number} sent a report of rank {report.rank}", number)
            return
        rank.report = report

    def ended(self, number: int) -> None:
        """Judge a rank whose process has ended, or whose connection broke with nothing known of the process."""
        rank = self.ranks[number]
        if rank.exit:
            outcome = "worker_killed" if rank.exit < 0 else "worker_exit"
            after = " after it had reported" if rank.report is not None else ""
            self.fail(outcome, f"rank {number} {describe_exit(rank.exit)}{after}", number, quote=True)
        elif rank.exit == 0 and rank.report is None:
            self.fail(
                "no_result", f"rank {number} ended with exit code 0 without a report", number, quote=True
            )

    def launcher_ended(self, code: int, output: str, *, is_rank: bool) -> None:
        """Judge a launcher that ended by itself with *code*. *output* is the end of what it printed."""
        if not code:
            return
        if is_rank:
            reported = 0 in self.ranks and self.ranks[0].report is not None
            who, number, after = "rank 0", 0, " after it had reported" if reported else ""
        else:
            for shown, exit_text in _TORCHRUN_TABLE.findall(output):
                if int(shown) < self.run.ranks:
                    self.ranks.setdefault(int(shown), Rank()).exit = int(exit_text)
                    self.ended(int(shown))
            who, number, after = "the launcher", LAUNCHER, ""
        outcome = "worker_killed" if code < 0 else "worker_exit"
        self.fail(outcome, f"{who} {describe_exit(code)}{after}", number, quote=True)

    def out_of_time(self) -> None:
        """Note that the time limit has passed, and how far the ranks were."""
        steps = ", ".join(
            f"rank {number} at step {rank.step}" for number, rank in sorted(self.ranks.items())[:4]
        )
        seen = f"last seen: {steps} of {self.run.steps}" if steps else "no rank had said anything"
        self.fail(
            "time_limit", f"the run did not end within {self.run.time_limit_s:g} s; {seen}", 0, quote=True
        )

    def reports(self) -> List[RankReport]:
        """Return the reports of all ranks in order; a missing one is a trouble, never hidden."""
        missing = [number for number in range(self.run.ranks) if number not in self.ranks]
        silent = [number for number, rank in sorted(self.ranks.items()) if rank.report is None]
        if missing and len(missing) == self.run.ranks:
            self.fail("no_result", "the run ended without a word from any rank", 0, quote=True)
        elif missing:
            some = ", ".join(map(str, missing[:8]))
            self.fail(
                "too_few_ranks", f"of {self.run.ranks} ranks these were never heard of: {some}", missing[0]
            )
        elif silent:
            some = ", ".join(map(str, silent[:8]))
            self.fail("no_result", f"these ranks ended without a report: {some}", silent[0], quote=True)
        return [rank.report for _, rank in sorted(self.ranks.items()) if rank.report is not None]

    def exits(self, launcher: Optional[int]) -> List[int]:
        """Return each rank's exit code (minus a signal's number), the launcher's where the rank's is not known."""
        unknown = 127 if launcher is None else launcher  # 127: the shell's code for what never started
        known = {number: rank.exit for number, rank in self.ranks.items()}
        codes = [known.get(number) for number in range(self.run.ranks)]
        return [unknown if code is None else code for code in codes]
