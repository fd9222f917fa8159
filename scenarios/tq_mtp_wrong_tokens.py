"""TurboQuant with speculative decoding under CUDA graphs: the server returns 200 with wrong tokens.

Releases from 0.24.0 on have the bug that stops 0.20 from booting (`tq-mtp-cudagraphs`) and crashes
0.21.0 to 0.23.0 on the first request (`tq-mtp-first-request`). During graph capture the context of
each request is as long as its query tokens, like the first chunk of a prompt. So the graph records
attention over these few tokens alone, without the KV cache, and every replay repeats that. The
first token comes from the prefill and is right. From the second token on, the model does not see
its context. Health, metrics and the acceptance rate of draft tokens stay normal.

Only a comparison with the answer of a server without graphs shows the bug. The issue gives a
release, flags and hardware, but no full command. The command here is built from those.
"""

from vllm_repro.vocabulary import *

TURBOQUANT = attention_backend("TURBOQUANT")

scenario = Scenario(
    id="tq-mtp-wrong-tokens",
    issue="vllm-project/vllm#53180",
    title=(
        "TurboQuant KV cache with speculative decoding repeats itself: the captured graph does not"
        " read the KV cache"
    ),
    command="""
        vllm serve Lorbus/Qwen3.6-27B-int4-AutoRound
        --tensor-parallel-size 2
        --kv-cache-dtype turboquant_k8v4
        --max-model-len 32768
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
    needs=Needs(gpus=2, gpu_memory_gb=24),
    status=Status(bad=">=0.24.0"),
    try_with="0.24.0",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantAttentionImpl._prefill_attention",
        "if q_len == seq_len:",
    ),
    workload=[chat(name="chat", prompt=100, max_tokens=16)],
    trigger=TURBOQUANT & drafting() & graphs_captured(),
    output=checks(longest_run=24, distinct=0.1, same=16, baseline="cudagraph-none", tokens=32),
    arms=[
        arm("reported", errs),
        arm(
            "cudagraph-none",
            lives,
            with_flags("--compilation-config.cudagraph_mode none"),
            trigger=TURBOQUANT & drafting(),
            why=(
                "without capture each step uses its own lengths; the other arms are compared with"
                " this answer"
            ),
        ),
        arm(
            "no-spec-decode",
            lives,
            without("--speculative-config"),
            trigger=TURBOQUANT & graphs_captured(),
            why=(
                "capture runs single tokens through the decode path, which reads lengths on the"
                " device; verified draft tokens do not change a greedy answer"
            ),
        ),
        arm(
            "one-draft-token",
            errs,
            with_flags("""--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""),
            why=(
                "two tokens at once also look like a first chunk; on a GPU this arm also crashed"
                " with an illegal memory access (#52475)"
            ),
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="        # Prefer the CPU-resident copies from the metadata if populated —\n",
                now="""        if torch.cuda.is_current_stream_capturing():
            # A graph is replayed for contexts of any length, so none may be
            # decided on here: each query token is a row of a decode, and its
            # length is computed on the device.
            per_req = N // num_reqs
            steps = torch.arange(
                1 - per_req,
                1,
                device=query.device,
                dtype=attn_metadata.seq_lens.dtype,
            )
            row_lens = (attn_metadata.seq_lens[:num_reqs, None] + steps).flatten()
            row_tables = attn_metadata.block_table[:num_reqs].repeat_interleave(
                per_req, dim=0
            )
            return triton_turboquant_decode_attention(
                query=query,
                kv_cache=kv_cache,
                block_table=row_tables,
                seq_lens=row_lens.clamp(min=1),
                Pi=Pi,
                centroids=centroids,
                scale=self.scale,
                mse_bits=self.tq_config.key_mse_bits,
                key_packed_size=self.tq_config.key_packed_size,
                value_quant_bits=self.tq_config.effective_value_quant_bits,
                key_fp8=self.tq_config.key_fp8,
                norm_correction=self.tq_config.norm_correction,
                PiT=PiT,
            ).to(query.dtype)
        # Prefer the CPU-resident copies from the metadata if populated —
""",
                why=(
                    "during capture, treat each query token as one row of a decode, whose length is"
                    " read on the device"
                ),
            ),
            why="the smallest change that makes the recorded graph read the KV cache",
        ),
    ],
    lab=Lab(
        mechanism="turboquant",
        family="mimo",
        layers=1,
        drafts=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        capture="record",
        weights="made",
        arms=["reported", "cudagraph-none", "no-spec-decode", "patched"],
        why=(
            "a graph keeps the branch that Python took, for any shape; the made weights give"
            " attention more influence than the token itself, so each token depends on its context;"
            " vLLM's own MTP drafter of MiMo drafts"
        ),
        changes=[
            with_flags(
                "--tensor-parallel-size 1",
                why="the lab has one device, and every device takes the same branch",
            ),
            with_flags("--dtype bfloat16", why="matrix products on a CPU are fast in bfloat16"),
            with_flags("--block-size 128", why="a block size that the KV cache supports on a CPU"),
            with_flags("--max-num-batched-tokens 2048", why="the profile run then takes seconds"),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
        ],
    ),
    related=[
        "vllm-project/vllm#52475",
        "vllm-project/vllm#53406",
        "vllm-project/vllm#40831",
        "vllm-project/vllm#40807",
    ],
)
