"""TurboQuant with speculative decoding and CUDA graphs: the first request crashes the engine.

Releases 0.21.0 to 0.23.0 have the bug that stops 0.20 from booting (`tq-mtp-cudagraphs`), with
another symptom. Each captured decode batch has draft tokens and takes the prefill path. So no
decode of single tokens runs before the workspace is locked, at 0.00 MB. The first such step needs
0.76 MB and fails an assertion. The length of the prompt does not matter. 0.24.0 reserves that room,
which ends this crash only: the server then returns wrong tokens (`tq-mtp-wrong-tokens`).

The issue gives flags and numbers for a private quantization of Qwen3.6-27B on Windows, but no full
command. The command here is built from those flags.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="tq-mtp-first-request",
    issue="vllm-project/vllm#42808",
    title=(
        "TurboQuant KV cache with speculative decoding: the first request crashes because the"
        " workspace was locked empty"
    ),
    command="""
        vllm serve Lorbus/Qwen3.6-27B-int4-AutoRound
        --kv-cache-dtype turboquant_4bit_nc
        --max-model-len 32768
        --max-num-batched-tokens 8192
        --max-num-seqs 1
        --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
    """,
    model=public_model(
        "Lorbus/Qwen3.6-27B-int4-AutoRound",
        why=(
            "the issue does not name the reporter's quantization; its attention is that of this"
            " model"
        ),
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        family="mimo",
        layers=1,
        drafts=1,
        why=(
            "one full-attention layer, which TurboQuant does not skip, and one MTP draft layer, in"
            " vLLM's own code for MiMo"
        ),
    ),
    status=Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    try_with="0.21.0",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantAttentionImpl._decode_attention",
        "current_workspace_manager().get_simultaneous(",
    ),
    workload=[chat(name="first chat", prompt=20, max_tokens=8)],
    trigger=attention_backend("TURBOQUANT") & drafting() & graphs_captured(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message=(
            "Workspace is locked but allocation from '{file}:{line}:_decode_attention' requires"
            " {asked} MB, current size is {locked} MB"
        ),
        frames=["_decode_attention", "get_simultaneous", "_ensure_workspace_size"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            untriggered,
            with_flags("--enforce-eager"),
            why="without graph capture the workspace is not locked",
        ),
        arm(
            "cudagraph-none",
            untriggered,
            with_flags("--compilation-config.cudagraph_mode none"),
            why="as with eager, but with the compiler on",
        ),
        arm(
            "no-spec-decode",
            untriggered,
            without("--speculative-config"),
            why=(
                "capture then runs single tokens, so the workspace has their room when it is locked"
            ),
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        family="mimo",
        layers=1,
        drafts=1,
        capture="guard",
        arms=["reported", "no-spec-decode", "cudagraph-none"],
        why=(
            "one full-attention layer with the reported heads, which set the workspace size, and"
            " vLLM's own MTP drafter of MiMo"
        ),
        changes=[
            with_flags("--dtype bfloat16", why="matrix products on a CPU are fast in bfloat16"),
            with_flags("--block-size 128", why="a block size that the KV cache supports on a CPU"),
            with_flags(
                "--max-num-batched-tokens 2048",
                why="the profile run then takes seconds; no workspace here depends on it",
            ),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
        ],
    ),
    related=["vllm-project/vllm#40807", "vllm-project/vllm#44053", "vllm-project/vllm#41726"],
)
