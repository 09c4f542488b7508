"""Pytest files with a stub for each test class of a ReFrame suite, and the list of what needs a person.

Open it when a field of a stub is wrong, or a question is missing. A stub with a question is skipped, and its reason is that list: it
measures nothing until a person has answered. A stub without one runs.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import normpath, relpath
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.cli.reframe_metrics import OpenQuestion, conditions, metrics, source
from pytest_mlhpc.cli.reframe_python import one_line, unknown_in
from pytest_mlhpc.cli.reframe_settings import add_option, minutes
from pytest_mlhpc.cli.reframe_suite import ReframeTest, Suite, texts
from pytest_mlhpc.store.text import count

#: Where the stubs lie in a project.
FOLDER: Final = "suites/from_reframe"
#: What only a shell understands in a command: ReFrame writes it into a script of bash.
_SHELL: Final = re.compile(r"[|&;<>`$*\n]")
#: Commands that are the shell's own, or functions in it.
_OF_SHELL: Final = ("module", "ml", "source", ".", "export", "unset", "ulimit", "cd", "eval", "exec", "set")
#: Questions that the reason of a skipped stub says in full; all stand above it.
_IN_REASON: Final = 2


@dataclass
class Stub:
    """One test as it will be written."""

    test: ReframeTest
    command: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)  #: their source
    fields: dict[str, str] = field(default_factory=dict)  #: name -> source
    body: list[str] = field(default_factory=list)
    build: str = ""  #: source of its fixture
    questions: list[OpenQuestion] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What follows ``test_`` in the function's name."""
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.test.name)
        return re.sub(r"\W+", "_", parts).strip("_").lower() or "unnamed"

    @property
    def open(self) -> list[OpenQuestion]:
        """What must be answered before the test can run: the questions that are no hints."""
        return [one for one in self.questions if not one.hint]

    def ask(self, kind: str, text: str, *, hint: bool = False) -> None:
        """Add a question; *kind* is the word by which questions are counted."""
        one = OpenQuestion(kind, text, hint)
        self.questions += [one] if one not in self.questions else []

    def known(self, kind: str, what: str, value: Any) -> bool:
        """Return whether *value* holds nothing unknown; otherwise ask for it."""
        if expression := unknown_in(value):
            self.ask(kind, f"{what} is computed by ReFrame: `{expression}`")
        return not expression


#: Options of the scheduler by the name of a resource, each form that some partition has.
Resources = Mapping[str, Sequence[Sequence[str]]]


def write_stubs(
    suite: Suite, root: Path, project: Path, systems: Iterable[str], resources: Resources
) -> tuple[dict[str, str], list[Stub]]:
    """Return the texts of the files by their paths in *project*, and all stubs.

    Args:
        suite: the tests, all below *root*.
        root: the suite's folder, or its file.
        project: the folder that ``mlhpc init`` writes to; sources are named relative to it.
        systems: those that the settings describe; a reference of ``*`` is a promise of each.
        resources: what the settings put in place of a test's ``extra_resources``.
    """
    folder = project / FOLDER
    stubs = [make_stub(test, folder, [*systems], resources) for test in suite.tests]
    by_file: dict[Path, list[Stub]] = {}
    for stub in stubs:
        by_file.setdefault(stub.test.path, []).append(stub)
    base = root if root.is_dir() else root.parent
    files: dict[str, str] = {}
    for path, of_file in by_file.items():
        parts = re.sub(r"\W+", "_", path.relative_to(base).with_suffix("").as_posix()).strip("_")
        name = f"{FOLDER}/test_{parts.removeprefix('test_')}.py"
        files[name if name not in files else f"{name[:-3]}_{len(files)}.py"] = _file(path, of_file)
    return files, stubs


