"""PAYLOAD. The two chains of matrix products that must give the same bits each time (see ``digest.py``)."""

from __future__ import annotations

import ctypes
import hashlib
import time
from dataclasses import dataclass
from typing import Dict, Tuple

import torch
from torch import Tensor

#: Products in a chain.
STEPS = 8

#: What the exact chain gives, by edge: SHA-256 of its last product as little-endian int32. Sums of whole numbers; a test
#: computes the first in integers alone, and the second in double precision.
EXACT: Dict[int, str] = {
    256: "cdc9f3bbcb2520e4b4e55a4b1f3d4522af5ade1e8eaa5becd4cbfc7e494803fb",
    2048: "9e6a9681230fc0dfaba24818011cd6dc76dbcec4f7a5de4ba5cfb0dc54191fba",
}


@dataclass(frozen=True)
class Digests:
    """What one core or device gave: for each computation its digests with how often each came."""

    exact: Dict[str, int]
    full: Dict[str, int]

    @property
    def steady(self) -> bool:
        """Return whether every repetition gave the same."""
        return len(self.exact) <= 1 and len(self.full) <= 1


def whole_numbers(size: int, salt: int) -> Tensor:
    """Return a square matrix of numbers of 32 bits, as int64, that look random and are the same everywhere."""
    mask = 0xFFFFFFFF
    mixed = (torch.arange(size * size, dtype=torch.int64) + salt) * 2654435761 & mask
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & mask
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 & mask
    return (mixed ^ (mixed >> 16)).reshape(size, size)


def small(numbers: Tensor) -> Tensor:
    """Return numbers from -8 to 7 in which every one of the 28 lower bits counts."""
    folded = numbers
    for shift in (4, 8, 12, 16, 20, 24):
        folded = folded ^ (numbers >> shift)
    return (folded & 15) - 8


def exact_chain(start: Tensor, factor: Tensor, steps: int = STEPS) -> Tensor:
    """Return the last product, as int32. Operands hold whole numbers from -8 to 7, in any type that holds all sums.

    Sums are at most 64 times the edge: below 2**24, up to which fp32 holds every whole number, for edges to 262,144.
    """
    current = start
    for _ in range(steps - 1):
        current = small(torch.mm(current, factor).to(torch.int32)).to(factor.dtype)
    return torch.mm(current, factor).to(torch.int32)


def full_chain(start: Tensor, factor: Tensor, steps: int = STEPS) -> Tensor:
    """Return the last product; *factor* keeps the numbers' size (:func:`full_operands`)."""
    current = start
    for _ in range(steps):
        current = torch.mm(current, factor)
    return current


def full_operands(size: int) -> Tuple[Tensor, Tensor]:
    """Return a matrix of numbers between -1 and 1, and one of such spread that a product's numbers are as large again.

    The variance of n products of independent numbers is n times the product of both variances; that of numbers from -1 to 1
    is 1/3, so the factor's is to be 1/n: numbers from -sqrt(3/n) to sqrt(3/n).
    """
    one, other = (
        whole_numbers(size, salt).to(torch.float64) / 2.0**31 - 1.0 for salt in (3, size * size + 11)
    )
    return one, other * (3.0 / size) ** 0.5


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    here = tensor.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())).hexdigest()


#: The operands of both computations.
Operands = Tuple[Tuple[Tensor, Tensor], Tuple[Tensor, Tensor]]


def operands(size: int) -> Operands:
    """Return the operands of both computations on the host, the full ones in double precision."""
    return (
        (small(whole_numbers(size, 1)).float(), small(whole_numbers(size, size * size + 7)).float()),
        full_operands(size),
    )


def compute(given: Operands, device: torch.device, dtype: torch.dtype, seconds: float) -> Digests:
    """Repeat both computations for *seconds*, at least twice each."""
    exact = (given[0][0].to(device, copy=True), given[0][1].to(device, copy=True))
    full = (given[1][0].to(dtype).to(device), given[1][1].to(dtype).to(device))
    found: Tuple[Dict[str, int], Dict[str, int]] = ({}, {})
    end, count = time.monotonic() + seconds, 0
    while count < 2 or time.monotonic() < end:
        for results, result in zip(found, (exact_chain(*exact), full_chain(*full))):
            key = digest(result)
            results[key] = results.get(key, 0) + 1
        count += 1
    return Digests(*found)
