"""``mlhpc history bisect``: which commit or set-up made a series slower, by the fewest paired runs that can tell.

Each comparison is a session of pytest with ``--mlhpc-against`` (``session/against.py``); what it measured is written down at once, so
that a bisection that was ended goes on where it was. The statistics are in ``judge/bisecting.py``.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.cli.history import series_of
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.events import events
from pytest_mlhpc.history.level_changes import NightlyQuery, WatchedSeries, watched_part, with_causes
from pytest_mlhpc.history.series import Series
from pytest_mlhpc.jobs.budget import parse_limit
from pytest_mlhpc.judge import bisecting
from pytest_mlhpc.judge.bisecting import SURE, Posterior
from pytest_mlhpc.judge.changes import find_all
from pytest_mlhpc.session.bisection import (
    UNKNOWN,
    Bisection,
    Candidates,
    LevelLoss,
    MeasuredComparison,
    StoppedError,
    compared,
    find_candidates,
    inside_merge,
    newest_loss,
    read_answers,
    state_file,
    write_answers,
)
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import locked_file
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.text import count, minutes, quantity, tell

#: Most runs unless the user says otherwise, both sides together: ours. 64 commits and a loss of one paired standard deviation
#: took 170 on average (docs/performance.md).
RUNS = "300 runs"
#: Exit code where none is named.
NONE_NAMED = 1
_RUNS = re.compile(r"([0-9]{1,6}) ?(?:runs?)?")


@click.command(
    cls=DataCommand,
    help="Find which commit or set-up made a benchmark slower: from the nights between which its level fell, by runs of today's "
    "set-up against others, in turns on the same nodes, as --mlhpc-against of pytest makes them. Run it in the checkout of "
    "the suites. Exit code 1 if none is named, 3 if the budget was too small to know.",
    example="mlhpc history bisect test_resnet50 --system cirrus --dry-run",
)
@click.argument("benchmark")
@click.option(
    "--metric", default="", metavar="NAME", help="This one.  [default: those by which a test fails]"
)
@click.option("--environment", default="", metavar="NAME", help="Only nights of this one.")
@options.since()
@click.option(
    "--good", default="", metavar="REVISION", help="Before the loss.  [default: the last good night's]"
)
@click.option(
    "--bad", default="", metavar="REVISION", help="After the loss.  [default: the first bad night's]"
)
@click.option(
    "--try", "tries", multiple=True, metavar="WHAT=VALUE",
    help="Another set-up that may be without the loss: environment=NAME, image=IMAGE or variables.NAME=VALUE; may be repeated.",
)  # fmt: skip
@click.option(
    "--budget", default=RUNS, show_default=True, metavar="LIMIT", help="Most runs, or node-hours (20nh), of all comparisons."
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be run, and run nothing.")
@options.system
@options.branch
@options.source
def command(
    *,
    benchmark: str,
    metric: str,
    environment: str,
    since_ns: int,
    good: str,
    bad: str,
    tries: tuple[str, ...],
    budget: str,
    dry_run: bool,
    system: str,
    branch: str,
    source: str,
    state_dir: Path,
) -> CommandReport:
    """Return what made the loss, and how sure that is."""
    query = selection_of(system, branch, judged_only=not metric)
    with chosen(source, state_dir) as opened:
        found = series_of(opened, benchmark, system, metric)
        found = [one for one in found if environment in ("", one.key.environment)]
        watched, loss = _chosen(found, query, since_ns, state_dir)
        key = watched.series.key
        others = list(opened.series(system=key.system, benchmark=key.benchmark))
    if not watched.series.judged:
        raise UsageError(
            f"no test fails by {key.metric}, and only such metrics are compared: give it a tolerance, or choose another"
        )
    record = _record(state_dir, loss)
    root = _root(record)
    candidates = find_candidates(
        loss, root, good=good, bad=bad, tries=tries, beside=_beside(others, watched.series)
    )
    file = state_file(state_dir, key, candidates)
    plan = Bisection(
        loss,
        candidates,
        _pytest(record, loss, state_dir),
        root,
        _most_runs(budget, watched.series),
        file,
        _noise(watched, loss),
    )
    if not candidates.every:
        return _nothing_to_try(plan)
    if dry_run:
        return CommandReport(_plan_text(plan), _json(plan, "planned"))
    return _locked_run(plan, state_dir)


def _locked_run(plan: Bisection, state_dir: Path) -> CommandReport:
    """Run the comparisons, from what was measured before on; no other process may bisect the same loss meanwhile."""
    file = plan.file
    busy = StoreError(
        f"{file}: another `mlhpc history bisect` of this loss is at work; wait until it has ended"
    )
    lock_file = file.with_suffix(".lock")
    with locked_file(lock_file, state_dir, busy) as lock:
        try:
            plan = replace(plan, answers=read_answers(file, plan.candidates))
            _refuse_small(plan)
            tell(_plan_text(plan).rstrip())
            return _run(plan, lock)
        finally:
            if not file.exists():  # there is nothing to go on with
                with contextlib.suppress(OSError):  # another user's, in a shared folder
                    lock_file.unlink(missing_ok=True)


# --- what is asked for


def _chosen(
    found: Sequence[Series], query: NightlyQuery, since_ns: int, state_dir: Path
) -> tuple[WatchedSeries, LevelLoss]:
    """Return the one series of *found* with a loss, and its newest one.

    Raises:
        UsageError: none has one, or several have.
    """
    known = events(state_dir, tell)
    parts = [watched_part(one, query.default_branch) for one in found]
    changes = find_all([[point.value for point in one.series.points] for one in parts], query.detector)
    watched = [with_causes(one, change, known) for one, change in zip(parts, changes, strict=True)]
    losses = [(one, loss) for one in watched if (loss := newest_loss(one, since_ns))]
    if len(losses) == 1:
        ((_, loss),) = losses
        if not min(loss.shift.before, loss.shift.after) > 0:
            raise UsageError(
                f"a level of {min(loss.shift.before, loss.shift.after):g} has no ratio to another: only figures above 0 are compared"
            )
        return losses[0]
    if losses:
        names = "; ".join(
            f"--system {one.series.key.system} --environment {one.series.key.environment} --metric {one.series.key.metric}"
            f" ({one.series.key.benchmark})"
            for one, _ in losses[:5]
        )
        raise UsageError(f"{count(len(losses), 'series')} became slower; choose one: {names}")
    nights = max((len(one.series.points) for one in watched), default=0)
    fewest = 2 * query.detector.shortest
    if nights < fewest:
        raise UsageError(
            f"{count(nights, 'night')} of it {'is' if nights == 1 else 'are'} watched, and a level change needs {fewest}: "
            f"{count(fewest - nights, 'night')} missing"
        )
    better = [one for one in watched if one.changes]
    said = (
        "its level changed, but not for the worse"
        if better
        else f"its level has not changed in {count(nights, 'night')}"
    )
    raise UsageError(
        f"{said}{' since then' if since_ns else ''}; `mlhpc history {shlex.quote(found[0].key.benchmark)}` shows it"
    )


def _record(state_dir: Path, loss: LevelLoss) -> Record:
    """Return the record of the bad night, which says how pytest was called.

    Raises:
        UsageError: it is not in the store of this state directory.
    """
    index = Index(state_dir, tell)
    try:
        found = [one for one in index.find(loss.bad.id) if one.id == loss.bad.id]
    finally:
        index.close()
    if not found:
        raise UsageError(
            f"the record {loss.bad.id} of the first bad night is not in {state_dir}; --state-dir names where nights were recorded"
        )
    return found[0]


def _root(record: Record) -> Path:
    """Return the folder to which the test's name is relative: this one, else where it was run.

    Raises:
        UsageError: neither has the test's file.
    """
    name = record.node_id.partition("::")[0]
    folders = [Path.cwd(), *([Path(record.root)] if record.root else [])]
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise UsageError(
        f"{name} is not in {' or '.join(dict.fromkeys(map(str, folders)))}: run it in the checkout of the suites"
    )


def _beside(every: Sequence[Series], series: Series) -> list[Series]:
    here = series.key
    return [
        one for one in every
        if one.key.environment != here.environment
        and replace(one.key, environment="", fingerprint="") == replace(here, environment="", fingerprint="")
    ]  # fmt: skip


def _most_runs(text: str, series: Series) -> int:
    """Return how many runs a budget allows.

    Raises:
        UsageError: it is no budget, or nothing is charged for this series.
    """
    if match := _RUNS.fullmatch(text.strip()):
        return int(match[1])
    try:
        limit = parse_limit(text, "--budget")
    except ValueError as error:
        raise UsageError(
            f"--budget {text!r}: write runs, such as '60 runs', or node-hours: {error}"
        ) from None
    hours = statistics.median(point.night.node_hours for point in series.points[-14:])
    if limit.unit != "node" or not hours:
        why = (
            "no node-hours are recorded of this series"
            if limit.unit == "node"
            else "only node-hours are recorded"
        )
        raise UsageError(f"--budget {text!r}: {why}; write runs, such as '60 runs'")
    return int(limit.hours / hours)


def _pytest(record: Record, loss: LevelLoss, state_dir: Path) -> tuple[str, ...]:
    place = f"{loss.bad.system}:{loss.bad.partition}"
    fixed = ("-p", "no:cacheprovider", f"--mlhpc-system={place}", f"--mlhpc-state={state_dir.resolve()}")
    inside = ("-o", "mlhpc_here=true")  # that night ran in a job; a comparison asks for one of its own
    given = record.options[:-2] if record.options[-2:] == inside else record.options
    return (sys.executable, "-m", "pytest", record.node_id, *fixed, *given)


def _noise(watched: WatchedSeries, loss: LevelLoss) -> float:
    """Return the deviation of the difference of two nights as a share of their level: that of the nights before the loss, as MAD is scaled."""
    before = [
        point.value for point in watched.series.points
        if point.night.created_ns < loss.shift.first.created_ns and math.isfinite(point.value)
    ]  # fmt: skip
    return math.sqrt(2) * 1.4826 * statistics.median(abs(value / loss.shift.before - 1) for value in before)


def _refuse_small(plan: Bisection) -> None:
    steps, each = _steps(plan), bisecting.runs_for(plan.size, plan.noise)
    least = steps * 4
    if plan.most_runs - plan.runs < min(least, 4) or plan.most_runs < least:
        raise UsageError(
            f"--budget: {count(plan.most_runs, 'run')} cannot tell {count(len(plan.candidates.every), 'candidate')}: {count(steps, 'comparison')} "
            f"of at least 4 runs are {least}, and with the noise of its nights about {max(least, steps * each, plan.runs + each)}"
        )


def _steps(plan: Bisection) -> int:
    return bisecting.comparisons_without_noise(
        bisecting.priors(plan.candidates.classes), plan.candidates.possible
    )


def _run(plan: Bisection, lock: int) -> CommandReport:
    """Compare until it is known what made the loss, or nothing more can be done."""
    while True:
        now = plan.now
        if end := bisecting.ending(now, plan.possible):
            return _report(plan, end)
        runs = bisecting.wanted_runs(plan.size, plan.evidence, plan.noise)
        if plan.runs + runs > plan.most_runs:
            runs = (plan.most_runs - plan.runs) // 4 * 4
        if runs < 4:
            return _report(plan, "budget")
        name = bisecting.next_comparison(now, plan.possible)
        try:
            answer = compared(plan, name, runs, lock)
        except StoppedError as error:
            text = f"{error}\nWhat was measured is in {plan.file}: the same command goes on.\n"
            return CommandReport(text, {**_json(plan, "stopped"), "why": str(error)}, error.code)
        new = plan.skip(name, answer.skipped) if answer.skipped else (answer,)
        plan = replace(plan, answers=(*plan.answers, *new))
        write_answers(plan)
        tell(_progress(plan, answer))


# --- what is said


def _plan_text(plan: Bisection) -> str:
    shift, candidates = plan.loss.shift, plan.candidates
    lines = [
        f"{rendering.place(shift.key)}  {shift.key.metric}: {rendering.change(shift)}  {shift.key.benchmark}"
    ]
    lines.append(
        f"last good night {minutes(plan.loss.good.created_ns)}, first bad night {minutes(plan.loss.bad.created_ns)}"
    )
    commits = [one for one in candidates.every if one.is_commit]
    if commits:
        lines.append(f"{count(len(commits), 'commit')}: {commits[0].name[:12]} to {commits[-1].name[:12]}")
    elif candidates.without_commits:
        lines.append(f"no commit is a candidate: {candidates.without_commits}")
    lines += [f"set-up: {one}" for one in candidates.every if not one.is_commit]
    lines += _unsettable(candidates)
    steps, each = _steps(plan), bisecting.runs_for(plan.size, plan.noise)
    if len(candidates.every) == 1:
        lines.append(
            f"only one candidate: {candidates.every[0]}; it is checked, as the machine may be the cause"
        )
    lines.append(
        f"plan: {count(steps, 'comparison')} if none errs, each of 4 to 30 runs in one allocation, about {steps * each} runs with the noise "
        f"of its nights; budget: {count(plan.most_runs, 'run')}"
    )
    first = bisecting.next_comparison(plan.now, plan.possible) if candidates.every else ""
    lines.append(f"next: --mlhpc-against {_short(first)}")
    return "".join(map(rendering.line, lines))


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(against: str) -> str:
    return against[:16] if against.startswith("rev=") else against


def _unsettable(candidates: Candidates) -> list[str]:
    return [f"cannot be set: {cause}" for cause in candidates.unsettable]


def _progress(plan: Bisection, answer: MeasuredComparison) -> str:
    number = len(plan.answers)
    if answer.skipped:
        return f"comparison {number}: {_short(answer.against)} is skipped: {answer.skipped}"
    now, change = plan.now, -math.expm1(-answer.mean)
    left = sum(one > 0.01 for one in (*now.candidates, now.none))
    side = f"{abs(change):.1%} {'worse' if change > 0 else 'better'} than with {_short(answer.against)}"
    return f"comparison {number}: today is {side}, {answer.runs} runs; {left} of {len(now.candidates) + 1} explanations are left"


def _report(plan: Bisection, how: str) -> CommandReport:
    """Return the answer. A bisection that ends has no state; one whose budget is spent goes on with a larger one."""
    now = plan.now
    lines = {"named": _named, "none": _none, "undecided": _undecided, "budget": _budget}[how](plan, now)
    skipped: dict[str, list[str]] = {one.skipped: [] for one in plan.answers if one.skipped}
    for one in plan.answers:
        if one.skipped:
            skipped[one.skipped].append(_short(one.against))
    lines += [f"skipped: {_some(names)}: {why}" for why, names in skipped.items()]
    if how != "budget":
        for suffix in (".json", ".log"):
            plan.file.with_suffix(suffix).unlink(missing_ok=True)
    code = {"named": 0, "none": NONE_NAMED, "undecided": NONE_NAMED, "budget": UNKNOWN}[how]
    return CommandReport("".join(map(rendering.line, lines)), _json(plan, how), code)


def _named(plan: Bisection, now: Posterior) -> list[str]:
    candidates, group = plan.candidates.every, bisecting.most_probable(now, plan.possible)
    sure = math.fsum(now.candidates[number] for number in group)
    used = f"{_sure(sure)} sure, after {count(plan.runs, 'run')} in {count(len(plan.evidence), 'comparison')}"
    today = f"today's loss by it is {-math.expm1(-now.loss):.1%}"
    if len(group) == 1:
        lines = [f"{candidates[group[0]]}", f"{used}; {today}"]
        if candidates[group[0]].is_commit and (more := inside_merge(candidates[group[0]], plan.root)):
            lines.append(f"inside the merge: {more}")
        return lines
    names = [f"one of {count(len(group), 'candidate')}, which no comparison tells apart:"]
    return [*names, *(f"  {candidates[number]}" for number in group), f"{used}; {today}"]


def _sure(share: float) -> str:
    return f"{min(99.9, math.floor(1000 * share) / 10):g} %"


def _none(plan: Bisection, now: Posterior) -> list[str]:
    """No candidate shows the loss: today's figures say whether it is still there."""
    shift = plan.loss.shift
    figures = [one.first for one in plan.answers if not one.skipped]
    today = statistics.median(figures)
    middle = math.sqrt(shift.before * shift.after)
    back = (today > middle) == (shift.before > middle)
    lines = [
        f"none of {count(len(now.candidates), 'candidate')}, {_sure(now.none)} sure, after {count(plan.runs, 'run')}"
    ]
    if back:
        lines.append(
            f"the loss does not come back today: {quantity(today, shift.unit)}, near the level before ({quantity(shift.before, shift.unit)})"
        )
        return lines
    lines.append(
        f"today's {quantity(today, shift.unit)} is as slow as the nights after it, also without the candidates: suspect the machine"
    )
    return [*lines, *_unsettable(plan.candidates)]


