"""Collection: declared tests become job specs for each target; an invalid one becomes an error of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.config.model import Target
from pytest_mlhpc.errors import MlhpcError, Problem, SpecError, nearest
from pytest_mlhpc.jobs.builds import DECLARED, Build, Needed, Preparation, named_fixtures
from pytest_mlhpc.jobs.contradictions import duplicates, lacking, unfulfilled
from pytest_mlhpc.jobs.declare import Declaration, misdeclared, resolve
from pytest_mlhpc.jobs.decorators import Declared, declared_of
from pytest_mlhpc.jobs.software import SoftwareError
from pytest_mlhpc.jobs.spec import JobSpec, as_list, field_names, run_root, with_needs
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.session.bench import Bench, workloads_of
from pytest_mlhpc.session.preflight import too_large

_PACKAGE: Final = Path(__file__).parents[1]
#: Any of these marks the root of a suite: where pytest finds its settings, our systems file, a repository.
_MARKS: Final = (
    "systems.yaml", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg", ".git",
)  # fmt: skip
#: Folders into which packages are installed.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
#: A folder of this name is part of the identity though nothing marks the folder above it.
_SUITES: Final = "suites"


def identity_of(item: pytest.Item, target: str) -> str:
    """Return ``suites/training/test_cosmoflow.py::test_cosmoflow[4]``; *target* is the id of the parameter that is left out."""
    names, parameters = item.nodeid.partition("::")[2], getattr(item, "callspec", None)
    if parameters is not None:
        names = names.removesuffix(f"[{parameters.id}]")
        if rest := _without(parameters.id, target):
            names += f"[{rest}]"
    path = item.path.relative_to(suite_root(item.path)).as_posix()
    return f"{path}::{names}"


def suite_root(path: Path) -> Path:
    """Return the folder to which the paths of a suite are relative; *path* is one of its files.

    It is the nearest folder that something marks as a root. Installed suites have their folder of packages, this project's
    own the package. Where nothing marks a root, it is the folder above ``suites``, else that of the file.
    """
    if path.is_relative_to(_PACKAGE):
        return _PACKAGE
    suites = path.parent
    for folder in path.parents:
        if folder.name in _INSTALLED or any((folder / mark).exists() for mark in _MARKS):
            return folder
        if folder.name == _SUITES:
            suites = folder.parent
    return suites


def _without(parameters: str, target: str) -> str:
    """Return a test's parameters without its target, which comes first unless another plugin has put one before it."""
    if parameters == target:
        return ""
    if parameters.startswith(f"{target}-"):
        return parameters.removeprefix(f"{target}-")
    return parameters.replace(f"-{target}", "", 1)


def allow_fields(metafunc: pytest.Metafunc, declared: Declared, bench: Bench | None) -> None:
    """Let parameters that are named like a field of the spec pass, though no argument of the test uses them.

    With a system selected, names that are neither are noted as problems, with the nearest valid one; otherwise
    pytest refuses them itself.
    """
    if bench is None:
        from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

        known = {w.name: w for w in WORKLOADS}
    else:
        known = dict(bench.workloads)
    fields = field_names(known.get(declared.workload)).union(declared.renamed)
    for mark in metafunc.definition.iter_markers("parametrize"):
        for name in _argnames(mark):
            if name in metafunc.fixturenames:
                continue
            if name in fields or bench is not None:
                metafunc.fixturenames.append(name)
            if name not in fields and bench is not None and declared.workload in known:
                valid = [*fields, *metafunc.fixturenames[: metafunc.fixturenames.index(name)]]
                text = f"neither an argument of the test nor a field of {declared.called}"
                problem = Problem(_line(metafunc.definition), name, text, nearest(name, valid))
                bench.misnamed.setdefault(metafunc.definition.nodeid, []).append(problem)


def parametrize_by_target(metafunc: pytest.Metafunc, bench: Bench) -> None:
    """Run a declared test once on each target; the target comes first in the node id, whatever else there is."""
    if "system" not in metafunc.fixturenames:
        metafunc.fixturenames.append("system")
    metafunc.parametrize("system", bench.targets, ids=[target.id for target in bench.targets])


