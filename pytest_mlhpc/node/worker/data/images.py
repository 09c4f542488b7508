"""Image folders: one folder per class, JPEG inside, as ImageNet is unpacked. Decoded by Pillow.

Classes are numbered in the order of their folders' names. Two crops, in the terms of the published recipes:

* ``random``: 8 to 100 % of the area, aspect 3/4 to 4/3, mirrored half of the time (training, ResNet-50 v1.5);
* ``center``: short edge to 8/7 of the size (256 for 224), middle cut out (evaluation; EPCC's runs train with it).

A random crop depends on seed and sample alone, so that equal seeds read equal pixels whatever the number of processes.
"""

from __future__ import annotations

import io
import math
import random
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.worker.data.files import DataError, read_error, replace_file

SUFFIXES = (".jpeg", ".jpg", ".png")
CROPS = ("random", "center")
#: Pixels that a picture may have. ImageNet's largest has 36 million; more is no photograph but a trap.
MAX_PIXELS = 1 << 26
MAX_BYTES = 1 << 28
#: JPEG quality of synthetic sets, see ``fields.GRAIN``.
QUALITY = 95
#: Written beside the folders' names: class 7 is class_00007.
CLASS = "class_{:05d}"


def classes_of(root: Path, files: Sequence[Path], limit: int) -> List[int]:
    """Return the class of each file: the place of its top folder's name among all of them."""
    names = [file.relative_to(root).parts for file in files]
    loose = next((file for file, parts in zip(files, names) if len(parts) < 2), None)
    if loose is not None:
        raise DataError(loose, f"lies in no class folder, expected {root}/CLASS/NAME.JPEG")
    numbers: Dict[str, int] = {
        name: number for number, name in enumerate(sorted({parts[0] for parts in names}))
    }
    if len(numbers) > limit:
        raise DataError(root, f"has {len(numbers)} class folders, the model tells {limit} classes apart")
    return [numbers[parts[0]] for parts in names]


def _random_box(rng: random.Random, width: int, height: int) -> Tuple[int, int, int, int]:
    """Return a box of 8 to 100 % of the area and aspect 3/4 to 4/3; the whole picture's middle if ten tries miss."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - high)
            return left, top, left + wide, top + high
    return _middle_box(width, height, 1.0)


def _middle_box(width: int, height: int, share: float) -> Tuple[int, int, int, int]:
    """Return the square in the middle whose edge is *share* of the short edge."""
    edge = max(1, round(min(width, height) * share))
    left, top = (width - edge) // 2, (height - edge) // 2
    return left, top, left + edge, top + edge


def _decode(path: Path, raw: bytes, shape: Tuple[int, ...], rng: Optional[random.Random]) -> Any:
    """Return the cut of a picture as an array of *shape*: a random one, or without *rng* the middle."""
    import numpy as np
    from PIL import Image

    with warnings.catch_warnings():
        # Pillow warns of large pictures; our own limit is stricter, and it is an error.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(raw), formats=("JPEG", "PNG")) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise DataError(path, f"has {width} x {height} pixels, more than {MAX_PIXELS}: refused")
            box = _random_box(rng, width, height) if rng else _middle_box(width, height, 7 / 8)
            cut = picture.convert("RGB").resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box=box)
            return np.array(cut)


def read_sample(path: Path, shape: Tuple[int, ...], crop: str, seed: int) -> Any:
    """Return a uint8 array of *shape* (size, size, 3); *seed* decides a random crop."""
    import numpy as np

    expected = "a JPEG picture"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(path, f"is larger than {MAX_BYTES} bytes, expected {expected}")
        raw = path.read_bytes()
    except OSError as error:
        raise read_error(path, error, expected) from None
    if not raw:
        raise DataError(path, f"is empty, expected {expected}")
    rng = random.Random(seed)  # noqa: S311 - crops are no secrets
    try:
        pixels = _decode(path, raw, shape, rng if crop == "random" else None)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise anything on damaged files
        text = f"cannot be decoded ({type(error).__name__}: {error}), expected {expected}"
        raise DataError(path, text) from None
    if crop == "random" and rng.random() < 0.5:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels


def write_sample(path: Path, pixels: Any) -> None:
    """Write one uint8 (height, width, 3) array as a JPEG."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=QUALITY)
    replace_file(path, out.getvalue())
