"""A submission package of MLPerf HPC from recorded runs, and its check by mlperf-logging's package checker.

The layout is that of MLCommons' policies (submission_rules.adoc, "Directory structure", HPC), time to train only::

    systems/SYSTEM.json
    benchmarks/BENCHMARK/implementations/pytest-mlhpc/     the test, its fields, what to install
    benchmarks/BENCHMARK/SYSTEM/                           README.md, setup.sh, init_datasets.sh, run_and_time.sh
    results/SYSTEM/strong/BENCHMARK/result_N.txt

SYSTEM is the platform with its scale: ``cirrus-gpu_16x4``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.yaml import read_file
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.papers.mlperf import logs, results
from pytest_mlhpc.papers.mlperf.logs import CheckedLog, LogEntry, Submission
from pytest_mlhpc.papers.mlperf.results import RunGroup
from pytest_mlhpc.papers.mlperf.trained import QUALITY, RULESET, USAGE, TrainedRun, values
from pytest_mlhpc.store.text import count

IMPLEMENTATION: Final = "pytest-mlhpc"
#: Fields of a system's description (submission_rules.adoc, "<system_desc_id>.json metadata"): what needs a meaningful response.
HOST_FIELDS: Final = (
    "host_processors_per_node", "host_processor_model_name", "host_processor_core_count", "host_memory_capacity",
    "host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology",
    "host_memory_configuration", "cooling", "framework", "other_software_stack", "operating_system",
)  # fmt: skip
#: Likewise, of systems with accelerators.
ACCELERATOR_FIELDS: Final = (
    "accelerator_model_name", "accelerator_host_interconnect", "accelerator_memory_configuration",
    "accelerator_memory_capacity", "accelerator_interconnect",
)  # fmt: skip
#: Fields that may be empty; those that the package checker does not ask for are written where they are given.
OPTIONAL_FIELDS: Final = (
    "host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches", "host_processor_interconnect",
    "accelerator_frequency", "accelerator_on-chip_memories", "accelerator_interconnect_topology", "hw_notes", "sw_notes",
)  # fmt: skip
EXTRA_FIELDS: Final = ("host_network_card_count", "system_type", "system_type_detail")
#: What the options and the records say, and nobody else.
OWN_FIELDS: Final = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "accelerators_per_node",
)  # fmt: skip


def read_description(path: Path | None) -> dict[str, str]:
    """Return the fields of the system's description in the YAML or JSON file at *path*, as text; none without a file.

    Raises:
        ConfigError: it cannot be read.
        UsageError: a field is unknown, is ours to say, or is neither a text nor a number.
    """
    if path is None:
        return {}
    found, problems = {}, []
    known = {*HOST_FIELDS, *ACCELERATOR_FIELDS, *OPTIONAL_FIELDS, *EXTRA_FIELDS}
    for name, node in read_file(path, top="").items():
        if name in OWN_FIELDS:
            problems.append(f"{node.where}: {name}: the options and the records say it; remove it")
        elif name not in known:
            problems.append(f"{node.where}: {name}: no field of a system's description")
        elif isinstance(node.value, bool) or not isinstance(node.value, (str, int, float)):
            problems.append(f"{node.where}: {name}: must be a text or a number")
        else:
            found[name] = str(node.value)
    if problems:
        raise UsageError("\n".join(problems))
    return found


def describe(
    run: TrainedRun, submission: Submission, system: str, described: Mapping[str, str]
) -> dict[str, str]:
    """Return the description of the system that *run* ran on; *described* goes before what the record knows.

    Raises:
        UsageError: fields that need a meaningful response have none; names all of them, in the form of the file.
    """
    facts = run.environment
    accelerated = run.device_type != "cpu"
    software = [f"{name} {facts[key]}" for name, key in _SOFTWARE if facts.get(key)]
    known = {
        "host_processor_model_name": facts.get("cpu_model", ""),
        "accelerator_model_name": run.device_model if accelerated else "",
        "framework": f"PyTorch {facts['torch']}" if facts.get("torch") else "",
        "other_software_stack": ", ".join(software),
        "operating_system": f"Linux {facts['kernel']}" if facts.get("kernel") else "",
    }
    fields = {
        "submitter": submission.org,
        "division": submission.division,
        "status": submission.status,
        "system_name": system,
        "number_of_nodes": str(run.nodes),
        "accelerators_per_node": str(logs.accelerators_per_node(run)),
        **dict.fromkeys((*HOST_FIELDS, *ACCELERATOR_FIELDS, *OPTIONAL_FIELDS), ""),
        **known,
        **described,
    }
    wanted = (*HOST_FIELDS, *(ACCELERATOR_FIELDS if accelerated else ()))
    missing = [name for name in wanted if not fields[name].strip()]
    if missing:
        lines = "".join(f"\n  {name}: ..." for name in missing)
        raise UsageError(
            f"the description of {system} lacks {count(len(missing), 'field')} that no record knows; write a file with them and "
            f"name it by --description:{lines}"
        )
    return fields


#: Of a record's environment, as it is called in a description.
_SOFTWARE: Final = (
    ("Python", "python"),
    ("CUDA", "cuda"),
    ("cuDNN", "cudnn"),
    ("NCCL", "nccl"),
    ("ROCm", "hip"),
    ("driver", "driver"),
    ("glibc", "glibc"),
)


def required_keys(workload: str, division: str, entries: Sequence[LogEntry]) -> tuple[str, ...]:
    """Return the keys that the compliance checker wants in a log of *workload* exactly once, from the checker's own files.

    Raises:
        UsageError: mlperf-logging is not installed.
    """
    import yaml

    said = {entry.key: str(entry.value).lower() for entry in entries}
    chosen = (said.get("opt_name", ""), said.get("scheduler_type", ""))
    names = [workload, *(f"{workload}_{choice}" for choice in chosen if choice)]
    try:
        folder = resources.files("mlperf_logging.compliance_checker") / f"{USAGE}_{RULESET}"
    except ModuleNotFoundError as error:
        raise UsageError(f"mlperf-logging is not installed: {logs.INSTALL}") from error
    files = [folder / f"{division}_{name}.yaml" for name in names]
    rules = [rule for file in files if file.is_file() for rule in yaml.safe_load(file.read_text()) or ()]
    keys = [rule["KEY"] for rule in rules if "KEY" in rule]
    return tuple(key["NAME"] for key in keys if key.get("REQ") == "EXACTLY_ONE")


@dataclass(frozen=True)
class PackagedRuns:
    """The runs of one benchmark at one scale, and the entries of their logs."""

    group: RunGroup
    system: str
    entries: tuple[list[LogEntry], ...]

    @property
    def results(self) -> str:
        """Where in the package its logs are."""
        return f"results/{self.system}/strong/{self.group.workload}"

    def logs(self, folder: Path) -> list[tuple[Path, TrainedRun]]:
        """Return the path of each log in the package at *folder*, with its run."""
        return [(folder / self.results / f"result_{at}.txt", run) for at, run in enumerate(self.group.runs)]


def packaged(groups: Sequence[RunGroup], submission: Submission) -> tuple[PackagedRuns, ...]:
    """Return what goes into the package.

    Raises:
        UsageError: anything is missing by which the package would be rejected; names all of it, and what to do.
    """
    machines = sorted({group.machine for group in groups})
    if len(machines) > 1:
        raise UsageError(f"a package describes one machine, not {', '.join(machines)}; choose by --system")
    made, problems = [], []
    for group in groups:
        entries = tuple(
            logs.entries(run, submission, results.departures(run)) for run in group.runs if run.events
        )
        problems += [f"{_what(group)}: {why}" for why in _problems(group, entries, submission.division)]
        made.append(PackagedRuns(group, _system(group, submission), entries))
    for (system, workload), number in Counter((one.system, one.group.workload) for one in made).items():
        if number > 1:
            problems.append(
                f"{number} trainings of {workload} on {system}: a package has one; choose by --benchmark"
            )
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(made)


def _what(group: RunGroup) -> str:
    return f"{group.name} on {group.machine}"


def _system(group: RunGroup, submission: Submission) -> str:
    """Return the name of a system, of letters that git and a path can hold (mlperf-logging, repo_checker)."""
    run = group.runs[0]
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", submission.platform).strip("-.") or "system"
    return f"{name}_{run.nodes}x{-(-run.devices // max(1, run.nodes))}"


def _problems(group: RunGroup, entries: Sequence[Sequence[LogEntry]], division: str) -> Iterator[str]:
    """Yield why the runs of *group* are no submission, each with what to do."""
    wanted = QUALITY[group.workload].runs or 0
    number = len(group.runs)
    seeds = f'@pytest.mark.parametrize("seed", range(1, {wanted + 1}))'
    if number < wanted:
        yield f"{number} of the {wanted} runs that the rules want; run the others, each with a seed of its own: {seeds}"
    elif number > wanted:
        yield f"{number} runs, where the rules want {wanted} and none may be chosen; leave older ones out by --since"
    yield from _seeds(group, seeds)
    for run in group.runs:
        if not run.events:
            yield f"record {run.record} ({run.verdict}) has no events, so no log; run all anew with a larger max_epochs"
    missing = dict.fromkeys(
        key
        for some in entries
        for key in required_keys(group.workload, division, some)
        if key != "seed" and key not in {entry.key for entry in some}
    )
    if missing:
        yield (
            f"the records lack the hyperparameters {', '.join(missing)}, which the {division} division asks for; run again with "
            'until="quality" and this release'
        )
    for name in ("torch", "python"):
        versions = sorted({run.environment.get(name, "") for run in group.runs if run.events})
        if len(versions) > 1:
            yield f"runs with {name} {' and '.join(versions)}; a result is of one software, choose by --since"


def _seeds(group: RunGroup, seeds: str) -> Iterator[str]:
    found = Counter(_seed(run) for run in group.runs)
    if found[None]:
        yield f"{count(found[None], 'run')} without a seed; give each its own: {seeds}"
    repeated = sorted(seed for seed, times in found.items() if seed is not None and times > 1)
    if repeated:
        yield f"several runs have the seed {', '.join(map(str, repeated))}; give each its own: {seeds}"
    low = sorted(seed for seed in found if seed is not None and seed <= 0)
    if low:
        yield f"a seed must be above 0, not {', '.join(map(str, low))}; take {seeds}"


def _seed(run: TrainedRun) -> int | None:
    found = next(iter(values(run.events, "seed")), run.parameters.get("seed"))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def files_of(
    runs: Sequence[PackagedRuns], submission: Submission, described: Mapping[str, str]
) -> dict[str, str]:
    """Return the package: path in it -> text.

    Raises:
        UsageError: the description lacks a field, or mlperf-logging is not installed.
        StoreError: mlperf-logging could not write an entry.
    """
    made: dict[str, str] = {}
    for one in runs:
        run, workload = one.group.runs[0], one.group.workload
        system = describe(run, submission, one.system, described)
        made[f"systems/{one.system}.json"] = _json(system)
        for number, entries in enumerate(one.entries):
            made[f"{one.results}/result_{number}.txt"] = logs.log_text(entries)
        code = f"benchmarks/{workload}/implementations/{IMPLEMENTATION}"
        made[f"{code}/test_{workload}.py"] = _TEST
        made[f"{code}/training.json"] = _json(_training(one.group))
        made[f"{code}/requirements.txt"] = (
            f"pytest-mlhpc=={metadata.version('pytest-mlhpc')}\ntorch=={run.environment.get('torch', '')}\n"
        )
        here = f"benchmarks/{workload}/{one.system}"
        made[f"{here}/{one.system}_{IMPLEMENTATION}.json"] = _json(_model_information(run))
        made[f"{here}/README.md"] = _readme(one, submission)
        for name, script in _SCRIPTS.items():
            made[f"{here}/{name}"] = script
    return made


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _training(group: RunGroup) -> dict[str, Any]:
    run = group.runs[0]
    fields = {name: value for name, value in run.asked.items() if name != "seed"}
    return {
        "workload": group.workload,
        "fields": fields,
        "seeds": sorted(seed for run in group.runs if (seed := _seed(run)) is not None),
    }


def _model_information(run: TrainedRun) -> dict[str, str]:
    """Return the facts of submission_rules.adoc, "model-info metadata"; reduced precision is autocast's."""
    return {
        "Starting weights filename?": "none: initialised from the seed",
        "Weight transformations?": "No",
        "Weight data type(s)": "fp32",
        "Input data type(s)": "fp32",
        "Retraining": "No",
        "Notes": f"precision={run.parameters.get('precision') or 'fp32'}",
    }