def finish(session: pytest.Session, bench: Bench) -> None:
    """Declare what was collected: to the session, or from a worker of pytest-xdist to the controller.

    Nothing is declared after errors of collection that end the run, and with --collect-only.

    Raises:
        pytest.UsageError: what the invocation as a whole asks for cannot be.
    """
    specs = declare(session, bench)
    option = session.config.option
    if session.testsfailed and not option.continue_on_collection_errors:
        return
    _refuse_one_sided(bench)
    if bench.declare_remotely is not None:
        bench.declare_remotely(specs, bench)
    elif bench.session is not None:
        bench.session.deselected = bench.deselected
        try:
            bench.session.declare(specs)
        except MlhpcError as error:
            raise pytest.UsageError(str(error)) from None


def declare(session: pytest.Session, bench: Bench) -> list[JobSpec]:
    """Resolve the specs of all declared items, deselect those that their target cannot run, and return what is to run.

    Items that will be skipped are resolved too, as their mistakes count, but not returned. What is wrong with an item is
    added to ``bench.faults``.
    """
    selected, gone, items = [], [], {}
    for item in session.items:
        declared, spec, reason = declared_of(item), None, ""
        if declared is not None and not (
            reason := _not_required(item, declared) or _elsewhere(item, declared, bench)
        ):
            spec = _spec(item, declared, bench)
            if spec is not None and not (reason := next(filter(None, map(lacking, with_needs([spec]))), "")):
                spec, reason = _two_sided(item, declared, spec, bench)
        if reason:
            gone.append(item)
            if (line := f"{_without_node(item)}: {reason}") not in bench.deselected:
                bench.deselected.append(line)
            continue
        selected.append(item)
        if spec is not None:
            bench.specs[item.nodeid] = spec
            items[item.nodeid] = item
    _compare(items, bench)
    if gone:
        session.items[:] = selected
        session.config.hook.pytest_deselected(items=gone)
    return [spec for node_id, spec in bench.specs.items() if will_run(items[node_id])]


def _two_sided(item: pytest.Item, declared: Declared, spec: JobSpec, bench: Bench) -> tuple[JobSpec, str]:
    """Return *spec* with what it is at the other revision, and why the test has no second side; empty where none is asked for."""
    against, revision = bench.settings.against, bench.revision
    if against is None:
        return spec, ""
    from pytest_mlhpc.session.against import second_side
    from pytest_mlhpc.session.revision import at_revision

    try:
        if revision is not None and revision.trees:
            assert isinstance(item, pytest.Function)  # noqa: S101 - else it had no spec
            declaration = _declaration(item, declared, spec.target, bench)
            root = run_root(spec.target.partition, bench.settings.state_dir)
            twin = at_revision(declaration, spec, revision, root, lambda one: _resolved(one, bench))
            spec = replace(spec, at_revision=twin)
        second_side(spec, against)
    except SoftwareError as error:
        return spec, str(error)
    return spec, ""


def _refuse_one_sided(bench: Bench) -> None:
    """Refuse a comparison of which nothing is left. A worker of pytest-xdist leaves that to the closing list.

    Raises:
        pytest.UsageError: names the tests and why each is left out.
    """
    against = bench.settings.against
    if against is None or bench.specs or bench.faults or bench.declare_remotely is not None:
        return
    lines = "; ".join(bench.deselected[:5]) or "no benchmark is selected"
    raise pytest.UsageError(f"--mlhpc-against {against}: nothing can be compared: {lines}")


def _not_required(item: pytest.Item, declared: Declared) -> str:
    """Return what the target has, or has not, against ``requires``: whatever else is wrong with the test there is no matter."""
    requires, target = declared.fields.get("requires"), _target(item)
    if not isinstance(requires, (str, list, tuple)) or target is None:
        return ""
    return unfulfilled(as_list(requires), target.partition)


