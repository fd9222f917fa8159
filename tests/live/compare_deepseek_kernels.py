"""Comparison of the lab's kernels for DeepSeek-V4 with vLLM's: Triton (interpreted) and CPU.

    TRITON_INTERPRET=1 PYTHONPATH=<release>:<plugin> <release's python> compare_deepseek_kernels.py

Print one line per comparison: equal, or what differs and by how much.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from vllm_repro_lab import interpreter

interpreter.install()
from vllm_repro_lab import deepseek_kernels as ours  # noqa: E402  # imports vLLM: after Triton

SIZE, ROW, TOP_K, WINDOW = 512, 584, 512, 128
BF16_STEP = 2**-7


def filled(ops: Any, blocks: int, block_size: int) -> torch.Tensor:
    """Return a cache of random keys, written by vLLM's own kernel."""
    cache = torch.zeros(blocks, block_size, ROW, dtype=torch.uint8)
    keys = torch.randn(blocks * block_size, SIZE, dtype=torch.bfloat16) * 3
    ops.quantize_and_insert_k_cache(
        keys, cache.view(blocks, -1), torch.arange(len(keys)), block_size=block_size
    )
    return cache


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gathered(ops: Any) -> str:
    different = values = 0
    for block_size, lengths, last, offset in (
        (16, (70, 131), None, 0),
        (16, (150, 77), (140, 77), 5),
        (2, (9, 4), None, 0),
    ):
        cache = filled(ops, 20, block_size)
        table = torch.randperm(20)[: 2 * -(-max(lengths) // block_size)].view(2, -1).to(torch.int32)
        own, stand_in = (torch.zeros(2, 210, SIZE, dtype=torch.bfloat16) for _ in range(2))
        for gather, out in ((ops.dequantize_and_gather_k_cache, own), (ours.gather, stand_in)):
            gather(
                out, cache, numbers(*lengths), last and numbers(*last), table, block_size, offset
            )
        different += int((own != stand_in).sum())
        values += int((own != 0).sum())
    return f"{different} of {values} gathered values differ"


def combined(ops: Any) -> str:
    different = indices = 0
    for ratio, top_k in ((1, 0), (4, 512), (128, 128)):
        chosen = torch.full((60, max(top_k, 1)), -1, dtype=torch.int32)
        for token, place in enumerate((*range(280, 300), *range(40))):
            count = min((place + 1) // ratio, top_k)
            chosen[token, :count] = torch.randperm(max(count, 1))[:count].to(torch.int32)
        before = 75 if top_k else 0
        width = -(-(top_k + WINDOW) // 128) * 128
        found = []
        for combine in (ops.combine_topk_swa_indices, ours.combine):
            out = (torch.empty(60, width, dtype=torch.int32), torch.empty(60, dtype=torch.int32))
            starts, lengths, last = numbers(7, 27, 67), numbers(300, 40), numbers(147, 40)
            found.append(
                combine(
                    chosen, starts, lengths, last, WINDOW, ratio, top_k, before + 150, before, out
                )
            )
        different += sum(int((one != other).sum()) for one, other in zip(*found, strict=True))
        indices += found[0][0].numel()
    return f"{different} of {indices} indices differ"


def attended(ops: Any) -> str:
    """Return a prompt's attention by the lab's kernels, and by vLLM's CPU kernel per token."""
    tokens, heads, scale = 200, 8, SIZE**-0.5
    windows, compressed = filled(ops, 4, 64), filled(ops, 2, 64)
    table, others = (
        torch.tensor([[3, 1, 2, 0]], dtype=torch.int32),
        torch.tensor([[1, 0]], dtype=torch.int32),
    )
    q, sink = torch.randn(tokens, heads, SIZE, dtype=torch.bfloat16), torch.randn(heads)
    place = torch.arange(tokens)
    seen = (place + 1).clamp(max=WINDOW)
    rows = (place - WINDOW + 1).clamp(min=0)[:, None] + torch.arange(WINDOW)
    slots = table[0].long()[(rows // 64).clamp(max=3)] * 64 + rows % 64
    counts = (place + 1) // 4
    chosen = torch.full((tokens, TOP_K), -1, dtype=torch.int32)
    for token, count in enumerate(counts.tolist()):
        chosen[token, :count] = torch.randperm(max(count, 1))[:count].to(torch.int32)
    far = others[0].long()[chosen.clamp(min=0).long() // 64] * 64 + chosen.clamp(min=0) % 64
    beyond = 0
    for before in (0, tokens // 4):
        one_by_one, whole = (
            torch.zeros(tokens, 1, heads, SIZE, dtype=torch.bfloat16),
            torch.zeros(tokens, heads, SIZE, dtype=torch.bfloat16),
        )
        extra = {
            "extra_k_cache": compressed.unsqueeze(-2),
            "extra_indices_in_kvcache": far[:, None],
            "extra_topk_length": counts,
        }
        ours.attend_cached(
            q[:, None],
            windows.unsqueeze(-2),
            slots[:, None],
            seen,
            scale,
            sink,
            one_by_one,
            **(extra if before else {}),
        )
        kv, length = torch.zeros(1, before + tokens, SIZE, dtype=torch.bfloat16), numbers(tokens)
        if before:
            ours.gather(kv, compressed, length // 4, None, others, 64, 0)
        ours.gather(kv, windows, length, length, table, 64, before)
        width = WINDOW + (TOP_K if before else 0)
        out = (
            torch.empty(tokens, width, dtype=torch.int32),
            torch.empty(tokens, dtype=torch.int32),
        )
        ratio, top_k = (4, TOP_K) if before else (1, 0)
        indices, lengths = ours.combine(
            chosen,
            numbers(0, tokens),
            length,
            length,
            WINDOW,
            ratio,
            top_k,
            before + tokens,
            before,
            out,
        )
        ours.attend(q, kv.view(-1, 1, SIZE), indices.unsqueeze(1), scale, sink, lengths, whole)
        own, other = one_by_one[:, 0].float(), whole.float()
        beyond += int(((own - other).abs() > 2 * BF16_STEP * (1 + own.abs())).sum())
    return f"{beyond} of {2 * whole.numel()} answers differ by more than two steps of bfloat16"


def main() -> int:
    torch.manual_seed(7)
    ops = import_module("vllm.models.deepseek_v4.common.ops.cache_utils")
    import_module("vllm.platforms").current_platform.import_kernels()
    for compare in (gathered, combined, attended):
        print(compare(ops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
