"""Another git revision as side B of ``--mlhpc-against rev=``: its worktree, and what of a test comes from there.

Open this to know which paths of B lie in the worktree, why a revision is refused, and who removes worktrees of killed sessions.
A worktree is ``worktrees/SESSION/tree`` below the folder of runs (:func:`run_root`). The session's file in the ledger is made
before it: a worktree whose session is dead, and no longer in the ledger, is removed by the next session.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Environment
from pytest_mlhpc.errors import SpecError, StoreError, UsageError, did_you_mean
from pytest_mlhpc.jobs.builds import Needed
from pytest_mlhpc.jobs.declare import Declaration
from pytest_mlhpc.jobs.ledger_files import LedgerSnapshot
from pytest_mlhpc.jobs.programs import resolved_argv
from pytest_mlhpc.jobs.software import SoftwareError
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.child_process import package_root
from pytest_mlhpc.node.processes import run_to_end
from pytest_mlhpc.provision.payload import make_session_directory, write_private

#: Longest time of a question to git, and of writing out a worktree, in seconds: ours. A kernel tree takes a minute on NFS.
ASK_S, WRITE_S = 60.0, 900.0
#: Below the folder of runs; within it one folder of each session.
FOLDER = "worktrees"
_SESSION = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: git's own pointers to a repository: a hook of git that starts pytest has them set.
_LOCATIONS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
)
#: Why a test has no revision at all.
WITHOUT_REVISION = "programs have a revision, and trainings of your own modules on nodes"
_SUBMODULE = b"160000 "
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Revision:
    """The revision of B. ``top`` is the checkout as git names it, ``aliases`` as pytest does, through links."""

    name: str
    commit: str
    top: str
    aliases: tuple[str, ...] = ()
    head: str = ""  #: the commit that is checked out
    dirty: bool = False  #: the checkout has changes: A is not its commit
    #: folder of runs -> the worktree below it; empty: none yet
    trees: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the revision as it was given, with its commit."""
        short = self.commit[:12]
        return self.name if self.name.startswith(short) else f"{self.name} ({short})"

    @property
    def first_commit(self) -> str:
        """The commit of A as records have it, with ``-dirty`` where A has changes, as ``git describe --dirty`` has it."""
        return f"{self.head}-dirty" if self.dirty else self.head

    @property
    def announcement(self) -> str:
        """What A and B are."""
        state = " with its uncommitted changes" if self.dirty else ""
        return f"A is the checkout {self.top}{state}; B has files, builds, programs and packages of {self}"


# --- git


def git(folder: str, *arguments: str, limit_s: float = ASK_S) -> subprocess.CompletedProcess[bytes]:
    """Run git in *folder*, without hooks of the user's and without a question at the terminal.

    Raises:
        UsageError: git is not there, or does not answer.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _LOCATIONS}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    argv = ["git", "-C", folder, "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        return run_to_end(argv, limit_s, env=environment)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"git {arguments[0]} in {folder} did not end within {limit_s:g} s") from error
    except OSError as error:
        raise UsageError(f"cannot start git: {error.strerror}") from error


def text_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return what git printed."""
    return os.fsdecode(done.stdout).strip()


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(os.fsdecode(done.stderr).split())[-500:] or f"exit code {done.returncode}"


def find_revision(root: Path, name: str, *, only: bool) -> Revision:
    """Return the revision *name* of the checkout in which *root* lies. Nothing is written.

    Args:
        root: pytest's root folder.
        name: whatever git understands.
        only: nothing else differs between both sides.

    Raises:
        UsageError: there is no such checkout or revision, it has submodules, or both sides are the same.
    """
    said = f"--mlhpc-against rev={name}"
    found = git(str(root), "rev-parse", "--show-toplevel")
    if found.returncode:
        raise UsageError(f"{said}: {root} is in no git checkout: {_reason(found)}")
    top = text_of(found)
    if not top.isprintable():
        raise UsageError(f"{said}: the path of the checkout {top!r} is no printable text; move the checkout")
    given = git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if given.returncode:
        raise UsageError(f"{said}: {_unknown(top, name)}")
    commit = text_of(given)
    if inside := _submodules(top, commit):
        names = ", ".join(inside[:5]) + (f" and {len(inside) - 5} more" if len(inside) > 5 else "")
        raise UsageError(
            f"{said}: the revision has submodules ({names}), which a worktree leaves empty; compare two checkouts by "
            "environment=NAME"
        )
    # As `git describe --dirty`: logs and caches lie in many a checkout, and what is new counts once it is added.
    dirty = bool(git(top, "status", "--porcelain", "--untracked-files=no").stdout.strip())
    head = text_of(git(top, "rev-parse", "HEAD"))
    if only and not dirty and commit == head:
        raise UsageError(
            f"{said}: both sides are the same: {commit[:12]} is checked out in {top}, without changes (new files count once "
            "they are added)"
        )
    up = text_of(git(str(root), "rev-parse", "--show-cdup"))
    as_pytest_says = os.path.normpath(root / up)
    return Revision(name, commit, top, tuple(dict.fromkeys((as_pytest_says, top))), head, dirty)