def _undecided(plan: Bisection, now: Posterior) -> list[str]:
    hidden = [
        one for number, one in enumerate(plan.candidates.every)
        if not any(number in culprits for culprits in plan.possible.values())
    ]  # fmt: skip
    del now
    return [
        f"not known: what is left cannot be compared with a set-up without it, after {count(plan.runs, 'run')}:",
        *(f"  {one}" for one in hidden[:10]),
        *([f"  and {len(hidden) - 10} more"] if len(hidden) > 10 else []),
    ]


def _budget(plan: Bisection, now: Posterior) -> list[str]:
    candidates, group = plan.candidates.every, bisecting.most_probable(now, plan.possible)
    share = math.fsum(now.candidates[number] for number in group)
    deviations = [one.deviation for one in plan.evidence]
    each = bisecting.runs_for(plan.size, statistics.median(deviations)) if deviations else 8
    entropy = -math.fsum(p * math.log2(p) for p in (*now.candidates, now.none) if p > 0)
    enough = plan.runs + each * max(1, math.ceil(entropy))
    name = f"{candidates[group[0]]}" if share > now.none else "none of the candidates"
    return [
        f"not known after {count(plan.runs, 'run')}: {name} is {_sure(max(share, now.none))} sure, and {SURE:.0%} is asked for",
        f"the same command with --budget '{enough} runs' goes on from here, and would probably do",
    ]


