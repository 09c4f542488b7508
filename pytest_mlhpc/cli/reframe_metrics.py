"""Figures, references and conditions of a ReFrame test as the source of our metrics, references and conditions.

Open it when a figure is taken over wrongly. ReFrame searches a pattern in the whole output, line by line for ``^`` and ``$``, and so
do we; it takes any of a pattern's groups, we take the one that there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_mlhpc.cli.reframe_python import SanityCall, unknown_in
from pytest_mlhpc.cli.reframe_suite import ReframeFigure, ReframeTest, references_in, texts
from pytest_mlhpc.jobs.metrics import base_unit, better_of, wrong_pattern


@dataclass(frozen=True)
class OpenQuestion:
    """What needs a person; ``kind`` is the word by which questions are counted. A hint alone lets the test run."""

    kind: str
    text: str
    hint: bool = False


@dataclass(frozen=True)
class _Found:
    """Where a figure stands: a pattern with one group, the samples that count, and the file; empty: the output."""

    pattern: str
    reduce: str
    file: str = ""


#: Function of ``sn`` over all matches -> how we reduce them.
_REDUCE: Final = {"avg": "mean", "max": "max", "min": "min", "sum": "sum"}
_OUTPUT: Final = ("⟨self.stdout⟩", "⟨self.stderr⟩")
#: Conversions of a match that a figure has anyhow.
_NUMBERS: Final = (None, "⟨float⟩", "⟨int⟩")


def source(value: Any) -> str:
    """Return Python that makes *value*, texts in double quotes."""
    if isinstance(value, str):
        if "\\" in value and not re.search(r'["\n\r]|\\\Z', value) and value.isprintable():
            return f'r"{value}"'
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text and "\\'" not in text else text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{source(key)}: {source(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(source, value))})"
    return f"[{', '.join(map(source, value))}]" if isinstance(value, list) else repr(value)


def metrics(test: ReframeTest, systems: Sequence[str]) -> tuple[list[str], str, list[OpenQuestion]]:
    """Return the source of each metric and of ``reference``, and what needs a person."""
    questions: list[OpenQuestion] = []
    promised = _references(test)
    made, names = [], set[str]()
    reference: dict[str, Any] = {}
    for figure in test.figures.values():
        name = _name(figure.name)
        name = name if name not in names else f"{name}_{len(names)}"
        names.add(name)
        values = promised.get(figure.name, {})
        arguments, better, asked = _metric(name, figure, values)
        made.append(f"Metric({', '.join(arguments)})")
        places, asked_of_places = _places(name, values, better, systems)
        reference |= {name: places} if places else {}
        questions += asked + asked_of_places
    unused = promised.keys() - test.figures.keys()
    for name in sorted(unused):
        questions.append(
            OpenQuestion("reference", f"there is a reference of {name}, and no figure of that name was found")
        )
    given = test.attributes.get("reference")
    if given and (not isinstance(given, dict) or unknown_in(given)):
        questions.append(
            OpenQuestion("reference", f"references are computed by ReFrame: `{unknown_in(given) or given}`")
        )
    return made, source(reference) if reference else "", questions


def _references(test: ReframeTest) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for system, name, value in references_in(test):
        found.setdefault(name, {})[system] = value
    return found


def _name(name: str) -> str:
    text = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")[:56] or "figure"
    return text if text[0].isalpha() else f"m_{text}"


#: How units are written elsewhere -> here.
_UNIT_WORDS: Final = (
    (r"(?i)bytes?", "B"), (r"(?i)(?<=/)(?:seconds|second|sec)\b", "s"), (r"(?i)^(?:seconds|second|secs|sec)$", "s"),
    (r"(?i)([kmgtp])flops?(?:/s)?$", r"\1FLOP/s"), (r"(?i)^usec(?:onds)?$|^microseconds$", "us"), (r"(?i)^msec(?:onds)?$", "ms"),
    (r"(?i)^minutes?$", "min"), (r"(?i)^hours?$", "h"),
)  # fmt: skip


def _unit(text: str) -> str:
    """Return *text* as a unit that we know; empty: it is none."""
    for pattern, word in _UNIT_WORDS:
        text = re.sub(pattern, word, text.strip())
    text = re.sub(r"^([mgtp])(?=FLOP)", lambda match: match[0].upper(), text)
    try:
        base_unit(text)
    except ValueError:
        return ""
    return text


def _metric(
    name: str, figure: ReframeFigure, values: dict[str, Any]
) -> tuple[list[str], str, list[OpenQuestion]]:
    """Return the arguments of a metric, its better direction, and what needs a person."""
    questions = []
    tuples = [value for value in values.values() if isinstance(value, (tuple, list)) and len(value) >= 3]
    declared = figure.unit or next((str(value[3]) for value in tuples if len(value) > 3), "")
    unit = _unit(declared)
    found = _find(figure.found)
    arguments = [source(name)]
    if isinstance(found, str):
        questions.append(
            OpenQuestion(
                "metric",
                f"{name} is `{figure.found.source if isinstance(figure.found, SanityCall) else unknown_in(figure.found) or figure.found}`: {found}",
            )
        )
    else:
        arguments.append(source(found.pattern))
    arguments.append(f"unit={source(unit or '1')}" if len(arguments) == 1 else source(unit or "1"))
    better = better_of(base_unit(unit or "1")[0]) or ""
    if not better:
        better = _direction(tuples)
        arguments.append(f"better={source(better)}")
    if declared and not unit:
        text = f"{name} is in {declared!r}, which is no unit here: it is a plain number"
        questions.append(OpenQuestion("metric", text, hint=better != "none"))
    if better == "none":
        questions.append(
            OpenQuestion("metric", f"{name}: is higher or lower better? No unit and no bound says it")
        )
    if not isinstance(found, str):
        arguments += [
            f"reduce={source(found.reduce)}",
            *([f"file={source(found.file)}"] if found.file else []),
        ]
    return arguments, better, questions


def _direction(values: Sequence[Any]) -> str:
    """Return what the bounds of references say: a lower bound alone means that higher is better."""
    said = {(value[1] is None, value[2] is None) for value in values}
    return {frozenset({(False, True)}): "higher", frozenset({(True, False)}): "lower"}.get(
        frozenset(said), "none"
    )


def _find(call: Any) -> _Found | str:
    """Return where the figure stands that *call* extracts, or why a person has to say it."""
    if not isinstance(call, SanityCall):
        return "it is computed; write pattern= or extract="
    if call.name == "defer" and len(call.args) == 1:
        return _find(call.args[0])
    if (
        call.name in _REDUCE
        and len(call.args) == 1
        and isinstance(call.args[0], SanityCall)
        and call.args[0].name == "extractall"
    ):
        found = _extracted(call.args[0])
        return found if isinstance(found, str) else replace(found, reduce=_REDUCE[call.name])
    return _extracted(call) if call.name == "extractsingle" else "it is computed; write pattern= or extract="


def _extracted(call: SanityCall) -> _Found | str:
    given = dict(zip(("patt", "filename", "tag", "conv", "item"), call.args, strict=False)) | dict(
        call.options
    )
    pattern, file, tag = given.get("patt"), given.get("filename"), given.get("tag", 0)
    if not isinstance(pattern, str) or unknown_in(pattern) or not isinstance(tag, (str, int)):
        return "its pattern is computed"
    if given.get("conv") not in _NUMBERS:
        return "its match is converted by a function; write extract="
    item = given.get("item", 0)
    if item not in (0, -1):
        return f"it is match number {item} of several; write extract="
    if file not in _OUTPUT and (not isinstance(file, str) or unknown_in(file) or not _is_inside(file)):
        return "the file that it stands in is computed; write file="
    one = one_group(pattern, tag)
    if why := wrong_pattern(one) if one else "its pattern refers to its own groups":
        return why
    return _Found(one, "last" if item == -1 else "first", "" if file in _OUTPUT else str(file))


def _is_inside(file: str) -> bool:
    return not file.startswith("/") and ".." not in file.split("/")


#: A bracket that opens a group which is captured, with its name; escaped and bracketed signs are passed over.
_GROUP: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?P<(?P<name>\w+)>|(?!\?))", re.DOTALL)


def one_group(pattern: str, tag: str | int) -> str:
    """Return *pattern* with the group *tag* alone, 0 for the whole of it; empty: it cannot be said so."""
    if re.search(r"\\[1-9]|\(\?P=|\(\?\(", pattern):
        return ""
    number = 0

    def changed(match: re.Match[str]) -> str:
        nonlocal number
        if match[0][0] != "(":
            return match[0]
        number += 1
        return "(" if tag in {number, match["name"] or None} else "(?:"

    changed_pattern = _GROUP.sub(changed, pattern)
    return f"({changed_pattern})" if tag == 0 else changed_pattern


def _places(
    name: str, values: dict[str, Any], better: str, systems: Sequence[str]
) -> tuple[dict[str, Any], list[OpenQuestion]]:
    """Return system -> promise of one figure, and what needs a person. ReFrame's 0 promises nothing, nor does a missing bound."""
    found: dict[str, Any] = {}
    questions = []
    rest = [one for one in systems if one not in values]
    for system, value in sorted(values.items(), key=lambda pair: pair[0] != "*"):
        if not isinstance(value, (tuple, list)) or len(value) < 3 or unknown_in(value):
            if value != 0:
                questions.append(
                    OpenQuestion(
                        "reference", f"{name} on {system}: the reference {value} is computed by ReFrame"
                    )
                )
            continue
        number, low, high = value[:3]
        bound = high if better == "lower" else low
        if number in (0, None) or (low is None and high is None):
            continue
        if better == "none" or bound is None or not _is_promise(number, low, high):
            why = (
                "its bound is that of the other direction"
                if bound is None
                else "it is none that can be promised here"
            )
            questions.append(OpenQuestion("reference", f"{name} on {system}: {(number, low, high)}: {why}"))
            continue
        found |= dict.fromkeys(rest if system == "*" else [system], (number, low, high))
    return found, questions