def summary(suite: Suite, stubs: Sequence[Stub]) -> list[str]:
    """Return what was taken over and what needs a person, as lines: counts by kind of question, then files that were not read."""
    asked = [stub for stub in stubs if stub.open]
    kinds = Counter(kind for stub in stubs for kind in {one.kind for one in stub.open})
    what = f"{count(len(stubs), 'test class', 'test classes')} of {count(suite.files, 'file')}"
    whole = len(stubs) - len(asked)
    lines = [f"{what}: {whole} taken over whole, {len(asked)} skipped until a person has answered"]
    ordered = sorted(kinds.items(), key=lambda pair: (-pair[1], pair[0]))
    lines += [f"  {number} of them for {_KINDS[kind]}" for kind, number in ordered]
    return lines + [f"  not read: {one}" for one in suite.unreadable]


#: Kind of a question -> what a person is needed for.
_KINDS: Final = {
    "base": "a base class that is not in the suite", "build": "a build", "command": "a command or its shell lines",
    "computed": "a value that ReFrame computes", "container": "a container", "fixture": "a fixture or a test that it needs",
    "metric": "a figure", "parameter": "a parameter", "ranks": "its nodes and ranks", "reference": "a reference",
    "resources": "options of the scheduler", "sanity": "a condition", "where": "where it may run",
}  # fmt: skip


def make_stub(test: ReframeTest, folder: Path, systems: Sequence[str], resources: Resources) -> Stub:
    """Return the stub of *test* for a file in *folder*."""
    stub = Stub(test)
    for base in test.missing:
        stub.ask("base", f"its base {base} is in no file of the suite: what it sets is unknown")
    if not test.kind and not test.missing:
        stub.ask("base", "no base of it is a test of ReFrame")
    _build(stub, folder)
    _command(stub)
    _ranks(stub)
    _software(stub)
    _resources(stub, resources)
    _where(stub)
    stub.metrics, reference, questions = metrics(test, systems)
    stub.questions += questions
    if reference:
        stub.fields["reference"] = reference
    sanity, body, artifacts, questions = conditions(test)
    stub.questions += questions
    stub.body += body
    if sanity:
        stub.fields["sanity"] = f"[{', '.join(sanity)}]" if len(sanity) > 1 else sanity[0]
    _files(stub, folder, artifacts)
    _needs(stub)
    _not_followed(stub)
    return stub


#: Systems that build by `make` here, and the variables that ReFrame sets for it.
_FLAGS: Final = {
    "cppflags": "CPPFLAGS", "cflags": "CFLAGS", "cxxflags": "CXXFLAGS", "fflags": "FFLAGS", "ldflags": "LDFLAGS",
}  # fmt: skip
#: Suffixes that make has a rule for, without a makefile (GNU make 4.4, "Catalogue of Built-In Rules").
_BUILT_IN: Final = (".c", ".cc", ".cpp", ".C", ".f", ".F")


def _build(stub: Stub, folder: Path) -> None:
    """Declare the build of a test: by make, which has rules for one source, and by which ReFrame's `Make` builds."""
    if stub.test.kind == "run":
        return
    given = stub.test.attributes
    system, path = str(given.get("build_system") or ""), str(given.get("sourcepath") or "")
    single = system == "SingleSource" or (not system and Path(path).suffix != "")
    sources = _sources(stub, folder)
    if unknown_in([system, path]) or (
        Path(path).suffix not in _BUILT_IN if single else system not in {"Make", ""}
    ):
        stub.ask(
            "build",
            f"it is built by {system or 'ReFrame'} from {path or 'its sources'}: write a command of build()",
        )
        return
    for name in ("prebuild_cmds", "postbuild_cmds"):
        if lines := texts(given.get(name)):
            stub.ask("build", f"{name} are lines of a shell: {lines}")
    arguments = ["make", *([Path(path).with_suffix("").as_posix()] if single else []), *_make_options(stub)]
    if not sources:
        return
    stub.build = f"{stub.name}_build = build({source(arguments)}, files={source(sources)})"
    if not given.get("executable"):
        stub.command = [f"{{{stub.name}_build}}/{arguments[1] if single else stub.test.name}"]
        if not single and stub.test.kind != "build":
            stub.ask("command", "ReFrame calls the built program like the test; write its name")