def _nothing_to_try(plan: Bisection) -> CommandReport:
    candidates = plan.candidates
    what = candidates.without_commits or "no commit, no image, no variable"
    nights = f"{minutes(plan.loss.good.created_ns)} and {minutes(plan.loss.bad.created_ns)}"
    lines = [f"nothing that can be set differs between {nights}: {what}", *_unsettable(candidates)]
    lines.append("suspect the machine; or name a set-up without the loss by --try environment=NAME")
    return CommandReport("".join(map(rendering.line, lines)), _json(plan, "nothing"), NONE_NAMED)


def _json(plan: Bisection, how: str) -> dict[str, Any]:
    now: Mapping[str, Any] = {"candidates": [], "none": 1.0, "loss": None}
    if plan.candidates.every:
        now = asdict(plan.now)
    named = bisecting.most_probable(plan.now, plan.possible) if how == "named" else ()
    return {
        "change": rendering.shift_json(plan.loss.shift),
        "good": plan.loss.good.id,
        "bad": plan.loss.bad.id,
        "outcome": how,
        "named": [plan.candidates.every[number].name for number in named],
        "candidates": [
            {"name": one.name, "said": one.said, "commit": one.is_commit, "probability": share}
            for one, share in zip(plan.candidates.every, now["candidates"], strict=True)
        ],
        "none": now["none"],
        "loss": now["loss"],
        "runs": plan.runs,
        "comparisons": [asdict(one) for one in plan.answers],
    }
