"""One engine over two nodes on a CPU, for the tests that kill a part of it."""

from vllm_repro.vocabulary import (
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    completion,
    dies,
    sent_with,
    signature,
)

scenario = Scenario(
    id="two-ranks",
    issue="vllm-project/vllm#41700",
    title="Two ranks on one host",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 4096
        --max-num-batched-tokens 512
        --max-num-seqs 4
        --enforce-eager
        --tensor-parallel-size 2
        --nnodes 2
    """,
    model=Model(
        "Qwen/Qwen3-0.6B",
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocab_size=151936,
        tiny_will_do=True,
    ),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.20.0"),
    try_with="0.32.0",
    workload=[completion(name="long answer", prompt=100, max_tokens=3500, ignore_eos=True)],
    trigger=sent_with("ignore_eos"),
    signature=signature(phase="request", exception="X", message="", frames=["x"]),
    arms=[arm("reported", dies)],
)
