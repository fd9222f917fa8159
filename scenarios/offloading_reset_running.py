"""OffloadingConnector: a reset of the prefix cache with `reset_running_requests` kills the engine.

The reset preempts every running request. The next step lists them as preempted and admits them
again at once. Their blocks were stored on the CPU, so the connector begins a load for each. In the
same step it flushes the transfers of preempted requests and assumes that they are stores: `assert
self._jobs[any_jid].is_store` fails in the scheduler. One running request with one stored block is
enough.

`LLM.reset_prefix_cache` has the same argument; over HTTP the endpoint needs development mode. A
trainer that changes weights must reset the connector, too (`reset_connector`), or later requests
load blocks of the old weights; that was not tried. We found no issue about it. The one named here
is the nearest: another assertion about transfers of preempted requests. The scheduler of 0.25.1 is
the first that names the requests of a reset in its next output. 0.33.0 flushes no loads of the same
step.
"""

from vllm_repro.vocabulary import *

BUSY = completion(name="busy", prompt=200, max_tokens=2000, ignore_eos=True)

scenario = Scenario(
    id="offloading-reset-running",
    issue="vllm-project/vllm#46014",
    filed=False,
    title="OffloadingConnector: reset_prefix_cache(reset_running_requests=True) kills the engine",
    command="""
        VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B
        --max-model-len 4096
        --max-num-batched-tokens 512
        --max-num-seqs 4
        --enable-chunked-prefill
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1073741824}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.25.1,<0.33.0", good=">=0.33.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler.build_connector_meta",
        "any_jid = next(iter(req_status.transfer_jobs))",
    ),
    workload=[
        together(
            BUSY,
            request(
                name="reset",
                path="/reset_prefix_cache?reset_running_requests=true",
                body={},
                starts_after=1,
            ),
        ),
    ],
    trigger=answered("reset", 200, during="busy"),
    signature=assertion(
        "self._jobs[any_jid].is_store", frames=["schedule", "build_connector_meta"]
    ),
    arms=[
        arm("reported", dies),
        arm(
            "plain-reset",
            lives,
            workload=[
                together(
                    BUSY, request(name="reset", path="/reset_prefix_cache", body={}, starts_after=1)
                )
            ],
            why="running requests are not preempted",
        ),
        arm(
            "no-offloading", lives, without("--kv-transfer-config"), why="no connector loads blocks"
        ),
    ],
    lab=scheduler_lab(mechanism="offloading"),
    related=["vllm-project/vllm#49118"],
)
