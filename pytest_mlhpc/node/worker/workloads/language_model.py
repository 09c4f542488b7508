"""A decoder-only transformer with the blocks of GPT-2 or Llama 3, and its attention."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_mlhpc.node.worker.base import Task, TensorSpec
from pytest_mlhpc.node.worker.workloads.optimizers import optimizer_of
from pytest_mlhpc.node.worker.workloads.trainings import language_model_conflicts, require

ROPE_BASE = 500_000.0  #: Llama 3, arXiv 2407.21783


class DotProduct(nn.Module):
    """Causal softmax(q k^T / sqrt(d)) v over tensors (N, heads, tokens, d).

    A module of its own so that operations can be counted (:mod:`pytest_mlhpc.node.worker.reporting`), and so that torch 1.13, which
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


WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)  #: GPT-3, arXiv 2005.14165, appendix B; Llama 3 likewise
INITIAL_SPREAD = 0.02  #: standard deviation of initial weights, GPT-2


class RmsNorm(nn.Module):
    """Divide by the root mean square (arXiv 1910.07467). torch has one of its own only since 2.4."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, stream: Tensor) -> Tensor:
        """Normalise the last dimension, in float32."""
        wide = stream.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return scaled.to(stream.dtype) * self.weight


class SwiGlu(nn.Module):
    """Feed-forward layer with a gate (arXiv 2002.05202)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the block adds to the stream."""
        added: Tensor = self.down(functional.silu(self.gate(stream)) * self.up(stream))
        return added


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each behind a norm and beside the residual stream (N, tokens, hidden)."""

    def __init__(self, *, llama: bool, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1: nn.Module = RmsNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.norm2: nn.Module = RmsNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.attention = CausalAttention(hidden, heads, kv_heads, bias=not llama)
        self.feed_forward: nn.Module
        if llama:
            self.feed_forward = SwiGlu(hidden, ffn)
        else:
            self.feed_forward = nn.Sequential(
                nn.Linear(hidden, ffn), nn.GELU(approximate="tanh"), nn.Linear(ffn, hidden)
            )

    def forward(self, stream: Tensor, rotation: Optional[Tuple[Tensor, Tensor]]) -> Tensor:
        """Return the stream with both added."""
        stream = stream + self.attention(self.norm1(stream), rotation)
        added: Tensor = self.feed_forward(self.norm2(stream))
        return stream + added


class DecoderModel(nn.Module):
    """Takes tokens (N, T) with T up to the context, returns logits (N, T, vocabulary).

    GPT-2 learns its positions and shares one matrix between embedding and output; Llama rotates and shares nothing.
    """

    def __init__(
        self,
        *,
        llama: bool,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        context: int,
        vocabulary: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = None if llama else nn.Embedding(context, hidden)
        self.rotary = Rotary(hidden // heads, context) if llama else None
        self.blocks = nn.ModuleList(
            TransformerBlock(llama=llama, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
            for _ in range(layers)
        )
        self.norm: nn.Module = RmsNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # GPT-2 shrinks what each block adds, so that the stream's variance does not grow with depth.
                adds = name.endswith(
                    ("attention.output.weight", "feed_forward.2.weight", "feed_forward.down.weight")
                )
                nn.init.normal_(parameter, std=INITIAL_SPREAD / ((2 * layers) ** 0.5 if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if not llama:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Score what comes after each token."""
        stream = self.embedding(tokens)
        count = tokens.shape[1]
        if self.positions is not None:
            stream = stream + self.positions(torch.arange(count, device=tokens.device))
        rotation = None if self.rotary is None else self.rotary(count, stream.device)
        for block in self.blocks:
            stream = block(stream, rotation)
        scores: Tensor = self.head(self.norm(stream))
        return scores


def _shape(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's arguments, with what is unset filled in."""
    llama = parameters["architecture"] == "llama"
    hidden, heads = int(parameters["hidden"]), int(parameters["heads"])
    kv_heads = int(parameters["kv_heads"] or heads)
    ffn = int(parameters["ffn"] or (hidden * 7 // 2 if llama else hidden * 4))
    return {
        "llama": llama,
        "layers": int(parameters["layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "context": int(parameters["context"]),
        "vocabulary": int(parameters["vocabulary"]),
    }


def _loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())


def task(parameters: Mapping[str, Any]) -> Task:
    """Return the language model with these fields.

    Stored samples: tokens (context,) and the tokens that follow each, (context,): uint8 where the vocabulary allows,
    else int32.

    Raises:
        ValueError: heads do not fit.
    """
    require(language_model_conflicts, parameters)
    shape = _shape(parameters)
    context, vocabulary = shape["context"], shape["vocabulary"]
    stored = torch.uint8 if vocabulary <= 256 else torch.int32

    def prepare(tokens: Tensor, following: Tensor) -> Tuple[Tensor, Tensor]:
        return tokens.long(), following.long()

    return Task(
        name="language_model",
        model=lambda: DecoderModel(**shape),
        prepare=prepare,
        loss=_loss,
        optimizer=optimizer_of(parameters, weight_decay=WEIGHT_DECAY, betas=BETAS),
        input=TensorSpec((context,), stored),
        target=TensorSpec((context,), stored),
        low=0.0,
        high=float(vocabulary),
        classes=vocabulary,
        tokens_per_sample=context,
    )
