"""DeepSeek-V4 on vLLM's CPU backend: the first request kills the engine, whatever it asks.

A decode step has a plan of tiles for each kind of layer, and the metadata builder reads five of them by name. The CPU's builder overrides
the method that makes them and names three, as there were before two more kinds came. On GPUs the shared method runs, which names all five.
The boot is fine, since dummy runs carry no metadata.

No issue about this was found; the pull request here is the one that added the CPU backend. It takes a Triton with a backend for CPUs, as
the official CPU images bring one: the published Triton has none, so the lab runs vLLM's kernels in Triton's interpreter.
"""

from vllm_repro.vocabulary import (
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    completion,
    dies,
    lives,
    patched,
    prefill_over,
    signature,
    with_flags,
)

scenario = Scenario(
    id="dsv4-cpu-first-request",
    issue="vllm-project/vllm#55355",
    filed=False,
    title="DeepSeek-V4 on a CPU: KeyError in the metadata builder at the first request",
    command="""
        vllm serve deepseek-ai/DeepSeek-V4-Flash
        --max-model-len 8192
        --max-num-batched-tokens 2048
        --max-num-seqs 4
        --enforce-eager
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
        why="every DeepSeek-V4 has this builder",
    ),
    needs=Needs(memory_gb=256),
    status=Status(bad=">=0.30.0"),
    try_with="0.32.0",
    workload=[completion(name="first request", prompt=20, max_tokens=4)],
    trigger=prefill_over(1),
    signature=signature(
        phase="request",
        exception="KeyError",
        message="'c1a'",
        frames=["_build_attention_metadata", "build"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "patched",
            lives,
            patched(
                "vllm/models/deepseek_v4/cpu/cpu_mla.py",
                was="            _LAYER_TYPE_C128A: None,\n        }\n",
                now='            _LAYER_TYPE_C128A: None,\n            "c1a": None,\n            "c2a": None,\n        }\n',
                why="the CPU plans no tiles, for those two kinds of layers neither",
            ),
            why="the smallest change that names all five",
        ),
    ],
    lab=Lab(
        mechanism="interpreter",
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        heads=8,
        why="one layer of each kind, with the model's own head size, window and top k",
        changes=[with_flags("--dtype bfloat16", why="there are no weights to be quantized")],
    ),
)
