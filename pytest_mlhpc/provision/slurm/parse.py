"""Parsers of Slurm's output: jobs and steps of squeue and sacct, records of scontrol and sacctmgr, host lists. Pure functions.

Any user of the cluster chooses job names, which may hold separators, newlines and escape sequences. So every record of
squeue and sacct ends with a mark that is drawn at random for that one call, and free text is the last field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_mlhpc.node.agents.nodes import HostlistError, expand_hostlist
from pytest_mlhpc.provision.scheduler.client import (
    JobStep,
    PartitionLimits,
    QosLimits,
    Reservation,
    SchedulerJob,
    SchedulerNode,
    SchedulerState,
)

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

#: Fields that jobcomp/filetxt has too, for sacct --completion.
COMPLETION_FIELDS = ("JobID", "JobName", "State", "Partition", "Start", "End", "NodeList")

_STATES = {state.value: state for state in SchedulerState}
_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def squeue_format(fields: Sequence[str], mark: str) -> str:
    """Return squeue's --Format: unpadded fields with ``|`` between them, *mark* after the last."""
    return ",".join([f"{name}:|" for name in fields[:-1]] + [f"{fields[-1]}:{mark}"])


def split_records(text: str, fields: Sequence[str], mark: str) -> list[dict[str, str]]:
    """Return the records that squeue printed by :func:`squeue_format`; incomplete ones are left out."""
    rows = []
    for record in text.split(mark)[:-1]:
        values = record.removeprefix("\n").split("|", len(fields) - 1)
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def parse_jobs(text: str, mark: str) -> list[SchedulerJob]:
    """Return the jobs that squeue printed with JOB_FIELDS."""
    return [_queued_job(row) for row in split_records(text, JOB_FIELDS, mark)]


def _queued_job(row: dict[str, str]) -> SchedulerJob:
    exit_code, signal = parse_wait_status(row["exit_code"])
    return SchedulerJob(
        id=row["JobID"],
        name=row["Name"],
        user=row["UserName"],
        state=parse_state(row["State"]),
        reason=_job_reason(row["State"], row["Reason"]),
        partition=row["Partition"],
        account=value_or_empty(row["Account"]),
        nodes=nodes_of(row["NodeList"]),
        node_count=parse_integer(row["NumNodes"]),
        time_limit_s=parse_duration_s(row["TimeLimit"]) or 0.0,
        priority=parse_integer(row["PriorityLong"]),
        restarts=parse_integer(row["RestartCnt"]),
        submit_ns=parse_time_ns(row["SubmitTime"]),
        start_ns=parse_time_ns(row["StartTime"]),
        end_ns=parse_time_ns(row["EndTime"]),
        exit_code=exit_code,
        signal=signal,
    )


def _job_reason(state_text: str, reason: str) -> str:
    """Return why a job waits or ended; for an unknown state with Slurm's name of it."""
    text = value_or_empty(reason)
    if parse_state(state_text) is not SchedulerState.UNKNOWN:
        return text
    return f"state {state_text.strip() or '(none)'}" + (f", {text}" if text else "")


def parse_queue(text: str, mark: str) -> list[SchedulerJob]:
    """Return the waiting jobs that squeue printed with QUEUE_FIELDS, highest priority first."""
    jobs = [
        SchedulerJob(
            id=row["JobID"], name="", user=row["UserName"], state=SchedulerState.PENDING,
            priority=parse_integer(row["PriorityLong"]), node_count=parse_integer(row["NumNodes"]),
        )
        for row in split_records(text, QUEUE_FIELDS, mark)
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: -job.priority)  # stable: squeue's own order among equals


def parse_steps(text: str, mark: str) -> dict[str, tuple[JobStep, ...]]:
    """Return job id -> its steps, as squeue --steps printed them with STEP_FIELDS."""
    steps: dict[str, tuple[JobStep, ...]] = {}
    for row in split_records(text, STEP_FIELDS, mark):
        job, _, step = row["StepID"].partition(".")
        if step:
            found = JobStep(
                id=step, name=row["StepName"], state=parse_state(row["StepState"]), nodes=nodes_of(row["Nodes"]),
                start_ns=parse_time_ns(row["StartTime"]),
            )  # fmt: skip
            steps[job] = (*steps.get(job, ()), found)
    return steps


def parse_accounting(text: str, fields: Sequence[str], mark: str) -> list[SchedulerJob]:
    """Return jobs with their steps from ``sacct --noheader --parsable --delimiter=mark --format=fields``.

    Of a job that was requeued the last row counts. A step without a row of its job is left out.
    """
    values = text.split(mark)[:-1]  # every field, the last too, is followed by the mark
    rows = [
        dict(zip(fields, [values[at].removeprefix("\n"), *values[at + 1 : at + len(fields)]], strict=True))
        for at in range(0, len(values) - len(fields) + 1, len(fields))
    ]
    jobs: dict[str, dict[str, str]] = {}
    steps: dict[str, dict[str, JobStep]] = {}
    for row in rows:
        job, _, step = row["JobID"].partition(".")
        if step:
            steps.setdefault(job, {})[step] = _accounted_step(step, row)
        else:
            jobs[job] = row
            steps[job] = {}  # earlier rows belong to an earlier start of the same job
    return [_accounted_job(row, tuple(steps[job].values())) for job, row in jobs.items()]


