"""What ``slurm:`` of a partition may hold, as a pydantic model. What is read later is ``options.SlurmSettings``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pytest_mlhpc.config.quantities import parse_memory
from pytest_mlhpc.config.schema import CountOrZero, Duration, Text
from pytest_mlhpc.errors import nearest
from pytest_mlhpc.node.agents.nodes import expand_hostlist
from pytest_mlhpc.provision.slurm.options import OTHER_CLUSTER, PENDING_LIMIT_S

_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*(=.*)?|-[A-Za-z].*")

#: Options of sbatch(1) that this package sets itself; the text says what to write instead: a key, or a sentence.
_SBATCH_OWN: Final = {
    "job-name": "", "J": "", "output": "", "o": "", "error": "", "e": "", "input": "", "i": "", "chdir": "", "D": "",
    "open-mode": "", "export": "", "export-file": "", "requeue": "", "no-requeue": "", "array": "", "a": "",
    "wrap": "", "parsable": "", "wait": "", "W": "", "test-only": "", "clusters": OTHER_CLUSTER, "M": OTHER_CLUSTER,
    "nodes": "", "N": "",
    "ntasks": "", "n": "", "ntasks-per-node": "", "cpus-per-task": "", "c": "",
    "time": "time_limit of the partition or test", "t": "time_limit of the partition or test",
    "partition": "partition", "p": "partition", "qos": "qos", "q": "qos", "account": "account", "A": "account",
    "reservation": "reservation", "constraint": "constraint", "C": "constraint", "licenses": "licenses",
    "L": "licenses", "nodelist": "nodelist", "w": "nodelist", "exclude": "exclude", "x": "exclude",
    "exclusive": "exclusive", "gres": "gres", "gpus": "gpus", "G": "gpus", "gpus-per-node": "gpus",
    "gpus-per-task": "gpus", "mem": "memory", "tres-per-node": "tres_per_node", "comment": "comment",
}  # fmt: skip
#: Likewise of srun(1): the launchers say these for every step.
_SRUN_OWN: Final = {
    "nodes": "", "N": "", "ntasks": "", "n": "", "ntasks-per-node": "", "cpus-per-task": "", "c": "", "jobid": "",
    "output": "", "o": "", "error": "", "e": "", "input": "", "i": "", "chdir": "", "D": "", "export": "",
    "nodelist": "nodelist", "w": "nodelist", "relative": "", "r": "", "label": "", "l": "", "pty": "",
    "multi-prog": "", "kill-on-bad-exit": "", "K": "", "job-name": "", "J": "", "mpi": "mpi",
    "gpus-per-task": "gpus",
}  # fmt: skip


#: Short options of sbatch(1) and srun(1) that take no argument: another may follow in the same word.
_WITHOUT_ARGUMENT: Final = frozenset("EHhOQsuVvXZ")


def _flag(value: str, own: dict[str, str], command: str) -> str:
    if separated := re.match(r"(--[A-Za-z0-9_-]+|-[A-Za-z])\s+(\S.*)", value):
        joined = f"{separated[1]}={separated[2]}" if value.startswith("--") else separated[1] + separated[2]
        raise ValueError(f"{value!r:.80} is two words; write {joined!r:.80}")
    if not _FLAG.fullmatch(value):
        raise ValueError(f"{value!r:.80} is no option of {command}; write it like --name=value")
    for name in _options(value, own):
        key = own[name]
        word, _, owner = key.partition(" ")
        what = f"use the key {word!r} {owner}".rstrip() if key else "it is set for each run"
        if key == OTHER_CLUSTER:
            what = key
        raise ValueError(f"{value!r:.80} cannot be given here: {what}")
    return value


def _options(value: str, own: Mapping[str, str]) -> Iterator[str]:
    """Yield those of *own* that a word means, as getopt_long(3) reads it: long names cut short, short ones in one word."""
    if value.startswith("--"):
        name = value[2:].partition("=")[0]
        yield from [name] if name in own else [one for one in own if len(one) > 1 and one.startswith(name)]
        return
    for letter in value[1:]:
        if letter in own:
            yield letter
        if letter not in _WITHOUT_ARGUMENT:
            return


def _sbatch_flag(value: str) -> str:
    return _flag(value, _SBATCH_OWN, "sbatch")


def _srun_flag(value: str) -> str:
    return _flag(value, _SRUN_OWN, "srun")


def _memory(value: object) -> str | int:
    if isinstance(value, str) and value in {"default", "all"}:
        return value
    try:
        return parse_memory(value)
    except ValueError as error:
        hint = nearest(str(value), ("default", "all"))
        raise ValueError(f"{error}; or default, all{f' (did you mean {hint!r}?)' if hint else ''}") from None


def _exclusive(value: object) -> object:
    if value == "multi-node" or isinstance(value, bool):
        return value
    raise ValueError(f"{value!r:.80} is not true, false or multi-node")


def _absolute(value: str) -> str:
    if not value.startswith(("/", "${")):  # a variable that is shown, not put in
        raise ValueError(f"{value!r:.80} is not an absolute path")
    if ":" in value:
        raise ValueError(f"{value!r:.80} holds a ':', which PYTHONPATH cannot take")
    return value


def _hosts(value: str) -> str:
    if "${" not in value:  # a variable that is shown, not put in
        expand_hostlist(value)
    return value


Hosts = Annotated[Text, AfterValidator(_hosts)]
Directory = Annotated[Text, AfterValidator(_absolute)]
SbatchFlag = Annotated[Text, AfterValidator(_sbatch_flag)]
SrunFlag = Annotated[Text, AfterValidator(_srun_flag)]


class SlurmOptions(BaseModel):
    """`slurm:` of a partition. Every field is described in docs/systems.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: What is the site's alone: a test cannot say it.
    OF_SITE: ClassVar[frozenset[str]] = frozenset(
        {"client", "partition", "pending_limit", "shared_directory", "batch_python", "tasks"}
    )

    client: Literal["auto", "cli", "pyslurm"] = Field(
        "cli", description="how Slurm is asked: its commands, or pyslurm"
    )
    partition: Text | None = Field(None, description="Slurm's name of the partition; its default without it")
    qos: Text | None = None
    account: Text | None = None
    reservation: Text | None = None
    constraint: Text | None = None
    licenses: Text | None = None
    nodelist: Hosts | None = Field(None, description="nodes that every job must have")
    exclude: Hosts | None = Field(None, description="nodes that no job may have")
    comment: Text | None = None
    exclusive: Annotated[bool | Literal["multi-node"], BeforeValidator(_exclusive)] = False
    gres: Text | None = Field(None, description="further generic resources of each node, such as cs:1")
    gpus: Literal["gpus-per-node", "gres", "gpus", "gpus-per-task", "none"] | None = Field(
        None, description="how accelerators are asked for; gpus-per-node where nodes have devices"
    )
    gpu_type: Annotated[Text, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    tres_per_node: Text | None = None
    memory: Annotated[str | int, BeforeValidator(_memory)] = Field(
        "default", description="default, all, or a size for each node"
    )
    tasks: Literal["sbatch", "srun"] = Field(
        "sbatch", description="where tasks and their cores are asked for"
    )
    sbatch: list[SbatchFlag] = Field([], description="more options of the job")
    srun: list[SrunFlag] = Field([], description="more options of every srun")
    mpi: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_]+$")] | None = Field(
        None, description="srun --mpi: pmix, pmi2, cray_shasta, none"
    )
    max_time: Duration | None = Field(None, description="longest allocation")
    pending_limit: Duration = PENDING_LIMIT_S
    shared_directory: Directory | None = Field(None, description="folder on a file system that nodes see")
    batch_python: Text | None = Field(
        None, description="interpreter on the host, where the environment is a container"
    )
    energy: bool = False
    spares: Annotated[CountOrZero, Field(le=1000)] = 0

    def model_post_init(self, context: Any, /) -> None:
        """Refuse two keys that speak of one thing."""
        del context
        if self.gpu_type and self.gpus == "none":
            raise ValueError("gpu_type says which GPUs to ask for, gpus: none to ask for none; leave one out")
