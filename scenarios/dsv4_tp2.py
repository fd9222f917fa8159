"""DeepSeek-V4 on SM12x GPUs, over two nodes: a prompt longer than a computable length asks for more workspace than was locked at boot.

Before CUDA graphs are captured a dummy run asks for the workspace that attention will need, and after them it is locked. In the branch for
SM12x GPUs (pull request #40991) the dummy run returned before it came to `_forward_prefill`, so that only the sparse indexer's share was
locked: 21.62 MB, by `--max-model-len` alone. A prompt of 1,304 tokens asks for 21.80 MB in its first layer. Prompts of up to 759 tokens
live, so a smoke test with a short one is green on such a server; several shorter ones in one step die like a long one. Without graphs
nothing is ever locked.

It never was in a release: those reserve the room in the dummy run, and so did the branch from its commit 1d6f5c4 on. What runs on GPUs as
"reported" is therefore the branch, by the version that it gave itself. The lab cannot install that. It runs a release, which lives, and two
arms that change its source: `unreserved` takes the reservation out of the dummy run, and `branch` asks for the branch's shapes as well,
those of the branch's own sources at the two lines that the report names. A release's own shapes are smaller for a lone prompt: they
outgrow the lock from 1,307 tokens on, which is why the workload has a longer chat after the reported one.

Both ranks die at the same step. The second `vllm serve` does not see the end of the first and stays, with its GPU, until it is told.
"""

from vllm_repro.vocabulary import (
    Dummy,
    Lab,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    chat,
    dies,
    lives,
    patched,
    signature,
    sized,
    sparse_prefill_outgrown,
    throughput,
    together,
    untriggered,
    with_flags,
)

SHORT = chat(name="short chat", prompt=sized(100, lab=400), max_tokens=4, stream=False)
FITS = chat(name="longest chat that fits a release", prompt=1306, max_tokens=4, stream=False)
BEYOND = chat(name="one token more", prompt=1307, max_tokens=4, stream=False)

# Line numbers stay: a death names the line of the release.
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
    why="the dummy run of the reported branch returned before it asked for anything",
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
""",
    why="its prefill asked for rows of four prompts, indices of the tokens there are, and states of up to 256 queries in float32",
)

scenario = Scenario(
    id="dsv4-tp2",
    issue="vllm-project/vllm#41700",
    title="Workspace rejects growth after the lock in DeepSeek-V4's _forward_prefill, on a branch for SM12x GPUs",
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
        why="each of the model's three kinds of layers, with its heads, its window, and the indexer's head size and top k: what is "
        "locked, and what a prompt asks for, depend on nothing else of it",
    ),
    status=Status(bad="==0.20.1rc1.dev12+g363ffa145", good=">=0.20.0,!=0.20.1rc1.dev12+g363ffa145"),
    try_with="0.20.1rc1.dev12+g363ffa145",
    workload=[
        SHORT,
        chat(name="reported chat", prompt=1304, max_tokens=sized(4000, lab=4), stream=False),
        chat(name="longer chat", prompt=1449, max_tokens=4, stream=False),
    ],
    trigger=sparse_prefill_outgrown(),
    signature=signature(
        phase="request",
        exception="AssertionError",
        message="Workspace is locked but allocation from '{file}:{line}:_forward_prefill' requires {asked} MB, "
        "current size is {locked} MB",
        frames=["_forward_prefill", "get_simultaneous", "_ensure_workspace_size"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            lives,
            with_flags("--enforce-eager"),
            why="nothing is locked without graph capture; the report measured a quarter of the throughput",
        ),
        arm(
            "near-miss-759",
            untriggered,
            workload=[chat(name="longest chat that fits", prompt=759, max_tokens=8, stream=False)],
            why="the longest prompt whose workspace fits: 21.62 MB asked for, 21.62 locked",
        ),
        arm(
            "near-miss-760",
            dies,
            workload=[chat(name="one token more", prompt=760, max_tokens=8, stream=False)],
            why="a layer with compression asks for 21.63 MB",
        ),
        arm(
            "fewer-sequences",
            dies,
            with_flags("--max-num-seqs 2"),
            why="reported to tighten the lock; by the code its size depends on --max-model-len alone",
        ),
        arm(
            "unreserved",
            dies,
            UNRESERVED,
            workload=[SHORT, FITS, BEYOND],
            bad=">=0.32.0",
            why="a release without the reservation, at its own threshold: 1,306 tokens fit, and 1,307 ask for 21.63 MB",
        ),
        arm(
            "unreserved-eager",
            lives,
            UNRESERVED,
            with_flags("--enforce-eager"),
            workload=[SHORT, FITS, BEYOND],
            why="the same release and requests, and nothing is locked without graph capture",
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
            why="prompts that fit alone do not fit together: what is gathered is for all prompts of a step",
        ),
        arm(
            "branch",
            dies,
            UNRESERVED,
            BRANCH,
            bad=">=0.31.0",
            why="also the shapes that the branch asked for: the reported chat asks for 21.80 MB in its first layer, the report's number",
        ),
    ],
    lab=Lab(
        mechanism="deepseek",
        vllm="0.32.0",
        arms=["reported", "unreserved", "unreserved-eager", "branch"],
        family="deepseek_v4",
        layers=["sliding", "sparse", "compressed", "sparse"],
        window=128,
        why="one layer of each kind, with the reported heads, head size, window and top k: by these and by flags the sizes go",
        changes=[
            with_flags("--dtype bfloat16", why="the reported quantization is of weights, and there are none"),
            with_flags("--compilation-config.mode 0", why="nothing is compiled, so that a boot takes seconds"),
            with_flags(
                "--no-enable-prefix-caching",
                why="the stand-in's tokenizer makes 316 tokens of the chat template, a block of which would be cached; the model's own "
                "makes less than a block of it",
            ),
        ],
    ),
    throughput=[
        # The points of #40991's own tables.
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ],
    related=["vllm-project/vllm#40991", "vllm-project/vllm#41834", "vllm-project/vllm#43477"],
)
