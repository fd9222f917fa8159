"""TurboQuant without chunked prefill: a prefix-cache hit needs workspace that is not reserved.

From 0.24.0 on, TurboQuant reserves room for a continued prefill before the workspace is locked, but
only with chunked prefill on. Without chunked prefill a prompt is never split, so there seems to be
nothing to continue. But a prompt that begins with cached blocks is also a continued prefill. Its
first tail of more than 128 tokens crashes with the assertion of #41726.

Releases from 0.21.0 on have the bug; with `--enforce-eager` the workspace is not locked. We found
no issue about this.

For this model vLLM takes its second model runner from 0.22 on, which locks the workspace in 0.32.0
but not in 0.28.0 (read, not run). So the command asks for the first one.
"""

from vllm_repro.vocabulary import *

PREFIX = 2048  # cached tokens: 8 MB to unpack, far more than the size locked for two sequences

scenario = Scenario(
    id="tq-prefix-hit-unreserved",
    issue="vllm-project/vllm#44053",
    filed=False,
    title="TurboQuant KV cache crashes on a prefix-cache hit when chunked prefill is off",
    command="""
        VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3-8B
        --kv-cache-dtype turboquant_4bit_nc
        --max-model-len 8192
        --max-num-batched-tokens 8192
        --max-num-seqs 2
        --no-enable-chunked-prefill
        --enable-prefix-caching
    """,
    model=public_model(
        "Qwen/Qwen3-8B", why="any model with full attention in all layers shows the bug"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        layers=1,
        why=(
            "the workspace is sized, locked and outgrown in a full-attention layer, so one is"
            " enough; with two or more layers TurboQuant skips the first and last ones"
        ),
    ),
    status=Status(bad=">=0.21.0"),
    try_with="0.24.0",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantMetadataBuilder._reserve_workspace",
        "scheduler_config.enable_chunked_prefill",
    ),
    workload=[
        completion(name="first with the prefix", prompt=PREFIX + 128, shared=PREFIX, max_tokens=4),
        completion(name="tail of 129 tokens", prompt=PREFIX + 129, shared=PREFIX, max_tokens=4),
    ],
    trigger=attention_backend("TURBOQUANT")
    & prefix_hit()
    & continuation_over(128)
    & workspace_outgrown(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message=(
            "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires"
            " {asked} MB, current size is {locked} MB"
        ),
        frames=[
            "_prefill_attention",
            "_continuation_prefill",
            "get_simultaneous",
            "_ensure_workspace_size",
        ],
    ),
    same_death_as="tq-chunked-prefill",
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            lives,
            with_flags("--enforce-eager"),
            why="without graph capture the workspace is not locked",
        ),
        arm(
            "near-miss-128",
            untriggered,
            workload=[
                completion(
                    name="first with the prefix", prompt=PREFIX + 128, shared=PREFIX, max_tokens=4
                ),
                completion(
                    name="tail of 128 tokens", prompt=PREFIX + 128, shared=PREFIX, max_tokens=4
                ),
            ],
            why="a tail of 128 tokens takes the decode path, not the continued prefill",
        ),
        arm(
            "no-prefix-hit",
            untriggered,
            workload=[
                completion(name="one prompt", prompt=PREFIX + 128, max_tokens=4),
                completion(name="another prompt", prompt=PREFIX + 129, max_tokens=4),
            ],
            why="the same lengths, without a shared prefix",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="            scheduler_config.enable_chunked_prefill\n",
                now=(
                    "            (\n"
                    "                scheduler_config.enable_chunked_prefill\n"
                    "                or self.vllm_config.cache_config.enable_prefix_caching\n"
                    "            )\n"
                ),
                why=(
                    "reserve room whenever a prefill may have context before it: after a chunk, or"
                    " after cached blocks"
                ),
            ),
            why=(
                "the smallest change of the reservation that fixes the bug, for releases from"
                " 0.24.0 on"
            ),
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        layers=1,
        why=(
            "the workspace is sized, locked and outgrown in a full-attention layer, so one is"
            " enough; with two or more layers TurboQuant skips the first and last ones"
        ),
        changes=[
            with_flags("--dtype bfloat16", why="matrix products on a CPU are fast in bfloat16"),
            with_flags("--block-size 128", why="a block size that the KV cache supports on a CPU"),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
        ],
    ),
    related=["vllm-project/vllm#41726"],
)