def _unknown(top: str, name: str) -> str:
    refs = text_of(git(top, "for-each-ref", "--format=%(refname:short)")).split()
    hint = did_you_mean(name, refs)
    shallow = text_of(git(top, "rev-parse", "--is-shallow-repository")) == "true"
    more = (
        "; the clone is shallow: run `git fetch --unshallow` (in GitLab CI: GIT_DEPTH: 0)" if shallow else ""
    )
    return f"{top} has no such revision{hint}{more}"


def _submodules(top: str, commit: str) -> list[str]:
    lines = git(top, "ls-tree", "-r", "-z", commit).stdout.split(b"\0")
    return [os.fsdecode(line.partition(b"\t")[2]) for line in lines if line.startswith(_SUBMODULE)]


# --- worktrees


def check_out(revision: Revision, roots: Sequence[Path], session_id: str) -> Revision:
    """Return *revision* with a worktree below each of *roots*, folders of runs.

    Raises:
        UsageError: one cannot be written; none is left.
    """
    try:
        _forget_lost(revision.top)
        trees = {str(root): _new_tree(revision, root / FOLDER / session_id) for root in roots}
    except BaseException as error:  # also Ctrl-C
        for root in roots:
            remove(root / FOLDER / session_id)
        if not isinstance(error, (UsageError, OSError)):
            raise
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise UsageError(f"--mlhpc-against rev={revision.name}: it cannot be checked out: {why}") from error
    return replace(revision, trees=trees)


def _new_tree(revision: Revision, folder: Path) -> str:
    make_session_directory(folder)
    write_private(folder / "repository", revision.top + "\n")  # first: who removes it asks that repository
    tree = str(folder / "tree")
    done = git(revision.top, "worktree", "add", "--detach", tree, revision.commit, limit_s=WRITE_S)
    if done.returncode:
        raise UsageError(_reason(done))
    return tree


def _forget_lost(top: str) -> None:
    """Remove what git knows of worktrees of ours whose folders are gone, as of a state directory that was removed by hand."""
    for line in os.fsdecode(git(top, "worktree", "list", "--porcelain").stdout).splitlines():
        path = Path(line.removeprefix("worktree "))
        ours = (
            path.name == "tree" and path.parent.parent.name == FOLDER and _SESSION.fullmatch(path.parent.name)
        )
        if line.startswith("worktree ") and ours and not os.path.lexists(path):
            git(top, "worktree", "remove", "--force", "--force", str(path))


def remove(folder: Path) -> str:
    """Remove the worktree of one session, and what git knows of it; return why that cannot be, empty if it is gone."""
    try:
        top = (folder / "repository").read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        top = ""  # the session died before it wrote anything else
    if os.path.isdir(top):  # noqa: PTH112 - Path's raises for a closed folder
        try:
            git(top, "worktree", "remove", "--force", "--force", str(folder / "tree"), limit_s=WRITE_S)
        except UsageError as error:
            return str(error)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"the worktree {folder} cannot be removed: {error.strerror}; please do"
    return ""


def remove_own(revision: Revision) -> list[str]:
    """Remove the worktrees of this session; return why one cannot be."""
    return [why for tree in revision.trees.values() if (why := remove(Path(tree).parent))]


def remove_left(roots: Iterable[Path], state_dir: Path, own: str) -> list[str]:
    """Remove worktrees of dead sessions, all but that of *own*; return what cannot be removed, and why.

    All stay where the ledgers cannot be read: their sessions may live.
    """
    left = [folder for root in roots for folder in _folders(root / FOLDER) if folder.name != own]
    if not left:
        return []
    try:
        files = LedgerSnapshot(state_dir, strict=True)
        needed = {path.stem for path in files.sessions if files.alive(path)}
        for entry in files.entries():
            needed |= {entry.submitted.session, Path(entry.submitted.directory).parent.name}
    except StoreError:
        return []
    if files.moved:
        return []  # another session claims what a dead one left; the next one removes it
    return [why for folder in left if folder.name not in needed and (why := remove(folder))]


