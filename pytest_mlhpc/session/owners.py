"""Who owns a file, as the CODEOWNERS file of its repository says.

The rules are GitLab's (docs.gitlab.com/user/project/codeowners/reference), which hold on GitHub for most patterns, too: patterns
like those of gitignore, the last match of a section wins, and all sections count. ``[Section] @default`` gives owners to rules
without any, ``!pattern`` takes a file's owners away. A pattern without ``/`` at its head matches at any depth.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pytest_mlhpc.config.model import MOST_OWNER
from pytest_mlhpc.store.text import one_line

#: Where it is looked for, below pytest's root directory; the first one counts.
PLACES: Final = ("CODEOWNERS", ".gitlab/CODEOWNERS", ".github/CODEOWNERS", "docs/CODEOWNERS")
#: A larger file is not read; GitHub takes 3 MB. More rules, or longer lines, would make collection slow.
MOST_BYTES, MOST_RULES, MOST_LINE = 3 << 20, 10_000, 4096
#: Mistakes that are named.
MOST_PROBLEMS = 3

_HEADING: Final = re.compile(r"\^?\[(?P<name>[^\]]+)\](?:\[\d+\])?(?:\s+(?P<owners>.*))?")
_PATTERN: Final = re.compile(r"(?P<pattern>(?:\\.|[^\s\\])+)(?P<owners>.*)")
#: What fnmatch would read in another way: no page of the two says that brackets are ranges.
_LITERAL: Final = re.compile(r"\\(.)|\[")


@dataclass(frozen=True)
class OwnerRule:
    """One line: names of folders and a file, of which ``**`` stands for any number of folders, and who owns what matches."""

    section: str
    pattern: tuple[str, ...]
    owners: tuple[str, ...]

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the path *names* matches: all of it, or a folder on it where the pattern ends with a plain name."""
        last = len(self.pattern)
        plain = not any(sign in self.pattern[-1] for sign in "*?")
        places = {0}  # in the pattern
        for at, name in enumerate(names, 1):
            places |= {place + 1 for place in places if self.pattern[place] == "**"}
            places = {
                place + (self.pattern[place] != "**")
                for place in places
                if self.pattern[place] == "**" or fnmatchcase(name, self.pattern[place])
            }
            if last in places and (plain or at == len(names)):
                return True
            places.discard(last)
        return False


@dataclass(frozen=True)
class CodeOwners:
    """The rules of one file, in its order. ``problems`` say in one line each what could not be used."""

    root: Path = Path()
    rules: tuple[OwnerRule, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, path: Path) -> str:
        """Return the owners of a file as one text with commas, empty where it has none."""
        if not path.is_relative_to(self.root):
            return ""
        names = path.relative_to(self.root).parts
        found = {rule.section: rule.owners for rule in self.rules if rule.matches(names)}
        text = ""
        for owner in dict.fromkeys(owner for owners in found.values() for owner in owners):
            longer = f"{text}, {owner}" if text else owner
            text = longer if len(longer) <= MOST_OWNER else text
        return text


def read_code_owners(root: Path) -> CodeOwners:
    """Return the rules of the first CODEOWNERS file of *root*. What is wrong with it fails nothing."""
    for place in PLACES:
        try:
            text = _text(root / place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return CodeOwners(
                root, problems=(f"{place}: cannot be read: {error.strerror}; it names no owner",)
            )
        except ValueError as error:
            return CodeOwners(root, problems=(f"{place}: {error}; it names no owner",))
        return parse_code_owners(text, place, root)
    return CodeOwners(root)


def _text(path: Path) -> str:
    """Return the text of a file, which is no device and not too large.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file; says why.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is no file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES >> 20} MiB")
    if b"\0" in data:
        raise ValueError("is no text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} is no UTF-8") from error


def parse_code_owners(text: str, name: str, root: Path = Path()) -> CodeOwners:
    """Return the rules of *text*; *name* is that of the file, for messages."""
    rules: list[OwnerRule] = []
    problems: list[str] = []
    section, default = "", ""
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        if heading := _HEADING.fullmatch(line):
            section, default = heading["name"].strip().lower(), heading["owners"] or ""
            continue
        try:
            rules.append(_rule(line, section, default))
        except ValueError as error:
            problems.append(f"{name}:{number}: {error}")
        if len(rules) + len(problems) > MOST_RULES:
            problem = f"{name}: has more than {MOST_RULES:,} rules; it names no owner"
            return CodeOwners(root, problems=(problem,))
    if len(problems) > MOST_PROBLEMS:
        problems[MOST_PROBLEMS:] = [f"{name}: {len(problems) - MOST_PROBLEMS} more lines are not used"]
    return CodeOwners(root, tuple(rules), tuple(one_line(problem) for problem in problems))


def _rule(line: str, section: str, default: str) -> OwnerRule:
    """Return the rule of one line.

    Raises:
        ValueError: what is wrong with it.
    """
    if len(line) > MOST_LINE:
        raise ValueError(f"the line is longer than {MOST_LINE} characters; it is not used")
    found = _PATTERN.fullmatch(line.removeprefix("!"))
    pattern = _names(found["pattern"]) if found else ()
    if found is None or not pattern:
        raise ValueError("the line has no pattern; it is not used")
    owners = () if line.startswith("!") else tuple(_owners(found["owners"])) or tuple(_owners(default))
    for word in owners:
        if "@" not in word or "," in word or not word.isprintable() or len(word) > MOST_OWNER:
            raise ValueError(f"{word!r:.60} is no owner, write @NAME or an address; the line is not used")
    return OwnerRule(section, pattern, owners)


def _names(pattern: str) -> tuple[str, ...]:
    """Return what a pattern says of each folder and of the file, ``**`` once where several follow one another."""
    plain = _LITERAL.sub(_as_it_is, pattern)
    if not plain.strip("/"):
        return ()
    names = ["**"] if not plain.startswith("/") else []
    names += [name for name in plain.split("/") if name]
    if plain.endswith("/") or names[-1] == "**":
        names += ["**", "*"]
    return tuple(name for at, name in enumerate(names) if name != "**" or names[at - 1 : at] != ["**"])


def _as_it_is(found: re.Match[str]) -> str:
    sign = found[1] or "["
    return f"[{sign}]" if sign in "*?[" else sign


def _owners(text: str) -> Iterator[str]:
    """Yield the fields before a comment."""
    for word in text.split():
        if word.startswith("#"):
            return
        yield word
