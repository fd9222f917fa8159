"""Token ids as a prompt, and the endpoint /v1/responses, plain and streamed."""

from vllm_repro.vocabulary import (
    Model,
    Needs,
    Scenario,
    Status,
    arm,
    chunked_prefill,
    completion,
    dies,
    request,
    sent_with,
    signature,
)

scenario = Scenario(
    id="responses",
    issue="vllm-project/vllm#54195",
    title="token ids, and responses",
    command="""
        vllm serve Qwen/Qwen3-0.6B --dtype float32 --max-model-len 2048 --max-num-batched-tokens 512
        --max-num-seqs 4 --enforce-eager
    """,
    model=Model(
        "Qwen/Qwen3-0.6B",
        heads=4,
        kv_heads=2,
        head_dim=32,
        layers=1,
        vocab_size=300,
        tiny_will_do=True,
    ),
    needs=Needs(memory_gb=2),
    status=Status(bad=">=0.20.0"),
    try_with="0.29.0",
    workload=[
        completion(name="ids", prompt=[7] * 1000, max_tokens=4),
        request(
            name="plain", path="/v1/responses", body={"input": "hello", "max_output_tokens": 4}
        ),
        request(
            name="streamed",
            path="/v1/responses",
            body={"input": "hello", "max_output_tokens": 5, "stream": True},
        ),
    ],
    trigger=chunked_prefill(chunks=2)
    & sent_with(max_output_tokens=4)
    & sent_with(max_output_tokens=5),
    signature=signature(phase="request", exception="X", message="", frames=["x"]),
    arms=[arm("reported", dies)],
)