def _readme(one: PackagedRuns, submission: Submission) -> str:
    group = one.group
    run = group.runs[0]
    options = shlex.join(
        [*run.options, "--system", ":".join(filter(None, (run.key.system, run.key.partition)))]
    )
    departures = [
        f"- {texts} ({rule})" for rule, found in results.by_rule(group.departures).items() for texts in found
    ]
    return "\n".join(
        [
            f"# {group.workload} on {one.system}",
            "",
            f"{len(group.runs)} runs, submitted as {submission.division}, by pytest-mlhpc. To run them again:",
            "",
            "    sh setup.sh",
            "    sh init_datasets.sh",
            f"    sh run_and_time.sh {options}",
            "",
            f"The test and its fields: `../implementations/{IMPLEMENTATION}`. The system that `--system` names is an entry of",
            "systems.yaml. `mlhpc papers mlperf log` makes the logs of what was recorded; they are not changed afterwards.",
            "",
            f"Records: {', '.join(each.record for each in group.runs)}.",
            "",
            *(["Departures from the rules:", "", *departures, ""] if departures else ["No departure from the rules is known.", ""]),
        ]
    )  # fmt: skip


_TEST: Final = '''\
"""The runs of this submission: the fields in training.json, once for each seed."""

import json
from pathlib import Path

import pytest

from pytest_mlhpc import train

TRAINING = json.loads(Path(__file__).with_name("training.json").read_text(encoding="utf-8"))


@train(TRAINING["workload"], **TRAINING["fields"])
@pytest.mark.parametrize("seed", TRAINING["seeds"])
def test_time_to_train(run):
    assert run["time_to_train"].value > 0
'''
_CODE: Final = f'"$(dirname "$0")/../implementations/{IMPLEMENTATION}"'
#: Scripts that the rules ask for. Nothing of a record stands in them.
_SCRIPTS: Final[Mapping[str, str]] = {
    "setup.sh": f"#!/bin/sh\nset -e\npython3 -m pip install -r {_CODE}/requirements.txt\n",
    "init_datasets.sh": (
        "#!/bin/sh\n# Data sets lie where `datasets:` of systems.yaml says; made ones are made by each run. This checks them.\n"
        "set -e\nmlhpc data check\n"
    ),
    "run_and_time.sh": f'#!/bin/sh\n# README.md has the arguments.\nset -e\nexec pytest {_CODE} "$@"\n',
}


