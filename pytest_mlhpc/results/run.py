"""What a test sees of its run, of its baseline, and of the metrics of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from pytest_mlhpc.errors import RunFailure, nearest
from pytest_mlhpc.judge.verdict import Judgement, MetricVerdict, Verdict
from pytest_mlhpc.results.outcome import Outcome
from pytest_mlhpc.results.schema import Measurement, Metric

#: Verdicts with which ``run >= baseline`` does not hold.
WORSE = frozenset({Verdict.REGRESSED, Verdict.DRIFTED})


class VerdictWarning(UserWarning):
    """A run passed, and there is something to know about it."""


class ImprovedWarning(VerdictWarning):
    """A metric is better than its baseline: the baseline should be raised."""


class InconclusiveWarning(VerdictWarning):
    """The machine was slower or busy: nothing can be said about the code."""


WARNINGS: dict[Verdict, type[VerdictWarning]] = {
    Verdict.IMPROVED: ImprovedWarning,
    Verdict.INCONCLUSIVE: InconclusiveWarning,
}


_HEADLINES = {
    Verdict.NEW: "the first run of its kind on this machine is now its provisional baseline",
    Verdict.INCONCLUSIVE: "nothing can be said about this run",
    Verdict.UNJUDGED: "the run is not judged",
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


class Run:
    """A measured and judged run: ``run["loss"].last``, ``run >= baseline``, ``run.measurement``, ``run.verdict``."""

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

    def __getitem__(self, name: str) -> Metric:
        """Return a metric; KeyError names the nearest and lists all."""
        metric = self.measurement.metric(name)
        if metric is None:
            raise KeyError(_no_metric(name, list(self), "metric"))
        return metric

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
            f"or compare one metric, such as run[{next(iter(self), 'name')!r}].value"
        )


def explain(judgement: Judgement) -> list[str]:
    """Return lines that say, metric by metric, how a run compares with its baseline."""
    lines = [_HEADLINES.get(judgement.verdict, f"the run has {judgement.verdict.value}")]
    # The judge explains each metric with its evidence; without that, its figures are all there is to say.
    lines += [f"  {line}" for line in judgement.explanation or map(_line, judgement.metrics)]
    if judgement.accept_command:
        lines.append(f"  to accept the new value: {judgement.accept_command}")
    return lines


def figure(value: float | None) -> str:
    """Return a figure for people: four significant digits."""
    return "-" if value is None else f"{value:.4g}"


def change(verdict: MetricVerdict) -> str:
    """Return the relative change as signed per cent; plus is better."""
    return "-" if verdict.change is None else f"{100 * verdict.change:+.1f} %"


def _line(verdict: MetricVerdict) -> str:
    text = f"{verdict.name}: {figure(verdict.value)} {verdict.unit}, {verdict.verdict.value}"
    if verdict.baseline is not None:
        text += f"; baseline {figure(verdict.baseline)}, {change(verdict)}, fence {100 * verdict.width:.1f} %"
    if verdict.reruns:
        text += f"; re-runs {', '.join(map(figure, verdict.reruns))}"
    return text + (f"; {verdict.reason}" if verdict.reason else "")


def _no_metric(name: str, names: list[str], what: str) -> str:
    hint = nearest(str(name), names)
    return f"no {what} {name!r}{f' (did you mean {hint!r}?)' if hint else ''}; there are: {', '.join(names)}"
