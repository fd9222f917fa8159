"""Simple CPU offload, lazy mode: a long prompt waits for ever while the same blocks are copied.

The lazy mode, which must be asked for, copies the blocks that the GPU will overwrite next, and
holds them during the copy. If the CPU pool has room for fewer blocks than the GPU keeps, each copy
evicts an older one, which is then copied again. While a request waits, each step starts such a
copy. So a prompt that needs nearly all blocks at once never gets them, even when no other request
runs.

Releases from 0.19.0 on have the bug. The eager mode, or a CPU pool with room for all blocks of the
GPU, avoids it. This bug was found by a search over the scheduler alone (`vllm-repro explore`).
"""

from vllm_repro.vocabulary import *

FIRST = completion(prompt=400, max_tokens=8, ignore_eos=True, name="first")
SECOND = completion(prompt=400, max_tokens=8, ignore_eos=True, name="second")
THIRD = completion(prompt=400, max_tokens=8, ignore_eos=True, name="third")
LONG = completion(prompt=900, max_tokens=8, ignore_eos=True, name="long")

scenario = Scenario(
    id="sco-lazy-starves",
    issue="vllm-project/vllm#42371",
    filed=False,
    title=(
        "Simple CPU offload, lazy mode: a long prompt waits forever while the engine copies the"
        " same blocks"
    ),
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --max-model-len 960
        --block-size 32
        --num-gpu-blocks-override 31
        --enable-chunked-prefill
        --max-num-batched-tokens 256
        --max-num-seqs 8
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":58720256,"lazy_offload":true}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B",
        block_size=32,
        why="the scheduler does not use weights, and the connector uses only the block size",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=4),
    status=Status(bad=">=0.19.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/simple_kv_offload/manager.py",
        "SimpleCPUOffloadScheduler.prepare_store_specs",
        "return self._prepare_lazy_store_specs()",
    ),
    workload=[FIRST, SECOND, THIRD, LONG],
    trigger=offload_outgrown(),
    arms=[
        arm("reported", hangs),
        arm(
            "eager",
            lives,
            with_flags(simple_cpu_offload(58_720_256), lab=simple_cpu_offload(131_072)),
            why="the eager mode copies each block once, when it is full",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/simple_kv_offload/manager.py",
                was="            return self._prepare_lazy_store_specs()\n",
                now="""\
            if scheduler_output.total_num_scheduled_tokens == 0:
                return [], [], [], None
            return self._prepare_lazy_store_specs()
""",
                why=(
                    "a step without scheduled tokens overwrites no block, but for one that admits"
                    " an asynchronous load: it may overwrite blocks that were not saved"
                ),
            ),
            why="a step in which no request can run waits for the copies in flight and starts none",
        ),
        arm(
            "room-for-all",
            untriggered,
            with_flags(
                simple_cpu_offload(117_440_512, lazy=True),
                lab=simple_cpu_offload(262_144, lazy=True),
            ),
            why="if the CPU pool has room for all blocks of the GPU, no block is copied twice",
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=32,
        arms=["reported", "eager", "patched"],
        why="one small layer: every layer's blocks are copied in the same way",
        changes=[
            with_flags(
                simple_cpu_offload(131_072, lazy=True),
                why="room for 16 blocks, as with the reported model",
            ),
            with_flags("--enforce-eager", why="without compilation a boot takes seconds"),
            with_flags("--dtype bfloat16", why="the data type of CPU attention"),
        ],
    ),
)
