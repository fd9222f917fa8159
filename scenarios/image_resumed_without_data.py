"""A preempted request whose image was in the prefix cache kills the engine when it comes back.

The scheduler sends a request's images to the workers when it first schedules the request. Since
0.29.0 (#52041) it leaves out the data of an image whose tokens are all in the prefix cache, as no
worker encodes it. If the request is preempted and its blocks are evicted, the image has to be
encoded after all. The first model runner keeps the request as first sent, skips an image without
data, and finds no encoder output: it raises a RuntimeError. By its source, the second model runner
is not affected: it receives the request again. vLLM uses the first without Triton, as its published
CPU packages are, and with features that the second does not support.

Here an image takes one block of 32 tokens, and the encoder cache has room for one image. A request
leaves red in the prefix cache; one with green drops red from the encoder cache and grows until it
needs every block; another with red is admitted beside it and preempted.
"""

from vllm_repro.vocabulary import *

RED_PROMPT = [{"role": "user", "content": [image("red")]}]
GREEN_PROMPT = [{"role": "user", "content": [image("green")]}]
CHAT = "/v1/chat/completions"

scenario = Scenario(
    id="image-resumed-without-data",
    issue="vllm-project/vllm#54994",
    filed=False,
    title=(
        "A preempted request whose image was in the prefix cache kills the engine: Encoder cache"
        " miss"
    ),
    command="""
        VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Salesforce/blip2-opt-2.7b
        --enforce-eager
        --enable-prefix-caching
        --enable-chunked-prefill
        --block-size 32
        --num-gpu-blocks-override 33
        --max-model-len 1024
        --max-num-seqs 2
        --max-num-batched-tokens 32
    """,
    model=public_model(
        "Salesforce/blip2-opt-2.7b",
        tiny_will_do=True,
        why="an image takes 32 tokens, so one block; the weights do not matter",
    ),
    needs=Needs(),
    status=Status(bad=">=0.29.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/output.py",
        "NewRequestData.from_request",
        "mm_features=strip_covered_mm_data(",
    ),
    workload=[
        request(name="red", path=CHAT, body={"messages": RED_PROMPT, "max_tokens": 1}),
        together(
            request(
                name="green, long",
                path=CHAT,
                body={"messages": GREEN_PROMPT, "max_tokens": 975, "ignore_eos": True},
            ),
            request(
                name="red again",
                path=CHAT,
                body={"messages": RED_PROMPT, "max_tokens": 600, "ignore_eos": True},
                starts_after=0.3,
            ),
        ),
    ],
    trigger=preempted(),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="Encoder cache miss for {hash}.",
        source='raise RuntimeError(f"Encoder cache miss for {mm_hash}.")',
        frames=["execute_model", "_preprocess", "_gather_mm_embeddings"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "no-prefix-caching",
            lives,
            with_flags("--no-enable-prefix-caching"),
            why="the image is not in the cache, so its data is sent",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/output.py",
                was="                request.num_computed_tokens,\n                uses_mrope",
                now=(
                    "                request.num_computed_tokens if prefill_token_ids is not None"
                    " else 0,\n                uses_mrope"
                ),
                why=(
                    "the first model runner gets the data of each image; no fix to propose: it"
                    " undoes #52041 for that runner, where a request that comes back could be sent"
                    " with its data"
                ),
            ),
        ),
    ],
    related=["vllm-project/vllm#52041", "vllm-project/vllm#32469"],
)
