"""What a test sees of its run, of its baseline, and of the metrics of both."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, NoReturn

from pytest_mlhpc.errors import RunFailure, nearest
from pytest_mlhpc.jobs.job import Outcome
from pytest_mlhpc.jobs.metrics import base_unit
from pytest_mlhpc.judge.evidence import metric_lines
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.node.run_files import place_of_run
from pytest_mlhpc.provision.output_search import RankFiles, RunFiles
from pytest_mlhpc.store.record import NEEDED_FAILED, WORSE, Judgement, MetricVerdict, Verdict
from pytest_mlhpc.store.text import quantity


class VerdictWarning(UserWarning):
    """A run passed, and there is something to know about it."""


class ImprovedWarning(VerdictWarning):
    """A metric is better than its baseline: the baseline should be raised."""


class WrongBaselineWarning(VerdictWarning):
    """A month of nights lies at another level than the accepted one: the baseline is wrong."""


class SuspectWarning(VerdictWarning):
    """A metric may be worse than it was: the next nights decide."""


class InconclusiveWarning(VerdictWarning):
    """The machine was slower or busy: nothing can be said about the code."""


WARNINGS: dict[Verdict, type[VerdictWarning]] = {
    Verdict.IMPROVED: ImprovedWarning,
    Verdict.WRONG_BASELINE: WrongBaselineWarning,
    Verdict.SUSPECT: SuspectWarning,
    Verdict.INCONCLUSIVE: InconclusiveWarning,
}


class Baseline:
    """The accepted values of a run's judged metrics: ``baseline["effective_throughput"]``; None where there is none."""

    def __init__(self, judgement: Judgement) -> None:
        self._verdicts = {verdict.name: verdict for verdict in judgement.metrics}

    def __getitem__(self, name: str) -> float | None:
        """Return the value; KeyError names the judged metrics."""
        try:
            return self._verdicts[name].baseline
        except KeyError:
            raise KeyError(_no_metric(name, list(self._verdicts), "judged metric")) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._verdicts)

    def __repr__(self) -> str:
        return f"<baseline of {', '.join(self._verdicts) or 'nothing'}>"


class MeasuredMetric(MetricValue):
    """A metric of a run: ``run["rate"] > 100`` compares its value, which is in base units; ``.to("GB/s")`` converts it."""

    def to(self, unit: str) -> float:
        """Return the value in *unit*.

        Raises:
            ValueError: it is no unit, or that of something else.
        """
        base, factor = base_unit(unit)
        if base != self.unit:
            raise ValueError(f"{self.name} is in {self.unit}, which is not converted to {unit}")
        return self.value / factor

    def __float__(self) -> float:
        return self.value

    def __lt__(self, other: object) -> bool:
        return self._compare(lt, "<", other)

    def __le__(self, other: object) -> bool:
        return self._compare(le, "<=", other)

    def __gt__(self, other: object) -> bool:
        return self._compare(gt, ">", other)

    def __ge__(self, other: object) -> bool:
        return self._compare(ge, ">=", other)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, MetricValue) else other))

    def __hash__(self) -> int:
        return hash((self.name, self.value))

    def __repr__(self) -> str:
        return f"<{self.name} {quantity(self.value, self.unit)}>"

    def _compare(self, compare: Callable[[float, float], bool], sign: str, other: object) -> bool:
        if isinstance(other, MetricValue) and other.unit != self.unit:
            raise TypeError(f"{self.name} is in {self.unit}, and {other.name} in {other.unit}")
        value = other.value if isinstance(other, MetricValue) else other
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"{self.name} is compared with a number in {self.unit}, as in run[{self.name!r}] {sign} 1.0; "
                f"found {other!r}"
            )
        return compare(self.value, float(value))


