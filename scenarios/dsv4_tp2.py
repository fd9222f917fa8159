"""DeepSeek-V4 on SM12x GPUs, two nodes: a long prompt outgrows the workspace locked at boot.

Before CUDA graph capture a dummy run reserves the workspace for attention; after the capture the
workspace is locked. In the branch for SM12x GPUs (pull request #40991) the dummy run returned
before `_forward_prefill`. So only the sparse indexer's share was locked: 21.62 MB, which depends on
`--max-model-len` alone. A prompt of 1,304 tokens needs 21.80 MB in its first layer. Prompts of up
to 759 tokens live, so a smoke test with a short prompt passes. Several shorter prompts in one step
crash the engine like a long one. Without graph capture, the workspace is not locked.

No release has this bug: releases reserve the workspace in the dummy run, as the branch does from
its commit 1d6f5c4 on. On GPUs the arm `reported` therefore runs the branch, named by its own
version. The lab cannot install the branch. It runs a release, which lives, and two arms with
patched source. `unreserved` removes the reservation from the dummy run. `branch` also requests the
workspace shapes of the branch's sources, at the two lines that the report names. A release requests
less for a single prompt: it outgrows the lock from 1,307 tokens on, so the workload has a longer
chat after the reported one.

Both ranks crash in the same step. The second `vllm serve` does not notice that the first one
exited; it keeps its GPU until it is stopped.
"""

from vllm_repro.vocabulary import *

SHORT = chat(name="short chat", prompt=sized(100, lab=400), max_tokens=4, stream=False)
FITS = chat(name="longest chat that fits a release", prompt=1306, max_tokens=4, stream=False)
BEYOND = chat(name="one token more", prompt=1307, max_tokens=4, stream=False)

# The patch keeps the line numbers, so that a traceback shows those of the release.
UNRESERVED = patched(
    "vllm/models/deepseek_v4/nvidia/flashmla.py",
    was="""\
            current_workspace_manager().get_simultaneous(
                ((self.PREFILL_CHUNK_SIZE, M, q.shape[-1]), torch.bfloat16),
                ((self.max_num_batched_tokens, combined_topk), torch.int32),
                ((self.max_num_batched_tokens,), torch.int32),
            )
            output.zero_()
""",
    now="""\
            # Nothing is asked for in a dummy run,
            # so that the sparse indexer alone
            # decides what is locked.
            #
            #
            output.zero_()
""",
    why="the dummy run of the reported branch returned before it reserved anything",
)
BRANCH = patched(
    "vllm/models/deepseek_v4/nvidia/flashmla.py",
    was="""\
                ((chunk_size, chunk_M, q.shape[-1]), torch.bfloat16),
                ((self.max_num_batched_tokens, combined_topk), torch.int32),
                ((self.max_num_batched_tokens,), torch.int32),
            )
            kv, combined_indices_out, combined_lens_out = workspace
""",
    now="""\
                ((self.PREFILL_CHUNK_SIZE, chunk_M, q.shape[-1]), torch.bfloat16),
                ((len(q), combined_topk), torch.int32), ((len(q),), torch.int32),
                *[((min(len(q), 256), self.n_local_heads, *more), torch.float32) for more in ((), (), q.shape[-1:])],
            )
            kv, combined_indices_out, combined_lens_out = workspace[:3]
""",  # noqa: E501  # source text
    why=(
        "the branch's prefill requested rows for four prompts, indices for the scheduled tokens,"
        " and float32 states of up to 256 queries"
    ),
)