def _is_promise(number: Any, low: Any, high: Any) -> bool:
    numbers = all(
        isinstance(one, (int, float)) and not isinstance(one, bool) for one in (number, low or 0, high or 0)
    )
    return numbers and number > 0 and -1 < (low or 0) <= 0 <= (high or 0)


def conditions(test: ReframeTest) -> tuple[list[str], list[str], list[str], list[OpenQuestion]]:
    """Return the patterns of ``sanity``, the lines of the test's body, the artifacts these read, and what needs a person."""
    patterns: list[str] = []
    body: list[str] = []
    artifacts: list[str] = []
    questions: list[OpenQuestion] = []
    waiting = [test.sanity]
    while waiting:
        one = waiting.pop(0)
        if one is None or one is True or _is_exit_code(one):
            continue
        if isinstance(one, SanityCall) and one.name in {"all", "and_", "chain"} and one.args:
            waiting = [
                *(part for arg in one.args for part in (arg if isinstance(arg, list) else [arg])),
                *waiting,
            ]
            continue
        line = _condition(one, patterns, artifacts)
        if line is None:
            text = one.source if isinstance(one, SanityCall) else unknown_in(one) or one
            questions.append(OpenQuestion("sanity", f"write the condition `{text}`"))
        body += [line] if line else []
    return list(dict.fromkeys(patterns)), body, artifacts, questions


