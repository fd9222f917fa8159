"""TurboQuant with speculative decoding under CUDA graphs: the server boots, and its first request kills it.

What 0.21.0 to 0.23.0 make of the defect that keeps 0.20 from booting (`tq-mtp-cudagraphs`). Each captured decode batch has drafts in it and
takes the way of a prefill, so nothing that decodes single tokens runs before the workspace is locked: it is locked with nothing in it, and
the first such step asks for 0.76 MB of 0.00. The length of the prompt has no part in it. 0.24.0 reserves that room, which ends this death
and nothing else: such a server answers wrongly (`tq-mtp-wrong-tokens`).

The issue names a quantization of Qwen3.6-27B for itself on Windows, its flags and its numbers, and no whole command; the one here is put
together from those.
"""

from vllm_repro.vocabulary import (
    Dummy,
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    attention_backend,
    chat,
    dies,
    drafting,
    graphs_captured,
    signature,
    untriggered,
    with_flags,
    without,
)

scenario = Scenario(
    id="tq-mtp-first-request",
    issue="vllm-project/vllm#42808",
    title="TurboQuant KV cache with speculative decoding: the first request finds a workspace that was locked empty",
    command="""
        vllm serve Lorbus/Qwen3.6-27B-int4-AutoRound
        --kv-cache-dtype turboquant_4bit_nc
        --max-model-len 32768
        --max-num-batched-tokens 8192
        --max-num-seqs 1
        --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
    """,
    model=Model(
        "Lorbus/Qwen3.6-27B-int4-AutoRound",
        architecture="Qwen3_5ForConditionalGeneration",
        heads=24,
        kv_heads=4,
        head_dim=256,
        layers=64,
        full_attention_interval=4,
        block_size=1024,
        vocab_size=248320,
        max_position=262144,
        why="the reporter's quantization is not named; the attention is this model's",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        family="mimo",
        layers=1,
        drafts=1,
        why="one layer of full attention, which TurboQuant does not leave out, and one that drafts, by vLLM's own code for MiMo",
    ),
    status=Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    try_with="0.21.0",
    workload=[chat(name="first chat", prompt=20, max_tokens=8)],
    trigger=attention_backend("TURBOQUANT") & drafting() & graphs_captured(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message="Workspace is locked but allocation from '{file}:{line}:_decode_attention' requires {asked} MB, "
        "current size is {locked} MB",
        frames=["_decode_attention", "get_simultaneous", "_ensure_workspace_size"],
    ),
    arms=[
        arm("reported", dies),
        arm("eager", untriggered, with_flags("--enforce-eager"), why="nothing is locked without graph capture"),
        arm(
            "cudagraph-none",
            untriggered,
            with_flags("--compilation-config.cudagraph_mode none"),
            why="the same, with the compiler still on",
        ),
        arm(
            "no-spec-decode",
            untriggered,
            without("--speculative-config"),
            why="single tokens are captured then, so their room is there when the workspace is locked",
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        family="mimo",
        layers=1,
        drafts=1,
        capture="guard",
        arms=["reported", "no-spec-decode", "cudagraph-none"],
        why="one full-attention layer with the reported heads, by which the workspace is counted, and vLLM's own MTP drafter of MiMo",
        changes=[
            with_flags("--dtype bfloat16", why="a CPU's matrix products are fast in it"),
            with_flags("--block-size 128", why="a block that the cache takes on a CPU"),
            with_flags(
                "--max-num-batched-tokens 2048",
                why="a profile run of it takes seconds; no workspace here depends on it",
            ),
            with_flags("--compilation-config.mode 0", why="nothing is compiled, so that a boot takes seconds"),
        ],
    ),
    related=["vllm-project/vllm#40807", "vllm-project/vllm#44053", "vllm-project/vllm#41726"],
)