def _accounted_job(row: dict[str, str], steps: tuple[JobStep, ...]) -> SchedulerJob:
    exit_code, signal = parse_exit_pair(row.get("ExitCode", ""))
    limit = row.get("TimelimitRaw", "")
    return SchedulerJob(
        id=row["JobID"],
        name=row["JobName"],
        user=row.get("User", ""),
        state=parse_state(row["State"]),
        reason=value_or_empty(row.get("Reason", "")),
        partition=row["Partition"],
        account=value_or_empty(row.get("Account", "")),
        nodes=nodes_of(row["NodeList"]),
        node_count=parse_integer(row.get("NNodes", "")),
        time_limit_s=60.0 * parse_integer(limit),
        priority=parse_integer(row.get("Priority", "")),
        submit_ns=parse_time_ns(row.get("Submit", "")),
        start_ns=parse_time_ns(row["Start"]),
        end_ns=parse_time_ns(row["End"]),
        exit_code=exit_code,
        signal=signal,
        steps=steps,
    )


def _accounted_step(step: str, row: dict[str, str]) -> JobStep:
    exit_code, signal = parse_exit_pair(row.get("ExitCode", ""))
    return JobStep(
        id=step,
        name=row["JobName"],
        state=parse_state(row["State"]),
        exit_code=exit_code,
        signal=signal,
        nodes=nodes_of(row["NodeList"]),
        energy_j=parse_energy_j(row.get("ConsumedEnergyRaw", "")),
        start_ns=parse_time_ns(row["Start"]),
        end_ns=parse_time_ns(row["End"]),
    )


def parse_state(text: str) -> SchedulerState:
    """Return the state of ``CANCELLED by 0``, ``RUNNING`` ...; UNKNOWN for other names."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return _STATES.get(first.rstrip("+"), SchedulerState.UNKNOWN)


def value_or_empty(text: str) -> str:
    """Return *text*; an empty string for Slurm's forms of no value."""
    return "" if text in {"(null)", "N/A", "n/a", "None", "Unknown"} else text


def parse_integer(text: str) -> int:
    """Return a whole number, 0 where there is none."""
    return int(text) if text.isascii() and text.isdecimal() else 0


def parse_time_ns(text: str) -> int:
    """Return epoch seconds as ns; 0 for N/A, Unknown, None."""
    return parse_integer(text) * NS


def parse_energy_j(text: str) -> float | None:
    """Return joules; None for an empty text, for 0, which sacct prints where no plug-in measures, and for NO_VAL64.

    NO_VAL64, Slurm's "no value", is printed as a number near 2**64.
    """
    value = parse_integer(text)
    return float(value) if 0 < value < 2**63 else None


def parse_exit_pair(text: str) -> tuple[int, int]:
    """Return exit code and signal of sacct's ``7:0``."""
    code, _, signal = text.partition(":")
    return parse_integer(code), parse_integer(signal)


def parse_wait_status(text: str) -> tuple[int, int]:
    """Return exit code and signal of squeue's exit_code, which is a wait status (7 << 8), or a pair ``7:0``."""
    if ":" in text:
        return parse_exit_pair(text)
    status = parse_integer(text)
    return (status >> 8) & 0xFF, status & 0x7F


def parse_duration_s(text: str) -> float | None:
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


# Records of ``scontrol -o show node | partition | reservation``: lines of ``Key=value`` pairs whose values may hold spaces,
# quotes and equals signs (``OS=Linux 6.1 #1 SMP``, ``Reason=says "a b=c" [root@1700000000]``). A pair ends where the next
# known form of a key begins.

MIB = 1 << 20

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")

#: How a reason ends: who set it and when.
_SIGNED = re.compile(r"(?P<text>.*) \[(?P<who>[^\[\]@]+)@(?P<when>[^\[\]@]*)\]")

#: Marks behind a node's state (sinfo(1), NODE STATE CODES) -> the flag that newer versions spell out.
_MARKS = {
    "*": "not_responding", "~": "powered_down", "#": "powering_up", "!": "power_down", "%": "powering_down",
    "$": "maintenance", "@": "reboot_requested", "^": "reboot_issued", "-": "planned",
}  # fmt: skip

#: Other spellings of flags -> ours.
_FLAGS = {
    "maint": "maintenance",
    "reboot": "reboot_requested",
    "power_down": "powering_down",
    "no_respond": "not_responding",
}

_BASES = {"alloc": "allocated", "mix": "mixed", "unk": "unknown"}


def parse_pairs(record: str) -> dict[str, str]:
    """Return the pairs of one record; the first of a repeated key counts, and free text reaches to its end."""
    found: dict[str, str] = {}
    matches = list(_KEY.finditer(record))
    for index, match in enumerate(matches):
        key = match[1]
        if key in found:
            continue
        end = matches[index + 1].start() if index + 1 < len(matches) else len(record)
        if key == "Reason":
            signed = _SIGNED.match(record, match.end())
            end = signed.end() if signed else len(record)
        found[key] = record[match.end() : end].strip()
        if key == "Reason":  # the last key that is read; text in it that resembles a key is none
            break
    return found