def _is_exit_code(one: Any) -> bool:
    """Return whether a condition is that of the exit code, which must be 0 here anyhow."""
    return (
        isinstance(one, SanityCall)
        and one.name == "assert_eq"
        and {*map(str, one.args)} == {"⟨self.job.exitcode⟩", "0"}
    )


def _condition(one: Any, patterns: list[str], artifacts: list[str]) -> str | None:
    """Return the line of the body for a condition, an empty one for a pattern that was added, None where a person must say it."""
    if not isinstance(one, SanityCall):
        return None
    if one.name in {"assert_found", "assert_not_found"}:
        given = dict(zip(("patt", "filename"), one.args, strict=False)) | dict(one.options)
        where = _where(given.get("filename"), artifacts)
        pattern = given.get("patt")
        if (
            not where
            or not isinstance(pattern, str)
            or unknown_in(pattern)
            or wrong_pattern(pattern, one_group=False)
        ):
            return None
        if one.name == "assert_found" and where in {"run.output", "run.errors"}:
            patterns.append(source(pattern))
            return ""
        return (
            f"assert {'not ' if 'not' in one.name else ''}re.search({source(pattern)}, {where}, re.MULTILINE)"
        )
    if one.name == "assert_eq" and len(one.args) >= 2:
        counted, number = sorted(one.args[:2], key=lambda arg: not isinstance(arg, SanityCall))
        inner = (
            texts(counted.args)[0]
            if isinstance(counted, SanityCall) and counted.name in {"count", "len"} and counted.args
            else None
        )
        if (
            isinstance(inner, SanityCall)
            and inner.name in {"findall", "extractall"}
            and type(number) is int
            and len(inner.args) >= 2
        ):
            where = _where(inner.args[1], artifacts)
            if where and isinstance(inner.args[0], str) and not unknown_in(inner.args[0]):
                return f"assert len(re.findall({source(inner.args[0])}, {where}, re.MULTILINE)) == {number}"
    return None


def _where(file: Any, artifacts: list[str]) -> str:
    """Return what of the run a condition reads; a file becomes an artifact."""
    if file in _OUTPUT:
        return "run.output" if file == "⟨self.stdout⟩" else "run.errors"
    if not isinstance(file, str) or unknown_in(file) or not _is_inside(file):
        return ""
    artifacts.append(file)
    return f"run.text({source(file)})"
