"""DeepSeek-V4 on vLLM's CPU backend: the engine crashes on the first request, whatever its prompt.

Each decode step has a tile plan for each kind of layer, and the metadata builder reads five plans
by name. The CPU builder overrides the method that creates the plans and returns only three of the
names, because two kinds were added later. On GPUs the shared method returns all five. The boot
succeeds because dummy runs carry no attention metadata. Releases from 0.30.0 on have the bug.

We found no issue about it; the pull request named here added the CPU backend. The bug needs a
Triton with a CPU backend, as in the official CPU images. The published Triton has none, so the lab
runs vLLM's kernels in Triton's interpreter.
"""

from vllm_repro.vocabulary import *

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
        why="every DeepSeek-V4 model uses this builder",
    ),
    needs=Needs(memory_gb=256),
    status=Status(bad=">=0.30.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/models/deepseek_v4/cpu/cpu_mla.py",
        "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler",
        "_LAYER_TYPE_C128A: None,",
    ),
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
                now=(
                    '            _LAYER_TYPE_C128A: None,\n            "c1a": None,\n           '
                    ' "c2a": None,\n        }\n'
                ),
                why="the CPU needs no tile plan, also for these two kinds of layers",
            ),
            why="the smallest change that returns all five names",
        ),
    ],
    lab=Lab(
        mechanism="interpreter",
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        heads=8,
        why="one layer of each kind, with the model's own head size, window and top k",
        changes=[with_flags("--dtype bfloat16", why="the tiny model has no quantized weights")],
    ),
)
