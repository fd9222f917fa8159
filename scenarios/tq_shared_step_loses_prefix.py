"""TurboQuant: a request loses its cached prefix if a long first chunk shares its step.

TurboQuant's prefill has a fast path for steps in which every prompt begins: FlashAttention over the
new tokens alone. It is taken if the longest new part equals the longest sequence of the step. A new
prompt that is at least as long as the other sequences makes both equal, although others continue a
prefix from the cache. These attend to their own new tokens only. Nothing is logged and no request
fails.

The scenario sends one prompt three times: to fill the cache, alone, and beside a longer new prompt.
The second and third answers should be equal. A long request keeps the engine busy while the two
arrive, so that one step takes both. The issue gives no command.
"""

from vllm_repro.vocabulary import *

SIZE = 543  # 512 tokens in whole blocks of 32, which the cache keeps, and 31 more
FILLS = completion(
    name="fills the cache", prompt=SIZE, shared=SIZE, logprobs=2, return_token_ids=True
)
ALONE = completion(name="alone", prompt=SIZE, shared=SIZE, logprobs=2, return_token_ids=True)
BUSY = completion(name="busy", prompt=flag("--max-num-batched-tokens") - 64, max_tokens=1)
BESIDE = completion(
    name="beside it", prompt=SIZE, shared=SIZE, logprobs=2, return_token_ids=True, starts_after=0.05
)

scenario = Scenario(
    id="tq-shared-step-loses-prefix",
    issue="vllm-project/vllm#46460",
    title=(
        "TurboQuant's fast path loses the cached prefix of a request that shares its step with a"
        " long new prompt"
    ),
    command="""
        vllm serve Qwen/Qwen3-8B
        --kv-cache-dtype turboquant_4bit_nc
        --enable-prefix-caching
        --max-num-seqs 512
        --max-model-len 8192
        --max-num-batched-tokens 8192
        --enable-logging-iteration-details
    """,
    model=public_model("Qwen/Qwen3-8B", why="the issue names this model"),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    status=Status(bad=">=0.20.2"),
    try_with="0.24.0",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantAttentionImpl._prefill_attention",
        "if _HAS_FLASH_ATTN and attn_metadata.max_query_len == attn_metadata.max_seq_len:",
    ),
    workload=[
        FILLS,
        ALONE,
        together(BUSY, completion(name="new", prompt=1000, starts_after=0.05), BESIDE),
    ],
    trigger=attention_backend("TURBOQUANT") & prefix_hit() & prefilled_together("new", "beside it"),
    output=checks(alike=[("alone", "beside it")]),
    arms=[
        arm("reported", errs),
        arm(
            "one-token-shorter",
            lives,
            workload=[
                FILLS,
                ALONE,
                together(BUSY, completion(name="new", prompt=SIZE - 1, starts_after=0.05), BESIDE),
            ],
            why=(
                "the new prompt is shorter than the other sequence, so the step does not look like"
                " one of new prompts only"
            ),
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was=(
                    "        if _HAS_FLASH_ATTN and attn_metadata.max_query_len =="
                    " attn_metadata.max_seq_len:\n"
                ),
                now="""        if (
            _HAS_FLASH_ATTN
            and attn_metadata.max_query_len == attn_metadata.max_seq_len
            and attn_metadata.query_start_loc_cpu is not None
            and attn_metadata.seq_lens_cpu is not None
            and attn_metadata.query_start_loc_cpu.diff().equal(attn_metadata.seq_lens_cpu)
        ):
""",
                why="take the fast path only if each prompt of the step begins in it",
            ),
            why="the smallest change that compares each request and not two maxima",
        ),
    ],
    lab=Lab(
        mechanism="turboquant-flash",
        family="mimo",
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        weights="made",
        why=(
            "the path is chosen for a whole step, in each layer alike; in the made weights"
            " attention decides the answer, so a lost prefix changes the first token"
        ),
        changes=[
            with_flags("--dtype bfloat16", why="matrix products on a CPU are fast in bfloat16"),
            with_flags("--block-size 32", why="a block size that the KV cache supports on a CPU"),
            with_flags(
                "--max-num-seqs 4",
                "--max-num-batched-tokens 4096",
                why="the profile run then takes seconds",
            ),
            with_flags("--enforce-eager", why="the bug does not depend on graphs"),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
        ],
    ),
    related=["vllm-project/vllm#46461"],
)