def _make_options(stub: Stub) -> list[str]:
    """Return the arguments that follow ``make`` for the attributes of a test's build system."""
    given = stub.test.attributes
    arguments: list[str] = []
    for name, option in (("makefile", "-f"), ("srcdir", "-C")):
        if (value := given.get(f"build_system.{name}")) and stub.known("build", name, value):
            arguments += [option, str(value)]
    options = [str(one) for one in texts(given.get("build_system.options"))]
    if stub.known("build", "build_system.options", options):
        arguments += [word for one in options for word in _split(stub, "build", one)]
    for name, variable in _FLAGS.items():
        flags = [str(one) for one in texts(given.get(f"build_system.{name}"))]
        if flags and stub.known("build", name, flags):
            arguments.append(f"{variable}={' '.join(flags)}")
    return arguments


def _sources(stub: Stub, folder: Path) -> list[str]:
    """Return the sources of *stub* relative to *folder*. ReFrame copies what is in the folder, not the folder."""
    given = stub.test.attributes.get("sourcesdir", "src")
    if given is None or not stub.known("build", "sourcesdir", given):
        return []
    place = Path(normpath(stub.test.path.absolute().parent / str(given)))
    if place.is_dir():
        return [f"{relpath(place, folder.absolute())}/*"]
    if "sourcesdir" in stub.test.attributes or stub.test.kind != "run":
        stub.ask("build", f"its sources {given!r} are not in {stub.test.path.parent}")
    return []


def _split(stub: Stub, kind: str, text: str) -> list[str]:
    """Return *text* as a shell splits it. What a shell would do besides is asked."""
    if _SHELL.search(text) and not unknown_in(text):
        stub.ask(kind, f"`{text}` is for a shell, and no shell takes part")
    try:
        return [text] if unknown_in(text) else shlex.split(text)
    except ValueError:
        return [text]


def _command(stub: Stub) -> None:
    given = stub.test.attributes
    lines = [
        given.get("executable") or given.get("container_platform.command"),
        *texts(given.get("executable_opts")),
    ]
    if stub.test.kind == "build":
        stub.command = ["true"]
        stub.ask("build", "it only builds: a test that takes the build fixture checks the same")
    elif lines[0] is None and not stub.command:
        stub.ask("command", "its executable is set by no statement that was followed")
        stub.command = ["⟨executable⟩"]
    stub.known("command", "the command", lines)
    arguments = [word for line in lines if line is not None for word in _split(stub, "command", str(line))]
    if arguments and (arguments[0] in _OF_SHELL or arguments[0].startswith("-")):
        stub.ask("command", f"`{arguments[0]}` is no program: ReFrame writes it into a script of bash")
    if stub.build and arguments and arguments[0].startswith("./"):
        arguments[0] = f"{{{stub.name}_build}}/{arguments[0][2:]}"
    stub.command = [*stub.command, *arguments] if stub.test.kind != "build" else stub.command
    for name in ("prerun_cmds", "postrun_cmds"):
        if cmds := texts(given.get(name)):
            stub.ask("command", f"{name} are lines of a shell: {cmds}")


