"""What systems.yaml may hold, as pydantic models and as a JSON Schema. Importing this module is slow; only ``config/`` and the schemas of schedulers do."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from pytest_mlhpc.config.model import MOST_OWNER
from pytest_mlhpc.config.quantities import (
    canonical_budget,
    parse_duration,
    parse_memory,
    parse_moment,
    parse_rate,
    parse_share,
    parse_size,
)

#: C0 and C1 control characters, line breaks among them, and lone surrogates, which no file can hold.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _text(value: object) -> str:
    """A number is a text here: an account may be called 1234."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} should be text")  # noqa: TRY004 - pydantic turns only ValueError into a finding
    if bad := _CONTROL.search(value):
        raise ValueError(f"{value!r:.80} holds the control character {bad.group()!r}")
    return value


def _word(value: str) -> str:
    if not value.strip():
        raise ValueError(f"{value!r} is empty")
    return value


#: One line of text that is not empty.
Text = Annotated[str, BeforeValidator(_text), AfterValidator(_word), Field(max_length=4096)]
Owner = Annotated[str, BeforeValidator(_text), AfterValidator(_word), Field(max_length=MOST_OWNER)]


#: Version of the file; readers refuse newer ones by name.
SYSTEMS_SCHEMA: Final = 1

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
#: None begins with a sign that ssh could take for an option.
_HOST = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}"
_DESTINATION = rf"({_HOST}|ssh://{_HOST}(:[0-9]{{1,5}})?)"
MODULE = r"[A-Za-z0-9_][A-Za-z0-9_.+@:=~-]*(/[A-Za-z0-9_][A-Za-z0-9_.+@:=~-]*)*"
_ENV: Final = {"type": "string", "pattern": r"\$\{"}  # any value may come from ${ENV}


def _name(value: object) -> str:
    return _matching(value, _NAME, "a name: letters, digits, '.', '_' and '-', at most 64, the first no sign")


def _variable(value: object) -> str:
    return _matching(value, _VARIABLE, "a name of a variable: letters, digits and '_', the first not a digit")


def _module(value: object) -> str:
    return _matching(value, MODULE, "a module: name/version of letters, digits and . _ + - @ : = ~")


def _matching(value: object, pattern: str, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{value!r:.80} is not {what}")
    return value


def _count(value: object) -> object:
    if isinstance(value, (bool, float)):
        raise ValueError(f"{value!r} is not a whole number")  # noqa: TRY004 - pydantic turns only ValueError into a finding
    return value


def _line(value: object) -> object:
    if isinstance(value, str) and "\n" in value:
        raise ValueError(f"{value!r:.80} holds a line break")
    return value


def _text_of_variable(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{value!r:.80} should be text; put it in quotes")


def _setup(value: object) -> object:
    if isinstance(value, str) and re.search(r"^#SBATCH", value, re.MULTILINE):
        raise ValueError("sbatch does not read #SBATCH lines here; put them under `slurm:`, `sbatch:`")
    return value


def _image(value: object) -> object:
    return {"image": value} if isinstance(value, str) else value


def _level(value: object) -> object:
    return {"level": value} if isinstance(value, str) else value


def _destination(value: object) -> str:
    return _matching(value, _DESTINATION, "a destination of ssh: user@login, or ssh://user@login:22")


def _schema(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$"})


Destination = Annotated[str, BeforeValidator(_destination), _schema(_DESTINATION)]
Name = Annotated[str, BeforeValidator(_name), _schema(_NAME)]
EnvName = Annotated[str, BeforeValidator(_variable), _schema(_VARIABLE)]
EnvText = Annotated[str, BeforeValidator(_text_of_variable), WithJsonSchema({"type": ["string", "integer"]})]
Module = Annotated[str, BeforeValidator(_module), WithJsonSchema({"type": "string"})]
Line = Annotated[str, Field(min_length=1, max_length=4096), BeforeValidator(_line)]
Count = Annotated[
    int,
    Field(ge=1, le=10**7),
    BeforeValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _ENV]}),
]
CountOrZero = Annotated[
    int,
    Field(ge=0, le=10**9),
    BeforeValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _ENV]}),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"type": ["string", "integer"], "description": "768GiB, 1.5TB, 4096B, or bytes"}),
]
Memory = Annotated[
    int,
    BeforeValidator(parse_memory),
    WithJsonSchema({"type": ["string", "integer"], "description": "768GiB, 1.5TB, or bytes from 1048576 on"}),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": ["string", "number"], "description": "1h, 30m, 1h30m, or seconds"}),
]
Budget = Annotated[
    str,
    BeforeValidator(canonical_budget),
    WithJsonSchema({"type": "string", "description": "20 node-hours"}),
]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    WithJsonSchema({"type": "string", "description": "1 per month, 1 per week, 4 per year"}),
]
Share = Annotated[
    float,
    BeforeValidator(parse_share),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$", "description": "3 %, 0.5 %"}),
]
Moment = Annotated[
    int,
    BeforeValidator(parse_moment),
    WithJsonSchema({"type": "string", "description": "2026-12-24T08:00, UTC unless it says otherwise"}),
]
AsOf = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$")]
Digest = Annotated[str, Field(pattern=r"^(sha256:)?[0-9a-f]{64}$")]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodesModel(_Closed):
    """`nodes:` what one node has; scheduler `local` reads from the machine what is not said."""

    cores: Count | None = None
    memory: Memory | None = None
    max: Count = Field(1, description="the most nodes that one job may ask for")
    devices: CountOrZero | None = Field(None, description="accelerators of a node")
    device_model: Line | None = None
    device_memory: Memory | None = Field(
        None, description="memory of one accelerator, where it does not follow from its model"
    )


