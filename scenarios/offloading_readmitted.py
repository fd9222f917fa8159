"""OffloadingConnector: a preempted request that resumes during its own store kills the engine.

A preemption flushes the stores of the request, but the scheduler receives that only with the output
of that step. With asynchronous scheduling it schedules the next step before. If another request
finishes then, there is room, and the preempted request is admitted again. If the CPU pool has more
of its prompt than the GPU's cache, the connector begins a load while a store is still pending, and
an assertion fails. 0.24.0 delays such a request.

It needs two groups of layers here, a full pool, shared prompts, and a request that finishes in one
certain step. On GPUs this workload alone shows the bug very rarely. In the lab no model runs, the
five requests share their first step, and a store takes nine steps.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="offloading-readmitted",
    issue="vllm-project/vllm#46014",
    title=(
        "OffloadingConnector crashes with `assert not req_status.transfer_jobs` when a preempted"
        " request is re-admitted"
    ),
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 160
        --max-num-batched-tokens 32
        --max-num-seqs 8
        --block-size 16
        --num-gpu-blocks-override 36
        --enable-chunked-prefill
        --enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1310720}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "google/gemma-3-1b-it", why="a small model with full attention and sliding windows"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.23.0,<0.24.0", good=">=0.24.0"),
    try_with="0.23.0",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler.update_state_after_alloc",
        "assert not req_status.transfer_jobs",
    ),
    workload=[
        together(
            completion(name="33", prompt=33, shared=33, max_tokens=57, ignore_eos=True),
            completion(name="49", prompt=49, max_tokens=1, ignore_eos=True),
            completion(name="60", prompt=60, max_tokens=77, ignore_eos=True),
            completion(name="65", prompt=65, shared=65, max_tokens=89, ignore_eos=True),
            completion(name="96", prompt=96, shared=96, max_tokens=57, ignore_eos=True),
        ),
    ],
    trigger=preempted(),
    signature=assertion(
        "not req_status.transfer_jobs",
        frames=["schedule", "update_state_after_alloc", "update_state_after_alloc"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "synchronous",
            lives,
            with_flags("--no-async-scheduling"),
            why="the end of the store is read in time",
        ),
        arm(
            "delayed",
            lives,
            patched(
                "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
                was="""\
        req_status = self._req_status[request.request_id]
        for group_state in req_status.group_states:
            group_state.block_ids.clear()
""",
                now="""\
        req_status = self._req_status[request.request_id]
        if req_status.transfer_jobs:
            return None, False
        for group_state in req_status.group_states:
            group_state.block_ids.clear()
""",
                why="ask the connector again later, as 0.24.0 does",
            ),
        ),
    ],
    lab=scheduler_lab(
        with_flags(
            offloading(327_680, store_polls=8, load_polls=0),
            why="room for twenty blocks of the two layers; a store is under way for eight polls",
        ),
        layers=["sliding", "full"],
        window=32,
    ),
    related=["vllm-project/vllm#46231", "vllm-project/vllm#46082"],
)
