"""TurboQuant with speculative decoding under CUDA graphs: the server answers 200, and with the wrong tokens.

What 0.24.0 and later make of the defect that keeps 0.20 from booting (`tq-mtp-cudagraphs`) and kills 0.21.0 to 0.23.0 with their first
request (`tq-mtp-first-request`). While graphs are captured, each request has as many tokens behind it as are decoded at once, which is what
a prompt's first chunk looks like: so attention over these few tokens alone is recorded, without the KV cache, and replayed for ever. The
first token comes from the prefill and is right. From the next one on the model no longer sees its context; health, metrics and the rate of
accepted drafts stay good.

Only the answer tells, held against one without graphs. The issue names a release, flags and hardware, and no whole command; the one here
is put together from those.
"""

from vllm_repro.vocabulary import (
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    attention_backend,
    chat,
    checks,
    drafting,
    errs,
    graphs_captured,
    lives,
    patched,
    with_flags,
    without,
)

TURBOQUANT = attention_backend("TURBOQUANT")

scenario = Scenario(
    id="tq-mtp-wrong-tokens",
    issue="vllm-project/vllm#53180",
    title="TurboQuant KV cache with speculative decoding repeats itself: the captured graph does not read the cache",
    command="""
        vllm serve Lorbus/Qwen3.6-27B-int4-AutoRound
        --tensor-parallel-size 2
        --kv-cache-dtype turboquant_k8v4
        --max-model-len 32768
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
    needs=Needs(gpus=2, gpu_memory_gb=24),
    status=Status(bad=">=0.24.0"),
    try_with="0.24.0",
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
            why="nothing is captured, so each step looks at the lengths that it has; the others are held against its answer",
        ),
        arm(
            "no-spec-decode",
            lives,
            without("--speculative-config"),
            trigger=TURBOQUANT & graphs_captured(),
            why="a batch of single tokens is captured by the way of a decode, which reads lengths on the device; drafts that are "
            "checked change no greedy token",
        ),
        arm(
            "one-draft-token",
            errs,
            with_flags("""--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""),
            why="two tokens at once are a first chunk too; on a GPU this one was also seen to die of an illegal memory access (#52475)",
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
                why="while a graph is captured each query token is one row of a decode, whose length is read on the device",
            ),
            why="the smallest change by which the recorded graph reads the cache",
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
        why="what is frozen in a graph is a branch of Python, whatever the shape; in one layer of attention whose output outweighs the "
        "token itself each token depends on its context, and vLLM's own MTP drafter of MiMo drafts for it",
        changes=[
            with_flags("--tensor-parallel-size 1", why="there is one device, and the branch is taken on each of them"),
            with_flags("--dtype bfloat16", why="a CPU's matrix products are fast in it"),
            with_flags("--block-size 128", why="a block that the cache takes on a CPU"),
            with_flags("--max-num-batched-tokens 2048", why="a profile run of it takes seconds"),
            with_flags("--compilation-config.mode 0", why="nothing is compiled, so that a boot takes seconds"),
        ],
    ),
    related=[
        "vllm-project/vllm#52475",
        "vllm-project/vllm#53406",
        "vllm-project/vllm#40831",
        "vllm-project/vllm#40807",
    ],
)
