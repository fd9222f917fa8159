"""KV offloading to the CPU: a client that leaves while its request waits kills the engine.

With prefix caching a request has block hashes from its arrival on, and the offloading connector
makes a key of each. Blocks are allocated only when the scheduler admits it. To store the last block
of a finished request, 0.26.0 also visits requests that have just ended, and counts the whole prompt
as computed. A request that never ran has keys of its prompt but no blocks: an assertion that both
lists are equally long fails in the scheduler. A prompt of one whole block is enough.

Any disconnect, client timeout or cancelled stream triggers it while the server is busy. 0.27.0
counts only the tokens computed before the abort.
"""

from vllm_repro.vocabulary import *

BUSY = completion(name="busy", prompt=200, max_tokens=2000, ignore_eos=True)

scenario = Scenario(
    id="offloading-waiting-leaves",
    issue="vllm-project/vllm#49118",
    title="OffloadingConnector: aborting a queued request kills the engine",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --max-model-len 4096
        --max-num-batched-tokens 512
        --max-num-seqs 1
        --enable-chunked-prefill
        --enable-prefix-caching
        --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1073741824}}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.26.0,<0.27.0", good=">=0.27.0"),
    try_with="0.26.0",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler._build_store_jobs",
        "num_tokens_after_batch = req.num_tokens",
    ),
    workload=[
        together(
            BUSY,
            completion(name="leaves", prompt=200, max_tokens=8, starts_after=1, leaves_after=1),
        ),
    ],
    trigger=left_waiting("leaves"),
    signature=assertion(
        "len(offload_keys) == len(offload_block_ids)",
        frames=["schedule", "build_connector_meta", "_build_store_jobs"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "near-miss",
            untriggered,
            workload=[
                together(
                    BUSY,
                    completion(
                        name="short", prompt=15, max_tokens=8, starts_after=1, leaves_after=1
                    ),
                ),
            ],
            why="the prompt does not fill a block of 16 tokens, so it has no key",
        ),
        arm(
            "no-offloading",
            lives,
            without("--kv-transfer-config"),
            why="no connector stores blocks",
        ),
    ],
    lab=scheduler_lab(mechanism="offloading", arms=["reported", "near-miss", "no-offloading"]),
    related=["vllm-project/vllm#52170", "vllm-project/vllm#51013", "vllm-project/vllm#49285"],
)
