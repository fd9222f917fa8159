"""Load of the rig: what `vllm-repro run loadgen --server attach --throughput` claims of a server whose token times are known.

No bug: issue, model and command only make a complete file.
"""

from vllm_repro.vocabulary import (
    Model,
    Needs,
    Scenario,
    Status,
    answered,
    arm,
    completion,
    dies,
    signature,
    throughput,
)

scenario = Scenario(
    id="loadgen",
    issue="vllm-project/vllm#54195",
    title="Load of the rig",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --max-model-len 8192
    """,
    model=Model(
        "Qwen/Qwen3-0.6B",
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocab_size=151936,
        max_position=40960,
    ),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.20.0,<0.29.0", good=">=0.29.0"),
    try_with="0.28.0",
    workload=[completion(name="first", prompt="hello", max_tokens=2, stream=True)],
    trigger=answered("first", 200),
    signature=signature(
        phase="request",
        exception="IndexError",
        message="index {index} is out of bounds for dimension 1 with size {vocabulary}",
        frames=["apply"],
    ),
    throughput=throughput(prompt=32, output=100, concurrency=[1, 8, 16, 32, 64, 128], baseline="reported"),
    arms=[arm("reported", dies)],
)
