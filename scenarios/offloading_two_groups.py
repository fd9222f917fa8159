"""OffloadingConnector with two groups of layers: an external hit evicts blocks of a local hit.

The scheduler counts a prompt's hits in its own prefix cache, asks the connector for more, then
allocates blocks: up to 0.23.0 group by group. If the pool is full, new blocks of one group may be
those of another group's hit, and the connector finds a block without a hash among those counted as
computed. 0.24.0 adds all local blocks first. It needs two groups, a preempted request, and a prompt
that is partly in each cache. In the lab no model runs, and all requests share a step. On GPUs this
workload may show it rarely.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="offloading-two-groups",
    issue="vllm-project/vllm#43884",
    title=(
        "EngineCore crash: AssertionError in offloading_connector during update_state_after_alloc"
    ),
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 128
        --max-num-batched-tokens 100
        --max-num-seqs 8
        --block-size 16
        --num-gpu-blocks-override 29
        --enable-chunked-prefill
        --enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1310720}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "google/gemma-3-1b-it", why="a small model with full attention and sliding windows"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    try_with="0.23.0",
    defect=source_line(
        "vllm/v1/core/kv_cache_coordinator.py",
        "KVCacheCoordinator.allocate_new_computed_blocks",
        "manager.allocate_new_computed_blocks(",
    ),
    workload=[
        together(
            completion(name="17", prompt=17, shared=17, max_tokens=32, ignore_eos=True),
            completion(name="65", prompt=65, shared=65, max_tokens=49, ignore_eos=True),
            completion(name="70", prompt=70, shared=34, max_tokens=49, ignore_eos=True),
            completion(name="95", prompt=95, shared=95, max_tokens=16, ignore_eos=True),
        ),
    ],
    trigger=preempted(),
    signature=assertion(
        "num_locally_computed_tokens",
        frames=["schedule", "update_state_after_alloc", "update_state_after_alloc"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "synchronous",
            dies,
            with_flags("--no-async-scheduling"),
            why="it is no race between steps",
        ),
        arm(
            "no-prefix-caching",
            lives,
            with_flags("--no-enable-prefix-caching"),
            why="no local hits to evict",
        ),
        arm(
            "more-blocks",
            untriggered,
            with_flags("--num-gpu-blocks-override 120"),
            why="no request is preempted",
        ),
        arm(
            "no-offloading",
            lives,
            without("--kv-transfer-config"),
            why="no connector has an external hit",
        ),
        arm(
            "held",
            lives,
            patched(
                "vllm/v1/core/kv_cache_coordinator.py",
                was="""\
        for i, manager in enumerate(self.single_type_managers):
            manager.allocate_new_computed_blocks(
""",
                now="""\
        held = [[b for b in blocks if not b.is_null] for blocks in new_computed_blocks]
        self.block_pool.touch([b for blocks in held for b in blocks])
        for i, manager in enumerate(self.single_type_managers):
            self.block_pool.free_blocks(held[i])
            manager.allocate_new_computed_blocks(
""",
                why=(
                    "hold the local hits of a group until its turn; 0.24.0 adds those of all groups"
                    " first"
                ),
            ),
        ),
    ],
    lab=scheduler_lab(
        with_flags(
            offloading(327_680),
            why="room for twenty blocks of the two layers",
        ),
        layers=["full", "sliding"],
        window=64,
    ),
    related=["vllm-project/vllm#44409", "vllm-project/vllm#50454"],
)
