"""DeepSeek-V4 on SM12x GPUs, over two nodes: the first real prefill asks for more workspace than was locked at boot.

Before CUDA graphs are captured a dummy run asks for the workspace that attention will need, and after them it is locked. In the branch for
SM12x GPUs (pull request #40991) the dummy run returned before it came to `_forward_prefill`, so that only the sparse indexer's share was
locked: 21.62 MB, by `--max-model-len` alone. A prompt of 1,304 tokens asks for 21.80 MB in its first layer. Prompts of up to 759 tokens
live, so a smoke test with a short one is green on such a server. Without graphs nothing is ever locked.

It never was in a release: those reserve the room in the dummy run, and so did the branch from its commit 1d6f5c4 on. What runs here as
"reported" is therefore the branch, by the version that it gave itself. Its patched form cannot be run by this harness.

Both ranks die at the same step. The second `vllm serve` does not see the end of the first and stays, with its GPU, until it is told.
"""

from vllm_repro.vocabulary import (
    Dummy,
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    chat,
    dies,
    lives,
    prefill_over,
    signature,
    throughput,
    untriggered,
    with_flags,
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
        chat(name="short chat", prompt=100, max_tokens=8, stream=False),
        chat(name="reported chat", prompt=1304, max_tokens=4000, stream=False),
    ],
    trigger=prefill_over(759),
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
    ],
    throughput=[
        # The points of #40991's own tables.
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ],
    related=["vllm-project/vllm#40991", "vllm-project/vllm#41834", "vllm-project/vllm#43477"],
)
