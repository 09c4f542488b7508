"""PAYLOAD. ``tf.train.Example`` to and from bytes, by hand: no TensorFlow, no protobuf library.

Messages (source: ``tensorflow/core/example/{example,feature}.proto``)::

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }        an entry is { string key = 1; Feature value = 2; }
    Feature   { oneof: BytesList 1 | FloatList 2 | Int64List 3 }
    BytesList { repeated bytes value = 1; }   FloatList { repeated float value = 1 [packed]; }
    Int64List { repeated int64 value = 1 [packed]; }

Bytes values come back as views of the given buffer, so that a sample of 16 MiB is not copied.
"""

from __future__ import annotations

import struct
from typing import Dict, Iterator, List, Mapping, Sequence, Tuple, Union

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
