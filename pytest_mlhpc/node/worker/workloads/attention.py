"""PAYLOAD. Causal self-attention with shared keys and values, and the rotation that tells it positions."""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ROPE_BASE = 500_000.0  #: Llama 3, arXiv 2407.21783


class DotProduct(nn.Module):
    """Causal softmax(q k^T / sqrt(d)) v over tensors (N, heads, tokens, d).

    A module of its own so that operations can be counted (:mod:`pytest_mlhpc.node.worker.flops`), and so that torch 1.13, which
    has no fused kernel for it, computes the same.
    """

    def __init__(self, *, fused: Optional[bool] = None) -> None:
        super().__init__()
        self.fused = hasattr(functional, "scaled_dot_product_attention") if fused is None else fused

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (N, heads, tokens, d)."""
        if self.fused:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = query.shape[-2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return weights.to(value.dtype) @ value

    def operations(self, query: Tensor, output: Tensor) -> int:
        """Count two full products of tokens x tokens x d for each head.

        Full, not halved for the causal mask: the convention of the PaLM paper (arXiv 2204.02311, appendix B) and of
        torch's own counter.
        """
        return 2 * 2 * output.numel() * query.shape[-2]


class Rotary(nn.Module):
    """Angles of rotary position embedding (RoPE, arXiv 2104.09864). Has no parameters."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.width, self.context = width, context
        self._table: Optional[Tuple[Tensor, Tensor]] = None

    def forward(self, tokens: int, device: torch.device) -> Tuple[Tensor, Tensor]:
        """Return cosine and sine, each (tokens, width / 2) in float32; made once per device."""
        if self._table is None or self._table[0].device != device:
            channel = torch.arange(0, self.width, 2, device=device, dtype=torch.float32)
            place = torch.arange(self.context, device=device, dtype=torch.float32)
            angles = torch.outer(place, ROPE_BASE ** (-channel / self.width))
            self._table = angles.cos(), angles.sin()
        return self._table[0][:tokens], self._table[1][:tokens]


def rotate(heads: Tensor, rotation: Tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (first half, second half) of the last dimension of (N, heads, tokens, d) by each token's angles."""
    cosine, sine = rotation
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(heads.dtype)


class CausalAttention(nn.Module):
    """Multi-head attention; ``kv_heads`` below ``heads`` is grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.inputs = nn.Linear(hidden, (heads + 2 * kv_heads) * self.width, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias)
        self.product = DotProduct()

    def forward(self, stream: Tensor, rotation: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
        """Mix each token of (N, tokens, hidden) with those before it."""
        batch, tokens, hidden = stream.shape
        parts = self.inputs(stream).split(
            [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width], dim=-1
        )
        query, key, value = (part.view(batch, tokens, -1, self.width).transpose(1, 2) for part in parts)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.kv_heads != self.heads:
            shared = self.heads // self.kv_heads
            key, value = (_repeated(part, shared) for part in (key, value))
        mixed = self.product(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, hidden))  # type: ignore[no-any-return]  # modules return Any


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Return (N, heads * times, tokens, d), each head *times* in a row.

    Not ``repeat_interleave``: torch 1.13 cannot do it without data, which counting operations needs.
    """
    return heads.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
