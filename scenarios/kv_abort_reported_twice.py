"""KV connectors: an abort during a load kills the engine when load and save are both reported.

An aborted request whose blocks still load is kept until the connector reports the end of the load.
If the connector also saves its blocks, they are kept until the end of the save. The scheduler
records that a report is pending, not how many. The first report frees the blocks and removes the
request; the second fails `assert req_id in self.requests`. The order does not matter, and both may
come in one step. LMCache loads and saves, as does a MultiConnector of NIXL and LMCache as in the
reports. All releases since 0.19.1 have the bug.

In the lab a connector without any transfer takes their place: it reports the load 100 steps after
the abort and the save 200 steps after it, in each boot in this order. On GPUs the command alone
shows nothing: a second server must send the blocks.
"""

from vllm_repro.vocabulary import *

BUSY = completion(name="busy", prompt=64, max_tokens=3500, ignore_eos=True)
BOTH = {"load_after_end": 100, "save": 200}  # steps from the abort to the report
LOAD = {"load_after_end": 100}
LEAVES = completion(
    name="leaves",
    prompt=200,
    max_tokens=8,
    starts_after=0.3,
    leaves_after=0.3,
    kv_transfer_params=BOTH,
)
ONLY_LOADS = completion(
    name="only loads",
    prompt=200,
    max_tokens=8,
    starts_after=0.3,
    leaves_after=0.3,
    kv_transfer_params=LOAD,
)

scenario = Scenario(
    id="kv-abort-reported-twice",
    issue="vllm-project/vllm#46240",
    title=(
        "AssertionError in _update_from_kv_xfer_finished when an aborted request's load and save"
        " both finish"
    ),
    command="""
        vllm serve Qwen/Qwen3-1.7B
        --max-model-len 4096
        --max-num-batched-tokens 512
        --max-num-seqs 4
        --enable-chunked-prefill
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"},{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}]}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-1.7B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=2, gpu_memory_gb=16),
    status=Status(bad=">=0.19.1"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._update_from_kv_xfer_finished",
        "self._free_blocks(self.requests[req_id])",
    ),
    workload=[together(BUSY, LEAVES)],
    trigger=left_waiting("leaves"),
    signature=assertion(
        "req_id in self.requests", frames=["update_from_output", "_update_from_kv_xfer_finished"]
    ),
    arms=[
        arm("reported", dies),
        arm(
            "near-miss",
            untriggered,
            workload=[together(BUSY, ONLY_LOADS)],
            why="the same abort with one report to come",
        ),
        arm(
            "guard",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
            logger.debug("Finished sending KV transfer for request %s", req_id)
            assert req_id in self.requests
""",
                now="""\
            logger.debug("Finished sending KV transfer for request %s", req_id)
            if req_id not in self.requests:
                continue
""",
                why=(
                    "pass over the second report. This ends the crash alone: the first report still"
                    " frees blocks that are being saved"
                ),
            ),
        ),
        arm(
            "counted",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
        delay_free_blocks |= connector_delay_free_blocks
""",
                now="""\
        request.reports_to_come = delay_free_blocks + connector_delay_free_blocks
        delay_free_blocks |= connector_delay_free_blocks
""",
                why="count the reports to come when a request ends; each must come once",
            ),
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
    def _free_blocks(self, request: Request):
        assert request.is_finished()
""",
                now="""\
    def _free_blocks(self, request: Request):
        assert request.is_finished()
        if getattr(request, "reports_to_come", 0) > 1:
            request.reports_to_come -= 1
            return
""",
                why="free the blocks at the last report",
            ),
        ),
    ],
    lab=scheduler_lab(
        with_flags(
            late_connector(),
            why="a connector that moves nothing",
        ),
        mechanism="late-connector",
    ),
    related=["vllm-project/vllm#43226", "vllm-project/vllm#56089", "vllm-project/vllm#48821"],
)