def _elsewhere(item: pytest.Item, declared: Declared, bench: Bench) -> str:
    """Return why a test with an environment of its own is left out: it runs once, on the target that has it."""
    target = _target(item)
    wanted = item.callspec.params.get("environment", declared.fields.get("environment")) if target else None  # type: ignore[attr-defined]
    if target is None or not isinstance(wanted, str) or wanted in {"", target.environment.name}:
        return ""
    here = (target.partition.id, target.node)
    twins = [one for one in bench.targets if (one.partition.id, one.node) == here]
    if any(one.environment.name == wanted for one in twins) or target is not twins[0]:
        return f"its environment is {wanted}"
    return ""


def faults_anywhere(session: pytest.Session) -> dict[str, list[Problem]]:
    """Return what is wrong with collected tests whatever they run on, by node id: no system is selected."""
    workloads: Mapping[str, Workload] = {}
    faults = {}
    for item in session.items:
        if (declared := declared_of(item)) is None:
            continue
        workloads = workloads or workloads_of(make_manager(), session.config)
        params = _named_params(item, declared, workloads)
        asked = {**declared.fields, **params}
        problems = [Problem("", "", declared.mistake)] if declared.mistake else []
        if not problems:
            problems = misdeclared("", declared.decorator, declared.workload, workloads, asked)
        if problems:
            faults[item.nodeid] = [_shown(problem, item, declared) for problem in problems]
    return faults


def _compare(items: Mapping[str, pytest.Item], bench: Bench) -> None:
    """Move specs that cannot be beside one another, or on their target, to ``bench.faults``."""
    specs = list(bench.specs.values())
    problems = [*duplicates(specs), *too_large(specs)]
    if bench.settings.here:
        problems += [problem for spec in specs for problem in _too_much_here(spec)]
    for problem in problems:
        node_id = problem.where
        bench.faults.setdefault(node_id, []).append(replace(problem, where=_line(items[node_id])))
        bench.specs.pop(node_id, None)


def _too_much_here(spec: JobSpec) -> list[Problem]:
    """Return what the allocation around us cannot give."""
    from pytest_mlhpc.provision.slurm.inside_job import beyond_job

    here, now_ns = spec.target.partition.scheduler_options["here"], time.time_ns()
    reason = next(filter(None, (beyond_job(one, here, now_ns) for one in with_needs([spec]))), "")
    return [Problem(spec.node_id, "", reason)] if reason else []


def _without_node(item: pytest.Item) -> str:
    """Return the node id without the node of a sweep: of its hundred twins that are left out, one line is enough."""
    target = _target(item)
    if target is None or not target.node:
        return item.nodeid
    return item.nodeid.replace(target.id, target.id.removesuffix(f"-{target.node}"))


def _target(item: pytest.Item) -> Target | None:
    """Return where *item* runs, the first of its parameters; None where it has none."""
    target = getattr(getattr(item, "callspec", None), "params", {}).get("system")
    return target if isinstance(target, Target) else None


def will_run(item: pytest.Item) -> bool:
    """Whether no skip, skipif or xfail(run=False) mark keeps *item* from running; --runxfail lifts the latter."""
    from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks

    try:
        if evaluate_skip_marks(item) is not None:
            return False
        xfail = evaluate_xfail_marks(item)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a condition of the user's own; pytest tells it in setup
        return False
    return xfail is None or xfail.run or bool(item.config.option.runxfail)


def _spec(item: pytest.Item, declared: Declared, bench: Bench) -> JobSpec | None:
    """Return the job of *item*, or None: what is wrong with it is in ``bench.faults``."""
    target = _target(item)
    problems, spec = list(bench.misnamed.get(item.nodeid.partition("[")[0], ())), None
    if declared.mistake:
        problems.append(Problem(_line(item), "", declared.mistake))
    elif target is None or not isinstance(item, pytest.Function):
        text = "only test functions and methods of plain classes can be benchmarks (not unittest.TestCase)"
        problems.append(Problem(_line(item), "", text))
    else:
        try:
            spec = _resolved(_declaration(item, declared, target, bench), bench)
            problems += _wrong_fixture(item, spec, declared)
        except SpecError as error:
            problems += [_shown(one, item, declared) for one in error.problems]
    if problems:
        bench.faults[item.nodeid] = problems
        return None
    return spec


