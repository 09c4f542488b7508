"""What may have made a series slower, and the sessions of pytest that tell: those of ``mlhpc history bisect``.

Open this to know which candidates there are, by which side B of ``--mlhpc-against`` each is compared, why a comparison is skipped or
stops all, and what is written down between comparisons. The statistics are in ``judge/bisecting.py``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pytest_mlhpc.config.overrides import parse_against
from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.history.level_changes import Cause, Shift, WatchedSeries
from pytest_mlhpc.history.series import Night, Series
from pytest_mlhpc.judge import bisecting
from pytest_mlhpc.judge.bisecting import PairedEvidence, Posterior
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import die_with_parent, start_in_new_session
from pytest_mlhpc.session.against import NOTHING_OF_CHECKOUT
from pytest_mlhpc.session.revision import WITHOUT_REVISION, Revision, find_revision, git, text_of
from pytest_mlhpc.store.locations import replace_file
from pytest_mlhpc.store.record import INFRASTRUCTURE, SeriesKey
from pytest_mlhpc.store.text import count, minutes, one_line, tell

#: Exit codes of a bisection that stops: it is not known yet; try again later.
UNKNOWN, LATER = 3, 75
#: Infrastructure outcomes that another try of the same does not change.
_LASTING = {"rejected", "quota_exceeded", "admission_denied", "forbidden", "unauthorized"}
#: Outcomes of side B's software, which are no fault of the machine though they are counted as such.
_OF_SOFTWARE = {
    "image_pull",
    "container_config",
    "crash_loop",
    "launch_failed",
    "import_failed",
    "not_supported",
}


#: The session ended, and says nothing of either side.
_GIVEN_UP = {"cancelled", "detached"}
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True)
class Candidate:
    """A commit, or a set-up that a night had and another had not; ``said`` is what else is known of it."""

    name: str  #: a commit's hash, or ``environment=old`` and the like
    said: str = ""
    is_commit: bool = False

    def __str__(self) -> str:
        """Return it for people."""
        name = f"commit {self.name[:12]}" if self.is_commit else self.name
        return f"{name} ({self.said})" if self.said else name


@dataclass(frozen=True)
class Candidates:
    """All that may be the culprit. ``possible`` has what B of each comparison is, and under which candidates the loss shows in it."""

    every: tuple[Candidate, ...]
    classes: tuple[int, ...]  #: how many candidates are commits, then 1 for each set-up
    possible: Mapping[str, frozenset[int]]
    unsettable: tuple[Cause, ...] = ()  #: what also differs between the nights, and no side B can have
    without_commits: str = ""  #: why no commit is a candidate


@dataclass(frozen=True)
class LevelLoss:
    """A level change for the worse, between the last night before it and the first that surely lies after it."""

    shift: Shift
    good: Night
    bad: Night


def newest_loss(watched: WatchedSeries, since_ns: int) -> LevelLoss | None:
    """Return the newest loss of *watched* whose new level began since then, None where there is none."""
    points = watched.series.points
    losses = [
        LevelLoss(shift, points[change.first - 1].night, points[change.last].night)
        for change, shift in zip(watched.changes, watched.shifts, strict=True)
        if shift.worse and shift.at.created_ns >= since_ns
    ]
    return losses[-1] if losses else None


def find_candidates(
    loss: LevelLoss, root: Path, *, good: str, bad: str, tries: Sequence[str], beside: Iterable[Series]
) -> Candidates:
    """Return what may have made *loss*.

    Args:
        loss: the level change.
        root: pytest's root folder, in the checkout of the suites.
        good: a revision instead of the good night's commit; empty: that one.
        bad: the same of the bad night.
        tries: more set-ups, as ``--mlhpc-against`` takes them.
        beside: series of the same benchmark in other environments of the partition.

    Raises:
        UsageError: the checkout has not these commits, or not the bad one without changes; or a set-up has another form.
    """
    base, commits, why = _commits(loss, root, good, bad)
    before = [base, *(one.name for one in commits[:-1])] if commits else []
    possible = {f"rev={one}": frozenset(range(at, len(commits))) for at, one in enumerate(before)}
    setups, explained = _setups(loss.shift, beside)
    for text in tries:
        if parse_against([text]).rev:
            raise UsageError(f"--try {text}: give the range of commits as --good and --bad")
        setups.setdefault(text, "")
    every = [*commits, *(Candidate(name, said) for name, said in setups.items())]
    for number, name in enumerate(setups, len(commits)):
        possible[name] = frozenset({number})
    classes = ((len(commits),) if commits else ()) + (1,) * len(setups)
    unsettable = tuple(
        cause for cause in loss.shift.causes if cause.name != "commit" and cause.name not in explained
    )
    return Candidates(tuple(every), classes, possible, unsettable, why)


def _commits(loss: LevelLoss, root: Path, good: str, bad: str) -> tuple[str, list[Candidate], str]:
    """Return the good commit, those after it up to the bad one, oldest first, and why there are none.

    Raises:
        UsageError: see :func:`find_candidates`.
    """
    first, last = good or loss.good.commit, bad or loss.bad.commit
    for text, night, option in ((first, loss.good, "--good"), (last, loss.bad, "--bad")):
        if not text:
            why = f"the record of {minutes(night.created_ns)} has no commit; {option} REVISION names one"
            return "", [], why
    if first == last:
        return "", [], f"both nights ran commit {first[:12]}"
    before = _found(root, first, f"the last good night, {minutes(loss.good.created_ns)},", good)
    after = _found(root, last, f"the first bad night, {minutes(loss.bad.created_ns)},", bad)
    top, short = before.top, after.commit[:12]
    if before.commit == after.commit:
        return "", [], f"--good and --bad are one commit, {short}"
    if before.head != after.commit:
        raise UsageError(
            f"{top} has {before.head[:12]} checked out, and the loss was recorded at {short}: run `git checkout {short}` there first, as "
            "side A is what is checked out"
        )
    if before.dirty:
        raise UsageError(
            f"{top} has changes that are not committed, which no night had: commit or stash them, so that side A is {short}"
        )
    if git(top, "merge-base", "--is-ancestor", before.commit, after.commit).returncode:
        shallow = text_of(git(top, "rev-parse", "--is-shallow-repository")) == "true"
        deepen = "the clone is shallow: run `git fetch --unshallow`"
        why = deepen if shallow else "the branch was rewritten since"
        raise UsageError(
            f"commit {before.commit[:12]} of the last good night is not among the ancestors of {short}: {why}; or name one by --good"
        )
    listed = git(
        top, "log", "--no-show-signature", "--first-parent", "--reverse", "--format=%H%x00%P%x00%an%x00%s", f"{before.commit}..{after.commit}"
    )  # fmt: skip
    lines = [line.split("\0") for line in text_of(listed).split("\n")]
    return before.commit, [_commit(top, *line) for line in lines], ""


def _found(root: Path, name: str, whose: str, given: str) -> Revision:
    if not given and not _COMMIT.fullmatch(name):
        raise UsageError(
            f"{whose} has {name[:80]!r} for a commit, which is none; name one by --good and --bad"
        )
    try:
        return find_revision(root, name, only=False)
    except UsageError as error:
        said = str(error).removeprefix(f"--mlhpc-against rev={name}: ")
        whose = f"{whose} ran commit {name[:12]}" if not given else name
        raise UsageError(f"{whose}: {said}") from None


def _commit(top: str, name: str, parents: str, author: str, subject: str) -> Candidate:
    others = parents.split()[1:]
    said = f"{one_line(subject, 60)}, {one_line(author, 40)}"
    if others:
        merged = text_of(git(top, "rev-list", "--count", f"{name}^1..{name}"))
        said += f", a merge of {count(max(0, int(merged or 1) - 1), 'commit')}"
    return Candidate(name, said, is_commit=True)


def inside_merge(candidate: Candidate, root: Path) -> str:
    """Return the command that looks into a merge; empty for all other commits."""
    parents = text_of(git(str(root), "rev-list", "--parents", "-n", "1", candidate.name)).split()[1:]
    if len(parents) != 2:
        return ""
    base = text_of(git(str(root), "merge-base", *parents))
    return f"git checkout {parents[1][:12]}, then --good {base[:12]} --bad {parents[1][:12]}" if base else ""


def _setups(shift: Shift, beside: Iterable[Series]) -> tuple[dict[str, str], set[str]]:
    """Return the sides B that have what the nights before had, each with what that is, and the names of all causes among it.

    An image and variables are set as they were. Another environment has an old value where its newest night says so.
    """
    found: dict[str, str] = {}
    explained: set[str] = set()
    causes = {
        cause.name: cause for cause in shift.causes if cause.name not in ("commit", "nodes") and cause.before
    }
    for one in beside:
        newest = one.points[-1].night
        same = [cause for name, cause in causes.items() if newest.changes.get(name) == cause.before]
        if same:
            found[f"environment={newest.environment}"] = ", ".join(map(str, same))
            explained |= {cause.name for cause in same}
    for name, cause in causes.items():
        variable = name.removeprefix("env_")
        if name not in explained and (name == "image" or variable != name):
            found[f"variables.{variable}={cause.before}" if variable != name else f"image={cause.before}"] = (
                str(cause)
            )
            explained.add(name)
    return found, explained


# --- comparisons


@dataclass(frozen=True)
class MeasuredComparison:
    """What one comparison, by what B had, measured; or why it cannot be made. ``first`` is the median of A in the unit."""

    against: str
    runs: int = 0
    mean: float = 0.0  #: natural logarithm, positive where A is worse
    deviation: float = 0.0
    first: float = 0.0
    skipped: str = ""


@dataclass(frozen=True)
class Bisection:
    """All that a bisection needs to run its comparisons."""

    loss: LevelLoss
    candidates: Candidates
    command: tuple[str, ...]  #: of pytest, without what B is
    root: Path
    most_runs: int
    file: Path  #: where answers are written down
    noise: float  #: deviation of the difference of two nights, as a share of their level
    answers: tuple[MeasuredComparison, ...] = field(default=())

    @property
    def size(self) -> float:
        """The recorded loss as a natural logarithm."""
        return abs(math.log(self.loss.shift.after / self.loss.shift.before))

    @property
    def runs(self) -> int:
        """Runs that were made."""
        return sum(one.runs for one in self.answers)

    @property
    def possible(self) -> dict[str, frozenset[int]]:
        """Comparisons that can be made as far as one knows."""
        skipped = {one.against for one in self.answers if one.skipped}
        return {name: who for name, who in self.candidates.possible.items() if name not in skipped}

    def skip(self, name: str, why: str) -> tuple[MeasuredComparison, ...]:
        """Return what is skipped because *name* is: all revisions, where the reason is that of no revision in particular."""
        every = any(text in why for text in (NOTHING_OF_CHECKOUT, WITHOUT_REVISION))
        names = [one for one in self.possible if every and one.startswith("rev=")]
        return tuple(MeasuredComparison(one, skipped=why) for one in dict.fromkeys((name, *names)))

    @property
    def evidence(self) -> list[PairedEvidence]:
        """What was measured."""
        every = self.candidates.possible
        return [
            PairedEvidence(every[one.against], one.runs // 2, one.mean, one.deviation)
            for one in self.answers
            if not one.skipped
        ]

    @property
    def now(self) -> Posterior:
        """How probable each candidate is."""
        return bisecting.posterior(bisecting.priors(self.candidates.classes), self.size, self.evidence)


class StoppedError(MlhpcError):
    """No further comparison can be made now; what was measured is written down."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def state_file(state_dir: Path, key: SeriesKey, candidates: Candidates) -> Path:
    """Return where answers are written down: another loss of the series, or other candidates, have another file."""
    what = json.dumps([asdict(key), *(one.name for one in candidates.every), *candidates.possible])
    return state_dir / "bisect" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def read_answers(file: Path, candidates: Candidates) -> tuple[MeasuredComparison, ...]:
    """Return what was measured before; nothing, which is reported, where the file is damaged."""
    try:
        content = read_json(file.read_bytes())
        answers = tuple(MeasuredComparison(**one) for one in content["answers"])
        good = all(
            one.against in candidates.possible and math.isfinite(one.mean) and math.isfinite(one.deviation)
            and (one.skipped or one.runs >= 4) for one in answers
        )  # fmt: skip
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        tell(f"{file} cannot be read ({error}); all is measured again")
        return ()
    if not good:
        tell(f"{file} is damaged; all is measured again")
        return ()
    if answers:
        tell(
            f"going on after {count(len(answers), 'comparison')} of before; to measure all again, remove {file}"
        )
    return answers


