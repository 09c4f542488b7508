"""PAYLOAD. CRC-32C (Castagnoli), as TFRecord files carry it, fast enough for samples of 16 MiB without a C extension.

A CRC is linear over GF(2). So the message is cut into lanes of equal length, NumPy runs the table algorithm over all
lanes side by side, and the lanes' remainders are joined pairwise: the remainder of A|B is that of A moved on by len(B)
zero bytes, xor that of B. Moving on by n zero bytes is a 32x32 matrix over GF(2).

Source of polynomial and initial value: RFC 3720, appendix B.4; of the mask: TensorFlow's record format.
"""

from __future__ import annotations

import functools
from typing import Any, List, Union

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

    words = np.frombuffer(data, dtype="<u4").reshape(lanes, -1)
    low, high = _word_tables()
    states = np.zeros(lanes, dtype=np.uint32)
    states[0] = state
    block = 64  # columns turned into rows at a time: small enough to stay in the cache
    for start in range(0, words.shape[1], block):
        for column in np.ascontiguousarray(words[:, start : start + block].T):
            states ^= column
            states = low.take(states & 0xFFFF) ^ high.take(states >> np.uint32(16))
    length = words.shape[1] * 4
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
