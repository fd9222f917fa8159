"""A refused request with an image makes the next request with that image fail, from any client.

The API server and EngineCore each keep a cache of processed images, which must have the same
content. The API server puts an image into its own cache before it checks the sampling parameters.
If it then refuses the request, EngineCore never gets the image. The next request with this image is
sent without it, and EngineCore has nothing to look up.

Up to 0.27.0 every later request with the image fails with 500, until the API server's cache drops
it. Newer releases forget the image after the first failure (#46747), so one request fails for each
that was refused.
"""

from vllm_repro.vocabulary import *

RED_PROMPT = [{"role": "user", "content": [image("red")]}]
GREEN_PROMPT = [{"role": "user", "content": [image("green")]}]

REFUSED = request(
    name="refused",
    path="/v1/chat/completions",
    body={"messages": RED_PROMPT, "max_tokens": 4, "logit_bias": {"999999": 1}},
    may_fail=[400],
)

scenario = Scenario(
    id="image-of-refused-request",
    issue="vllm-project/vllm#31404",
    title="A refused request with an image makes the next request with that image fail",
    command="""
        vllm serve Salesforce/blip2-opt-2.7b
        --max-model-len 1024
        --enforce-eager
    """,
    model=public_model(
        "Salesforce/blip2-opt-2.7b",
        tiny_will_do=True,
        why="the reports used larger models; the caches do not depend on the model",
    ),
    needs=Needs(),
    status=Status(bad=">=0.20.2"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/multimodal/cache/lru.py",
        "LruKeyReplicatedSenderCache.get_and_update_item",
        "return None, cached_item.prompt_updates",
    ),
    workload=[
        REFUSED,
        request(
            name="next image",
            path="/v1/chat/completions",
            body={"messages": RED_PROMPT, "max_tokens": 4},
        ),
    ],
    trigger=answered("refused", 400) & answered("next image", 200, 500),
    arms=[
        arm("reported", errs),
        arm(
            "other-image",
            lives,
            workload=[
                REFUSED,
                request(
                    name="next image",
                    path="/v1/chat/completions",
                    body={"messages": GREEN_PROMPT, "max_tokens": 4},
                ),
            ],
            why="EngineCore gets an image that the API server has not seen before",
        ),
        arm(
            "no-cache",
            lives,
            with_flags("--mm-processor-cache-gb 0"),
            why="each image is sent whole",
        ),
    ],
    related=[
        "vllm-project/vllm#33865",
        "vllm-project/vllm#46354",
        "vllm-project/vllm#46747",
        "vllm-project/vllm#51897",
    ],
)