def write_answers(plan: Bisection) -> None:
    """Write down what was measured.

    Raises:
        StoreError: it cannot be.
    """
    content = {"schema": 1, "answers": [asdict(one) for one in plan.answers]}
    replace_file(plan.file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def compared(plan: Bisection, name: str, runs: int, lock: int) -> MeasuredComparison:
    """Return what one comparison says.

    Raises:
        StoppedError: it cannot be made now, whatever B is.
    """
    precision = 100 * math.expm1(plan.size / 2)
    words = (name, f"precision={min(50.0, max(0.0001, precision)):.4f}%", f"runs={runs}")
    argv = [*plan.command, *(f"--mlhpc-against={word}" for word in words)]
    for again in (True, False):
        code, printed = _session(argv, plan, lock)
        answer, failure = _answer(plan, name, code, printed)
        if answer is not None:
            return answer
        outcome, text = failure
        if not (again and outcome in INFRASTRUCTURE and outcome not in _LASTING):
            break
        tell(f"{name}: {outcome}: {text}; once more")
    later = outcome in INFRASTRUCTURE and outcome not in _LASTING
    raise StoppedError(
        f"{name}: {outcome}: {text}" if outcome else f"{name}: {text}", LATER if later else UNKNOWN
    )


def _session(argv: Sequence[str], plan: Bisection, lock: int) -> tuple[int, str]:
    """Run a session of pytest and return its exit code and what it printed. It ends with this process, and holds its lock until then.

    Raises:
        StoppedError: pytest cannot be started.
    """
    parent = os.getpid()
    with tempfile.TemporaryFile() as file:
        try:
            process = start_in_new_session(
                argv, cwd=plan.root, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,),
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )  # fmt: skip
        except OSError as error:
            raise StoppedError(f"{argv[0]} cannot be started: {error.strerror}", UNKNOWN) from error
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C: the session ends its jobs, and removes its worktree
            process.terminate()
            process.wait()
            raise
        file.seek(0)
        return code, file.read().decode("utf-8", "replace")


