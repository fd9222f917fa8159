"""PyTorch versions of vLLM's five TurboQuant kernels and of FlashAttention.

The TurboQuant ones use the same cache bytes and formulas.

A cache slot, for one token and one head, holds the bytes of the key, then from offset `KPS` those
of the value. Key: D indices of `MSE_BITS` bits into the centroids and the norm in float16, or D
bytes of fp8. Value: D numbers of `VQB` bits, then their scale and minimum in float16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import capture

Grid: TypeAlias = tuple[int, ...]
Call: TypeAlias = SimpleNamespace
"""Arguments of a call, by the names of the kernel's parameters."""

_LAUNCH_OPTIONS = {"num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}


class TorchKernel:
    """PyTorch replacement of a kernel, called like Triton's: `kernel[grid](...)`.

    Arguments are bound by name to the kernel's own signature, because releases pass them in
    different orders and numbers.
    """

    def __init__(self, kernel: Callable[..., None], body: Callable[[Grid, Call], None]) -> None:
        self._signature = inspect.signature(kernel)
        self._body = body

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            passed = {
                name: value for name, value in keywords.items() if name not in _LAUNCH_OPTIONS
            }
            bound = self._signature.bind(*args, **passed)
            bound.apply_defaults()
            capture.launch(self._body, grid, SimpleNamespace(**bound.arguments))

        return launch


def store_mse(_: Grid, call: Call) -> None:
    """Store each rotated key as its norm and nearest centroids' indices, and the packed value."""
    indices = torch.searchsorted(
        call.Midpoints_ptr.contiguous(), call.Y_ptr.contiguous(), right=True
    )
    _store(call, torch.cat([_pack(indices, call.MSE_BITS), _halves(call.Norms_ptr)], -1))


def store_fp8(_: Grid, call: Call) -> None:
    """Store each key in fp8, and the packed value."""
    _store(call, call.Key_ptr.to(torch.float8_e4m3fn).view(torch.uint8))


def unpack_cache(grid: Grid, call: Call) -> None:
    """Unpack the first `grid[0]` tokens of a request into `K_out_ptr` and `V_out_ptr`.

    Both have the shape (1, heads, tokens, D) in float16.
    """
    tokens = grid[0]
    keys, values = _unpack_tokens(call, call.Block_table_ptr[0], tokens)
    call.K_out_ptr[0, :, :tokens] = keys.transpose(0, 1).to(torch.float16)
    call.V_out_ptr[0, :, :tokens] = values.transpose(0, 1).to(torch.float16)


def decode_splits(grid: Grid, call: Call) -> None:
    """Compute attention of one query per row over its cached tokens.

    Write output and log-sum-exp of each of `NUM_KV_SPLITS` splits to `Mid_o_ptr`.
    """
    lengths = [int(length) for length in call.Seq_lens_ptr[: grid[0]]]
    # Rows with one block table (stride 0) are the tokens of one short continuation: unpack its
    # cache once.
    shared = (
        _unpack_tokens(call, call.Block_table_ptr[0], max(lengths))
        if call.stride_bt_b == 0
        else None
    )
    for row, length in enumerate(lengths):
        if length <= 0:
            continue
        keys, values = shared or _unpack_tokens(call, call.Block_table_ptr[row], length)
        query = (
            call.Q_rot_ptr[row]
            .float()
            .reshape(call.NUM_KV_HEADS, call.KV_GROUP_SIZE, call.HEAD_DIM)
        )
        scores = torch.einsum("hgd,nhd->hgn", query, keys[:length]) * call.ATTN_SCALE
        step = -(-length // call.NUM_KV_SPLITS)
        for split, start in enumerate(range(0, length, step)):
            part = scores[..., start : start + step]
            total = torch.logsumexp(part, -1, keepdim=True)
            out = torch.einsum(
                "hgn,nhd->hgd", torch.exp(part - total), values[start : min(start + step, length)]
            )
            call.Mid_o_ptr[row, :, split, : call.HEAD_DIM] = out.flatten(0, 1)
            call.Mid_o_ptr[row, :, split, call.HEAD_DIM] = total.flatten()


def merge_splits(grid: Grid, call: Call) -> None:
    """Merge the splits of each row by their log-sum-exp; write the result to `o` and `lse`."""
    for row, length in enumerate(int(length) for length in call.B_Seqlen[: grid[0]]):
        if length <= 0:
            continue
        step = -(-length // call.NUM_KV_SPLITS)
        splits = call.Mid_O[row, :, : -(-length // step)]
        weights = splits[..., call.Lv]
        total = torch.logsumexp(weights, -1)
        merged = (torch.exp(weights - total[:, None])[..., None] * splits[..., : call.Lv]).sum(1)
        call.o[row] = merged.to(call.o.dtype)
        call.lse[row] = total


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    **_: Any,
) -> torch.Tensor:
    """Return causal attention of each sequence.

    The last query of a sequence sees all of its keys, as in FlashAttention 2.1 and later.
    """
    out = torch.empty_like(q)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (start, end), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        seen = torch.ones(end - start, last - first, dtype=torch.bool).tril(
            (last - first) - (end - start)
        )
        rows = (
            part.transpose(0, 1).float() for part in (q[start:end], k[first:last], v[first:last])
        )
        attended = scaled_dot_product_attention(
            *rows, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        out[start:end] = attended.transpose(0, 1).to(q.dtype)
    return out


def _store(call: Call, keys: torch.Tensor) -> None:
    """Write keys, one row per token and head, and the packed values into their slots."""
    slots = call.Slot_mapping_ptr.long()
    tokens = slots.numel()
    values = call.Value_ptr.float().reshape(tokens, call.H, call.D)
    levels = (1 << call.VQB) - 1
    lowest = values.amin(-1)
    scale = ((values.amax(-1) - lowest) / levels).clamp(min=1e-8)
    numbers = (
        ((values - lowest[..., None]) / scale[..., None] + 0.5).to(torch.int32).clamp(0, levels)
    )
    packed = torch.cat([_pack(numbers, call.VQB), _halves(scale), _halves(lowest)], -1)
    block, position = slots // call.BLOCK_SIZE, slots % call.BLOCK_SIZE
    first = (block * call.stride_cache_block + position * call.stride_cache_pos)[:, None]
    first = first + torch.arange(call.H) * call.stride_cache_head
    taken = slots >= 0  # a negative slot is padding
    cache = _flat(call.KV_cache_ptr)
    for offset, content in ((0, keys.reshape(tokens, call.H, -1)), (call.KPS, packed)):
        places = first[..., None] + offset + torch.arange(content.shape[-1])
        cache[places[taken].flatten()] = content[taken].flatten()


def _flat(cache: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the cache, as a kernel sees them: some releases pass a strided view."""
    if cache.dim() == 1:
        return cache
    start = cache.storage_offset()
    return cache.as_strided((cache.untyped_storage().nbytes() - start,), (1,), start)


def _unpack_tokens(
    call: Call, blocks: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K, still rotated, and V of the first tokens, both (tokens, heads, D) in float32."""
    place = torch.arange(tokens)
    slots = call.KV_cache_ptr[blocks[place // call.BLOCK_SIZE].long(), place % call.BLOCK_SIZE]
    if call.KEY_FP8:
        keys = slots[..., : call.HEAD_DIM].contiguous().view(torch.float8_e4m3fn).float()
    else:
        keys = call.Centroids_ptr[_unpack(slots[..., : call.MSE_BYTES], call.MSE_BITS)]
        if call.NORM_CORRECTION:
            keys = keys / torch.sqrt((keys * keys).sum(-1, keepdim=True) + 1e-16)
        keys = keys * _half(slots, call.MSE_BYTES)
    end = call.KPS + call.VAL_DATA_BYTES
    values = _unpack(slots[..., call.KPS : end], call.VQB).float() * _half(slots, end) + _half(
        slots, end + 2
    )
    return keys, values


def _pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack groups of eight numbers into `bits` bytes, the first in the lowest bits."""
    groups = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, 8)
    words = (groups << (torch.arange(8) * bits)).sum(-1, keepdim=True)
    return (words >> (torch.arange(bits) * 8) & 255).to(torch.uint8).flatten(-2)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of `bits` bits each that `_pack` has packed."""
    groups = packed.to(torch.int64).reshape(*packed.shape[:-1], -1, bits)
    words = (groups << (torch.arange(bits) * 8)).sum(-1, keepdim=True)
    return (words >> (torch.arange(8) * bits) & ((1 << bits) - 1)).flatten(-2)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Return each number as the two bytes of a float16."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8).reshape(*numbers.shape, 2)


def _half(slots: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte `at` of each slot, in float32, with a last dimension of 1."""
    return slots[..., at : at + 2].contiguous().view(torch.float16).float()
