"""Pinned mutants: changes of the product that the tests must notice. ``make mutants`` runs them all.

    python tests/mutants/mutants.py run [--tenth SEED] [--checkout DIR]   # do the tests notice what they noticed before?
    python tests/mutants/mutants.py draw --seed N [--count 300]           # pin new ones where the list is short
    python tests/mutants/mutants.py pin RESULTS                           # take over what a run found

``pinned.json`` says of each mutant whether the tests noticed it when it was pinned. `run` fails if one lives that died then, and if
one cannot be found any more: who rewrites a function removes its mutants from the list, and draws as many new ones.

Each mutant is tried in a copy of the checkout: tests that name the mutated module come first, then the folders of its area;
the first failure ends it. Hypothesis has a fixed seed, so that the same mutant dies every time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations import Mutation, Place, mutations, replace

ROOT = Path(__file__).resolve().parents[2]
PINNED = Path(__file__).with_name("pinned.json")
#: A mutant that makes tests hang is noticed: in seconds.
_LIMIT_S = 300.0
#: pytest's exit codes.
_PASSED, _FAILED, _INTERRUPTED, _INTERNAL, _USAGE = range(5)


@dataclass(frozen=True)
class Area:
    """A part of the product: its modules, the folders of tests that are about it, and its share of the list."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    share: float


AREAS: Mapping[str, Area] = {
    "judge": Area(("judge/*.py",), ("tests/judge", "tests/history"), 0.25),
    "jobs": Area(("jobs/*.py",), ("tests/jobs",), 0.25),
    "ledger": Area(
        ("jobs/ledger*.py", "jobs/resume.py", "session/ledger_writer.py"),
        ("tests/jobs",),
        0.12,
    ),
    "vet": Area(
        (
            *(f"node/vet/{name}.py" for name in ("judge", "rules", "statistics", "policy", "check")),
            "node/vet/checks/*.py",
        ),
        ("tests/node/vet",),
        0.2,
    ),
    "batch": Area(
        ("node/batch/*.py", "node/agents/*.py", "node/processes.py"),
        ("tests/node/batch", "tests/node/launch"),
        0.18,
    ),
}


@dataclass(frozen=True)
class Mutant:
    """A pinned mutation. ``module`` is where it was last found; ``died``: None until it has been tried."""

    area: str
    module: str
    function: str
    original: str
    mutated: str
    nth: int
    died: bool | None = None

    @property
    def mutation(self) -> Mutation:
        """Return what is changed."""
        return Mutation(self.function, self.original, self.mutated, self.nth)

    def __str__(self) -> str:
        """Return it as a line."""
        number = f" (number {self.nth + 1})" if self.nth else ""
        return f"{self.module}: {self.function}: {self.original}  ->  {self.mutated}{number}"


# --- finding


def find(mutant: Mutant, sources: Mapping[str, str]) -> tuple[str, Place]:
    """Return the module where a mutant is now, and the place: where it was, or the only other module that offers it.

    Raises:
        LookupError: No module offers it, or several do.
    """
    other = [name for name in sources if name != mutant.module]
    found = []
    for names in ([mutant.module], other):
        for name in names:
            found += [
                (name, place) for one, place in mutations(sources.get(name, "")) if one == mutant.mutation
            ]
        if len(found) == 1:
            return found[0]
    raise LookupError(f"{'no module has' if not found else 'several modules have'} {mutant}")


def read_sources(checkout: Path) -> dict[str, str]:
    """Return path below the package -> text."""
    package = checkout / "pytest_mlhpc"
    return {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }


