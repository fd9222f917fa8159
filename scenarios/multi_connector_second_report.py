"""MultiConnector: a second report of one request's load crashes the engine.

A MultiConnector loads the blocks of a request with one of its connectors and none with the others.
It passes on a report of a finished load from any of them. After the first report the request runs.
At a second report, some steps later, the request neither waits for a load nor is finished, and
`assert RequestStatus.is_finished(req.status)` fails in the scheduler. The reporter names
LMCacheMPConnector beside NixlConnector as such a pair. All releases since 0.21.0 have the
assertion.

The command is the reported one; the role of its second connector is assumed. In the lab two
connectors without any transfer take their place. The second reports each load 40 steps after the
first. On GPUs the command alone shows nothing: another server must send the blocks.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="multi-connector-second-report",
    issue="vllm-project/vllm#51786",
    title="Scheduler crashes due to duplicate recving completion events in MultiConnector",
    command="""
        vllm serve /models/GLM-5.2-FP8
        --trust-remote-code
        --served-model-name glm5.2-pd
        --tensor-parallel-size 8
        --kv-cache-dtype fp8
        --kv-transfer-config '{"kv_connector":"MultiConnector","kv_role":"kv_consumer","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_consumer"},{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}]}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=8, gpu_memory_gb=140),
    status=Status(bad=">=0.21.0"),
    try_with="0.26.0",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
        "MultiConnector.get_finished",
        "finished_recving.update(recving or ())",
    ),
    workload=[
        completion(
            name="loads",
            prompt=200,
            max_tokens=200,
            ignore_eos=True,
            kv_transfer_params={"load": 5},
        ),
    ],
    trigger=sent_with("kv_transfer_params"),
    signature=assertion(
        "RequestStatus.is_finished(req.status)",
        frames=["update_from_output", "_update_from_kv_xfer_finished"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "one-connector",
            lives,
            with_flags(
                '--kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}\'',
                lab=late_connector(),
            ),
            why="nobody reports the load a second time",
        ),
        arm(
            "guard",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
            else:
                assert RequestStatus.is_finished(req.status)
                self._free_blocks(self.requests[req_id])
""",
                now="""\
            elif RequestStatus.is_finished(req.status):
                self._free_blocks(self.requests[req_id])
""",
                why="pass over a second report for a request that runs",
            ),
        ),
    ],
    lab=Lab(
        mechanism="late-connector",
        layers=2,
        why="the scheduler does not use weights",
        changes=[
            without(
                "--tensor-parallel-size",
                why="one worker is enough: the only scheduler gets the reports",
            ),
            without("--kv-cache-dtype", why="CPU attention does not support an fp8 KV cache"),
            with_flags("--enforce-eager", why="no compiler is needed"),
            with_flags("--max-model-len 4096", "--max-num-seqs 4", why="sizes for a small machine"),
            with_flags(
                "--kv-transfer-config"
                ' \'{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"LateConnector","kv_connector_module_path":"vllm_repro_lab.late_connector","kv_role":"kv_both"},{"kv_connector":"LateConnector","kv_connector_module_path":"vllm_repro_lab.late_connector","kv_role":"kv_both","kv_connector_extra_config":{"echo":40}}]}}\'',  # noqa: E501  # one flag is one word
                why="connectors that move nothing",
            ),
        ],
    ),
    related=["vllm-project/vllm#53049"],
)