scenario = Scenario(
    id="dsv4-tp2",
    issue="vllm-project/vllm#41700",
    title=(
        "Workspace rejects growth after the lock in DeepSeek-V4's _forward_prefill, on a branch for"
        " SM12x GPUs"
    ),
    command="""
        vllm serve pastapaul/DeepSeek-V4-Flash-W4A16-FP8 \\
          --served-model-name deepseek-v4-flash --trust-remote-code \\
          --kv-cache-dtype fp8 --block-size 256 \\
          --tokenizer-mode deepseek_v4 \\
          --tool-call-parser deepseek_v4 --enable-auto-tool-choice \\
          --reasoning-parser deepseek_v4 \\
          --max-model-len 16384 \\
          --max-num-seqs 4 --max-num-batched-tokens 8192 \\
          --gpu-memory-utilization 0.92 \\
          -tp 2 --nnodes 2 \\
          --master-addr <HEAD_IP> --master-port 29501 --node-rank 0
    """,
    model=Model(
        "pastapaul/DeepSeek-V4-Flash-W4A16-FP8",
        architecture="DeepseekV4ForCausalLM",
        heads=64,
        kv_heads=1,
        head_dim=512,
        layers=43,
        block_size=256,
        vocab_size=129280,
        max_position=1048576,
    ),
    needs=Needs(gpus=2, gpu_memory_gb=96, capability=12.0, nodes=2),
    dummy=Dummy(
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        fp8=True,
        why=(
            "the model's three kinds of layers, with its heads, window, indexer head size and top"
            " k: the locked and the requested sizes depend on nothing else in the model"
        ),
    ),
    status=Status(bad="==0.20.1rc1.dev12+g363ffa145", good=">=0.20.0,!=0.20.1rc1.dev12+g363ffa145"),
    try_with="0.20.1rc1.dev12+g363ffa145",
    defect=source_line(
        "vllm/models/deepseek_v4/nvidia/flashmla.py",
        "DeepseekV4FlashMLAAttention._forward_prefill",
        "workspace = workspace_manager.get_simultaneous(",
    ),
    workload=[
        SHORT,
        chat(name="reported chat", prompt=1304, max_tokens=sized(4000, lab=4), stream=False),
        chat(name="longer chat", prompt=1449, max_tokens=4, stream=False),
    ],
    trigger=sparse_prefill_outgrown(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message=(
            "Workspace is locked but allocation from '{file}:{line}:_forward_prefill' requires"
            " {asked} MB, current size is {locked} MB"
        ),
        frames=["_forward_prefill", "get_simultaneous", "_ensure_workspace_size"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            lives,
            with_flags("--enforce-eager"),
            why=(
                "without graph capture the workspace is not locked; the report measured a quarter"
                " of the throughput"
            ),
        ),
        arm(
            "near-miss-759",
            untriggered,
            workload=[chat(name="longest chat that fits", prompt=759, max_tokens=8, stream=False)],
            why="the longest prompt that fits: it needs 21.62 MB, and 21.62 MB are locked",
        ),
        arm(
            "near-miss-760",
            dies,
            workload=[chat(name="one token more", prompt=760, max_tokens=8, stream=False)],
            why="a layer with compression needs 21.63 MB",
        ),
        arm(
            "fewer-sequences",
            dies,
            with_flags("--max-num-seqs 2"),
            why=(
                "the report says that this lowers the locked size; in the code it depends on"
                " --max-model-len alone"
            ),
        ),
        arm(
            "unreserved",
            dies,
            UNRESERVED,
            workload=[SHORT, FITS, BEYOND],
            bad=">=0.32.0",
            why=(
                "a release without the reservation, at its own threshold: 1,306 tokens fit, and"
                " 1,307 need 21.63 MB"
            ),
        ),
        arm(
            "unreserved-eager",
            lives,
            UNRESERVED,
            with_flags("--enforce-eager"),
            workload=[SHORT, FITS, BEYOND],
            why="the same release and requests: without graph capture the workspace is not locked",
        ),
        arm(
            "unreserved-together",
            dies,
            UNRESERVED,
            workload=[
                chat(name="one chat of four", prompt=600, max_tokens=4, stream=False),
                together(
                    chat(name="first of four at once", prompt=600, max_tokens=4, stream=False),
                    chat(name="second of four at once", prompt=600, max_tokens=4, stream=False),
                    chat(name="third of four at once", prompt=600, max_tokens=4, stream=False),
                    chat(name="fourth of four at once", prompt=600, max_tokens=4, stream=False),
                ),
            ],
            bad=">=0.32.0",
            why=(
                "each prompt fits alone, but not all four: one step gathers the KV of all its"
                " prompts"
            ),
        ),
        arm(
            "branch",
            dies,
            UNRESERVED,
            BRANCH,
            bad=">=0.31.0",
            why=(
                "also the branch's workspace shapes: the reported chat needs 21.80 MB in its first"
                " layer, as in the report"
            ),
        ),
    ],
    lab=Lab(
        mechanism="deepseek",
        vllm="0.32.0",
        arms=["reported", "unreserved", "unreserved-eager", "branch"],
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        why=(
            "one layer of each kind, with the reported heads, head size, window and top k: only"
            " these and the flags set the sizes"
        ),
        changes=[
            with_flags("--dtype bfloat16", why="the tiny model's weights are not quantized"),
            with_flags(
                "--compilation-config.mode 0", why="without compilation a boot takes seconds"
            ),
            with_flags(
                "--no-enable-prefix-caching",
                why=(
                    "the tiny model's tokenizer turns the chat template into 316 tokens, so one"
                    " block would be cached; with the model's own tokenizer it is shorter than a"
                    " block"
                ),
            ),
        ],
    ),
    throughput=[
        # The load points in the tables of #40991.
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ],
    related=["vllm-project/vllm#40991", "vllm-project/vllm#41834", "vllm-project/vllm#43477"],
)
