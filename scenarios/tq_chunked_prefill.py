"""TurboQuant: the second chunk of a long prompt outgrows the workspace locked at boot.

After CUDA graph capture, vLLM locks the workspace at the size that the warm-up needed. A prompt
longer than `--max-num-batched-tokens` is prefilled in chunks. From the second chunk on, TurboQuant
unpacks all cached tokens into the workspace: 2 x cached x KV heads x head size x 2 bytes. The
warm-up never does this, so the first long prompt fails an assertion. A remainder of up to 128
tokens takes the decode path and lives. With `--enforce-eager`, or without CUDA graphs, the
workspace is not locked. Releases 0.21.0 to 0.23.0 have the bug; 0.24.0 and later reserve the room.
"""

from vllm_repro.vocabulary import *

BATCH = flag("--max-num-batched-tokens")
BACKEND = "vllm/v1/attention/backends/turboquant_attn.py"
CONTEXT = 2048  # cached tokens: 8 MB to unpack, far more than the size locked for two sequences
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file of the project",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}

scenario = Scenario(
    id="tq-chunked-prefill",
    issue="vllm-project/vllm#41726",
    title=(
        "TurboQuant KV cache crashes on a large chunked continuation prefill after the workspace is"
        " locked"
    ),
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
        why=(
            "the reported NVFP4 quantization is private; this is its base model, with the same"
            " attention shape"
        ),
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        layers=1,
        why=(
            "the workspace is sized, locked and outgrown in a full-attention layer, so one is"
            " enough; with two or more layers TurboQuant skips the first and last ones"
        ),
    ),
    status=Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    try_with="0.23.0",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantAttentionImpl._continuation_prefill",
        "k_buf, v_buf = current_workspace_manager().get_simultaneous(",
    ),
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
        message=(
            "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires"
            " {asked} MB, current size is {locked} MB"
        ),
        frames=[
            "_prefill_attention",
            "_continuation_prefill",
            "get_simultaneous",
            "_ensure_workspace_size",
        ],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            lives,
            with_flags("--enforce-eager"),
            why="without graph capture the workspace is not locked",
        ),
        arm(
            "graphs-off",
            lives,
            with_flags("--compilation-config.cudagraph_mode none"),
            why="as with eager, but with the compiler on",
        ),
        arm(
            "bigger-chunk",
            untriggered,
            with_flags("--max-num-batched-tokens 8192", "--no-enable-prefix-caching"),
            workload=[chat(name="one-chunk chat", prompt=7593, max_tokens=8)],
            why=(
                "the report's prompt fits one chunk, so it does not trigger the bug; prefix caching"
                " is off because it also splits a hybrid model's prompts at cache blocks"
            ),
        ),
        arm(
            "near-miss-128",
            untriggered,
            workload=[chat(name="chat at the threshold", prompt=BATCH + 128, max_tokens=8)],
            why="a remainder of 128 tokens takes the decode path, not the continued prefill",
        ),
        arm(
            "near-miss-129",
            dies,
            workload=[chat(name="chat past the threshold", prompt=BATCH + 129, max_tokens=8)],
            why="one token more than near-miss-128",
        ),
        arm(
            "prefix-hit",
            dies,
            workload=[
                completion(
                    name="first with the prefix", prompt=CONTEXT + 64, shared=CONTEXT, max_tokens=4
                ),
                completion(
                    name="short tail on a cached prefix",
                    prompt=CONTEXT + 128,
                    shared=CONTEXT,
                    max_tokens=4,
                ),
                completion(
                    name="longer tail on a cached prefix",
                    prompt=CONTEXT + 129,
                    shared=CONTEXT,
                    max_tokens=4,
                ),
            ],
            why=(
                "no prompt reaches the batch size: a tail of 129 tokens after cached blocks is also"
                " a continued prefill"
            ),
        ),
        arm(
            "growing-chat",
            dies,
            workload=[
                conversation(
                    first=CONTEXT + 128, adds=[128, 128, 256], tools=[READ_FILE], max_tokens=8
                ),
            ],
            why=(
                "an agent's chat: turns of up to 128 tokens live, and the first longer tool result"
                " crashes the engine"
            ),
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        layers=1,
        arms=["reported", "eager"],
        why=(
            "the workspace is sized, locked and outgrown in a full-attention layer, so one is"
            " enough; with two or more layers TurboQuant skips the first and last ones"
        ),
        changes=[
            without(
                "--gpu-memory-utilization", why="on a CPU this is a share of the host's memory"
            ),
            without("--language-model-only", why="the tiny model has no vision tower"),
            with_flags("--dtype bfloat16", why="the tiny model's weights are not quantized"),
            with_flags(
                "--block-size 128",
                why="the tiny model is not hybrid, and its KV cache supports blocks of 128",
            ),
            with_flags(
                "--max-num-seqs 2",
                why=(
                    "two sequences lock the reported 1.02 MB here; the hybrid model locked it"
                    " with one"
                ),
            ),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
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
                    was=(
                        "        self._init_reorder_batch_threshold(1,"
                        " supports_spec_as_decode=False)\n"
                    ),
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
""",  # noqa: E501  # source text
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