def write_package(folder: Path, files: Mapping[str, str]) -> None:
    """Write *files* below *folder*, which comes to be whole or not at all.

    Raises:
        UsageError: it is there already.
        StoreError: a file cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} is there already; name another folder by --output, or remove it")
    made: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
        made.chmod(0o755)
        made.rename(folder)
    except OSError as error:
        raise StoreError(f"{folder}: the package cannot be written: {error.strerror}") from error
    finally:
        if made is not None and made.exists():
            shutil.rmtree(made, ignore_errors=True)


def is_package(folder: Path) -> bool:
    """Return whether *folder* has the folders of a submission package."""
    return all((folder / name).is_dir() for name in ("results", "systems"))


_MODULE: Final = "mlperf_logging.package_checker"
_VERDICT: Final = re.compile(r"^INFO - PACKAGE CHECKER FOUND (NO ERRORS, SUCCESS !|ERRORS, )", re.MULTILINE)
#: Of its lines, what people should know: what it says of training epochs beside the reference's, and errors.
_REMARK: Final = re.compile(
    r"(?:INFO|WARNING) - +(RCP Test Passed: .*|.*normalization factor of [0-9.]+|.*accepting this under olympic scoring)\Z"
)
_ERROR: Final = re.compile(r"ERROR - +(.*\S)")


def check_package(
    folder: Path, *, usage: str = USAGE, ruleset: str = RULESET, limit_s: float = 10 * logs.LIMIT_S
) -> CheckedLog:
    """Return the package checker's verdict on *folder*; ``complaints`` of an accepted one are remarks.

    The checker writes ``scaling.json`` beside results that need fewer training epochs than the reference, as published
    packages have it.

    Raises:
        UsageError: there are no such rules, or mlperf-logging is not installed.
        MlhpcError: the checker came to no verdict.
    """
    arguments = [str(folder.resolve()), usage, ruleset, "--log_output", os.devnull]
    code, logged = logs.run_checker(_MODULE, folder, arguments, limit_s)
    lines = logged.splitlines()
    remarks = [found[1].strip() for line in lines if (found := _REMARK.match(line))]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    verdicts = _VERDICT.findall(logged)
    if code == 0 and verdicts and verdicts[-1].startswith("NO ERRORS"):
        return CheckedLog(folder, accepted=True, complaints=tuple(dict.fromkeys(remarks)))
    said = [*errors, *(one for one in logs.complaints(logged) if not errors or one != logs.SILENT)]
    if any(one.startswith("RCP Test Failed") for one in errors):
        said.append(_CONVERGENCE)
    return CheckedLog(folder, accepted=False, complaints=tuple(dict.fromkeys(said)))


_CONVERGENCE: Final = (
    "RCP: too few training epochs beside the reference's convergence points, or none for this batch; what is not the "
    "reference's model, data and batch belongs in the open division, where this is not checked"
)