class Run:
    """A measured and judged run: ``run["loss"].last``, ``run.output``, ``run.json("m.json")``, ``run >= baseline``, ``run.verdict``."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.judgement = outcome.judgement or Judgement(Verdict.UNJUDGED)

    @property
    def measurement(self) -> Measurement:
        """What was measured.

        Raises:
            RunFailure: the run was broken. Tests do not get that far; fixtures that use ``run`` may.
        """
        if self.outcome.measurement is None:
            failure = self.outcome.failure
            raise RunFailure(failure.outcome if failure else "no_result", "the run has no measurement")
        return self.outcome.measurement

    @property
    def verdict(self) -> Verdict:
        """The verdict of all judged metrics together."""
        return self.judgement.verdict

    @property
    def output(self) -> str:
        """What the program printed, standard output and error line by line as they came; of several ranks, what their launcher did.

        Raises:
            RunFailure: the folder of the run is gone.
        """
        return self._files().output

    @property
    def errors(self) -> str:
        """What the program wrote to its standard error, at most 1 MiB; of several ranks, what their launcher passed on.

        Raises:
            RunFailure: the folder of the run is gone, or the program was its container's command: then nobody parts them.
        """
        return self._files().errors

    @property
    def ranks(self) -> tuple[RankFiles, ...]:
        """What each rank of a program printed: ``run.ranks[3].output``, ``run.ranks[3].errors``.

        Raises:
            RunFailure: the folder of the run is gone, or its launcher does not say which rank printed a line.
        """
        return self._files().ranks

    @property
    def log(self) -> Path:
        """The file with what the program printed.

        Raises:
            RunFailure: the folder of the run is gone.
        """
        return self._files().log

    def path(self, name: str) -> Path:
        """Return where the artifact *name* lies, a path in the folder of the run.

        Raises:
            RunFailure: the program has not written it, or the test does not name it among its ``artifacts``.
        """
        return self._files().path(name)

    def text(self, name: str) -> str:
        """Return the content of the artifact *name* as text."""
        return self._files().text(name)

    def json(self, name: str) -> Any:
        """Return the content of the artifact *name*, a JSON file.

        Raises:
            RunFailure: it is missing, or no JSON.
        """
        return self._files().json(name)

    def _files(self) -> RunFiles:
        """Return what the run left.

        Raises:
            RunFailure: the folder of the run is gone.
        """
        folder = Path(self.outcome.directory)
        if not folder.is_dir():
            raise RunFailure("no_result", f"the run's output was removed with its folder {folder}")
        return RunFiles(*place_of_run(folder, self.measurement.run_id), self.outcome.artifacts)

    def needed(self, name: str) -> RunFiles | None:
        """Return what the run of the fixture *name* (``prepare``) has left; None of a build, which lies on nodes.

        Raises:
            RunFailure: it failed, or a build did; the run was not made.
        """
        failure = self.outcome.failure
        if failure is not None and failure.outcome in NEEDED_FAILED:
            raise RunFailure(failure.outcome, failure.text)
        found = self.outcome.needed.get(name)
        return RunFiles(Path(found.folder), Path(found.log), found.artifacts) if found else None

    def __getitem__(self, name: str) -> MeasuredMetric:
        """Return a metric; KeyError names the nearest and lists all."""
        metric = self.measurement.metric(name)
        if metric is None:
            raise KeyError(_no_metric(name, list(self), "metric"))
        return MeasuredMetric(**{field.name: getattr(metric, field.name) for field in fields(metric)})

    def __getattr__(self, name: str) -> NoReturn:
        """Say where a metric is found that was looked for as an attribute."""
        text = f"a run has no attribute {name!r}"
        names = list(self) if not name.startswith("_") and self.outcome.measurement else []
        if metric := nearest(name, names):
            text += f"; its metrics are found by name: run[{metric!r}]"
        raise AttributeError(text)

    def __iter__(self) -> Iterator[str]:
        return (metric.name for metric in self.measurement.metrics)

    def __contains__(self, name: object) -> bool:
        return any(metric.name == name for metric in self.measurement.metrics)

    def __ge__(self, other: object) -> bool:
        """Whether no judged metric has regressed; the judge has compared before the test's body ran."""
        if not isinstance(other, Baseline):
            self._refuse(">=")
        if self.verdict is Verdict.UNJUDGED:
            raise RunFailure(
                "no_baseline", "this run is not judged (judge=False), so there is nothing to compare"
            )
        return self.verdict not in WORSE

    def __gt__(self, other: object) -> bool:
        self._refuse(">")

    def __le__(self, other: object) -> bool:
        self._refuse("<=")

    def __lt__(self, other: object) -> bool:
        self._refuse("<")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Baseline, int, float)):
            self._refuse("==")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<run {self.outcome.record_id}: {self.verdict.value}>"

    def _refuse(self, operator: str) -> NoReturn:
        raise TypeError(
            f"a run has many metrics and cannot be compared by {operator}: write `run >= baseline`, "
            f"or compare one metric, such as run[{next(iter(self), 'name')!r}] {operator} 1.0"
        )


def explain(judgement: Judgement) -> list[str]:
    """Return lines that say how a run compares with its baseline: the worst metric first, and then its evidence."""
    found = judgement.explanation or [line for one in judgement.metrics for line in metric_lines(one)]
    lines = [*found] or [f"the run is {judgement.verdict.value}"]
    if judgement.accept_command:
        lines.append(f"to accept the new value: {judgement.accept_command}")
    return lines


def change(verdict: MetricVerdict) -> str:
    """Return the relative change as signed per cent; plus is better."""
    return "-" if verdict.change is None else f"{100 * verdict.change:+.1f} %"


def _no_metric(name: str, names: list[str], what: str) -> str:
    hint = nearest(str(name), names)
    return f"no {what} {name!r}{f' (did you mean {hint!r}?)' if hint else ''}; there are: {', '.join(names)}"