def _shown(problem: Problem, item: pytest.Item, declared: Declared) -> Problem:
    """Return *problem* with its line, and its field as the test calls it."""
    names = {name: called for called, name in declared.renamed.items()}
    return replace(problem, where=_line(item), key=names.get(problem.key, problem.key))


def _named_params(item: pytest.Item, declared: Declared, workloads: Mapping[str, Workload]) -> dict[str, Any]:
    """Return the parameters of a test that are named like a field, by the workload's name of it."""
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    fields = field_names(workloads.get(declared.workload))
    named = {declared.renamed.get(name, name): value for name, value in params.items()}
    return {name: value for name, value in named.items() if name in fields}


def _declaration(item: pytest.Function, declared: Declared, target: Target, bench: Bench) -> Declaration:
    return Declaration(
        node_id=item.nodeid,
        function=item.originalname,
        workload=declared.workload,
        target=target,
        marked=declared.fields,
        parametrized=_named_params(item, declared, bench.workloads),
        folder=item.path.parent,
        decorator=declared.decorator,
        line=_line(item),
        identity=identity_of(item, target.id),
        owner=bench.owner_of(item.path),
        needs=_needs(item, item.fixturenames),
    )


def _resolved(declaration: Declaration, bench: Bench) -> JobSpec:
    return resolve(declaration, bench.workloads, bench.settings.preset, bench.launchers, bench.models)


def _needs(item: pytest.Function, names: Sequence[str], above: tuple[str, ...] = ()) -> dict[str, Needed]:
    """Return the builds and runs among the fixtures *names* of *item*, and what these need. *above* are those that need them.

    Raises:
        SpecError: one needs itself.
    """
    found = {}
    for name in names:
        # pytest has no public way to ask for the definitions of a fixture.
        own = item._fixtureinfo.name2fixturedefs.get(name)  # noqa: SLF001
        definitions = own or (item.session._fixturemanager.getfixturedefs(name, item) if above else ())  # noqa: SLF001
        declared = getattr(definitions[-1].func, DECLARED, None) if definitions else None
        if not isinstance(declared, (Build, Preparation)) or not definitions:
            continue
        if name in above:
            text = f"the run needs itself: {' needs '.join((*above[above.index(name) :], name))}"
            raise SpecError([Problem(_line(item), name, text)])
        inner = named_fixtures(declared.command) if isinstance(declared, Preparation) else ()
        file, names_within = _file_of(definitions[-1], item)
        found[name] = Needed(
            declared,
            file.parent,
            f"{_relative(file, item.config.rootpath)}::{names_within}{name}",
            f"{file.relative_to(suite_root(file)).as_posix()}::{names_within}{name}",
            _needs(item, inner, (*above, name)),
        )
    return found


def _file_of(definition: Any, item: pytest.Function) -> tuple[Path, str]:
    """Return the file in which a fixture is declared, and its class as ``TestA::``. Its base is a file, or the folder of a conftest.py."""
    path, _, names = str(definition.baseid).partition("::")
    base = item.config.rootpath / path
    return base / "conftest.py" if base.is_dir() else base, f"{names}::" if names else ""


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _wrong_fixture(item: pytest.Function, spec: JobSpec, declared: Declared) -> Sequence[Problem]:
    """Return whether the test holds nodes and does not use them, or the other way round, or takes what only programs can have."""
    if spec.workload != "command" and (needs := _needs(item, item.fixturenames)):
        text = f"builds and runs that go before are for programs: @program(...), not @{declared.decorator}"
        return [Problem(_line(item), next(iter(needs)), text)]
    asks = "allocation" in item.fixturenames
    if spec.holds_nodes and not asks:
        text = "the test holds nodes and does not use them: take the fixture `allocation` (or `vetting`, with vet='quick')"
        return [Problem(_line(item), "", text)]
    if asks and not spec.holds_nodes:
        text = f"the fixture `allocation` is for tests that hold nodes: @nodes(count=2), not @{declared.decorator}"
        return [Problem(_line(item), "allocation", text)]
    return []


def _line(item: pytest.Item) -> str:
    """Return where a test begins, as ``file:line``."""
    path, line, _ = item.location
    return f"{path}:{(line or 0) + 1}"


def _argnames(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(name) for name in names]