def _ranks(stub: Stub) -> None:
    given = stub.test.attributes
    tasks, each = given.get("num_tasks", 1), given.get("num_tasks_per_node")
    if not all(type(one) is int for one in (tasks, each or 0)):
        stub.known("ranks", "num_tasks or num_tasks_per_node", [tasks, each])
    elif tasks <= 0:
        stub.ask(
            "ranks", f"num_tasks={tasks} takes all nodes that are free; write nodes= and ranks_per_node="
        )
    elif each:
        stub.fields |= {"nodes": str(-(-tasks // each)), "ranks_per_node": str(min(each, tasks))}
        if tasks % each and tasks > each:
            stub.ask("ranks", f"num_tasks={tasks} does not fill nodes of {each}")
    elif tasks > 1:
        stub.fields["ranks_per_node"] = str(tasks)
        stub.ask("ranks", f"num_tasks={tasks} does not say of how many nodes; one was taken")
    threads = given.get("num_cpus_per_task")
    if threads not in (None, 1):
        stub.ask(
            "ranks",
            f"num_cpus_per_task={threads}: here ranks share the cores of the node, {{cores_per_rank}} each",
            hint=type(threads) is int,
        )
    devices = given.get("num_gpus_per_node")
    if (
        devices is not None
        and stub.known("ranks", "num_gpus_per_node", devices)
        and type(devices) is int
        and devices > 0
    ):
        stub.fields["devices_per_node"] = str(devices)


def _software(stub: Stub) -> None:
    given = stub.test.attributes
    _variables(stub, given.get("env_vars") or given.get("variables"))
    modules = [str(one) for one in texts(given.get("modules"))]
    if modules and stub.known("computed", "modules", modules):
        stub.fields["modules"] = source(modules)
    limit = given.get("time_limit")
    if limit and stub.known("computed", "time_limit", limit):
        if text := minutes(limit):
            stub.fields["time_limit"] = source(text)
        else:
            stub.ask("computed", f"time_limit={limit}: write it as 30m or 1h30m")
    if given.get("exclusive_access") is True:
        stub.fields["exclusive"] = "True"
    owners = [" ".join(str(one).split()) for one in texts(given.get("maintainers"))]
    if owners and not unknown_in(owners):
        stub.fields["owner"] = source(", ".join(owners))
    image, platform = given.get("container_platform.image"), given.get("container_platform")
    if image and stub.known("container", "the image", image):
        stub.fields["image"] = source(str(image))
    if platform or image:
        runtime = platform or "a container"
        stub.ask("container", f"it runs in {runtime}: its partitions need an environment with `container:`")


def _variables(stub: Stub, given: Any) -> None:
    if not isinstance(given, dict):
        stub.known("computed", "env_vars", given)
        return
    env = {
        str(key): str(value) for key, value in given.items() if stub.known("computed", str(key), [key, value])
    }
    for key, value in env.items():
        if "$" in value:
            stub.ask("computed", f"{key}={value} is for a shell, and no shell takes part")
    if env:
        stub.fields["env"] = source(env)


def _resources(stub: Stub, resources: Resources) -> None:
    """Take over ``extra_resources`` by the options that all partitions of the settings have for them, and options of the job."""
    made: dict[str, Any] = {}
    given = stub.test.attributes
    wanted = given.get("extra_resources")
    for name, values in wanted.items() if isinstance(wanted, dict) else ():
        forms = resources.get(name, ())
        if len(forms) != 1 or not isinstance(values, dict) or unknown_in(values):
            stub.ask("resources", f"extra_resources {name}={values}: write slurm={{...}}")
            continue
        for option in forms[0]:
            text = re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), option)  # noqa: B023 - used at once
            why = "it is not filled in" if "{" in text or unknown_in(text) else add_option(made, text)
            if why:
                stub.ask("resources", f"extra_resources {name}: {text}: {why}")
    for name in ("job.options", "job.launcher.options"):
        if options := texts(given.get(name)):
            stub.ask("resources", f"{name} = {options}: write slurm={{...}}")
    if made:
        stub.fields["slurm"] = source(made)


def _where(stub: Stub) -> None:
    for name, what in (("valid_systems", "system"), ("valid_prog_environs", "environment")):
        value = [str(one) for one in texts(stub.test.attributes.get(name))]
        if not stub.known("where", name, value) or not value or "*" in value:
            continue
        features = re.fullmatch(r"[+-][\w.-]+(?: [+-][\w.-]+)*", value[0]) if len(value) == 1 else None
        if features and what == "system":
            stub.fields["requires"] = source(value[0])
        elif all(re.fullmatch(r"[\w.:-]+", one) and one[0] not in "+-" for one in value):
            option = "--system" if what == "system" else "--mlhpc-environment"
            stub.ask("where", f"ReFrame runs it with {name}={value} alone: select by {option}", hint=True)
        else:
            stub.ask(
                "where",
                f"{name}={value}: give such partitions a feature in systems.yaml, and write requires=",
            )


def _files(stub: Stub, folder: Path, artifacts: Sequence[str]) -> None:
    if stub.test.kind == "run" and (sources := _sources(stub, folder)):
        stub.fields["files"] = source(sources)
    names = [str(one) for one in texts(stub.test.attributes.get("keep_files")) if not unknown_in(one)]
    names = [
        *dict.fromkeys([one for one in names if not one.startswith("/") and ".." not in one] + [*artifacts])
    ]
    if names:
        stub.fields["artifacts"] = source(names)


def _needs(stub: Stub) -> None:
    for name, values in stub.test.parameters.items():
        stub.ask("parameter", f"parameter {name} = {values}: parametrize the fields that it changes")
    for name, maker in stub.test.fixtures.items():
        stub.ask("fixture", f"fixture {name} is made by {maker}: declare it by build() or prepare()")


def _not_followed(stub: Stub) -> None:
    """Ask for each statement of a hook that changes the test, or may skip it, and was not followed."""
    for one in stub.test.unread:
        touched = {name for name in one.names if name.startswith("self.")}
        if "skip" in one.text:
            stub.ask("where", f"a hook leaves it out: `{one.text}`")
        elif "depends_on" in one.text:
            stub.ask("fixture", f"it needs another test: `{one.text}`")
        elif "launcher" in one.text:
            stub.ask("ranks", f"a hook changes the launcher: `{one.text}`")
        elif touched or one.sets:
            stub.ask("computed", f"a hook was not followed: `{one.text}`")


def _file(path: Path, stubs: Sequence[Stub]) -> str:
    """Return the text of the pytest file for the tests of *path*."""
    names = [
        "Metric" if any(stub.metrics for stub in stubs) else "",
        "build" if any(stub.build for stub in stubs) else "",
        "program",
    ]
    imports = ["import re\n"] if any("re." in line for stub in stubs for line in stub.body) else []
    imports += ["import pytest\n"] if any(stub.open for stub in stubs) else []
    name = re.sub(r"[^\w.+-]", "_", path.name)  # nothing that would end the docstring
    text = f'"""Stubs of the ReFrame tests of {name}. A skipped one says what needs a person."""\n\n'
    text += "".join(imports) + ("\n" if imports else "")
    text += f"from pytest_mlhpc import {', '.join(filter(None, names))}\n"
    return text + "".join(f"\n\n{_stub(name, stub)}" for name, stub in _distinct(stubs))


def _distinct(stubs: Sequence[Stub]) -> list[tuple[str, Stub]]:
    """Return each stub with a name that no other of the file has."""
    times: Counter[str] = Counter()
    found = []
    for stub in stubs:
        times[stub.name] += 1
        found.append((f"{stub.name}_{times[stub.name]}" if times[stub.name] > 1 else stub.name, stub))
    return found


def _stub(name: str, stub: Stub) -> str:
    lines = [stub.build, "", ""] if stub.build else []
    if hints := [one_line(one.text) for one in stub.questions if one.hint]:
        lines += ["# to know:", *(f"# - {one}" for one in hints)]
    if asked := [one_line(one.text) for one in stub.open]:
        lines += ["# what needs a person:", *(f"# - {one}" for one in asked)]
        some, rest = "; ".join(one[:200] for one in asked[:_IN_REASON]), len(asked) - _IN_REASON
        reason = f"needs a person: {some}" + (f"; {rest} more above the test" if rest > 0 else "")
        lines.append(f"@pytest.mark.skip({source(reason)})")
    lines += ["@program(", f"    {source(stub.command)},"]
    lines += [f"    {one}," for one in stub.metrics]
    lines += [f"    {key}={value}," for key, value in stub.fields.items()]
    taken = f"run, {stub.name}_build" if stub.build else "run"
    lines += [")", f"def test_{name}({taken}):"]
    about = " ".join(stub.test.descr.split())
    lines += [f"    {source(about)}"] if about and not unknown_in(about) else []
    lines += [f"    {line}" for line in stub.body] or ["    pass"]
    return "\n".join(lines) + "\n"
