"""Collection: parametrize marked tests by target, turn them into job specs, and tell what is wrong with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_mlhpc.batch.plan import HELD
from pytest_mlhpc.bench import Bench
from pytest_mlhpc.errors import MlhpcError, Problem, SpecError, nearest
from pytest_mlhpc.jobs.contradictions import duplicates, lacking
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.fields import field_names
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.options import MARKER_NAMES, is_marked
from pytest_mlhpc.system.model import Target


def allow_fields(metafunc: pytest.Metafunc, bench: Bench | None) -> None:
    """Let parameters that are named like a field of the spec pass, though no argument of the test uses them.

    With a system selected, names that are neither are noted as problems, with the nearest valid one; otherwise
    pytest refuses them itself.
    """
    workload = _workload_name(metafunc.definition)
    if bench is None:
        from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS

        known = {w.name: w for w in WORKLOADS}
    else:
        known = dict(bench.workloads)
    fields = field_names(known.get(workload or ""))
    for mark in metafunc.definition.iter_markers("parametrize"):
        for name in _argnames(mark):
            if name in metafunc.fixturenames:
                continue
            if name in fields or bench is not None:
                metafunc.fixturenames.append(name)
            if name not in fields and bench is not None and workload in known:
                valid = [*fields, *metafunc.fixturenames[: metafunc.fixturenames.index(name)]]
                text = f"neither an argument of the test nor a field of {workload}"
                bench.problems.append(Problem(metafunc.definition.nodeid, name, text, nearest(name, valid)))


def parametrize_by_target(metafunc: pytest.Metafunc, bench: Bench) -> None:
    """Run a marked test once on each target; the target comes first in the node id, whatever else there is."""
    if "system" not in metafunc.fixturenames:
        metafunc.fixturenames.append("system")
    metafunc.parametrize("system", bench.targets, ids=[target.id for target in bench.targets])


def finish(session: pytest.Session, bench: Bench) -> None:
    """Declare what was collected: to the session, or from a worker of pytest-xdist to the controller.

    Nothing is declared after errors of collection that end the run, and with --collect-only.

    Raises:
        pytest.UsageError: all problems of all selected tests (in a worker, the controller raises it).
    """
    specs = declare(session, bench)
    option = session.config.option
    broken = session.testsfailed and not option.continue_on_collection_errors
    if bench.declare_remotely is not None:
        if not broken:
            bench.declare_remotely(specs, bench)
        return
    if bench.problems:
        raise pytest.UsageError("\n".join(dict.fromkeys(map(str, bench.problems))))
    if bench.session is not None:
        bench.session.deselected = bench.deselected
        if not broken:
            try:
                bench.session.declare(specs)
            except MlhpcError as error:
                raise pytest.UsageError(str(error)) from None


def declare(session: pytest.Session, bench: Bench) -> list[JobSpec]:
    """Resolve the specs of all marked items, deselect those that their target cannot run, and return the rest.

    Items that will be skipped are resolved too, as their mistakes count, but not returned. What is wrong is added to
    ``bench.problems``.
    """
    kept, gone, specs = [], [], []
    for item in session.items:
        spec = _resolve(item, bench) if is_marked(item) else None
        if spec is not None and (reason := lacking(spec)):
            gone.append(item)
            if (line := f"{_told(item, spec)}: {reason}") not in bench.deselected:
                bench.deselected.append(line)
            continue
        kept.append(item)
        if spec is not None and bench.settings.here:
            bench.problems += _too_much_here(spec)
        if spec is not None:
            bench.specs[item.nodeid] = spec
            if will_run(item):
                specs.append(spec)
    bench.problems += duplicates(list(bench.specs.values()))
    if gone:
        session.items[:] = kept
        session.config.hook.pytest_deselected(items=gone)
    return specs


def _too_much_here(spec: JobSpec) -> list[Problem]:
    """Return what the allocation around us cannot give."""
    from pytest_mlhpc.provision.slurm.here import beyond_job

    reason = beyond_job(spec, spec.target.partition.scheduler_options["here"], time.time_ns())
    return [Problem(spec.node_id, "", reason)] if reason else []


def _told(item: pytest.Item, spec: JobSpec) -> str:
    """Return the node id as people are told of it: of a sweep's hundred twins that fall out, one line is enough."""
    target = spec.target
    return (
        item.nodeid.replace(target.id, target.id.removesuffix(f"-{target.node}"))
        if target.node
        else item.nodeid
    )


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


def _resolve(item: pytest.Item, bench: Bench) -> JobSpec | None:
    marks = [mark for name in MARKER_NAMES if (mark := item.get_closest_marker(name))]
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    target = params.get("system")
    problem = ""
    if len(marks) > 1:
        problem = f"is marked both {' and '.join(mark.name for mark in marks)}"
    elif len(marks[0].args) != 1 or not isinstance(marks[0].args[0], str):
        problem = f"{marks[0].name} takes the workload's name and then fields: {marks[0].name}('cosmoflow', steps=20)"
    elif not isinstance(target, Target) or not isinstance(item, pytest.Function):
        problem = "only test functions and methods of plain classes can be marked (not unittest.TestCase)"
    if problem or not isinstance(target, Target):
        bench.problems.append(Problem(item.nodeid, "", problem))
        return None
    workload = marks[0].args[0]
    fields = field_names(bench.workloads.get(workload))
    declared = Declaration(
        node_id=item.nodeid,
        function=getattr(item, "originalname", None) or item.name,
        workload=workload,
        target=target,
        marked=marks[0].kwargs,
        parametrized={name: value for name, value in params.items() if name in fields},
        folder=item.path.parent,
    )
    try:
        spec = resolve(declared, bench.workloads, bench.settings.preset, bench.launchers, bench.models)
    except SpecError as error:
        bench.problems += error.problems
        return None
    asks = "allocation" in getattr(item, "fixturenames", ())
    if spec.held and not asks:
        text = (
            "holds nodes and never uses them: take the fixture `allocation`, and call allocation.run([...])"
        )
        bench.problems.append(Problem(item.nodeid, "", text))
    elif asks and not spec.held:
        text = (
            f"the fixture `allocation` is for tests that hold nodes: job({HELD!r}, nodes=2), not {workload!r}"
        )
        bench.problems.append(Problem(item.nodeid, "allocation", text))
    return spec


def _workload_name(node: Any) -> str | None:
    for name in MARKER_NAMES:
        mark = node.get_closest_marker(name)
        if mark is not None and mark.args and isinstance(mark.args[0], str):
            return str(mark.args[0])
    return None


def _argnames(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(name) for name in names]
