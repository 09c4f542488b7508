"""CosmoFlow as the MLPerf HPC reference stores it: TFRecord files of tf.train.Example with CRC-32C, without TensorFlow."""

from __future__ import annotations

import functools
import struct
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from pytest_mlhpc.node.worker.data.dataset_files import DataError, read_error, write_file

Value = Union[Sequence[bytes], Sequence[memoryview], Sequence[float], Sequence[int]]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "bytes", 2: "float", 3: "int64"}


class DecodeError(ValueError):
    """The bytes are no ``tf.train.Example``; the caller knows the file and says so."""


def _varint(view: memoryview, at: int) -> Tuple[int, int]:
    """Return (value, next offset) of the base-128 number at *at*."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise DecodeError("ends inside a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise DecodeError("a number is longer than ten bytes")


def _fields(view: memoryview) -> Iterator[Tuple[int, int, Union[int, memoryview]]]:
    """Yield (field number, wire type, value) of one message."""
    at = 0
    while at < len(view):
        tag, at = _varint(view, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(view, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise DecodeError(f"wire type {wire} is unknown")
        if length > len(view) - at:
            raise DecodeError(f"a field of {length} bytes begins {len(view) - at} bytes before the end")
        yield number, wire, view[at : at + length]
        at += length


def _messages(view: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the sub-messages in field *number*; other fields are skipped, as protobuf demands."""
    for found, wire, value in _fields(view):
        if found == number and wire == _BYTES and isinstance(value, memoryview):
            yield value


def _floats(view: memoryview) -> List[float]:
    """Return a FloatList's values, packed or not."""
    values: List[float] = []
    for number, _wire, value in _fields(view):
        if number == 1 and isinstance(value, memoryview):
            if len(value) % 4:
                raise DecodeError("a list of floats is no multiple of four bytes")
            values.extend(struct.unpack(f"<{len(value) // 4}f", value))
    return values


def _signed(value: int) -> int:
    """Return a 64-bit two's complement number as an int."""
    return value - (1 << 64) if value >> 63 else value


def _ints(view: memoryview) -> List[int]:
    """Return an Int64List's values, packed or not."""
    values: List[int] = []
    for number, wire, value in _fields(view):
        if number != 1:
            continue
        if wire == _VARINT and isinstance(value, int):
            values.append(_signed(value))
        elif wire == _BYTES and isinstance(value, memoryview):
            at = 0
            while at < len(value):
                item, at = _varint(value, at)
                values.append(_signed(item))
    return values


def _feature(view: memoryview) -> Value:
    """Return the values of one Feature; of several lists the last one counts, as in any oneof."""
    result: Value = []
    for number, wire, value in _fields(view):
        if wire != _BYTES or not isinstance(value, memoryview):
            continue
        if number == 1:
            result = list(_messages(value, 1))
        elif number == 2:
            result = _floats(value)
        elif number == 3:
            result = _ints(value)
    return result


def decode(data: Union[bytes, memoryview]) -> Dict[str, Value]:
    """Return feature name -> values. Raises :class:`DecodeError` and nothing else."""
    features: Dict[str, Value] = {}
    for group in _messages(memoryview(data), 1):
        for entry in _messages(group, 1):
            name, value = "", memoryview(b"")
            for number, _wire, content in _fields(entry):
                if number == 1 and isinstance(content, memoryview):
                    try:
                        name = bytes(content).decode()
                    except UnicodeDecodeError:
                        raise DecodeError("the name of a feature is not UTF-8") from None
                elif number == 2 and isinstance(content, memoryview):
                    value = content
            features[name] = _feature(value)
    return features


def _number(value: int) -> bytes:
    """Return *value* as a base-128 number."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, *parts: bytes) -> bytes:
    """Return a length-delimited field."""
    return b"".join((_number(number << 3 | _BYTES), _number(sum(map(len, parts))), *parts))


def _encode_feature(values: Value) -> bytes:
    """Return one Feature; the type of the first value decides which list it is."""
    first = values[0] if len(values) else b""
    if isinstance(first, (bytes, bytearray, memoryview)):
        return _delimited(1, *(_delimited(1, bytes(item)) for item in values))  # type: ignore[arg-type]  # all are bytes
    if isinstance(first, float):
        return _delimited(2, _delimited(1, struct.pack(f"<{len(values)}f", *values)))
    return _delimited(3, _delimited(1, b"".join(_number(int(item)) for item in values)))


def encode(features: Mapping[str, Value]) -> bytes:
    """Return the Example with these features, names sorted, so that equal features are equal bytes."""
    entries = (
        _delimited(1, _delimited(1, name.encode()), _delimited(2, _encode_feature(features[name])))
        for name in sorted(features)
    )
    return _delimited(1, *entries)


#: The Castagnoli polynomial, bits reversed.
POLYNOMIAL = 0x82F63B78
#: What TFRecord adds to a rotated CRC.
MASK_DELTA = 0xA282EAD8
_ALL = 0xFFFFFFFF
#: Below this length the plain loop is faster than setting up lanes.
SHORT = 2048

Buffer = Union[bytes, bytearray, memoryview]


@functools.lru_cache(maxsize=1)
def _table() -> List[int]:
    """Return the remainders of the 256 single bytes."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


