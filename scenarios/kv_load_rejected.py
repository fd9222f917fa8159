"""KV connectors: a request whose load is rejected stays RUNNING for ever.

A connector may load a prompt in the step that needs it, and report blocks that did not come. With
`kv_load_failure_policy` `recompute` the scheduler then counts those tokens as not computed. With
asynchronous scheduling the token of that step stays counted as in flight, although its output is
dropped. So the request seems to be one token ahead, until the limit of its length: its last token
is never scheduled.

A worker with a model must also read a token that does not exist: on a CPU this raises an IndexError
and crashes vLLM. On GPUs the second model runner, the default since 0.29.0, answers wrongly,
because it does not return to the rejected tokens (#49250).

In the lab no model runs, and a connector that moves nothing offers the blocks of a prompt and
reports that none came.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="kv-load-rejected",
    issue="vllm-project/vllm#45138",
    title="a request whose KV load fails in its step never finishes with asynchronous scheduling",
    command="""
        VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3-1.7B
        --max-model-len 96
        --max-num-batched-tokens 2048
        --max-num-seqs 4
        --block-size 32
        --enable-chunked-prefill
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-1.7B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.20.2"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._update_requests_with_invalid_blocks",
        "request.num_computed_tokens = idx * self.block_size",
    ),
    workload=[
        completion(prompt=45, max_tokens=51, ignore_eos=True, kv_transfer_params={"reject": True})
    ],
    trigger=sent_with("kv_transfer_params"),
    arms=[
        arm("reported", hangs),
        arm("synchronous", lives, with_flags("--no-async-scheduling"), why="no token is in flight"),
        arm(
            "not-rejected",
            untriggered,
            workload=[completion(prompt=45, max_tokens=51, ignore_eos=True)],
            why="the same request without a load",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="                request.num_computed_tokens = idx * self.block_size\n",
                now=(
                    "                request.num_computed_tokens = idx * self.block_size\n         "
                    "       request.num_output_placeholders = 0\n               "
                    " request.drop_stale_output = True\n               "
                    " request.num_stale_output_tokens = request.num_in_flight_tokens\n"
                ),
                why=(
                    "what is in flight is dropped, as after a preemption; 0.32.0 and newer; not for"
                    " a request whose blocks another one shares"
                ),
            ),
        ),
    ],
    lab=scheduler_lab(
        with_flags(
            late_connector(rejects=True),
            why="a connector that moves nothing, and rejects the load",
        ),
        layers=["full"],
    ),
    related=["vllm-project/vllm#45146", "vllm-project/vllm#49250", "vllm-project/vllm#53298"],
)
