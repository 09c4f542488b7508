"""PAYLOAD, standard library only. What a synthetic set consists of: workload, format, sizes, samples, seed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Tuple

from pytest_mlhpc.node.worker.data.errors import DataError

#: workload -> its formats, the default first.
FORMATS: Mapping[str, Tuple[str, ...]] = {
    "cosmoflow": ("tfrecord-gzip", "tfrecord", "hdf5"),
    "deepcam": ("hdf5",),
    "resnet50": ("images",),
}
#: Most frequent picture of ImageNet, for crops of 224 pixels; smaller crops get smaller pictures.
PICTURE = (375, 500)
CROP = 224
#: Raised when equal layouts would give other bytes than before, so that old sets are not taken for new ones.
REVISION = 1


@dataclass(frozen=True)
class Layout:
    """One synthetic set. ``sizes``: edge (cosmoflow), height and width (deepcam, resnet50), classes (resnet50).

    ``sizes`` also has ``learnable`` (1) where a small model is to learn its task quickly (``learnable.py``).
    """

    workload: str
    format: str
    sizes: Mapping[str, int]
    samples: int
    validation: int
    seed: int
    revision: int = REVISION

    def as_json(self) -> Dict[str, Any]:
        """Return plain JSON values, as they stand in the manifest."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """A folder name that differs for sets that differ."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return f"{self.workload}-{self.format}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def learnable(self) -> bool:
        """Whether targets are shown plainly, instead of samples that pack like real ones."""
        return bool(self.sizes.get("learnable"))

    @property
    def raw_bytes(self) -> int:
        """Bytes of one sample, unpacked: what has to be made."""
        if self.workload == "cosmoflow":
            return self.sizes["edge"] ** 3 * 4 * 2
        pixels = self.sizes["height"] * self.sizes["width"]
        return pixels * (16 * 4 + 8) if self.workload == "deepcam" else pixels * 3

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample on disk, about (for the question whether there is room)."""
        packed = {"tfrecord-gzip": 0.16, "images": 0.22}.get(self.format, 1.0)
        return int(
            self.raw_bytes * (0.16 if self.workload == "cosmoflow" and self.format == "hdf5" else packed)
        )


def layout_of(
    workload: str,
    parameters: Mapping[str, Any],
    *,
    samples: int,
    validation: int,
    seed: int,
    form: str = "",
    learnable: bool = False,
) -> Layout:
    """Return the layout of a set for *workload* with these fields; *form* is one of its formats, empty: the default.

    Raises:
        DataError: the workload has no format, or not this one.
    """
    if workload not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise DataError(workload, f"has no file format to make a synthetic set in, these have: {known}")
    form = form or FORMATS[workload][0]
    if form not in FORMATS[workload]:
        raise DataError(workload, f"has no format {form!r}, choose one of {', '.join(FORMATS[workload])}")
    more = {"learnable": 1} if learnable else {}
    return Layout(workload, form, {**_sizes(workload, parameters), **more}, samples, validation, seed)


def _sizes(workload: str, parameters: Mapping[str, Any]) -> Dict[str, int]:
    """Return what of the workload's fields decides the size of a sample."""
    if workload == "cosmoflow":
        return {"edge": int(parameters["input_size"])}
    if workload == "deepcam":
        return {"height": int(parameters["height"]), "width": int(parameters["width"])}
    crop = int(parameters["image_size"])
    height, width = (max(1, extent * crop // CROP) for extent in PICTURE)
    return {"height": height, "width": width, "classes": int(parameters["classes"])}