def _step(state: int, data: Buffer) -> int:
    """Return the state after *data*, byte by byte."""
    table = _table()
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state


def _apply(matrix: Any, values: Any) -> Any:
    """Return matrix x value for each of *values* (uint32 array); ``matrix[b]`` is the image of bit b."""
    import numpy as np

    result = np.zeros_like(values)
    for bit in range(32):
        chosen = (values >> np.uint32(bit)) & np.uint32(1)
        result ^= chosen * matrix[bit]
    return result


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> Any:
    """Return the matrix that moves a state on by *count* zero bytes."""
    import numpy as np

    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if count == 0:
        return bits
    if count == 1:
        return np.array([_step(int(bit), b"\0") for bit in bits], dtype=np.uint32)
    half = _zeros(count // 2)
    whole = _apply(half, half)
    return _apply(_zeros(1), whole) if count % 2 else whole


@functools.lru_cache(maxsize=1)
def _word_tables() -> Any:
    """Return two tables of 65,536 remainders: of a word's low half, and of its high half."""
    import numpy as np

    halves = np.arange(65536, dtype=np.uint32)
    return _apply(_zeros(4), halves), _apply(_zeros(4), halves << np.uint32(16))


def _lanes(state: int, data: memoryview, lanes: int) -> int:
    """Return the state after *data*, whose length is a multiple of ``4 * lanes``; *lanes* is a power of two."""
    import numpy as np

    lanes_of_data = np.frombuffer(data, dtype="<u4").reshape(lanes, -1)
    low, high = _word_tables()
    states = np.zeros(lanes, dtype=np.uint32)
    states[0] = state
    block = 64  # columns turned into rows at a time: small enough to stay in the cache
    for start in range(0, lanes_of_data.shape[1], block):
        for column in np.ascontiguousarray(lanes_of_data[:, start : start + block].T):
            states ^= column
            states = low.take(states & 0xFFFF) ^ high.take(states >> np.uint32(16))
    length = lanes_of_data.shape[1] * 4
    while len(states) > 1:
        states = _apply(_zeros(length), states[0::2]) ^ states[1::2]
        length *= 2
    return int(states[0])


def crc32c(data: Buffer) -> int:
    """Return the CRC-32C of *data*."""
    view = memoryview(data)
    if len(view) < SHORT:
        return _step(_ALL, view) ^ _ALL
    lanes = 4096 if len(view) >= 1 << 20 else 256
    body = len(view) // (4 * lanes) * (4 * lanes)
    state = _lanes(_ALL, view[:body], lanes)
    return _step(state, view[body:]) ^ _ALL


def masked(data: Buffer) -> int:
    """Return the CRC of *data* as TFRecord stores it, rotated by 15 bits and moved by a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & _ALL


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
    return b"".join((length, struct.pack("<I", masked(length)), data, struct.pack("<I", masked(data))))


def unframe(path: Path, raw: bytes, *, verify: bool = True) -> memoryview:
    """Return the data of the single record in *raw*; *path* is named in errors."""
    if len(raw) < FRAME:
        raise DataError(path, f"holds {len(raw)} bytes, expected one TFRecord (at least {FRAME})")
    view = memoryview(raw)
    length, check = struct.unpack_from("<QI", view)
    if masked(view[:8]) != check:
        raise DataError(path, "wrong CRC of the record's length: damaged, or no TFRecord")
    if length != len(raw) - FRAME:
        raise DataError(
            path,
            f"its record says {length} bytes, the file has {len(raw) - FRAME}: expected exactly one sample per file",
        )
    data = view[12 : 12 + length]
    if verify and masked(data) != struct.unpack_from("<I", view, 12 + length)[0]:
        raise DataError(path, "wrong CRC of the record's data: the file is damaged")
    return data


def read_record(path: Path, limit: int) -> memoryview:
    """Return the data of the one record of *path* (gzip is recognised by its first bytes), at most *limit* bytes."""
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
        features = decode(data)
    except DecodeError as error:
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
    record = frame(encode({"x": [raw], "y": [float(value) for value in labels]}))
    if compress:
        packer = zlib.compressobj(LEVEL, wbits=31)  # writes no time stamp: equal samples are equal files
        record = packer.compress(record) + packer.flush()
    write_file(path, record)