def _answer(
    plan: Bisection, name: str, code: int, printed: str
) -> tuple[MeasuredComparison | None, tuple[str, str]]:
    """Return what a session measured, or that B cannot be, else the outcome and text of what is wrong with either side."""
    paths = re.findall(r"^the same for programs: (.+)$", printed, re.MULTILINE)
    if not paths:
        said = [line.removeprefix("ERROR: ") for line in printed.splitlines() if line.startswith("ERROR: ")]
        text = " ".join(said) or f"pytest ended with exit code {code}: {' '.join(printed.split())[-500:]}"
        if code == 4 and f"--mlhpc-against {name}" in text:
            return MeasuredComparison(name, skipped=text.rpartition(f"{plan.command[3]}: ")[2]), ("", "")
        log = plan.file.with_suffix(".log")
        replace_file(log, printed, follow=False)
        return None, ("", f"{text}; all that pytest said is in {log}")
    content = read_json(Path(paths[-1]).read_bytes())
    metric = plan.loss.shift.key.metric
    for test in content["tests"]:
        for result in test["results"]:
            if result["metric"] == metric and result["change"] is not None and result["noise"] is not None:
                mean = -math.log1p(result["change"])
                runs, noise, first = result["runs"], result["noise"], result["first"]
                return MeasuredComparison(name, runs, mean, noise, first), ("", "")
    failure = next(
        iter(content["failures"]), {"outcome": "no_result", "text": f"nothing was compared by {metric}"}
    )
    outcome, text = failure["outcome"], failure["text"]
    of_machine = outcome in INFRASTRUCTURE and outcome not in _OF_SOFTWARE
    if "(A):" not in text and not of_machine and outcome not in _GIVEN_UP:
        return MeasuredComparison(name, skipped=f"{outcome}: {text}"), ("", "")
    return None, (outcome, text)
