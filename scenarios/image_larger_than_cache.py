"""An image that is larger than the cache of processed images keeps the server from booting.

vLLM processes an image of the largest size at boot, to learn how many tokens it takes, and puts it
into the cache. The cache raises an exception for an item larger than its capacity, and nothing
catches it. With the default of 4 GiB a model for long videos fails: the largest video takes several
GiB. 0.29.0 leaves such an item out of the cache.

The report is about a video of Qwen3.8. Here the cache is made smaller instead: an image of 224 x
224 pixels takes 0.6 MB.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="image-larger-than-cache",
    issue="vllm-project/vllm#52835",
    title="EngineCore fails to start when one processed item exceeds mm_processor_cache_gb",
    command="""
        vllm serve Salesforce/blip2-opt-2.7b
        --max-model-len 1024
        --enforce-eager
        --mm-processor-cache-gb 0.0002
    """,
    model=public_model(
        "Salesforce/blip2-opt-2.7b",
        tiny_will_do=True,
        why="it takes images of one size, so the cache is the larger or the smaller of the two",
    ),
    needs=Needs(),
    status=Status(bad=">=0.20.2,<0.29.0", good=">=0.29.0"),
    try_with="0.28.0",
    defect=source_line(
        "vllm/multimodal/cache.py",
        "MultiModalProcessorOnlyCache.get_and_update_item",
        "self._cache[mm_hash] = MultiModalProcessorCacheItem(*mm_item)",
    ),
    workload=[
        request(
            name="image",
            path="/v1/chat/completions",
            body={
                "messages": [{"role": "user", "content": [image("red")]}],
                "max_tokens": 4,
            },
        ),
    ],
    trigger=answered("image", 200),
    signature=signature(
        phase="boot",
        exception="ValueError",
        message="value too large",
        frames=["get_dummy_mm_inputs", "get_and_update_item"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "larger-cache",
            lives,
            with_flags("--mm-processor-cache-gb 0.002"),
            why="the image fits: 2.1 MB are enough for three",
        ),
        arm(
            "no-cache",
            lives,
            with_flags("--mm-processor-cache-gb 0"),
            why="nothing is put into a cache",
        ),
    ],
    related=["vllm-project/vllm#53016"],
)
