"""MultiConnector with NIXL: a prompt whose fetch failed waits for ever for blocks it reserved.

While a request loads, the scheduler reserves blocks for the rest of it, so that others leave it
room. With `kv_load_failure_policy` "recompute" a request whose blocks failed to come frees its
blocks, but keeps its reservation. If another connector has blocks of its prompt, the scheduler
plans to load these, and the pool needs room for the request in addition to that reservation. In a
pool without room for the prompt twice it never starts, and all requests behind it wait too.
`/health` stays 200.

The first request stores its blocks in CPU memory. The second has the same prompt, of five whole
blocks. The prefix cache has four of them, and the fifth comes from another server, which is gone.
Then the offloading connector offers it.
"""

from vllm_repro.vocabulary import *

GONE = remote_prefill("gone", 5601, blocks=[[1, 2, 3, 4, 5]])

scenario = Scenario(
    id="nixl-failed-fetch-reserves",
    issue="vllm-project/vllm#45388",
    filed=False,
    title=(
        "MultiConnector with kv_load_failure_policy=recompute: a request waits forever for blocks"
        " that its failed load reserved"
    ),
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --max-model-len 96
        --block-size 16
        --num-gpu-blocks-override 7
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"},{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1310720}}]}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=2, gpu_memory_gb=8),
    status=Status(bad=">=0.32.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._inflight_prefill_reserved_blocks",
        "self._request_remaining_blocks(req) for req in self._inflight_prefills",
    ),
    workload=[
        completion(name="stores", prompt=80, shared=80, max_tokens=1),
        completion(name="fails", prompt=80, shared=80, max_tokens=1, kv_transfer_params=GONE),
    ],
    trigger=sent_with("kv_transfer_params", name="fails"),
    arms=[
        arm("reported", hangs),
        arm(
            "room",
            lives,
            with_flags("--num-gpu-blocks-override 20"),
            why="the pool has room for the prompt twice",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
                # reallocated, so the skipped blocks need no handling.)
                self.kv_cache_manager.free(request)
""",
                now="""\
                # reallocated, so the skipped blocks need no handling.)
                self.kv_cache_manager.free(request)
                self._inflight_prefills.discard(request)
""",
                why="a request that gave up its blocks reserves none",
            ),
        ),
    ],
    lab=scheduler_lab(),
)
