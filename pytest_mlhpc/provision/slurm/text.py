"""What squeue and sacct print, as jobs and steps. Pure functions.

Job names are chosen by any user of the cluster and may hold our separators, newlines and escape sequences. So every
record ends, and every field that a user fills is fenced, with a word drawn at random for that one call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_mlhpc.provision.slurm.client import Job, State, Step
from pytest_mlhpc.provision.slurm.hostlist import nodes

NS = 1_000_000_000

#: Fields of one job, squeue(1) --Format; the name is last because anything may be in it.
JOB_FIELDS = (
    "JobID", "UserName", "State", "Partition", "Account", "NumNodes", "TimeLimit", "PriorityLong", "RestartCnt",
    "SubmitTime", "StartTime", "EndTime", "exit_code", "NodeList", "Reason", "Name",
)  # fmt: skip

#: Fields of one step, squeue(1) --steps --Format.
STEP_FIELDS = ("StepID", "StepState", "StartTime", "Nodes", "StepName")

#: Fields of one waiting job in :func:`parse_queue`.
QUEUE_FIELDS = ("PriorityLong", "JobID", "UserName", "NumNodes")

#: Fields of jobs and steps, sacct(1) --format.
ACCOUNTING_FIELDS = (
    "JobID", "JobName", "User", "State", "ExitCode", "Partition", "Account", "NNodes", "TimelimitRaw", "Priority",
    "Submit", "Start", "End", "NodeList", "Reason", "ConsumedEnergyRaw",
)  # fmt: skip

#: Fields that jobcomp/filetxt keeps too, for sacct --completion.
COMPLETION_FIELDS = ("JobID", "JobName", "State", "Partition", "Start", "End", "NodeList")

_STATES = {state.value: state for state in State}
_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def long_format(fields: Sequence[str], mark: str) -> str:
    """Return squeue's --Format: unpadded fields with ``|`` between them, *mark* after the last."""
    return ",".join([f"{name}:|" for name in fields[:-1]] + [f"{fields[-1]}:{mark}"])


def records(text: str, fields: Sequence[str], mark: str) -> list[dict[str, str]]:
    """Return what :func:`long_format` made squeue print; records that do not have all fields are left out."""
    rows = []
    for record in text.split(mark)[:-1]:
        values = record.removeprefix("\n").split("|", len(fields) - 1)
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def parse_jobs(text: str, mark: str) -> list[Job]:
    """Return the jobs that squeue printed with JOB_FIELDS."""
    return [_job(row) for row in records(text, JOB_FIELDS, mark)]


def _job(row: dict[str, str]) -> Job:
    exit_code, signal = wait_status(row["exit_code"])
    return Job(
        id=row["JobID"],
        name=row["Name"],
        user=row["UserName"],
        state=state(row["State"]),
        reason=_reason(row["State"], row["Reason"]),
        partition=row["Partition"],
        account=word(row["Account"]),
        nodes=nodes(row["NodeList"]),
        node_count=integer(row["NumNodes"]),
        time_limit_s=duration_s(row["TimeLimit"]) or 0.0,
        priority=integer(row["PriorityLong"]),
        restarts=integer(row["RestartCnt"]),
        submit_ns=time_ns(row["SubmitTime"]),
        start_ns=time_ns(row["StartTime"]),
        end_ns=time_ns(row["EndTime"]),
        exit_code=exit_code,
        signal=signal,
    )


def _reason(state_text: str, reason: str) -> str:
    """Return why a job waits or ended; of a state that we do not know, with Slurm's word for it."""
    said = word(reason)
    if state(state_text) is not State.UNKNOWN:
        return said
    return f"state {state_text.strip() or '(none)'}" + (f", {said}" if said else "")


def parse_queue(text: str, mark: str) -> list[Job]:
    """Return the waiting jobs that squeue printed with QUEUE_FIELDS, highest priority first."""
    jobs = [
        Job(
            id=row["JobID"], name="", user=row["UserName"], state=State.PENDING,
            priority=integer(row["PriorityLong"]), node_count=integer(row["NumNodes"]),
        )
        for row in records(text, QUEUE_FIELDS, mark)
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: -job.priority)  # stable: squeue's own order among equals


def parse_steps(text: str, mark: str) -> dict[str, tuple[Step, ...]]:
    """Return job id -> its steps, as squeue --steps printed them with STEP_FIELDS."""
    steps: dict[str, tuple[Step, ...]] = {}
    for row in records(text, STEP_FIELDS, mark):
        job, _, step = row["StepID"].partition(".")
        if step:
            found = Step(
                id=step, name=row["StepName"], state=state(row["StepState"]), nodes=nodes(row["Nodes"]),
                start_ns=time_ns(row["StartTime"]),
            )  # fmt: skip
            steps[job] = (*steps.get(job, ()), found)
    return steps