def _folders(folder: Path) -> list[Path]:
    try:
        found = sorted(folder.iterdir())
        return [one for one in found if _SESSION.fullmatch(one.name) and one.lstat().st_uid == os.getuid()]
    except OSError:
        return []


# --- a test at the revision


def at_revision(
    declared: Declaration,
    spec: JobSpec,
    revision: Revision,
    root: Path,
    resolve: Callable[[Declaration], JobSpec],
) -> JobSpec:
    """Return what the test *declared*, resolved as *spec*, is at *revision*, whose worktree lies below *root*.

    Limits, metrics and conditions are those of *spec*: the test is the same.

    Raises:
        SoftwareError: the revision has not what the test needs, or nothing of the test comes from the checkout.
    """
    if spec.workload != "command" and (not spec.module or spec.target.partition.scheduler == "kubernetes"):
        whose = f"in the pods' payload ({spec.module})" if spec.module else "the installed pytest-mlhpc's"
        text = f"its code is {whose}; {WITHOUT_REVISION}"
        raise SoftwareError("against", text)
    moved = Paths(revision, revision.trees[str(root)])
    other = replace(
        declared,
        marked=moved.values(declared.marked),
        parametrized=moved.values(declared.parametrized),
        folder=Path(moved.folder(str(declared.folder))),
        needs={name: _needed(one, moved) for name, one in declared.needs.items()},
    )
    try:
        twin = resolve(other)
    except SpecError as error:
        text = "; ".join(one.what for one in error.problems).replace(moved.tree, revision.top)
        raise SoftwareError("against", f"at {revision}: {text}") from None
    _refuse_missing(spec, twin, revision, moved)
    return replace(
        twin,
        env={**twin.env, **_variables(spec, moved)},
        packages=_packages(spec, moved),
        needs=spec.needs,
        definition=spec.definition,
        functions=spec.functions,
        asked=spec.asked,
        owner=spec.owner,
    )


def _needed(one: Needed, moved: Paths) -> Needed:
    declared: Any = one.declared
    changes = {
        name: moved.values(getattr(declared, name))
        for name in ("command", "files", "env", "fields")
        if hasattr(declared, name)
    }
    inner = {name: _needed(other, moved) for name, other in one.needs.items()}
    # A fixture of an installed plug-in is the same on both sides.
    folder = Path(moved.folder(str(one.folder))) if moved.has(str(one.folder)) else one.folder
    return replace(one, declared=replace(declared, **changes), folder=folder, needs=inner)


def _refuse_missing(spec: JobSpec, twin: JobSpec, revision: Revision, moved: Paths) -> None:
    """Refuse what the revision has not, and runs that go before, which are made once for both sides.

    Raises:
        SoftwareError: names it.
    """
    for name, one in spec.needs.items():
        other = twin.needs[name]
        if (source_of(one), one.env) != (source_of(other), other.env):
            text = f"the run {name} that it needs is made once for both sides, and uses files of the checkout"
            raise SoftwareError("against", f"{text}; make them part of a build, or of the test's own program")
    program, its = resolved_argv(spec), resolved_argv(twin)
    if spec.argv and program[0] != spec.argv[0] and its[0] == spec.argv[0]:
        text = f"{revision} has no {spec.argv[0]} beside the test; declare a build that makes it"
        raise SoftwareError("against", text)
    if twin.cwd and twin.cwd.startswith(moved.tree) and not os.path.isdir(twin.cwd):  # noqa: PTH112 - Path's raises for a closed folder
        raise SoftwareError(
            "against", f"{revision} has no folder {os.path.relpath(twin.cwd, moved.tree)} (cwd)"
        )


def source_of(spec: JobSpec) -> tuple[object, ...]:
    """Return all by which *spec* may use files of a checkout: other paths, or another content of builds."""
    builds = tuple((build.name, build.key) for build in spec.builds)
    return (resolved_argv(spec), dict(spec.files), spec.cwd, builds, spec.data, spec.packages)


