"""Requests to a server of a pooling model, none of which is a completion."""

from vllm_repro.vocabulary import (
    Model,
    Needs,
    Scenario,
    Status,
    answered,
    arm,
    errs,
    request,
    sent_with,
)

SINGLE = request(
    name="ids", path="/v1/embeddings", body={"input": [7, 8, 9], "encoding_format": "base64"}
)

scenario = Scenario(
    id="other-endpoints",
    issue="vllm-project/vllm#54195",
    title="requests to other endpoints",
    command="""
        vllm serve Qwen/Qwen3-0.6B --runner pooling --convert embed --dtype float32
        --max-model-len 512 --max-num-seqs 4 --enforce-eager
    """,
    model=Model(
        "Qwen/Qwen3-0.6B",
        heads=4,
        kv_heads=2,
        head_dim=32,
        layers=1,
        vocab_size=300,
        tiny_will_do=True,
        why="any will do",
    ),
    needs=Needs(memory_gb=2),
    status=Status(bad=">=0.20.0"),
    try_with="0.29.0",
    workload=[
        SINGLE,
        request(name="pooled", path="/pooling", body={"input": "hello"}),
        request(name="too long", path="/v1/embeddings", body={"input": [7] * 600}),
    ],
    trigger=sent_with("input", encoding_format="base64", name="ids") & answered("too long", 400),
    arms=[
        arm("reported", errs),
        arm(
            "not-refused",
            errs,
            workload=[SINGLE, request(name="too long", path="/pooling", body={"input": [7] * 9})],
        ),
    ],
)
