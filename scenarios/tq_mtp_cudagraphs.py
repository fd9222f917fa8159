"""TurboQuant with speculative decoding under CUDA graphs: the server does not boot.

A decode step with drafts has more than one query token a request, so graph capture runs it through TurboQuant's `_prefill_attention`. In
0.20 that turns tensors on the GPU into Python lists, a copy that CUDA refuses while a graph is captured. The report blames chunked prefill
and three draft tokens; neither is needed (`no-chunked-prefill` and `one-draft-token` die too), only TurboQuant, drafts and graphs that
hold the attention. It also blames piecewise graphs, which carry no attention: vLLM 0.20 keeps full graphs of decode batches here, and dies
while it measures what memory they take, before there is a KV cache.

This text is gone from 0.21.0 on, and the defect is not: 0.21.0 to 0.23.0 boot and die of their first request (`tq-mtp-first-request`), and
0.24.0 and later answer wrongly (`tq-mtp-wrong-tokens`). So no release is called good here, and an engine that lives is asked for an answer
that is held against one without graphs.

Released 0.20 refuses the reported model, whose layers are of two kinds; the report took that refusal out. A model of full attention alone
needs no such change, and so the shape here leaves the other layers out.
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
    checks,
    dies,
    drafting,
    graphs_captured,
    lives,
    patched,
    signature,
    throughput,
    untriggered,
    with_flags,
    without,
)

scenario = Scenario(
    id="tq-mtp-cudagraphs",
    issue="vllm-project/vllm#40807",
    title="TurboQuant KV cache with speculative decoding crashes CUDA graph capture at query_start_loc.tolist()",
    command="""
        docker run --gpus all -p 8000:8000 \\
          -v /path/to/hf-cache:/root/.cache/huggingface \\
          vllm/vllm-openai:nightly \\
            --model Lorbus/Qwen3.6-27B-int4-AutoRound \\
            --quantization auto_round \\
            --dtype float16 \\
            --tensor-parallel-size 1 \\
            --max-model-len 125000 \\
            --max-num-batched-tokens 4128 \\
            --max-num-seqs 1 \\
            --gpu-memory-utilization 0.92 \\
            --kv-cache-dtype turboquant_k8v4 \\
            --enable-chunked-prefill \\
            --enable-prefix-caching \\
            --disable-custom-all-reduce \\
            --trust-remote-code \\
            --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
    """,
    model=Model(
        "Lorbus/Qwen3.6-27B-int4-AutoRound",
        architecture="Qwen3_5ForConditionalGeneration",
        heads=24,
        kv_heads=4,
        head_dim=256,
        layers=16,
        block_size=16,
        vocab_size=248320,
        max_position=262144,
        why="its 16 layers of full attention; 0.20 refuses the other ones beside TurboQuant",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    dummy=Dummy(
        family="mimo",
        layers=1,
        drafts=1,
        why="one layer of full attention, which TurboQuant does not leave out, and one that drafts, by vLLM's own code for MiMo",
        changes=[
            without(
                "--quantization",
                why="it names how the reported weights were made smaller, and vLLM refuses it where there are none",
            )
        ],
    ),
    status=Status(bad=">=0.20.0,<0.21.0"),
    try_with="0.20.2",
    workload=[
        chat(name="short chat", prompt=100, max_tokens=32),
        chat(name="longer chat", prompt=1000, max_tokens=32),
    ],
    trigger=attention_backend("TURBOQUANT") & drafting() & graphs_captured(),
    signature=signature(
        phase="boot",
        exception="RuntimeError",
        message="Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        frames=["_dummy_run", "_prefill_attention"],
    ),
    output=checks(longest_run=24, distinct=0.1, same=8, baseline="cudagraph-none"),
    arms=[
        arm("reported", dies),
        arm(
            "cudagraph-none",
            untriggered,
            with_flags("--compilation-config.cudagraph_mode none"),
            why="without capture the copy is an ordinary one; the report measured 55 % less throughput",
        ),
        arm("eager", untriggered, with_flags("--enforce-eager"), why="the same, without the compiler"),
        arm(
            "no-spec-decode",
            untriggered,
            without("--speculative-config"),
            why="a decode batch of single tokens is captured by another way",
        ),
        arm(
            "plain-cache",
            untriggered,
            with_flags("--kv-cache-dtype fp8_e5m2", lab="--kv-cache-dtype auto"),
            why="the cache that the report compares with; it is not TurboQuant's",
        ),
        arm(
            "4bit-nc",
            dies,
            with_flags("--kv-cache-dtype turboquant_4bit_nc"),
            why="reported with each of three presets",
        ),
        arm("3bit-nc", dies, with_flags("--kv-cache-dtype turboquant_3bit_nc"), why="the third of them"),
        arm(
            "one-draft-token",
            dies,
            with_flags("""--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""),
            why="two query tokens a request are not one either",
        ),
        arm(
            "no-chunked-prefill",
            dies,
            with_flags(
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens 125000",
                lab="--no-enable-chunked-prefill --max-num-batched-tokens 4128 --max-model-len 4128",
            ),
            why="what is captured is a decode batch: prompts have no part in it",
        ),
        arm(
            "interactivity",
            dies,
            with_flags("--performance-mode interactivity", "--async-scheduling"),
            why="tried in the report, together with the next one: the same crash",
        ),
        arm(
            "flash-attn-2",
            dies,
            with_flags("--attention-config.flash_attn_version 2"),
            why="tried in the report: TurboQuant's own code makes the copy, whatever FlashAttention's version",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="    num_decode_tokens: int = 0  # tokens from decode requests\n",
                now="    num_decode_tokens: int = 0  # tokens from decode requests\n"
                "    query_start_loc_cpu: torch.Tensor | None = None\n"
                "    seq_lens_cpu: torch.Tensor | None = None\n",
                why="the lists come from what the runner has on the host already, as from 0.21.0 on",
            ),
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="            num_decode_tokens=num_decode_tokens,\n        )\n",
                now="            num_decode_tokens=num_decode_tokens,\n"
                "            query_start_loc_cpu=cam.query_start_loc_cpu,\n"
                "            seq_lens_cpu=cam._seq_lens_cpu,\n"
                "        )\n",
            ),
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="        qsl = query_start_loc.tolist()\n        seq_lens_list = attn_metadata.seq_lens.tolist()\n",
                now="        lens, starts = attn_metadata.seq_lens_cpu, attn_metadata.query_start_loc_cpu\n"
                "        qsl = (query_start_loc if starts is None else starts).tolist()\n"
                "        seq_lens_list = (attn_metadata.seq_lens if lens is None else lens).tolist()\n",
            ),
            why="the smallest change that captures. Like 0.24.0 it freezes the branch that the capture took (`tq-mtp-wrong-tokens`)",
        ),
    ],
    throughput=throughput(prompt=1024, output=256, baseline="eager"),
    lab=Lab(
        mechanism="turboquant",
        family="mimo",
        layers=1,
        drafts=1,
        heads=6,
        kv_heads=1,
        capture="guard",
        arms=["reported", "no-spec-decode", "cudagraph-none", "patched"],
        why="one full-attention layer of the reported head size, which vLLM's own MTP drafter of MiMo drafts for; a quarter of the heads, "
        "since what a capture refuses has no size",
        changes=[
            without("--gpu-memory-utilization", why="on a CPU it is a share of the host's memory"),
            without("--quantization", why="there are no quantized weights"),
            with_flags(
                "--dtype bfloat16",
                why="TurboQuant's stand-ins are checked in it, and a CPU's matrix products are fast in it",
            ),
            with_flags("--block-size 128", why="a block that the cache takes on a CPU"),
            with_flags("--compilation-config.mode 0", why="nothing is compiled, so that a boot takes seconds"),
        ],
    ),
    related=[
        "vllm-project/vllm#42808",
        "vllm-project/vllm#52475",
        "vllm-project/vllm#53180",
        "vllm-project/vllm#40831",
        "vllm-project/vllm#43747",
        "vllm-project/vllm#53406",
        "vllm-project/vllm#40092",
        "vllm-project/vllm#40069",
    ],
)
