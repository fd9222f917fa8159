"""TurboQuant with speculative decoding under CUDA graphs: the server crashes during boot.

A decode step with draft tokens has more than one query token per request, so graph capture runs
TurboQuant's `_prefill_attention`. In 0.20 this function converts GPU tensors to Python lists, a
copy that CUDA refuses during graph capture. The report blames chunked prefill and three draft
tokens. Neither is needed: `no-chunked-prefill` and `one-draft-token` crash too. The bug needs
TurboQuant, draft tokens and graphs that include attention. The report also blames piecewise graphs,
but these do not include attention. vLLM 0.20 keeps full graphs for decode batches here, and crashes
while it measures their memory, before it creates the KV cache. Released 0.20 refuses the reported
hybrid model; the reporter removed that check.

From 0.21.0 on this error text is gone, but the bug is not. Releases 0.21.0 to 0.23.0 boot and crash
on the first request (`tq-mtp-first-request`); 0.24.0 and later return wrong tokens
(`tq-mtp-wrong-tokens`). So the scenario calls no release good, and compares the answers of an
engine that lives with those of one without graphs.

A model with full attention only needs no such change, so the shape here omits the other layers.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="tq-mtp-cudagraphs",
    issue="vllm-project/vllm#40807",
    title=(
        "TurboQuant KV cache with speculative decoding crashes CUDA graph capture at"
        " query_start_loc.tolist()"
    ),
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
        why=(
            "its 16 full-attention layers; 0.20 refuses TurboQuant for a model that also has other"
            " layers"
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
        changes=[
            without(
                "--quantization",
                why=(
                    "vLLM refuses the quantization of the reported weights for a model without them"
                ),
            )
        ],
    ),
    status=Status(bad=">=0.20.0,<0.21.0"),
    try_with="0.20.2",
    defect=source_line(
        "vllm/v1/attention/backends/turboquant_attn.py",
        "TurboQuantAttentionImpl._prefill_attention",
        "qsl = query_start_loc.tolist()",
    ),
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
            why="without capture the copy is allowed; the report measured 55 % less throughput",
        ),
        arm(
            "eager",
            untriggered,
            with_flags("--enforce-eager"),
            why="as with cudagraph-none, but without the compiler",
        ),
        arm(
            "no-spec-decode",
            untriggered,
            without("--speculative-config"),
            why="capture runs a decode batch of single tokens through another function",
        ),
        arm(
            "plain-cache",
            untriggered,
            with_flags("--kv-cache-dtype fp8_e5m2", lab="--kv-cache-dtype auto"),
            why="the KV cache that the report compares with; it does not use TurboQuant",
        ),
        arm(
            "4bit-nc",
            dies,
            with_flags("--kv-cache-dtype turboquant_4bit_nc"),
            why="the report tried three presets; this is the second one",
        ),
        arm(
            "3bit-nc",
            dies,
            with_flags("--kv-cache-dtype turboquant_3bit_nc"),
            why="the third preset in the report",
        ),
        arm(
            "one-draft-token",
            dies,
            with_flags("""--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""),
            why="one draft token already makes two query tokens per request",
        ),
        arm(
            "no-chunked-prefill",
            dies,
            with_flags(
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens 125000",
                lab=(
                    "--no-enable-chunked-prefill --max-num-batched-tokens 4128 --max-model-len 4128"
                ),
            ),
            why="capture runs a decode batch, which has no prompt",
        ),
        arm(
            "interactivity",
            dies,
            with_flags("--performance-mode interactivity", "--async-scheduling"),
            why="tried in the report, together with flash-attn-2: the same crash",
        ),
        arm(
            "flash-attn-2",
            dies,
            with_flags("--attention-config.flash_attn_version 2"),
            why=(
                "tried in the report: TurboQuant's own code does the copy, with any version of"
                " FlashAttention"
            ),
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="    num_decode_tokens: int = 0  # tokens from decode requests\n",
                now=(
                    "    num_decode_tokens: int = 0  # tokens from decode requests\n"
                    "    query_start_loc_cpu: torch.Tensor | None = None\n"
                    "    seq_lens_cpu: torch.Tensor | None = None\n"
                ),
                why=(
                    "use the copies that the runner already has on the host, as 0.21.0 and later"
                    " do; no fix to propose: the graph then keeps the branch that the capture took,"
                    " and answers are wrong, as from 0.24.0 on"
                ),
            ),
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was="            num_decode_tokens=num_decode_tokens,\n        )\n",
                now=(
                    "            num_decode_tokens=num_decode_tokens,\n"
                    "            query_start_loc_cpu=cam.query_start_loc_cpu,\n"
                    "            seq_lens_cpu=cam._seq_lens_cpu,\n"
                    "        )\n"
                ),
            ),
            patched(
                "vllm/v1/attention/backends/turboquant_attn.py",
                was=(
                    "        qsl = query_start_loc.tolist()\n        seq_lens_list ="
                    " attn_metadata.seq_lens.tolist()\n"
                ),
                now=(
                    "        lens, starts = attn_metadata.seq_lens_cpu,"
                    " attn_metadata.query_start_loc_cpu\n        qsl = (query_start_loc if starts"
                    " is None else starts).tolist()\n        seq_lens_list ="
                    " (attn_metadata.seq_lens if lens is None else lens).tolist()\n"
                ),
            ),
            why=(
                "the smallest change that lets capture succeed; as in 0.24.0, the graph keeps the"
                " captured branch (`tq-mtp-wrong-tokens`)"
            ),
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
        why=(
            "one full-attention layer of the reported head size, with vLLM's own MTP drafter of"
            " MiMo; a quarter of the heads, because capture refuses a copy of any size"
        ),
        changes=[
            without(
                "--gpu-memory-utilization", why="on a CPU this is a share of the host's memory"
            ),
            without("--quantization", why="the tiny model has no quantized weights"),
            with_flags(
                "--dtype bfloat16",
                why=(
                    "the lab's TurboQuant kernels are checked in bfloat16, and matrix products on a"
                    " CPU are fast in it"
                ),
            ),
            with_flags("--block-size 128", why="a block size that the KV cache supports on a CPU"),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
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