def parse_accounting(text: str, fields: Sequence[str], mark: str) -> list[Job]:
    """Return jobs with their steps from ``sacct --noheader --parsable --delimiter=mark --format=fields``.

    Of a job that was requeued the last row counts. A step without a row of its job is left out.
    """
    values = text.split(mark)[:-1]  # every field, the last too, is followed by the mark
    rows = [
        dict(zip(fields, [values[at].removeprefix("\n"), *values[at + 1 : at + len(fields)]], strict=True))
        for at in range(0, len(values) - len(fields) + 1, len(fields))
    ]
    jobs: dict[str, dict[str, str]] = {}
    steps: dict[str, dict[str, Step]] = {}
    for row in rows:
        job, _, step = row["JobID"].partition(".")
        if step:
            steps.setdefault(job, {})[step] = _accounted_step(step, row)
        else:
            jobs[job] = row
            steps[job] = {}  # what stood before belongs to an earlier start of the same job
    return [_accounted_job(row, tuple(steps[job].values())) for job, row in jobs.items()]


def _accounted_job(row: dict[str, str], steps: tuple[Step, ...]) -> Job:
    exit_code, signal = exit_pair(row.get("ExitCode", ""))
    limit = row.get("TimelimitRaw", "")
    return Job(
        id=row["JobID"],
        name=row["JobName"],
        user=row.get("User", ""),
        state=state(row["State"]),
        reason=word(row.get("Reason", "")),
        partition=row["Partition"],
        account=word(row.get("Account", "")),
        nodes=nodes(row["NodeList"]),
        node_count=integer(row.get("NNodes", "")),
        time_limit_s=60.0 * integer(limit),
        priority=integer(row.get("Priority", "")),
        submit_ns=time_ns(row.get("Submit", "")),
        start_ns=time_ns(row["Start"]),
        end_ns=time_ns(row["End"]),
        exit_code=exit_code,
        signal=signal,
        steps=steps,
    )


def _accounted_step(step: str, row: dict[str, str]) -> Step:
    exit_code, signal = exit_pair(row.get("ExitCode", ""))
    return Step(
        id=step,
        name=row["JobName"],
        state=state(row["State"]),
        exit_code=exit_code,
        signal=signal,
        nodes=nodes(row["NodeList"]),
        energy_j=energy_j(row.get("ConsumedEnergyRaw", "")),
        start_ns=time_ns(row["Start"]),
        end_ns=time_ns(row["End"]),
    )


def state(text: str) -> State:
    """Return the state of ``CANCELLED by 0``, ``RUNNING`` ...; UNKNOWN for words that we do not know."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return _STATES.get(first.rstrip("+"), State.UNKNOWN)


def word(text: str) -> str:
    """Return *text* or nothing where Slurm says that there is nothing."""
    return "" if text in {"(null)", "N/A", "n/a", "None", "Unknown"} else text


def integer(text: str) -> int:
    """Return a whole number, 0 where there is none."""
    return int(text) if text.isascii() and text.isdecimal() else 0


def time_ns(text: str) -> int:
    """Return epoch seconds as ns; 0 for N/A, Unknown, None."""
    return integer(text) * NS


def energy_j(text: str) -> float | None:
    """Return joules; None for nothing and for 0, which is what sacct says where no plug-in measures.

    Slurm's "no value" (NO_VAL64) comes out as a number near 2**64: that is none either.
    """
    value = integer(text)
    return float(value) if 0 < value < 2**63 else None


def exit_pair(text: str) -> tuple[int, int]:
    """Return exit code and signal of sacct's ``7:0``."""
    code, _, signal = text.partition(":")
    return integer(code), integer(signal)


def wait_status(text: str) -> tuple[int, int]:
    """Return exit code and signal of squeue's exit_code, which is a wait status (7 << 8), or a pair ``7:0``."""
    if ":" in text:
        return exit_pair(text)
    status = integer(text)
    return (status >> 8) & 0xFF, status & 0x7F


def duration_s(text: str) -> float | None:
    """Return seconds of ``1-02:03:04``, ``02:03:04``, ``03:04`` (minutes) or ``5`` (minutes; hours after days); else None."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, *parts, 0]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return float(86400 * int(match["days"] or 0) + 3600 * hours + 60 * minutes + seconds)