def draw(sources: Mapping[str, str], pinned: Iterable[Mutant], count: int, seed: int) -> Iterator[Mutant]:
    """Yield as many new mutants as an area's share of *count* lacks; at most one of a statement's, so that they spread."""
    present = list(pinned)
    for area, what in AREAS.items():
        inside = [name for name in sources if any(Path(name).match(pattern) for pattern in what.modules)]
        if area == "jobs":
            inside = [
                name for name in inside if not any(Path(name).match(one) for one in AREAS["ledger"].modules)
            ]
        offered = [(name, mutation) for name in inside for mutation, _ in mutations(sources[name])]
        random.Random(f"{seed} {area}").shuffle(offered)  # noqa: S311 - no secret
        mine = [mutant for mutant in present if mutant.area == area]
        functions = {(mutant.module, mutant.function) for mutant in mine}
        lacking = round(count * what.share) - len(mine)
        for name, mutation in offered:
            if lacking <= 0:
                break
            if (name, mutation.function) in functions:
                continue
            functions.add((name, mutation.function))
            lacking -= 1
            yield Mutant(area, name, **dataclasses.asdict(mutation))


# --- trying


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: whether the tests noticed it, by what, and how long that took."""

    mutant: Mutant
    died: bool
    by: str
    seconds: float


class Copy:
    """A copy of a checkout in which one mutant at a time is tried."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        """Copy what git tracks, as it is in the working tree."""
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=checkout, capture_output=True, check=True
        ).stdout
        for name in listed.decode().split("\0")[:-1]:
            if (checkout / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, folder / name)
        self._changed = (
            2_000_000_000  # a time of change that no file has: bytecode is known by it, in seconds
        )

    def attempt(self, mutant: Mutant, sources: Mapping[str, str]) -> Outcome:
        """Try one mutant; the copy is as before afterwards."""
        name, place = find(mutant, sources)
        path = self.folder / "pytest_mlhpc" / name
        start = time.monotonic()
        self._write(path, replace(sources[name], place))
        try:
            code, output = self.test(order_tests(self.folder, name, AREAS[mutant.area].tests))
        finally:
            self._write(path, sources[name])
        if code in {_INTERRUPTED, _INTERNAL, _USAGE} and not re.search(
            r"^(FAILED|ERROR) ", output, re.MULTILINE
        ):
            found = re.search(r"^(E  .*|.*Error: .*)$", output, re.MULTILINE)
            by = found[1] if found else f"exit code {code}"
        else:
            by = next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)), f"exit code {code}")
        return Outcome(mutant, code != _PASSED, "" if code == _PASSED else by, time.monotonic() - start)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._changed += 1
        os.utime(path, (self._changed, self._changed))

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        """Run tests until one fails; return pytest's exit code, and its output."""
        words = [
            *(sys.executable, str(Path(__file__).parents[1] / "supervise.py"), "--quiet", "--grace", "0", "--limit", str(_LIMIT_S), "--"),
            *(sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"),
            *("-p", "timeout", "-p", "hypothesispytest", "--hypothesis-seed=0", "-m", "not slow and not servers", *tests),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "pytest_mlhpc.plugin",
        }
        done = subprocess.run(
            words, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


def order_tests(checkout: Path, module: str, folders: Sequence[str]) -> list[str]:
    """Return the test files that name the module, wherever they lie (but for those of real servers), then those of an area."""
    dotted = "pytest_mlhpc." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, last = dotted.rpartition(".")
    named = re.compile(rf"{re.escape(dotted)}\b|from {re.escape(package)} import .*\b{re.escape(last)}\b")
    everywhere = _test_files(checkout, ("tests",))
    naming = [
        name
        for name in sorted(everywhere)
        if named.search(everywhere[name]) and not name.startswith("tests/real/")
    ]
    of_area = sorted(_test_files(checkout, tuple(folders)))
    return list(dict.fromkeys((*naming, *of_area)))


@functools.cache
def _test_files(checkout: Path, folders: tuple[str, ...]) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted((checkout / folder).rglob("test_*.py"))]
    return {str(path.relative_to(checkout)): path.read_text(encoding="utf-8") for path in paths}


def attempt_all(mutants: Sequence[Mutant], checkout: Path, jobs: int) -> Iterator[Outcome]:
    """Try mutants side by side, each in a copy of its own; yield what became of them as it is known."""
    sources = read_sources(checkout)
    with tempfile.TemporaryDirectory(prefix="mlhpc-mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            copies.put(Copy(checkout, Path(folder, str(number))))

        def check(area: str) -> None:
            copy = copies.get()
            try:
                code, output = copy.test(AREAS[area].tests)
            finally:
                copies.put(copy)
            if code != _PASSED:
                raise SystemExit(f"tests of {area} fail without any mutant:\n{output[-4000:]}")

        def attempt(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return copy.attempt(mutant, sources)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(check, sorted({mutant.area for mutant in mutants})))
            pending = [pool.submit(attempt, mutant) for mutant in mutants]
            try:
                for one in concurrent.futures.as_completed(pending):
                    yield one.result()
            finally:
                for one in pending:
                    one.cancel()


# --- the list


def read_pinned(path: Path = PINNED) -> list[Mutant]:
    """Return the list."""
    return [Mutant(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def write_pinned(mutants: Iterable[Mutant], path: Path = PINNED) -> None:
    """Write the list, one mutant a line."""
    ordered = sorted(
        mutants, key=lambda one: (list(AREAS).index(one.area), one.module, one.function, str(one))
    )
    rows = ",\n".join(f" {json.dumps(dataclasses.asdict(one), ensure_ascii=False)}" for one in ordered)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


# --- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a mutant lives that died, or cannot be found."""
    parser = argparse.ArgumentParser(
        prog="mutants.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="try the pinned mutants")
    running.add_argument(
        "--tenth", type=int, metavar="SEED", help="only a tenth of them, drawn with this seed"
    )
    running.add_argument(
        "--checkout",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="whose product and tests (default: this one)",
    )
    running.add_argument("--jobs", type=int, default=2, metavar="N", help="so many side by side (default 2)")
    running.add_argument("--output", type=Path, metavar="FILE", help="write what was found as JSON")
    drawing = commands.add_parser("draw", help="pin new ones where the list is short")
    drawing.add_argument("--count", type=int, default=300)
    drawing.add_argument("--seed", type=int, required=True)
    pinning = commands.add_parser("pin", help="take over what `run --output` found")
    pinning.add_argument("results", type=Path)
    options = parser.parse_args(argv)
    if options.command == "draw":
        pinned = read_pinned() if PINNED.exists() else []
        write_pinned([*pinned, *draw(read_sources(ROOT), pinned, options.count, options.seed)])
        return 0
    if options.command == "pin":
        found = {
            Mutant(**{**row["mutant"], "died": None}): row["died"]
            for row in json.loads(options.results.read_text())
        }
        bare = {mutant: dataclasses.replace(mutant, died=None) for mutant in read_pinned()}
        write_pinned(
            dataclasses.replace(mutant, died=found.get(key, mutant.died)) for mutant, key in bare.items()
        )
        return 0
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    mutants = read_pinned()
    if options.tenth is not None:
        mutants = random.Random(options.tenth).sample(mutants, len(mutants) // 10)  # noqa: S311 - no secret
    start, outcomes, lost = time.monotonic(), [], []
    sources = read_sources(options.checkout)
    for mutant in list(mutants):
        try:
            find(mutant, sources)
        except LookupError as error:
            lost.append(str(error))
            mutants.remove(mutant)
    for outcome in attempt_all(mutants, options.checkout, options.jobs):
        outcomes.append(outcome)
        _say(
            f"{len(outcomes)}/{len(mutants)} {'died' if outcome.died else 'LIVES'} in {outcome.seconds:.0f} s: {outcome.mutant} {outcome.by}"
        )
    if options.output:
        options.output.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=1))
    living = [one.mutant for one in outcomes if one.mutant.died and not one.died]
    new = [one.mutant for one in outcomes if one.mutant.died is False and one.died]
    for text in lost:
        _say(f"lost: {text}")
    for mutant in living:
        _say(f"lives now: {mutant}")
    for mutant in new:
        _say(f"dies now (`pin` takes it over): {mutant}")
    died = sum(one.died for one in outcomes)
    _say(
        f"{died} of {len(outcomes)} mutants died, {len(living)} live that died before, {len(lost)} are lost; {time.monotonic() - start:.0f} s"
    )
    return 1 if living or lost else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