class Paths:
    """Paths of a checkout, and what they are in the worktree *tree* of a revision."""

    def __init__(self, revision: Revision, tree: str) -> None:
        self._revision = revision
        self.tree = tree
        names = "|".join(re.escape(name) for name in sorted(revision.aliases, key=len, reverse=True))
        # A path ends where a word, a list of paths or a quotation does.
        self._inside = re.compile(rf"(?<![\w/.~+-])(?:{names})(?:/[^\s:;,=\"']*|(?![\w/.+-]))")

    def has(self, path: str) -> bool:
        """Return whether *path* lies in the checkout."""
        return self._relative(path) is not None

    def folder(self, path: str) -> str:
        """Return what the folder of a test's file is, whether the revision has it or not.

        Raises:
            SoftwareError: it is not in the checkout.
        """
        inside = self._relative(path)
        if inside is None:
            raise SoftwareError(
                "against", f"its file is in {path}, outside the checkout {self._revision.top}"
            )
        return os.path.normpath(f"{self.tree}/{inside}")

    def values(self, value: Any) -> Any:
        """Return *value* with the worktree's paths in all texts and paths of it.

        Raises:
            SoftwareError: the revision has not a file that it names.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
            return Path(self.text(path))
        if isinstance(value, Mapping):
            return {name: self.values(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.values, value)) if type(value) in (list, tuple) else value
        return value

    def text(self, text: str) -> str:
        """Return *text* with the worktree's paths in it."""
        if self._relative(text) is not None and os.path.lexists(text):
            return self._moved(text)
        return self._inside.sub(lambda found: self._moved(found[0]), text)

    def _relative(self, path: str) -> str | None:
        for name in self._revision.aliases:
            if path == name or path.startswith(f"{name}/"):
                return path[len(name) + 1 :]
        return None

    def _moved(self, path: str) -> str:
        """Return *path* in the worktree. What git ignores and the revision has not stays where it is: a virtual environment, data."""
        inside = self._relative(path) or ""
        plain = _GLOB.split(inside)[0] if not os.path.lexists(path) else inside
        plain = plain if plain == inside else os.path.dirname(plain)  # noqa: PTH120 - a text
        new = os.path.normpath(f"{self.tree}/{inside}")
        if os.path.lexists(f"{self.tree}/{plain}"):
            return new
        listed = git(
            self._revision.top, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", f":(top,literal){plain}"
        )  # fmt: skip
        if listed.stdout:
            raise SoftwareError("against", f"{self._revision} has no {plain}")
        return path


def _variables(spec: JobSpec, moved: Paths) -> dict[str, str]:
    """Return the variables of test and environment that name the checkout, as B has them. Pods have a file system of their own."""
    if spec.target.partition.scheduler == "kubernetes":
        return {}
    given = {**spec.target.environment.variables, **spec.env}
    return {name: new for name, text in given.items() if (new := moved.text(text)) != text}


def _packages(spec: JobSpec, moved: Paths) -> tuple[str, ...]:
    """Return the folders of the worktree from which B imports what A imports from the checkout (``pip install -e``).

    Raises:
        SoftwareError: the code of a training is not among them.
    """
    if spec.target.partition.scheduler == "kubernetes":
        return ()
    pythons = _interpreters(spec.target.environment)
    found = [path for python in pythons for path in imported_from(python) if path != package_root()]
    if spec.module:
        found.insert(0, _folder_of(spec.module))
    there = {path: moved.text(path) for path in found}
    if spec.module and there[found[0]] == found[0]:
        raise SoftwareError(
            "against", f"its code {spec.module} is in {found[0]}, which is not of the checkout"
        )
    return tuple(dict.fromkeys(new for path, new in there.items() if new != path and os.path.isdir(new)))  # noqa: PTH112 - Path's raises for a closed folder


def _folder_of(module: str) -> str:
    """Return the folder from which this process imports *module*, the code of a workload of its site."""
    found = importlib.util.find_spec(module)
    if found is None or not found.origin:
        raise SoftwareError("against", f"its code {module} cannot be found")
    path = Path(found.origin)
    return str(path.parents[len(module.split(".")) - (0 if path.name == "__init__.py" else 1)])


def _interpreters(environment: Environment) -> list[str]:
    """Return the interpreters that may run a test's program: pytest's own, and that of *environment* outside of a container."""
    extra = environment.extra
    if any(extra.get(name) for name in ("container", "uenv", "conda")):
        return [sys.executable]
    return [sys.executable, f"{extra['venv']}/bin/python" if extra.get("venv") else environment.python]


#: Prints the folders that an interpreter imports from: those of its path, and those of setuptools' finders of editable installs.
_IMPORTED_FROM = """
import json, os, sys
paths = list(sys.path)
for finder in sys.meta_path:
    names = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
    paths += [os.path.dirname(path) for path in names.values()] if isinstance(names, dict) else []
print(json.dumps(paths))
"""


@functools.lru_cache(maxsize=16)  # each test of a session asks for the same ones
def imported_from(python: str) -> tuple[str, ...]:
    """Return the folders from which the interpreter *python* imports; none where it is not to be had on this machine."""
    try:
        done = run_to_end([python, "-c", _IMPORTED_FROM], ASK_S, cwd=os.sep)
        paths = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ()
    return tuple(path for path in paths if isinstance(path, str) and path)
