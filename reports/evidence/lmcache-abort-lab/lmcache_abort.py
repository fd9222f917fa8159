"""LMCache: a client that leaves before its answer kills the engine.

vLLM reports the end of a request to the scheduler half of its KV connector. LMCache makes its
storage engine in the worker half alone. At an abort the scheduler half of 0.5.0 asserts that the
engine exists, and the first abort crashes EngineCore. 0.5.1 checks instead (LMCache/LMCache#3340).

The lab has no model and no worker half of LMCache. The scheduler half finds no stored block, and
waits 100 ms for the answer of a worker that is not there. `--max-num-seqs 1` keeps the request that
leaves waiting, which the trigger can prove. In the reports the requests ran.

The declared releases are those of vLLM that crash with LMCache 0.5.0.
"""

from vllm_repro.vocabulary import *

BUSY = completion(name="busy", prompt=32, max_tokens=20000, ignore_eos=True)
LEAVES = completion(name="leaves", prompt=64, max_tokens=8, starts_after=0.3, leaves_after=0.5)
STAYS = completion(name="stays", prompt=64, max_tokens=8, starts_after=0.3)

scenario = Scenario(
    id="lmcache-abort",
    issue="LMCache/LMCache#3499",
    title="EngineCore crashes with AssertionError when a request is aborted",
    command="""
        LMCACHE_CHUNK_SIZE=16 LMCACHE_LOCAL_CPU=True LMCACHE_MAX_LOCAL_CPU_SIZE=1
        LMCACHE_LOOKUP_TIMEOUT_MS=100 vllm serve Qwen/Qwen3-1.7B
        --max-model-len 32768
        --max-num-seqs 1
        --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
    """,
    model=public_model(
        "Qwen/Qwen3-1.7B", tiny_will_do=True, why="the connector does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.20.2"),
    try_with="0.28.0",
    workload=[together(BUSY, LEAVES)],
    trigger=left_waiting("leaves"),
    signature=assertion("self.lmcache_engine is not None", frames=["request_finished"]),
    arms=[
        arm("reported", dies),
        arm(
            "stays",
            untriggered,
            workload=[together(BUSY, STAYS)],
            why="the same requests, and no client leaves",
        ),
    ],
    lab=scheduler_lab(),
    related=["LMCache/LMCache#3337", "LMCache/LMCache#3688"],
)
