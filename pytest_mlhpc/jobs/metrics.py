"""The metrics of a program as its test declares them, and what is wrong with them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from pytest_mlhpc.errors import nearest
from pytest_mlhpc.jobs.patterns import wrong_pattern
from pytest_mlhpc.jobs.units import base_unit, better_of
from pytest_mlhpc.node.protocol.schema import BETTER, REDUCE

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class Metric:
    r"""One figure that a program prints: ``Metric("triad", r"Triad:\s+(\S+)", "MB/s", reduce="max")``.

    Args:
        name: snake_case, as in ``run["triad"]``.
        pattern: regular expression with one group; each match in the output is a sample. ``^`` and ``$`` match at each
            line. None: the program prints JSON lines, ``{"metric": "triad", "value": 12.5}``.
        unit: of the printed figure, such as ``MB/s``, ``us``, ``GFLOP/s``, ``%``, ``img/s``; ``1`` is a plain number.
            Figures are recorded in base units: B/s, s, FLOP/s, 1, samples/s.
        better: ``higher``, ``lower`` or ``none`` (never judged). None: it follows from the unit; rates are better
            higher, times lower.
        reduce: how samples become the value: median, min, max, first, last, sum, mean.
        tolerance: how far equal runs differ, as a share (0.1 is 10 %), where that is more than usual.
    """

    name: str
    pattern: str | None = None
    unit: str = "1"
    better: Literal["higher", "lower", "none"] | None = None
    reduce: Literal["median", "min", "max", "first", "last", "sum", "mean"] = "median"
    tolerance: float | None = None
    mistake: str = field(default="", init=False, repr=False)  #: of the call

    def rule(self) -> dict[str, Any]:
        """Return what node and judge need of a metric without a mistake, as plain JSON, in base units."""
        unit, scale = base_unit(self.unit)
        found = {
            "pattern": self.pattern,
            "unit": unit,
            "better": self.better or better_of(unit),
            "scale": None if scale == 1 else scale,
            "reduce": None if self.reduce == "median" else self.reduce,
            "tolerance": self.tolerance,
        }
        return {key: value for key, value in found.items() if value is not None}


if not TYPE_CHECKING:
    _strict = Metric.__init__

    def _lenient(self: Metric, *args: Any, **options: Any) -> None:
        """Store a call that cannot be understood: an exception here would take all tests of the file away."""
        try:
            _strict(self, *args, **options)
        except TypeError as error:
            _strict(self, str(args[0] if args else options.get("name", "")))
            names = [one.name for one in fields(Metric) if one.init]
            object.__setattr__(self, "mistake", mistake_of(error, "Metric", names))

    Metric.__init__ = _lenient


def mistake_of(error: TypeError, what: str, names: Iterable[str]) -> str:
    """Return what a call of *what* got wrong, whose arguments have these *names*."""
    if found := _UNEXPECTED.search(str(error)):
        hint = nearest(found[1], names)
        return f"{what} has no {found[1]!r}" + (f" (did you mean {hint!r}?)" if hint else "")
    return f"{what} {str(error).partition('() ')[2] or error}"


def wrong_metrics(metrics: Sequence[Any]) -> list[str]:
    """Return what is wrong with the metrics of a program."""
    texts = []
    for metric in metrics:
        if isinstance(metric, Metric):
            name = metric.name if isinstance(metric.name, str) else repr(metric.name)
            texts += [f"{name[:64]}: {text}" for text in _wrong(metric)]
        else:
            texts.append(f"expected Metric(name, pattern, unit), found {metric!r}")
    names = [metric.name for metric in metrics if isinstance(metric, Metric)]
    texts += [f"{name}: is declared twice" for name in names if names.count(name) > 1][:1]
    return texts


def _wrong(metric: Metric) -> list[str]:
    if metric.mistake:
        return [metric.mistake]
    texts = []
    if not isinstance(metric.name, str) or not _NAME.match(metric.name):
        texts.append("a metric's name is snake_case of at most 64 characters")
    if metric.pattern is not None and (text := wrong_pattern(metric.pattern)):
        texts.append(text)
    texts += _wrong_unit(metric)
    if metric.reduce not in REDUCE:
        texts.append(f"reduce {metric.reduce!r} is not one of {', '.join(REDUCE)}")
    share = metric.tolerance
    if share is not None and (
        isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1
    ):
        texts.append(f"tolerance {share!r} is no share between 0 and 1, such as 0.1 for 10 %")
    return texts


def _wrong_unit(metric: Metric) -> list[str]:
    try:
        unit, _ = base_unit(metric.unit)
    except ValueError as error:
        return [str(error)]
    if metric.better is None and better_of(unit) is None:
        return [f"say better='higher', 'lower' or 'none': it does not follow from the unit {metric.unit!r}"]
    if metric.better is not None and metric.better not in BETTER:
        return [f"better {metric.better!r} is not one of {', '.join(BETTER)}"]
    return []
