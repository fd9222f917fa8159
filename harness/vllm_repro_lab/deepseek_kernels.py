"""PyTorch versions of the CUDA kernels under vLLM's DeepSeek-V4 attention class.

They use the same indices and formulas.

A cache block holds the rows of its tokens, then their scales. A row is 448 fp8 values and 64
bfloat16 values. A token's scales are seven powers of two, one per 64 fp8 values, and one byte of
padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import vllm._custom_ops as ops

_NARROW, _WIDE = 448, 64
_ROW = _NARROW + 2 * _WIDE
_GROUP, _SCALES = 64, 8
_BIAS = 127
_AT_ONCE = 64


def gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    **_: Any,
) -> None:
    """Unpack each request's last `gather_lens` tokens (None: all) into `out[request, offset:]`."""
    blocks = k_cache.view(k_cache.shape[0], -1)
    for request, length in enumerate(seq_lens.tolist()):
        count = length if gather_lens is None else int(gather_lens[request])
        if count > 0:
            tokens = torch.arange(length - count, length)
            block = block_table[request][tokens // block_size].long()
            out[request, offset : offset + count] = _unpacked(
                blocks, block, tokens % block_size, block_size
            )


def _unpacked(
    blocks: torch.Tensor, block: torch.Tensor, place: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Return cached tokens, given by block and place in it: (tokens, 512) in bfloat16."""
    at = place[:, None]
    row = blocks[block[:, None], at * _ROW + torch.arange(_ROW)]
    groups = _NARROW // _GROUP
    exponents = blocks[block[:, None], block_size * _ROW + at * _SCALES + torch.arange(groups)]
    narrow = (
        row[:, :_NARROW].contiguous().view(torch.float8_e4m3fn).float().view(-1, groups, _GROUP)
    )
    scaled = narrow * torch.exp2(exponents.float() - _BIAS)[..., None]
    return torch.cat(
        [scaled.flatten(1).bfloat16(), row[:, _NARROW:].contiguous().view(torch.bfloat16)], 1
    )


def combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    rows_each: int,
    rows_before: int,
    out: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the rows of the gathered cache that each token attends to.

    Compressed rows come first, then its window, padded with -1. Return `out`.

    rows_each: rows per request; the first `rows_before` of them are compressed. out: the indices
    and their count per token, which are overwritten.
    """
    indices, lengths = out
    indices.fill_(-1)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    columns = torch.arange(indices.shape[1])
    for request, (first, end) in enumerate(pairwise(starts)):
        length, gathered = int(seq_lens[request]), int(gather_lens[request])
        token = torch.arange(length - (end - first), length)[:, None]
        compressed = ((token + 1) // compress_ratio).clamp(max=topk)
        oldest = (token - window_size + 1).clamp(min=0)
        seen = token - oldest + 1
        lengths[first:end] = (compressed + seen).flatten().to(lengths.dtype)
        base = rows_each * request
        rows = base + rows_before + oldest - (length - gathered) + columns - compressed
        if topk:
            chosen = base + topk_indices[first:end, :topk].long()
            width = min(topk, len(columns))
            rows[:, :width] = torch.where(
                columns[:width] < compressed, chosen[:, :width], rows[:, :width]
            )
        indices[first:end] = torch.where(columns < compressed + seen, rows, -1).to(indices.dtype)
    return indices, lengths


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor,
    topk_length: torch.Tensor,
    out: torch.Tensor,
) -> tuple[torch.Tensor, None, None]:
    """Write the attention of each query over its rows of `kv` to `out`, with a sink.

    The sink is a logit in the softmax that has no value.
    """
    for first in range(0, len(q), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        rows = indices[some, 0, : int(topk_length[some].max())].long()
        real = (rows >= 0) & (torch.arange(rows.shape[1]) < topk_length[some, None])
        values = kv[rows.clamp(min=0), 0].float()
        scores = torch.einsum("thd,trd->thr", q[some].float(), values) * sm_scale
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        sink = attn_sink[: q.shape[1]].float().expand(len(rows), -1)
        weights = torch.softmax(torch.cat([scores, sink[..., None]], -1), -1)[..., :-1]
        out[some] = torch.einsum("thr,trd->thd", weights, values).to(out.dtype)
    return out, None, None


def attend_cached(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor,
    out: torch.Tensor,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the attention of one decoded token per row to `out`, with vLLM's CPU kernel."""
    window = k_cache.squeeze(-2)
    window_slots = _slots(indices, topk_length)
    compressed, slots, block_size = window, window_slots[:, :0], 1
    if extra_k_cache is not None:
        compressed = extra_k_cache.squeeze(-2)
        slots, block_size = _slots(extra_indices_in_kvcache, extra_topk_length), compressed.shape[1]
    ops.flash_mla_with_kvcache_cpu(
        out.squeeze(1),
        q.squeeze(1),
        window.view(window.shape[0], -1),
        window_slots,
        window.shape[1],
        compressed.view(compressed.shape[0], -1),
        slots,
        block_size,
        attn_sink,
        softmax_scale,
    )
    return out, None


def _slots(indices: Any, lengths: Any) -> torch.Tensor:
    """Return the indices, one token per row, with -1 after the first `lengths` of each."""
    rows = indices.flatten(1).long()
    return torch.where(torch.arange(rows.shape[1]) < lengths[:, None], rows, -1)
