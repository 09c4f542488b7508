"""PAYLOAD. CosmoFlow as the MLPerf HPC reference stores it: TFRecord, gzip or plain, one sample per file.

A record is ``uint64 length | uint32 masked CRC of those 8 bytes | data | uint32 masked CRC of data``, little-endian
(source: TensorFlow, ``core/lib/io/record_writer.h``). The data is a ``tf.train.Example`` with ``x``, raw int16
D x D x D x 4 with channels last, and ``y``, 4 floats (source: ``mlcommons/hpc: cosmoflow/data/cosmo.py``).

The length's CRC is always verified. So is the data's, but for gzip files above :data:`LARGE`: gzip carries a CRC of the
same bytes, which has been verified by then, and a second one costs as much time as inflating (40 ms per 16 MiB).
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, Tuple

from pytest_mlhpc.node.worker.data import crc32c, example
from pytest_mlhpc.node.worker.data.errors import DataError, read_error
from pytest_mlhpc.node.worker.data.files import replace_file

SUFFIX = ".tfrecord"
#: Framing of one record: 8 + 4 bytes before the data, 4 after.
FRAME = 16
#: Above this, a gzip file's own CRC is taken to be enough.
LARGE = 1 << 20
#: Room for names, labels and framing around the raw voxels.
SLACK = 1 << 16
_GZIP = b"\x1f\x8b"
#: zlib's default, which TensorFlow uses too.
LEVEL = 6


def _inflate(path: Path, packed: bytes, limit: int) -> bytes:
    """Return gzip data unpacked (of several members, all of them), refusing to make more than *limit* bytes."""
    parts, total, rest = [], 0, packed
    while rest:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(rest, limit - total + 1)
        except zlib.error as error:
            raise DataError(path, f"damaged gzip data ({error}), expected one TFRecord") from None
        total += len(part)
        if total > limit:
            raise DataError(path, f"unpacks to more than the {limit} bytes that a sample can have")
        if not member.eof:
            raise DataError(
                path, f"gzip data is cut short after {len(packed)} bytes, expected one whole TFRecord"
            )
        parts.append(part)
        rest = member.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def frame(data: bytes) -> bytes:
    """Return *data* as one record."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", crc32c.masked(length)), data, struct.pack("<I", crc32c.masked(data)))
    )


def unframe(path: Path, raw: bytes, *, verify: bool = True) -> memoryview:
    """Return the data of the single record in *raw*; *path* is named in errors."""
    if len(raw) < FRAME:
        raise DataError(path, f"holds {len(raw)} bytes, expected one TFRecord (at least {FRAME})")
    view = memoryview(raw)
    length, check = struct.unpack_from("<QI", view)
    if crc32c.masked(view[:8]) != check:
        raise DataError(path, "wrong CRC of the record's length: damaged, or no TFRecord")
    if length != len(raw) - FRAME:
        raise DataError(
            path,
            f"its record says {length} bytes, the file has {len(raw) - FRAME}: expected exactly one sample per file",
        )
    data = view[12 : 12 + length]
    if verify and crc32c.masked(data) != struct.unpack_from("<I", view, 12 + length)[0]:
        raise DataError(path, "wrong CRC of the record's data: the file is damaged")
    return data


def read_record(path: Path, limit: int) -> memoryview:
    """Return the data of the one record of *path* (gzip is told by its first bytes), at most *limit* bytes."""
    try:
        size = path.stat().st_size
        if size > limit + FRAME:
            raise DataError(path, f"has {size} bytes, a sample can have {limit} at most")
        raw = path.read_bytes()
    except OSError as error:
        raise read_error(path, error, "a TFRecord") from None
    if not raw:
        raise DataError(path, "is empty, expected one TFRecord")
    packed = raw[:2] == _GZIP
    if packed:
        raw = _inflate(path, raw, limit + FRAME)
    return unframe(path, raw, verify=not (packed and len(raw) > LARGE))


def read_sample(path: Path, shape: Tuple[int, ...], targets: int) -> Tuple[Any, Any]:
    """Return (int16 array of *shape*, channels last, float32 array of *targets* values)."""
    import numpy as np

    size = 2
    for extent in shape:
        size *= extent
    data = read_record(path, size + SLACK)
    try:
        features = example.decode(data)
    except example.DecodeError as error:
        raise DataError(path, f"is no tf.train.Example: {error}") from None
    voxels, labels = features.get("x"), features.get("y")
    if not voxels or not labels:
        raise DataError(path, f"has features {sorted(features)}, expected x (bytes) and y ({targets} floats)")
    if len(voxels) != 1 or not isinstance(voxels[0], memoryview) or len(voxels[0]) != size:
        found = len(voxels[0]) if isinstance(voxels[0], memoryview) else type(voxels[0]).__name__
        raise DataError(path, f"x: found {found} bytes, expected {size} (int16 {'x'.join(map(str, shape))})")
    if len(labels) != targets or not isinstance(labels[0], float):
        raise DataError(path, f"y: found {len(labels)} values, expected {targets} floats")
    x = np.frombuffer(voxels[0], dtype="<i2").reshape(shape)
    return x, np.array(labels, dtype=np.float32)


def write_sample(path: Path, voxels: Any, labels: Any, *, compress: bool) -> None:
    """Write one sample: *voxels* int16 with channels last, *labels* float32."""
    raw = voxels.astype("<i2", copy=False).tobytes()
    record = frame(example.encode({"x": [raw], "y": [float(value) for value in labels]}))
    if compress:
        packer = zlib.compressobj(LEVEL, wbits=31)  # writes no time stamp: equal samples are equal files
        record = packer.compress(record) + packer.flush()
    replace_file(path, record)
