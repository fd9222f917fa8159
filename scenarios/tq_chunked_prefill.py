"""TurboQuant: the second chunk of a long prompt asks for workspace that was locked at boot.

After CUDA graphs are captured, vLLM locks the workspace at the size that its warm-up needed. A prompt longer than
`--max-num-batched-tokens` is prefilled in chunks, and from the second chunk on TurboQuant unpacks all that is cached so far into that
workspace: 2 x cached x KV heads x head size x 2 bytes. The warm-up never did that, so the first long prompt dies of an assertion. A
remainder of up to 128 tokens takes another way and lives. With `--enforce-eager`, or without CUDA graphs, nothing is ever locked.
"""

from vllm_repro.vocabulary import (
    Causes,
    Dummy,
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    attention_backend,
    cause,
    chat,
    chunked_prefill,
    completion,
    continuation_over,
    conversation,
    dies,
    flag,
    lives,
    patched,
    prefix_hit,
    signature,
    throughput,
    untriggered,
    with_flags,
    without,
    workspace_outgrown,
)

BATCH = flag("--max-num-batched-tokens")
BACKEND = "vllm/v1/attention/backends/turboquant_attn.py"
CONTEXT = 2048  # of these cached tokens 8 MB are unpacked, far more than two sequences lock
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file of the project",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}

scenario = Scenario(
    id="tq-chunked-prefill",
    issue="vllm-project/vllm#41726",
    title="TurboQuant KV cache crashes on a large chunked continuation prefill after the workspace is locked",
    command="""
        vllm serve /home/yk/AI/Models/models/qwen3.5-9b-nvfp4-ptq
        --gpu-memory-utilization 0.95
        --kv-cache-dtype turboquant_4bit_nc
        --max-model-len 102400
        --enable-chunked-prefill
        --reasoning-parser qwen3
        --enable-auto-tool-choice
        --tool-call-parser qwen3_coder
        --language-model-only
        --max-num-seqs 1
        --max-num-batched-tokens 4096
        --enable-prefix-caching
        --default-chat-template-kwargs '{"enable_thinking": true}'
    """,
    model=Model(
        "Qwen/Qwen3.5-9B",
        architecture="Qwen3_5ForConditionalGeneration",
        heads=16,
        kv_heads=4,
        head_dim=256,
        layers=32,
        full_attention_interval=4,
        block_size=2048,
        vocab_size=248320,
        max_position=262144,
        why="the reported NVFP4 quantization is private; this is the model it was made from, with the same attention shape",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        layers=1,
        why="one full-attention layer is where the workspace is sized, locked and outgrown; with two or more layers TurboQuant "
        "leaves out the first and the last ones",
    ),
    status=Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    try_with="0.23.0",
    workload=[
        chat(name="short chat", prompt=100, max_tokens=8),
        chat(name="long chat", prompt=BATCH + 3497, max_tokens=8),
    ],
    trigger=attention_backend("TURBOQUANT")
    & (chunked_prefill(chunks=2) | prefix_hit())
    & continuation_over(128)
    & workspace_outgrown(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message="Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires {asked} MB, "
        "current size is {locked} MB",
        frames=["_prefill_attention", "_continuation_prefill", "get_simultaneous", "_ensure_workspace_size"],
    ),
    arms=[
        arm("reported", dies),
        arm("eager", lives, with_flags("--enforce-eager"), why="nothing is locked without graph capture"),
        arm(
            "graphs-off",
            lives,
            with_flags("--compilation-config.cudagraph_mode none"),
            why="the same, with the compiler still on",
        ),
        arm(
            "bigger-chunk",
            untriggered,
            with_flags("--max-num-batched-tokens 8192", "--no-enable-prefix-caching"),
            workload=[chat(name="one-chunk chat", prompt=7593, max_tokens=8)],
            why="the prompt of the report fits one chunk, so its survival proves nothing; with prefix caching a hybrid model's prompts "
            "are cut at its cache blocks as well",
        ),
        arm(
            "near-miss-128",
            untriggered,
            workload=[chat(name="chat at the threshold", prompt=BATCH + 128, max_tokens=8)],
            why="a remainder of 128 tokens is decoded, not continued",
        ),
        arm(
            "near-miss-129",
            dies,
            workload=[chat(name="chat past the threshold", prompt=BATCH + 129, max_tokens=8)],
            why="one token more",
        ),
        arm(
            "prefix-hit",
            dies,
            workload=[
                completion(name="first with the prefix", prompt=CONTEXT + 64, shared=CONTEXT, max_tokens=4),
                completion(name="short tail on a cached prefix", prompt=CONTEXT + 128, shared=CONTEXT, max_tokens=4),
                completion(name="longer tail on a cached prefix", prompt=CONTEXT + 129, shared=CONTEXT, max_tokens=4),
            ],
            why="no prompt comes near the batch size: a tail of 129 tokens after cached blocks is a continuation too",
        ),
        arm(
            "growing-chat",
            dies,
            workload=[
                conversation(first=CONTEXT + 128, adds=[128, 128, 256], tools=[READ_FILE], max_tokens=8),
            ],
            why="an agent's chat: turns that add a little live, and the first tool result of more than 128 tokens kills",
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        layers=1,
        arms=["reported", "eager"],
        why="one full-attention layer is where the workspace is sized, locked and outgrown; with two or more layers TurboQuant "
        "leaves out the first and the last ones",
        changes=[
            without("--gpu-memory-utilization", why="on a CPU it is a share of the host's memory"),
            without("--language-model-only", why="the stand-in has no vision tower to leave out"),
            with_flags("--dtype bfloat16", why="the reported quantization is of weights, and there are none"),
            with_flags("--block-size 128", why="the stand-in is not hybrid, and 128 is a block that its cache takes"),
            with_flags(
                "--max-num-seqs 2",
                why="the reported 1.02 MB is what two sequences lock; the hybrid model locked it with one",
            ),
            with_flags("--compilation-config.mode 0", why="nothing is compiled, so that a boot takes seconds"),
        ],
    ),
    throughput=throughput(prompt=1024, output=256, baseline="eager"),
    causes=Causes(
        changes=[
            cause(
                "room for the longest context reserved, as from 0.24.0 (#44053)",
                "0.23.0",
                lives,
                patched(
                    BACKEND,
                    was="        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)\n",
                    now="""\
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        self._reserve_workspace()

    def _reserve_workspace(self) -> None:
        if not is_workspace_manager_initialized():
            return
        spec = self.kv_cache_spec
        blocks = -(-(self.vllm_config.model_config.max_model_len - 1) // spec.block_size)
        cached = (1, spec.num_kv_heads, blocks * spec.block_size, spec.head_size)
        current_workspace_manager().get_simultaneous((cached, torch.float16), (cached, torch.float16))
""",
                ),
            ),
            cause(
                "that reservation taken out",
                "0.24.0",
                dies,
                patched(BACKEND, was="        self._reserve_workspace()\n\n", now="\n"),
            ),
            cause(
                "only what decoding needs reserved, the first half of #44053",
                "0.24.0",
                dies,
                patched(
                    BACKEND,
                    was="        if not reserve_continuation_prefill:\n            return\n",
                    now="        return\n",
                ),
            ),
            cause(
                "that reservation taken out",
                "0.32.0",
                dies,
                patched(BACKEND, was="        self._reserve_workspace()\n\n", now="\n"),
            ),
        ],
    ),
    related=[
        "vllm-project/vllm#43357",
        "vllm-project/vllm#46767",
        "vllm-project/vllm#41565",
        "vllm-project/vllm#44053",
    ],
)
