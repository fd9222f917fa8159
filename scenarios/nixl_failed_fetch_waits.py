"""NIXL with recomputed loads: a failed fetch and a finished one wait for each other for ever.

With `kv_load_failure_policy` "recompute" a decode server computes a prompt itself if its blocks
fail to come. That takes more blocks than the fetch did, which needs only the last ones of a layer
with a sliding window. The request keeps its place among those that hold blocks, which are admitted
first, although it holds none. If the pool has no room for it, the loop over them ends there. A
request behind it that has fetched its blocks is never admitted and never frees them. `/health`
stays 200. #45406 and #57841 are about other ways to this end; the latter, which is open, lists this
policy among its limits.

It takes two requests, the failing one first, and a model with more than one KV cache group. In the
lab the second request fetches from the server's own blocks, whose content does not matter here; the
first one names a server that does not exist.
"""

from vllm_repro.vocabulary import *

GONE = remote_prefill(
    "gone", 5601, blocks=[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
)
PREFILL = remote_prefill(
    "prefill", 5600, blocks=[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
)
FAILS = completion(name="fails", prompt=310, kv_transfer_params=GONE)
COMES = completion(name="comes", prompt=310, starts_after=0.3, kv_transfer_params=PREFILL)

scenario = Scenario(
    id="nixl-failed-fetch-waits",
    issue="vllm-project/vllm#30659",
    filed=False,
    title=(
        "NIXL with kv_load_failure_policy=recompute: a failed fetch and a finished one wait for"
        " each other forever"
    ),
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 352
        --block-size 32
        --num-gpu-blocks-override 27
        --max-num-batched-tokens 512
        --no-enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --enforce-eager
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","engine_id":"prefill","kv_load_failure_policy":"recompute"}'
    """,  # noqa: E501  # one flag is one word
    model=Model(
        "google/gemma-3-1b-it",
        architecture="Gemma3ForCausalLM",
        heads=4,
        kv_heads=2,
        head_dim=32,
        layers=2,
        vocab_size=4096,
        block_size=32,
        max_position=32768,
        why="a small model with sliding windows; the scheduler does not use weights",
    ),
    needs=Needs(gpus=2, gpu_memory_gb=4),
    status=Status(bad=">=0.32.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        "request_queue = self.kv_holding_waiting",
    ),
    workload=[together(FAILS, COMES)],
    trigger=sent_with("kv_transfer_params", name="fails"),
    arms=[
        arm("reported", hangs),
        arm(
            "room",
            lives,
            with_flags("--num-gpu-blocks-override 40"),
            why="the pool has room for both",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
                    if request.has_encoder_inputs:
                        self.encoder_cache_manager.free(request)
                    break

                # KVTransfer: the connector uses""",
                now="""\
                    if request.has_encoder_inputs:
                        self.encoder_cache_manager.free(request)
                    if request_queue is self.kv_holding_waiting and not self._holds_kv_blocks(request):
                        skip_request(request_queue)
                        continue
                    break

                # KVTransfer: the connector uses""",  # noqa: E501  # source text
                why="a request that holds no blocks goes back to those that wait for some",
            ),
        ),
    ],
    lab=Lab(
        mechanism="nixl",
        family="gemma3",
        layers=["sliding", "full"],
        window=32,
        why="the scheduler does not use weights",
        changes=[with_flags("--dtype float32", why="no other type is needed")],
    ),
    related=["vllm-project/vllm#45406", "vllm-project/vllm#57841", "vllm-project/vllm#45388"],
)
