"""Simple CPU offload in its lazy mode: an engine with nothing to do copies the same KV blocks to the CPU for ever.

The lazy mode copies what stands first in line to be overwritten on the GPU. With room for fewer blocks than the GPU keeps, each copy
throws an older one away, which is then copied again. From 0.30.0 on the engine steps while a copy is under way, and each step begins
another one, with nothing else to do.

What waits beside it is another scenario, `sco-lazy-starves`. Found by a search over the scheduler alone (`vllm-repro explore`).
"""

from vllm_repro.vocabulary import (
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    completion,
    lives,
    offload_outgrown,
    patched,
    rest,
    simple_cpu_offload,
    spins,
    untriggered,
    with_flags,
)

FIRST = completion(prompt=400, max_tokens=8, ignore_eos=True, name="first")
SECOND = completion(prompt=400, max_tokens=8, ignore_eos=True, name="second")
THIRD = completion(prompt=400, max_tokens=8, ignore_eos=True, name="third")

scenario = Scenario(
    id="sco-lazy-never-rests",
    issue="vllm-project/vllm#37160",
    filed=False,
    title="Simple CPU offload, lazy: an idle engine copies the same blocks to the CPU for ever and never comes to rest",
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
    model=Model(
        "Qwen/Qwen3-0.6B",
        architecture="Qwen3ForCausalLM",
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocab_size=151936,
        block_size=32,
        max_position=40960,
        why="the scheduler asks for no weights, and the connector only for the size of a block",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=4),
    status=Status(bad=">=0.30.0"),
    try_with="0.32.0",
    workload=[FIRST, SECOND, THIRD, rest(within=30)],
    trigger=offload_outgrown(),
    arms=[
        arm("reported", spins),
        arm(
            "eager",
            lives,
            with_flags(simple_cpu_offload(58_720_256), lab=simple_cpu_offload(131_072)),
            why="the eager mode copies a block once, when it is full",
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
                why="a step that computes nothing overwrites nothing, so nothing has to be saved from it",
            ),
            why="copies are begun in steps that compute something, and those under way are waited for",
        ),
        arm(
            "room-for-all",
            untriggered,
            with_flags(simple_cpu_offload(117_440_512, lazy=True), lab=simple_cpu_offload(262_144, lazy=True)),
            why="where the connector has room for all that the GPU keeps, nothing is copied twice",
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=32,
        arms=["reported", "eager", "patched"],
        why="one small layer: blocks are copied the same way in each",
        changes=[
            with_flags(simple_cpu_offload(131_072, lazy=True), why="room for 16 blocks, as for the model"),
            with_flags("--enforce-eager", why="nothing is compiled, so that a boot takes seconds"),
            with_flags("--dtype bfloat16", why="what the CPU's attention computes in"),
        ],
    ),
)
