"""The metrics that a test declares: their units, what finds them in a program's output and files, and what is wrong with them. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from pytest_mlhpc.errors import nearest
from pytest_mlhpc.node.protocol.schema import BETTER, REDUCE, UNITS
from pytest_mlhpc.node.run_files import safe

#: What :func:`choices` says of a pattern that repeats a group.
MANY = 1_000_000

#: A pattern's parts: what a quantifier can follow, brackets, bars, and quantifiers with a lazy or possessive mark.
_TOKEN = re.compile(
    r"(?P<skip>\(\?[a-zA-Z]+\)|\(\?\#[^)]*\))"
    r"|(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P=\w+\))"
    r"|(?P<open>\((?:\?(?:P<\w+>|<?[=!]|[:>]|[a-zA-Z-]+:|\(\w+\)))?)"
    r"|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})[?+]?)"
    r"|(?P<plain>.)",
    re.DOTALL,
)


def wrong_pattern(pattern: object, *, one_group: bool = True) -> str:
    """Return why *pattern* cannot be searched for, or an empty string: no expression, not one group, or without end."""
    if not isinstance(pattern, str):
        return f"pattern {pattern!r} is no text"
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"pattern {pattern!r} is no regular expression: {error}"
    if one_group and groups != 1:
        return f"pattern {pattern!r} has {groups} groups; exactly one must catch the figure"
    if _nested_repeat(pattern):
        return f"pattern {pattern!r} repeats a repeat, which can take for ever"
    return ""


def choices(pattern: str) -> int:
    """Return how many repeats of any kind and alternatives a search may have to try again; MANY if it repeats a group.

    The time of a search grows at most like the text's length to the power of one more than this, below MANY.
    """
    count, before = 0, ""
    for kind, text in _tokens(pattern):
        if kind == "repeat" and before == "close":
            return MANY
        count += kind == "bar" or (kind == "repeat" and _span(text) != "fixed")
        before = kind
    return count


@dataclass
class _Group:
    """What was read of one group so far; ``needed``: its current branch has what must match by itself."""

    open_ended: bool = False  #: holds an open-ended repeat
    variable: bool = False  #: its current branch holds a `?` or a repeat of bounded but varying length
    needed: bool = False
    loose: bool = False  #: some branch is made of varying repeats alone: two of its turns can match like one
    branches: list[str] = field(default_factory=lambda: [""])

    def end_branch(self) -> None:
        self.loose = self.loose or (self.variable and not self.needed)
        self.variable = self.needed = False

    @property
    def endless(self) -> bool:
        """Whether repeating it without bound can take exponential time."""
        return self.open_ended or self.loose or len(set(self.branches)) < len(self.branches)


def _nested_repeat(pattern: str) -> bool:
    r"""Return whether an open-ended repeat holds another, as in ``(a+)+``, or a body that can split in many ways.

    Such are ``(\d{1,3},?)+``, of varying repeats alone, and ``(a|a)+``, of equal alternatives.
    """
    stack = [_Group()]
    tokens = [*_tokens(pattern), ("end", "")]
    for (kind, text), (after, quantifier) in pairwise(tokens):
        if kind == "open":
            stack.append(_Group())
        elif kind == "bar":
            stack[-1].end_branch()
            stack[-1].branches.append("")
        elif kind in {"atom", "plain", "close"}:
            inner, body = _Group(), text
            if kind == "close" and len(stack) > 1:
                inner = stack.pop()
                inner.end_branch()
                body = f"({'|'.join(inner.branches)})"
            span = _span(quantifier) if after == "repeat" else "fixed"
            if span == "open" and inner.endless:
                return True
            _take(stack[-1], inner, span, body + (quantifier if after == "repeat" else ""))
    return False


def _take(outer: _Group, inner: _Group, span: str, text: str) -> None:
    """Note in *outer* an atom or a whole group, repeated as *span* says."""
    outer.open_ended = outer.open_ended or inner.open_ended or span == "open"
    outer.variable = outer.variable or inner.loose or span == "varying"
    outer.needed = outer.needed or (span == "fixed" and not inner.loose)
    outer.branches[-1] += text


def _span(quantifier: str) -> str:
    """Return open, varying or fixed, as the number of turns is without bound, between two bounds, or one number."""
    bounds = re.match(r"\{(\d*)(,?)(\d*)\}", quantifier)
    if bounds is None:
        return "varying" if quantifier.startswith("?") else "open"
    low, comma, high = bounds.groups()
    if comma and not high:
        return "open"
    return "varying" if comma and int(low or 0) != int(high) else "fixed"


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(pattern):
        if match.lastgroup and match.lastgroup != "skip":
            yield match.lastgroup, match[0]


_SI = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}  # fmt: skip
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}

#: What may stand behind a prefix -> base unit and factor.
_PREFIXED = {
    "s": ("s", 1.0), "B": ("B", 1.0), "bit": ("B", 1 / 8), "b": ("B", 1 / 8), "FLOP": ("FLOP", 1.0), "FLOPS": ("FLOP/s", 1.0),
    "J": ("J", 1.0), "W": ("W", 1.0), "Hz": ("Hz", 1.0), "IOPS": ("items/s", 1.0), "op": ("items", 1.0), "ops": ("items", 1.0),
}  # fmt: skip
_PLAIN = {
    "1": ("1", 1.0), "%": ("1", 0.01), "min": ("s", 60.0), "h": ("s", 3600.0), "K": ("K", 1.0),
    **dict.fromkeys(("sample", "samples", "img", "image", "images"), ("samples", 1.0)),
    **dict.fromkeys(("item", "items", "it", "step", "steps"), ("items", 1.0)),
    **dict.fromkeys(("token", "tokens"), ("tokens", 1.0)),
}  # fmt: skip
_PREFIX = re.compile(rf"({'|'.join([*_BINARY, *_SI])})(.+)")

#: A choice of what can be written, for messages.
EXAMPLES = "1, %, s, ms, us, B, GiB, B/s, MB/s, GB/s, Gbit/s, FLOP/s, GFLOP/s, TFLOPS, J, W, Hz, K, items/s, samples/s, img/s, tokens/s"


def base_unit(text: object) -> tuple[str, float]:
    """Return the base unit of *text* and the factor to it: ``MB/s`` gives ``B/s`` and 1e6.

    Raises:
        ValueError: it is not in the table.
    """
    unit, factor = _of_table(text) if isinstance(text, str) else ("", 1.0)
    if unit not in UNITS:
        raise ValueError(_unknown_unit(text))
    return unit, factor


def _of_table(text: str) -> tuple[str, float]:
    top, slash, bottom = text.partition("/")
    unit, factor = _single(top)
    if not slash:
        return unit, factor
    below, divisor = _single(bottom)
    return f"{unit}/{below}", factor / divisor


def _unknown_unit(text: object) -> str:
    """Say what could have been written in place of *text*: the units that look like it, or a choice of all."""
    small = {prefix for prefix, factor in _SI.items() if factor < 1}  # of seconds, joules and watts alone
    prefixed = (
        f"{prefix}{unit}"
        for unit in _PREFIXED
        for prefix in ("", *_SI, *_BINARY)
        if prefix not in small or unit in {"s", "J", "W"}
    )
    written = (f"{top}{bottom}" for top in (*_PLAIN, *prefixed) for bottom in ("", "/s", "/J"))
    known = [unit for unit in written if _of_table(unit)[0] in UNITS]
    near = []
    if isinstance(text, str):
        near = [unit for unit in known if unit.lower() == text.lower()][:3] or get_close_matches(
            text, known, n=3
        )
    if near:
        return f"unit {text!r} is unknown; did you mean {' or '.join(map(repr, near))}?"
    return f"unit {text!r} is unknown; write one like {EXAMPLES}, or 1 for a plain number"


def better_of(unit: str) -> str | None:
    """Return which direction of a figure in this base unit is an improvement, None where it does not follow."""
    if unit.endswith(("/s", "/J")):
        return "higher"
    return "lower" if unit in {"s", "J"} else None


def _single(text: str) -> tuple[str, float]:
    """Return the base of a unit without a slash, and its factor; an unknown one is its own base."""
    if found := _PLAIN.get(text) or _PREFIXED.get(text):
        return found
    match = _PREFIX.fullmatch(text)
    base, factor = _PREFIXED.get(match[2], ("", 1.0)) if match else ("", 1.0)
    if not match or not base:
        return text, 1.0
    return base, factor * ({**_SI, **_BINARY}[match[1]])


_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class Metric:
    r"""One figure that a program prints: ``Metric("triad", r"Triad:\s+(\S+)", "MB/s", reduce="max")``.

    Args:
        name: snake_case, as in ``run["triad"]``.
        pattern: regular expression with one group; each match in the output is a sample. ``^`` and ``$`` match at each
            line. None, and nothing of what follows: the program prints JSON lines, ``{"metric": "triad", "value": 12.5}``.
        unit: of the printed figure, such as ``MB/s``, ``us``, ``GFLOP/s``, ``%``, ``img/s``; ``1`` is a plain number.
            Figures are recorded in base units: B/s, s, FLOP/s, 1, samples/s.
        better: ``higher``, ``lower`` or ``none`` (never judged). None: it follows from the unit; rates are better
            higher, times lower.
        reduce: how samples become the value: median, min, max, first, last, sum, mean.
        tolerance: how far equal runs differ, as a share (0.1 is 10 %), where that is more than usual.
        file: a file that the program writes into its folder, in which *pattern* is looked for instead of in the output.
        key: of a file .json or .jsonl the path of the figure, such as ``results.rate`` (``*``: each of a list), of .csv and
            .tsv the column, of which each row is a sample.
        extract: a function that takes what the run left (``output``, ``errors``, ``json(name)``, ``text(name)``,
            ``path(name)``) and returns a number, or a list of samples. It runs in a process of its own.
    """

    name: str
    pattern: str | None = None
    unit: str = "1"
    better: Literal["higher", "lower", "none"] | None = None
    reduce: Literal["median", "min", "max", "first", "last", "sum", "mean"] = "median"
    tolerance: float | None = None
    file: str | None = None
    key: str | None = None
    extract: Callable[[Any], Any] | None = None
    mistake: str = field(default="", init=False, repr=False)  #: of the call

    def rule(self) -> dict[str, Any]:
        """Return what node and judge need of a metric without a mistake, as plain JSON, in base units."""
        unit, scale = base_unit(self.unit)
        found = {
            "pattern": self.pattern,
            "unit": unit,
            "better": self.better or better_of(unit),
            "scale": None if scale == 1 else scale,
            "declared": None if self.unit == unit else self.unit,
            "reduce": None if self.reduce == "median" else self.reduce,
            "tolerance": self.tolerance,
            "file": self.file,
            "key": self.key,
            "extract": True if self.extract is not None else None,
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
    texts += _wrong_source(metric)
    texts += _wrong_unit(metric)
    if metric.reduce not in REDUCE:
        texts.append(f"reduce {metric.reduce!r} is not one of {', '.join(REDUCE)}")
    share = metric.tolerance
    if share is not None and (
        isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1
    ):
        texts.append(f"tolerance {share!r} is no share between 0 and 1, such as 0.1 for 10 %")
    return texts


#: What a file is read as, by the end of its name; all others are text.
JSON_FILES, CSV_FILES = (".json", ".jsonl", ".ndjson"), (".csv", ".tsv")


def _wrong_source(metric: Metric) -> list[str]:
    """Return what is wrong with where the figure is taken from."""
    given = [name for name in ("pattern", "key", "extract") if getattr(metric, name) is not None]
    if len(given) > 1:
        return [f"has both {' and '.join(given)}; one of them finds the figure"]
    if metric.extract is not None and metric.file is not None:
        return ["has both file and extract; the function reads files itself, by run.text(name)"]
    if metric.extract is not None:
        text = wrong_function("extract", metric.extract)
    elif metric.file is None:
        text = "" if metric.key is None else f"key {metric.key!r} is of a file; name that by file='m.json'"
    else:
        text = _wrong_file(metric.file, metric.key, metric.pattern)
    return [text] if text else []


def _wrong_file(file: object, key: object, pattern: object) -> str:
    if not isinstance(file, str) or not safe(file) or set("*?[") & set(file):
        return f"file {file!r} is no path of one file in the run's folder"
    if key is not None and not (isinstance(key, str) and key):
        return f"key {key!r} is no text"
    has_keys = PurePosixPath(file).suffix in {*JSON_FILES, *CSV_FILES}
    if key is not None and not has_keys:
        return f"file {file!r} has no keys, as {', '.join((*JSON_FILES, *CSV_FILES))} have; give a pattern"
    if key is None and pattern is None:
        return f"file {file!r}: say what of it: {'key' if has_keys else 'pattern'}=..."
    return ""


def wrong_function(what: str, function: object) -> str:
    """Return why *function* cannot be called with a run, or an empty string."""
    if not callable(function):
        return f"{what} {function!r:.80} is no function; write {what}=lambda run: ..."
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return f"{what} {getattr(function, '__qualname__', function)} does not take one argument, the run"
    except ValueError:  # of a few built-in functions nobody knows what they take
        return ""
    return ""


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
