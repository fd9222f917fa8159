"""Simple CPU offload with sliding windows: two requests wait for each other for ever.

A prompt that loads its beginning from the CPU first gets blocks for that part. vLLM also reserves
as many blocks as the request can still need. With a sliding window this bound counts the blocks
that a request really holds, but vLLM subtracts the length of the request's block table. That table
still includes blocks that the window has passed. So two such requests are admitted into a pool with
room for one, and neither gets the rest of its blocks. `/health` stays 200.

Three waves of six simultaneous requests trigger it. From 0.29.0 on the prefix cache keeps only the
part of a sliding window that the end of a prompt needs (the retention interval is 0 unless it is
set). A shared beginning that used to come from the GPU then comes from the CPU, and small pools
hang that did not hang before.

This bug was found by a search over the scheduler alone (`vllm-repro explore`). Other causes of such
a hang were reported and fixed (vllm-project/vllm#45388, #53868, #57104); we found no report of this
one.
"""

from vllm_repro.vocabulary import *

# The requests that share a step differ from boot to boot. Three waves of six make the hang likely
# in every boot.
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
    title=(
        "Simple CPU offload with sliding windows: requests that load from the CPU wait for each"
        " other forever"
    ),
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
        why=(
            "the scheduler does not use weights; one full-attention layer and two sliding-window"
            " layers are enough"
        ),
    ),
    needs=Needs(gpus=1, gpu_memory_gb=4),
    status=Status(bad=">=0.29.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/core/single_type_kv_cache_manager.py",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "num_req_blocks = len(self.req_to_blocks.get(request_id, ()))",
    ),
    workload=[WAVE, WAVE, WAVE],
    trigger=prefix_hit(),
    arms=[
        arm("reported", hangs),
        arm(
            "all-kept",
            lives,
            with_flags("--prefix-cache-retention-interval 32"),
            why="the prefix cache keeps every block of the window, as it did up to 0.28.0",
        ),
        arm(
            "sco-off",
            lives,
            without("--kv-transfer-config"),
            why="without the connector, requests do not wait for a load",
        ),
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
                why="subtract the blocks that the request really holds from the bound",
            ),
            patched(
                FILE,
                was=(
                    "            return max(num_required_blocks - num_req_blocks, 0)\n\n       "
                    " num_skipped_tokens"
                ),
                now=(
                    "            return max(min(num_required_blocks - num_req_blocks, most), 0)\n\n"
                    "        num_skipped_tokens"
                ),
                why="apply the bound to a running request",
            ),
            patched(
                FILE,
                was="""\
        num_new_blocks = max(
            num_required_blocks - max(num_skipped_blocks, num_local_computed_blocks),
""",
                now="""\
        # prefix hits inside the window are held, too
        most -= max(num_local_computed_blocks - max(num_skipped_blocks, num_req_blocks), 0)
        num_new_blocks = max(
            min(num_required_blocks - max(num_skipped_blocks, num_local_computed_blocks), most),
""",
                why="apply the bound to a new request, less its hits in the prefix cache",
            ),
            why="the bound counts held blocks, so the number subtracted from it must do so too",
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=["full", "sliding", "sliding"],
        window=32,
        arms=["reported", "all-kept", "patched"],
        why="the kinds and the order of the layers with which the search found the bug",
        changes=[
            with_flags("--enforce-eager", why="without compilation a boot takes seconds"),
            with_flags("--dtype bfloat16", why="the data type of CPU attention"),
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
