"""OffloadingConnector with sliding windows: a KV block twice in a store job crashes the engine.

The connector delays a store while the CPU pool is full of stores in flight. Meanwhile a
sliding-window layer frees a block, and the same request gets it again, so the store that is made
later lists the block twice. The connector keeps a set of pending jobs for each block. When the job
is done, it is removed once for each entry: the second removal finds no key, and EngineCore exits
with a KeyError.

It needs sliding windows, the hybrid manager and a CPU pool too small for the stores in flight. On
GPUs the reporter saw it after a few requests of real traffic. This workload shows it rarely there,
because copies finish within a step. In the lab no model runs, the four requests share their first
step, and a store takes two steps. 0.23.0 drops the blocks of a window that has moved on.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="offloading-window-twice",
    issue="vllm-project/vllm#42761",
    title="KV offloading with sliding windows: KeyError in _remove_pending_job",
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 208
        --max-num-batched-tokens 64
        --max-num-seqs 8
        --block-size 16
        --num-gpu-blocks-override 35
        --enable-chunked-prefill
        --enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":655360}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "google/gemma-3-1b-it",
        why="the report does not name its model; this one has sliding windows",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.21.0,<0.23.0", good=">=0.23.0"),
    try_with="0.22.1",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler._build_store_jobs",
        "sliding_window_block_ids.append(block_id)",
    ),
    workload=[
        together(
            completion(name="17", prompt=17, max_tokens=15, ignore_eos=True),
            completion(name="65", prompt=65, max_tokens=15, ignore_eos=True),
            completion(name="109", prompt=109, max_tokens=67, ignore_eos=True),
            completion(name="137", prompt=137, max_tokens=48, ignore_eos=True),
        ),
    ],
    trigger=preempted(),
    signature=signature(
        phase="request",
        exception="KeyError",
        message="{block}",
        source="pending = self._block_id_to_pending_jobs[bid]",
        frames=[
            "update_from_output",
            "_update_from_kv_xfer_finished",
            "update_connector_output",
            "_remove_pending_job",
        ],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "more-room",
            lives,
            with_flags(
                offloading(26_214_400),
            ),
            why="the CPU pool has room for each store, so none is put off",
        ),
        arm(
            "no-offloading",
            lives,
            without("--kv-transfer-config"),
            why="no connector stores blocks",
        ),
    ],
    lab=scheduler_lab(
        with_flags(
            offloading(163_840, store_polls=1),
            why="room for ten blocks of the two layers; a store is under way for one poll",
        ),
        layers=["full", "sliding"],
        window=16,
    ),
)
