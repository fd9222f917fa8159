"""NIXL prefill server with Mamba layers: a request that just fits is preempted for ever.

With prefix caching (mode `align`) a Mamba layer keeps its last two states, and with asynchronous
scheduling the one before, too, while a step is in flight. vLLM's check at start counts two. If the
third takes the block that the next token needs, the request is the only one to preempt, and
preempts itself. In the roles kv_producer and kv_both it also loses the token in flight. So it is
computed again, is preempted at the same token, and never answers. It takes a pool for little more
than one request, and a request for two or more tokens: the single one that a proxy requests from a
prefill server needs no further block.

Here a request has 32 tokens, and the pool 6 blocks of 16: 1.20 requests by vLLM's boot log.
In the lab no model runs and NIXL sends nothing. One Mamba layer stands for three of four.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="nixl-mamba-preempted-for-ever",
    issue="vllm-project/vllm#53706",
    filed=False,
    title=(
        "NIXL prefill server with Mamba layers: a request that fills the pool preempts itself for"
        " ever"
    ),
    command="""
        vllm serve Qwen/Qwen3.5-9B
        --block-size 16
        --max-model-len 34
        --max-num-batched-tokens 16
        --max-num-seqs 8
        --num-gpu-blocks-override 6
        --enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
    """,
    model=public_model("Qwen/Qwen3.5-9B", why="linear attention in three of four layers"),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    status=Status(bad=">=0.28.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        "drop_stale_output=self.requires_kv_delivery,",
    ),
    workload=[
        completion(name="fills", prompt=flag("--block-size") * 2, max_tokens=2, ignore_eos=True)
    ],
    trigger=sent_with("ignore_eos", name="fills"),
    arms=[
        arm("reported", hangs),
        arm(
            "one-block-more",
            lives,
            with_flags("--num-gpu-blocks-override 7"),
            why="the third state has a block",
        ),
        arm("synchronous", lives, with_flags("--no-async-scheduling"), why="no step is in flight"),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
            # Schedule newly needed KV blocks for the request.
            with record_function_or_nullcontext("schedule: allocate_slots"):
""",
                now="""\
            # Schedule newly needed KV blocks for the request.
            waits = False
            with record_function_or_nullcontext("schedule: allocate_slots"):
""",
            ),
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
                    # A deferred free will not help with immediate allocation.
                    if not self._request_blocks_can_be_freed(preempted_req):
""",
                now="""\
                    if (
                        preempted_req == request
                        and self.need_mamba_block_aligned_split
                        and request.num_in_flight_tokens
                    ):
                        waits = True
                        break

                    # A deferred free will not help with immediate allocation.
                    if not self._request_blocks_can_be_freed(preempted_req):
""",
            ),
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="\n            if new_blocks is None:\n",
                now="""
            if new_blocks is None and waits:
                req_index += 1
                continue
            if new_blocks is None:
""",
                why=(
                    "with Mamba layers a request waits for its step in flight, which frees a"
                    " block, instead of preempting itself; vLLM's check at start, which counts two"
                    " states, is the other place to mend"
                ),
            ),
        ),
    ],
    lab=scheduler_lab(
        family="granite_hybrid",
        layers=["full", "mamba"],
        why=(
            "the scheduler does not use weights; a real model sets its own block size, and needs"
            " another prompt and pool"
        ),
    ),
)
