"""Simple CPU offload with sliding windows: a KV block is freed twice, then `popleft_n` crashes.

The connector stores a prompt's KV blocks in CPU memory. A sliding-window layer frees blocks as its
window moves on. If the pool is nearly full, the last chunk of the same prompt gets some of these
blocks again, and the connector's list then has them twice. If the answer fills the prompt's last
block, one store event lists each of them twice. Both entries are freed, so the counter of free
blocks exceeds the length of the free list. The second long prompt then fails a bare assertion. A
pause between the two prompts does not help.

Releases 0.20.0 to 0.21.0 crash in this way. Releases 0.22.0 to 0.23.0 skip the block without a hash
at which the scan stopped before, which removes this trigger but not the bug: a CPU pool full of
stores in flight also triggers it. From 0.24.0 on a block is freed once, however often it is listed.
"""

from vllm_repro.vocabulary import *

# The report says "about 90k". LONG is three tokens short of whole blocks (352, or 178 in the lab):
# an answer of eight fills the last one. UNFILLED is five tokens longer than whole blocks: a short
# answer does not fill its last block.
LONG = sized(90_109, lab=5_693)
UNFILLED = sized(90_117, lab=6_789)
MANAGER = "vllm/v1/simple_kv_offload/manager.py"
POOL = "vllm/v1/core/block_pool.py"