class ContainerModel(_Closed):
    """`container:` an image, or a mapping with how to run it."""

    image: Line
    runtime: (
        Literal[
            "apptainer", "singularity", "podman", "docker", "shifter", "sarus", "enroot", "pyxis", "edf"
        ]
        | None
    ) = Field(None, description="edf: image is the file for srun --environment")  # fmt: skip
    mounts: list[Line] = []
    workdir: Line | None = None


class UenvModel(_Closed):
    """`uenv:` a CSCS user environment, and its view."""

    image: Line
    view: Line | None = None


def _text_or(model: type[BaseModel]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, model.model_json_schema()]})


class EnvironmentModel(_Closed):
    """One named software set-up of a partition."""

    python: Line | None = Field(None, description="interpreter that has torch; on `local`: that of pytest")
    setup: Annotated[str, Field(min_length=1, max_length=65536), BeforeValidator(_setup)] | None = Field(
        None,
        description="lines of bash that go into a job script as they are, before modules; no ${ENV} is put in",
    )
    modules: list[Module] = []
    variables: dict[EnvName, EnvText] = Field(
        {}, description="may hold ${ENV} and {cores_per_rank} and the like"
    )
    venv: Line | None = None
    conda: Line | None = None
    container: Annotated[ContainerModel, BeforeValidator(_image), _text_or(ContainerModel)] | None = None
    uenv: Annotated[UenvModel, BeforeValidator(_image), _text_or(UenvModel)] | None = None


class DatasetModel(_Closed):
    """Files of one workload on this system; the key is the workload or a name of your own."""

    path: Line
    kind: Literal["real", "synthetic"]
    files: Count | None = None
    bytes: Size | None = None
    digest: Digest | None = None
    licence: str = ""


class VetModel(_Closed):
    """`vet:` how nodes are vetted before anything is measured on them; a level alone, or a mapping."""

    level: Literal["off", "quick", "deep"] = "quick"
    unknown: Literal["fail", "warn"] = Field(
        "fail",
        description="what becomes of a node that cannot be judged; warn, until this kind of node has a history",
    )
    budget: Duration | None = Field(None, description="longest time for it; else that of the level")
    exclude_for: Duration = Field(
        86400.0, description="how long later jobs keep away from a node that was found unfit"
    )
    expect: dict[Name, EnvText] = Field(
        {}, description="what each node must have: driver, numa, hugepages, governor, firmware"
    )
    policy: Line | None = Field(None, description="TOML file with other bounds, relative to this file")


