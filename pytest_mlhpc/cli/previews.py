"""What the entries of a systems file lead to: job scripts, manifests, as each scheduler's hook shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_mlhpc.config.build import LOCAL
from pytest_mlhpc.config.files import scheduler_of
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.text import count

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Environment, Partition
    from pytest_mlhpc.config.systems import Systems
    from pytest_mlhpc.config.yaml import YamlNode
    from pytest_mlhpc.hookspecs import Preview

#: What a file of these kinds is called.
_NAMES: Final = {"sh": "job script", "yaml": "manifest"}


@dataclass(frozen=True)
class Previews:
    """``system.partition.environment`` -> what its scheduler would be given; and why a partition was left out."""

    found: Mapping[str, Preview]
    notes: tuple[str, ...] = ()

    def counted(self) -> str:
        """Return how many there are of each kind: ``6 job scripts, 2 manifests``; empty if there are none."""
        suffixes = [preview.suffix for preview in self.found.values()]
        return ", ".join(
            count(suffixes.count(suffix), _NAMES.get(suffix, f".{suffix} file"))
            for suffix in sorted(set(suffixes))
        )


def previews(systems: Systems, hook: Any, name: str = "") -> Previews:
    """Return the previews of all partitions, or of *name* (``NAME[:PARTITION]``), by *hook*'s ``mlhpc_preview``.

    A variable that is not set stays in the text as ``${NAME}``.

    Raises:
        UsageError: there is no such system or partition, nothing is shown of it, or a preview cannot be made.
    """
    system, _, wanted = name.partition(":")
    if system and system not in systems.known:
        systems.system(system)  # raises, with the nearest name
    found: dict[str, Preview] = {}
    notes: list[str] = []
    for entry in systems.entries.values():
        scheduled = {key for key, node in entry.partitions.items() if scheduler_of(node) != LOCAL}
        if not scheduled or system not in {"", entry.name}:
            continue
        built, left_out = systems.system(entry.name, display=True)
        notes += [
            f"{entry.name}:{key}: not rendered: {left_out[key]}"
            for key in sorted(scheduled & left_out.keys())
        ]
        for partition in built.partitions:
            if partition.name not in scheduled or wanted not in {"", partition.name}:
                continue
            for environment in partition.environments:
                shown = _shown(hook, entry.partitions[partition.name], partition, environment)
                if shown is not None:
                    found[f"{entry.name}.{partition.name}.{environment.name}"] = shown
    if name and not found:
        raise UsageError("; ".join([f"{systems.path}: {name!r} has no partition to render", *notes]))
    return Previews(found, tuple(notes))


def _shown(hook: Any, node: YamlNode, partition: Partition, environment: Environment) -> Preview | None:
    try:
        shown: Preview | None = hook.mlhpc_preview(partition=partition, environment=environment)
    except UsageError as error:
        raise UsageError(f"{node.where}: {node.key}: {error}") from error
    return shown