scenario = Scenario(
    id="sco-hybrid",
    issue="vllm-project/vllm#42085",
    title=(
        "SimpleCPUOffloadConnector with the hybrid KV cache manager: popleft_n asserts on the"
        " second long prompt"
    ),
    command="""
        vllm serve deepseek-ai/DeepSeek-V4-Flash
        --kv-cache-dtype=fp8
        --block-size=256
        --max-model-len=128000
        --gpu-memory-utilization=0.97
        --tensor-parallel-size=2
        --kv-transfer-config='{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":137438953472}}'
        --no-disable-hybrid-kv-cache-manager
        --no-enable-flashinfer-autotune
        --enable-prefix-caching
        --enable-chunked-prefill
        --max-num-batched-tokens=16384
        --compilation-config='{"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}'
    """,
    model=Model(
        "deepseek-ai/DeepSeek-V4-Flash",
        architecture="DeepseekV4ForCausalLM",
        heads=64,
        kv_heads=1,
        head_dim=512,
        layers=43,
        block_size=256,
        vocab_size=129280,
        max_position=1048576,
        # The groups of vLLM 0.21.0 for this model: two halves of the sliding windows, and the
        # states of both compressors.
        window_groups=[(64, 128), (64, 128), (4, 8), (8, 128)],
        group_pages=[1_002_240, 823_680, 786_240, 967_680, 748_800],
        kv_cache_tokens=145_274,
        kv_cache_gib=7.13,
    ),
    needs=Needs(gpus=2, gpu_memory_gb=96),
    dummy=Dummy(
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        fp8=True,
        why=(
            "vLLM 0.21.0 splits the KV cache of these four layers into the same five groups as that"
            " of the model's 43; a block has an eleventh of the size"
        ),
        changes=[
            with_flags(
                "--num-gpu-blocks-override 7283",
                why="the number of blocks for the report's 145,274 tokens, on any GPU",
            ),
            with_flags(
                simple_cpu_offload(12_494_450_315),
                why="an eleventh of the reported 128 GiB: the same number of blocks",
            ),
        ],
    ),
    status=Status(bad=">=0.20.0,<0.22.0", good=">=0.24.0"),
    try_with="0.21.0",
    defect=source_line(
        "vllm/v1/simple_kv_offload/manager.py",
        "SimpleCPUOffloadScheduler._prepare_eager_store_specs",
        "gpu_block_id in gpu_blocks_this_step",
    ),
    workload=[
        chat(name="prompt A", prompt=LONG, max_tokens=8, stream=False),
        chat(name="prompt B", prompt=LONG, max_tokens=8, stream=False),
    ],
    trigger=block_listed_twice(),
    signature=assertion(
        "assert curr_block is not None",
        frames=["schedule", "allocate_slots", "allocate_new_blocks", "get_new_blocks", "popleft_n"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            dies,
            with_flags("--enforce-eager"),
            why="the scheduler allocates the blocks, with or without CUDA graphs",
        ),
        arm(
            "pause",
            dies,
            workload=[
                chat(name="prompt A", prompt=LONG, max_tokens=8, stream=False),
                pause(10),
                chat(name="prompt B", prompt=LONG, max_tokens=8, stream=False),
            ],
            why="all stores finish within the ten seconds, so the crash is not a race with them",
        ),
        arm(
            "sco-off",
            lives,
            without("--kv-transfer-config"),
            why="without the connector there are no store events",
        ),
        arm(
            "hybrid-off",
            lives,
            with_flags("--disable-hybrid-kv-cache-manager"),
            why="every layer keeps all its blocks, so the prompt does not get a freed block again",
        ),
        arm(
            "lazy",
            lives,
            with_flags(simple_cpu_offload(268_435_456, lazy=True)),
            why="the lazy mode reads the free list, which has each block once",
        ),
        arm(
            "six-prompts",
            dies,
            workload=[
                chat(name="prompt A", prompt=LONG, max_tokens=8, stream=False),
                chat(name="prompt B", prompt=LONG, max_tokens=8, stream=False),
                chat(name="prompt C", prompt=LONG, max_tokens=8, stream=False),
                chat(name="prompt D", prompt=LONG, max_tokens=8, stream=False),
                chat(name="prompt E", prompt=LONG, max_tokens=8, stream=False),
                chat(name="prompt F", prompt=LONG, max_tokens=8, stream=False),
            ],
            why="the crash may come after the second prompt",
        ),
        arm(
            "small-cpu-pool",
            dies,
            with_flags(
                simple_cpu_offload(7_516_192_768),
                lab=simple_cpu_offload(1_310_720),
                dummy=simple_cpu_offload(683_290_251),
            ),
            workload=[
                chat(name="prompt A", prompt=UNFILLED, max_tokens=8, stream=False),
                chat(name="prompt B", prompt=UNFILLED, max_tokens=8, stream=False),
                chat(name="prompt C", prompt=UNFILLED, max_tokens=8, stream=False),
                chat(name="prompt D", prompt=UNFILLED, max_tokens=8, stream=False),
            ],
            bad=">=0.20.0,<0.24.0",
            why=(
                "the scan also stops if the CPU pool, half the GPU's, is full of stores in flight:"
                " releases up to 0.23.0 crash"
            ),
        ),
        arm(
            "bigger-pool",
            untriggered,
            with_flags("--num-gpu-blocks-override 50000", lab="--num-gpu-blocks-override 1000"),
            why="the prompt does not get a freed block again: a bigger pool hides the bug",
        ),
        arm(
            "near-miss-length",
            untriggered,
            workload=[
                chat(
                    name="whole blocks A",
                    prompt=sized(90_112, lab=5_664),
                    max_tokens=8,
                    stream=False,
                ),
                chat(
                    name="whole blocks B",
                    prompt=sized(90_112, lab=5_664),
                    max_tokens=8,
                    stream=False,
                ),
            ],
            why="the prompt ends at a block boundary, so it has no partial block to fill",
        ),
        arm(
            "near-miss-answer",
            untriggered,
            workload=[
                chat(name="prompt A", prompt=LONG, max_tokens=3, stream=False),
                chat(name="prompt B", prompt=LONG, max_tokens=3, stream=False),
            ],
            why="the answer is one token too short to fill the prompt's last block",
        ),
        arm(
            "patched",
            lives,
            patched(
                MANAGER,
                was="gpu_block_id in gpu_blocks_this_step",
                now=(
                    "gpu_block_id in gpu_blocks_this_step\n                        or gpu_block_id"
                    " in gpu_block_ids"
                ),
                why="do not list a block that this scan has already listed",
            ),
            why="the idea of #42615 and #42903, written for the source of 0.20.0 to 0.21.0",
        ),
    ],
    lab=Lab(
        mechanism="offload",
        arms=["reported", "lazy", "small-cpu-pool", "near-miss-length"],
        layers=["full", "sliding"],
        window=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        why=(
            "the bug needs a full-attention layer before a sliding-window layer, and nothing else"
            " of the model"
        ),
        changes=[
            without(
                "--gpu-memory-utilization", why="on a CPU this is a share of the host's memory"
            ),
            without(
                "--tensor-parallel-size",
                why="one worker is enough: the only scheduler allocates the blocks",
            ),
            without("--kv-cache-dtype", why="CPU attention does not support an fp8 KV cache"),
            without("--compilation-config", why="a CPU has no CUDA graphs"),
            with_flags("--enforce-eager", why="without compilation a boot takes seconds"),
            with_flags("--dtype bfloat16", why="the tiny model's weights are not quantized"),
            with_flags("--block-size 32", why="a block size that CPU attention supports"),
            with_flags(
                "--max-num-batched-tokens 2048",
                why=(
                    "an eighth of the reported chunk, because the block is an eighth of the"
                    " reported block"
                ),
            ),
            with_flags("--max-model-len 7600", why="long enough for the prompts here"),
            with_flags("--max-num-seqs 8", why="a smaller warm-up; the requests come one by one"),
            with_flags(
                "--num-gpu-blocks-override 330",
                why="a pool slightly too small for the last chunk of a prompt",
            ),
            with_flags(
                simple_cpu_offload(268_435_456),
                why="256 MiB hold a hundred times the tiny model's pool",
            ),
        ],
    ),
    throughput=throughput(prompt=8192, output=256, concurrency=[1, 4], baseline="eager"),
    causes=Causes(
        prompts=lengths(blocks=(160, 235), over=(25, 31)),
        answer=8,
        requests=4,
        changes=[
            cause(
                "in-flight set of #41289 added",
                "0.20.2",
                dies,
                patched(
                    MANAGER,
                    was="        self._store_event_to_reqs: dict[int, list[str]] = {}\n",
                    now=(
                        "        self._store_event_to_reqs: dict[int, list[str]] = {}\n"
                        "        self._in_flight_store_gpu_blocks: set[int] = set()\n"
                    ),
                ),
                patched(
                    MANAGER,
                    was="gpu_blocks_this_step: set[int] = set()",
                    now="gpu_blocks_this_step = self._in_flight_store_gpu_blocks",
                ),
                patched(
                    MANAGER,
                    was="        transfer = self._store_event_to_blocks.pop(event_idx)\n",
                    now=(
                        "        transfer = self._store_event_to_blocks.pop(event_idx)\n"
                        "       "
                        " self._in_flight_store_gpu_blocks"
                        ".difference_update(transfer.gpu_block_ids)\n"
                    ),
                ),
                believed="it is taken for the fix",
            ),
            cause(
                "scan skips a block without a hash, as from 0.22.0",
                "0.20.2",
                lives,
                patched(
                    MANAGER,
                    was=(
                        "                    if bhash_with_group is None:\n                       "
                        " break\n"
                    ),
                    now=(
                        "                    if bhash_with_group is None:\n                       "
                        " advanced_per_group[g] += 1\n                        continue\n"
                    ),
                ),
            ),
            cause(
                "a block that is listed is not listed again (#42615, #42903)",
                "0.20.2",
                lives,
                patched(
                    MANAGER,
                    was="gpu_block_id in gpu_blocks_this_step",
                    now=(
                        "gpu_block_id in gpu_blocks_this_step\n                        or"
                        " gpu_block_id in gpu_block_ids"
                    ),
                ),
            ),
            cause(
                "free_blocks in one pass, as from 0.24.0",
                "0.20.2",
                lives,
                patched(
                    POOL,
                    was=(
                        "        for block in blocks_list:\n            block.ref_cnt -= 1\n       "
                        " self.free_block_queue.append_n(\n            [block for block in"
                        " blocks_list if block.ref_cnt == 0 and not block.is_null]\n        )\n"
                    ),
                    now=(
                        "        freed = []\n        for block in blocks_list:\n           "
                        " block.ref_cnt -= 1\n            if block.ref_cnt == 0 and not"
                        " block.is_null:\n                freed.append(block)\n       "
                        " self.free_block_queue.append_n(freed)\n"
                    ),
                ),
            ),
            cause(
                "scan stops at a block without a hash, as to 0.21.0",
                "0.22.1",
                dies,
                patched(
                    MANAGER,
                    was=(
                        "                        # Masked-out SWA position the coordinator chose"
                        " not to\n                        # hash; it can never serve a prefix-cache"
                        " hit, so skip.\n                        advanced_per_group[g] += 1\n      "
                        "                  continue\n"
                    ),
                    now="                        break\n",
                ),
            ),
            cause(
                "in-flight set of #41289 taken back",
                "0.22.1",
                lives,
                patched(
                    MANAGER,
                    was="        in_flight = self._in_flight_store_gpu_blocks\n",
                    now="        in_flight: set[int] = set()\n",
                ),
            ),
            cause(
                "free_blocks in two passes, as to 0.23.0",
                "0.28.0",
                dies,
                patched(
                    POOL,
                    was=(
                        "        for block in ordered_blocks:\n            block.ref_cnt -= 1\n"
                        "            if block.ref_cnt == 0 and not block.is_null:\n"
                        "                if block.block_hash is None or not self.enable_caching:\n"
                    ),
                    now=(
                        "        ordered_blocks = list(ordered_blocks)\n        for block in"
                        " ordered_blocks:\n            block.ref_cnt -= 1\n        for block in"
                        " ordered_blocks:\n            if block.ref_cnt == 0 and not"
                        " block.is_null:\n                if block.block_hash is None or not"
                        " self.enable_caching:\n"
                    ),
                ),
                arm="small-cpu-pool",
            ),
        ],
    ),
    related=[
        "vllm-project/vllm#42571",
        "vllm-project/vllm#42615",
        "vllm-project/vllm#42903",
        "vllm-project/vllm#41289",
    ],
)
