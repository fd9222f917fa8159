"""A refused request leaves its image in the cache's order, and a later eviction hangs the engine.

The API server and the engine each keep a cache of processed images. The API server fills its own
before it checks the prompt's length. If it then refuses the prompt, the image stays in its cache,
so the next request with that image is sent without data and fails. The engine's cache then has the
image in its order of use, without content. When the cache is full, `popitem` picks that entry as
the oldest, removes nothing, and is called again in an endless loop. The thread that reads requests
never returns: no later request is answered, and `/health` is 200.

Up to 0.23.0 `LRUCache.touch` adds an unknown image to the order; from 0.24.0 on (#43595) it does
not. From 0.28.0 on the second request may be sent again. An image takes 32 tokens here. The cache
has room for three images in bfloat16 and for one in float32.
"""

from vllm_repro.vocabulary import *

RED_IMAGE = image("red")
GREEN_IMAGE = image("green")
BLUE_IMAGE = image("blue")
WHITE_IMAGE = image("white")
BLACK_IMAGE = image("black")
CHAT = "/v1/chat/completions"
LONG = {"type": "text", "text": "one two three four five six seven eight nine ten eleven twelve"}

scenario = Scenario(
    id="image-cache-never-evicts",
    issue="vllm-project/vllm#43941",
    title=(
        "Infinite loop in EngineCore during multimodal cache eviction after a refused request's"
        " image is sent again"
    ),
    command="""
        vllm serve Salesforce/blip2-opt-2.7b
        --enforce-eager
        --max-model-len 64
        --mm-processor-cache-gb 0.001
    """,
    model=public_model(
        "Salesforce/blip2-opt-2.7b", tiny_will_do=True, why="the weights do not matter"
    ),
    needs=Needs(),
    status=Status(bad="<0.24.0", good=">=0.24.0"),
    try_with="0.23.0",
    defect=source_line(
        "vllm/utils/cache.py", "LRUCache.touch", "self._LRUCache__order[key] = None  # type: ignore"
    ),
    workload=[
        request(
            name="too long",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [RED_IMAGE, LONG]}], "max_tokens": 1},
            may_fail=[400],
        ),
        request(
            name="same image",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [RED_IMAGE]}], "max_tokens": 1},
            may_fail=[500, 503],
        ),
        request(
            name="green",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [GREEN_IMAGE]}], "max_tokens": 1},
        ),
        request(
            name="blue",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [BLUE_IMAGE]}], "max_tokens": 1},
        ),
        request(
            name="white",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [WHITE_IMAGE]}], "max_tokens": 1},
        ),
        request(
            name="black",
            path=CHAT,
            body={"messages": [{"role": "user", "content": [BLACK_IMAGE]}], "max_tokens": 1},
        ),
    ],
    trigger=answered("too long", 400),
    arms=[
        arm("reported", hangs),
        arm("no-cache", lives, with_flags("--mm-processor-cache-gb 0"), why="nothing is evicted"),
        arm(
            "patched",
            lives,
            patched(
                "vllm/utils/cache.py",
                was="            self._LRUCache__order[key] = None  # type: ignore\n",
                now="            pass\n",
                why="an image that is not there is not noted",
            ),
        ),
    ],
    related=["vllm-project/vllm#43595", "vllm-project/vllm#44533", "vllm-project/vllm#47958"],
)