class MaintenanceModel(_Closed):
    """One of `maintenance:` when nothing runs, and why."""

    from_: Moment = Field(alias="from")
    until: Moment
    reason: Annotated[str, BeforeValidator(_text), AfterValidator(_word), Field(max_length=300)]

    @model_validator(mode="after")
    def _ordered(self) -> MaintenanceModel:
        if self.until <= self.from_:
            raise ValueError("`until` is not after `from`")
        return self


class TransportModel(_Closed):
    """`transport:` how the scheduler's commands are reached from the machine where pytest runs."""

    ssh: Destination = Field(
        description="user@login, a name of ~/.ssh/config, or ssh://user@login:2222; by ssh's own configuration and agent"
    )


class PartitionModel(BaseModel):
    """One kind of node under one scheduler. Any other key is a scheduler's name, with its options."""

    # For editors, mappings under unknown keys are schedulers' options; the loader knows the schedulers and is strict.
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"additionalProperties": {"type": "object"}}
    )

    scheduler: Name
    launcher: Name | None = None
    accelerator: Literal["auto", "cpu", "cuda", "rocm", "xpu", "ipu", "wse"] = "cpu"
    nodes: NodesModel | None = None
    environments: dict[Name, EnvironmentModel] | None = None
    features: list[Name] = []
    max_jobs: Annotated[Count, Field(le=10_000)] = Field(8, description="jobs kept in the queue")
    preset: Literal["smoke", "small", "reference"] = "reference"
    vet: Annotated[VetModel, BeforeValidator(_level), _text_or(VetModel)] = Field(
        default_factory=lambda: VetModel.model_validate({"level": "off"})
    )
    time_limit: Duration = 3600.0
    budget: Budget | None = None
    owner: Owner | None = Field(
        None, description="who is asked about its nodes, and about tests that have no owner of their own"
    )
    maintenance: list[MaintenanceModel] = Field(
        [], description="when nothing runs here: explains what was not measured"
    )
    matters: Share | None = Field(
        None, description="smallest loss that fails a test here; else 5 %, on scheduler local 10 %"
    )
    warm: bool | None = Field(
        None, description="fork ranks of short runs from a process that has imported torch; else not on Slurm"
    )
    transport: TransportModel | None = Field(
        None, description="how Slurm's commands are reached; without it they are on this machine"
    )


class SystemModel(_Closed):
    """One machine. Archived systems render and compare, but never run."""

    description: str = ""
    status: Literal["live", "archived"] = "live"
    as_of: AsOf | None = Field(None, description="when these facts were last checked, 2026-11 or 2026-11-21")
    owner: Owner | None = Field(None, description="of each partition that names none")
    maintenance: list[MaintenanceModel] = Field([], description="of each partition that names none")
    transport: TransportModel | None = Field(None, description="of each partition that names none")
    partitions: dict[Name, PartitionModel] = Field(min_length=1)
    datasets: dict[Name, DatasetModel] = {}


class SystemsFile(_Closed):
    """systems.yaml of pytest-mlhpc."""

    schema_: Literal[1] = Field(SYSTEMS_SCHEMA, alias="schema")
    include: list[Line] = Field([], description="more such files, relative to this one")
    defaults: dict[str, Any] = Field(
        {}, description="merged into every partition of this and the included files"
    )
    false_alarms: Rate = Field(
        1.0, description="losses that may fail a test falsely, all series of the site together: 1 per month"
    )
    systems: dict[Name, SystemModel] = {}


PATH: Final = Path(__file__).with_name("systems.schema.json")


def json_schema() -> str:
    """Return the text that :data:`PATH` should hold."""
    schema = SystemsFile.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the schema, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH}")
    if parser.parse_args().write:
        PATH.write_text(json_schema(), encoding="utf-8")
    else:
        sys.stdout.write(json_schema())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
