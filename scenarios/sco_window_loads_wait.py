"""Simple CPU offload with sliding windows: two requests wait for each other for ever, while the server says that it is well.

A prompt that loads its beginning from the CPU gets blocks for it first, and as many are kept back as it will still need at most. With a
sliding window that bound counts blocks really held, but it is lessened by the length of the request's table, where blocks that the window
has left still stand. So two such requests are admitted into a pool that holds one, and neither gets the rest. Three waves
of six requests at once do it.

From 0.29.0 on the prefix cache keeps of a sliding window what the end of a prompt needs and nothing before (the retention interval is 0
unless it is set). A shared beginning then comes from the CPU where it came from the GPU, and small pools stand still that did not.

Found by a search over the scheduler alone (`vllm-repro explore`). Other ways into such a standstill were reported and mended
(vllm-project/vllm#45388, #53868, #57104); of this one no report was found.
"""

from vllm_repro.vocabulary import (
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    completion,
    hangs,
    lives,
    patched,
    prefix_hit,
    together,
    with_flags,
    without,
)

# Which of them come into one step differs from boot to boot; six of them, three times over, leave little to that.
WAVE = together(
    completion(prompt=450, shared=150, max_tokens=8, ignore_eos=True),
    completion(prompt=450, shared=200, max_tokens=8, ignore_eos=True),
    completion(prompt=450, shared=200, max_tokens=8, ignore_eos=True),
    completion(prompt=450, shared=200, max_tokens=8, ignore_eos=True),
    completion(prompt=450, shared=200, max_tokens=8, ignore_eos=True),
    completion(prompt=450, shared=200, max_tokens=8, ignore_eos=True),
)

FILE = "vllm/v1/core/single_type_kv_cache_manager.py"

scenario = Scenario(
    id="sco-window-loads-wait",
    issue="vllm-project/vllm#45388",
    filed=False,
    title="Simple CPU offload with sliding windows: requests that load from the CPU wait for each other for ever",
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 514
        --block-size 32
        --num-gpu-blocks-override 31
        --enable-chunked-prefill
        --max-num-batched-tokens 129
        --max-num-seqs 8
        --enable-prefix-caching
        --enable-prompt-tokens-details
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1114112}}'
    """,  # noqa: E501  # one flag is one word
    model=Model(
        "google/gemma-3-1b-it",
        architecture="Gemma3ForCausalLM",
        heads=4,
        kv_heads=2,
        head_dim=32,
        layers=3,
        vocab_size=4096,
        block_size=32,
        max_position=32768,
        why="the scheduler asks for no weights; one layer that sees everything and two with a window decide",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=4),
    status=Status(bad=">=0.29.0"),
    try_with="0.32.0",
    workload=[WAVE, WAVE, WAVE],
    trigger=prefix_hit(),
    arms=[
        arm("reported", hangs),
        arm(
            "all-kept",
            lives,
            with_flags("--prefix-cache-retention-interval 32"),
            why="the cache keeps every block of the window, as it did to 0.28.0",
        ),
        arm("sco-off", lives, without("--kv-transfer-config"), why="without the connector no request waits for a load"),
        arm(
            "patched",
            lives,
            patched(
                FILE,
                was="""\
            num_required_blocks = min(
                num_required_blocks, self.max_admission_blocks_per_request
            )
        num_req_blocks = len(""",
                now="""\
            most = self.max_admission_blocks_per_request - sum(
                not block.is_null for block in self.req_to_blocks.get(request_id, ())
            )
        else:
            most = num_required_blocks
        num_req_blocks = len(""",
                why="what the bound leaves is counted in blocks that the request holds",
            ),
            patched(
                FILE,
                was="            return max(num_required_blocks - num_req_blocks, 0)\n\n        num_skipped_tokens",
                now="            return max(min(num_required_blocks - num_req_blocks, most), 0)\n\n        num_skipped_tokens",
                why="and holds for what a running request still needs",
            ),
            patched(
                FILE,
                was="            num_required_blocks - max(num_skipped_blocks, num_local_computed_blocks),\n",
                now="            min(num_required_blocks - max(num_skipped_blocks, num_local_computed_blocks), most),\n",
                why="and for what a new one needs",
            ),
            why="the bound counts held blocks, so what is taken from it must count them too",
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=["full", "sliding", "sliding"],
        window=32,
        arms=["reported", "all-kept", "patched"],
        why="these kinds of layers, in this order, are what the search had",
        changes=[
            with_flags("--enforce-eager", why="nothing is compiled, so that a boot takes seconds"),
            with_flags("--dtype bfloat16", why="what the CPU's attention computes in"),
        ],
    ),
    related=[
        "vllm-project/vllm#53868",
        "vllm-project/vllm#57104",
        "vllm-project/vllm#57841",
        "vllm-project/vllm#39734",
        "vllm-project/vllm#44560",
    ],
)