def _parse_records(text: str, first: str) -> list[dict[str, str]]:
    """Return the records of *text*: each begins with the key *first* at the start of a line."""
    records = re.split(rf"(?m)^(?={first}=)", text)
    return [
        parse_pairs(" ".join(record.split("\n")).strip())
        for record in records
        if record.startswith(f"{first}=")
    ]


def parse_nodes(text: str) -> list[SchedulerNode]:
    """Return the nodes of ``scontrol -o show node``."""
    return [_parse_node(record) for record in _parse_records(text, "NodeName")]


def _parse_node(record: dict[str, str]) -> SchedulerNode:
    base, flags = parse_node_state(record.get("State", ""))
    reason = record.get("Reason", "")
    signed = _SIGNED.fullmatch(reason)
    return SchedulerNode(
        name=record["NodeName"],
        state=base,
        flags=flags,
        reason=signed["text"] if signed else reason,
        address=value_or_empty(record.get("NodeAddr", "")),
        hostname=value_or_empty(record.get("NodeHostName", "")),
        cpus=parse_integer(record.get("CPUTot", "")),
        memory=parse_integer(record.get("RealMemory", "")) * MIB,
        gres=value_or_empty(record.get("Gres", "")),
        features=parse_names(record.get("AvailableFeatures", "")),
        partitions=parse_names(record.get("Partitions", "")),
    )


def parse_node_state(text: str) -> tuple[str, frozenset[str]]:
    """Return base state and flags of ``IDLE+DRAIN``, ``DOWN*``, ``idle~`` ..., in lower case."""
    flags: set[str] = set()
    names: list[str] = []
    for bare in text.strip().lower().split("+"):
        name = bare.rstrip("".join(_MARKS))
        flags.update(_MARKS[mark] for mark in bare[len(name) :])
        if name:
            names.append(name)
    base = names[0] if names else "unknown"
    flags.update(_FLAGS.get(flag, flag) for flag in names[1:])
    return _BASES.get(base, base), frozenset(flags)


def parse_partition(text: str) -> PartitionLimits | None:
    """Return the partition of ``scontrol -o show partition NAME``, None if there is none."""
    for record in _parse_records(text, "PartitionName"):
        return PartitionLimits(
            name=record["PartitionName"],
            up=record.get("State", "") == "UP",
            max_time_s=parse_duration_s(record.get("MaxTime", "")),
            max_nodes=parse_limit(record.get("MaxNodes", "")),
            min_nodes=parse_integer(record.get("MinNodes", "")),
            total_nodes=parse_integer(record.get("TotalNodes", "")),
            nodes=nodes_of(record.get("Nodes", "")),
            allow_accounts=parse_names(record.get("AllowAccounts", "")),
            allow_qos=parse_names(record.get("AllowQos", "")),
            qos=value_or_empty(record.get("QoS", "")),
        )
    return None


def parse_reservations(text: str) -> list[Reservation]:
    """Return the reservations of ``scontrol -o show reservation``."""
    return [
        Reservation(
            name=record["ReservationName"],
            start_ns=parse_time_ns(record.get("StartTime", "")),
            end_ns=parse_time_ns(record.get("EndTime", "")),
            nodes=nodes_of(record.get("Nodes", "")),
            partition=value_or_empty(record.get("PartitionName", "")),
            users=parse_names(record.get("Users", "")),
            accounts=parse_names(record.get("Accounts", "")),
            flags=frozenset(flag.upper() for flag in parse_names(record.get("Flags", ""))),
        )
        for record in _parse_records(text, "ReservationName")
    ]


def parse_qos(text: str, name: str) -> QosLimits | None:
    """Return the QoS *name* of ``sacctmgr -nP show qos format=Name,MaxWall,MaxTRES,UsageFactor``, None if not there."""
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0] == name:
            limits = dict(part.partition("=")[::2] for part in fields[2].split(","))
            return QosLimits(
                name=name,
                max_time_s=parse_duration_s(fields[1]),
                max_nodes=parse_limit(limits.get("node", "")),
                usage_factor=_parse_factor(fields[3]),
            )
    return None


def _parse_factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


def parse_limit(text: str) -> int | None:
    """Return a limit; None for UNLIMITED and an empty text."""
    return int(text) if text.isascii() and text.isdecimal() else None


def parse_names(text: str) -> frozenset[str]:
    """Return the names between commas; an empty set for ALL and for Slurm's forms of no value."""
    return (
        frozenset() if text == "ALL" or not value_or_empty(text) else frozenset(filter(None, text.split(",")))
    )


def nodes_of(hostlist: str) -> tuple[str, ...]:
    """Like :func:`expand_hostlist`, but a text that is no host list counts as one name: no query fails for it."""
    try:
        return expand_hostlist(hostlist)
    except HostlistError:
        return (hostlist,)
