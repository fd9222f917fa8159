"""KV connectors: rejected blocks stay in the prefix cache and make later answers wrong.

A connector may load a prompt in the step that needs it, and report blocks that did not come. With
`kv_load_failure_policy` `recompute` the scheduler counts those tokens as not computed, and computes
them again, in chunks. It leaves the blocks in the prefix cache, because the request fills them
again. A request that is preempted before that resumes, finds them there, and continues after tokens
whose keys and values were never written. The server returns 200.

The pool has room for the prompt and one more block. Another request takes a second block while the
prompt is computed again. The prompt is sent twice, rejected and alone, and both answers should be
equal. Between the two another prompt takes the blocks.

The pull request named here is open and names this cause, too. The bug takes a connector that loads
within the step, and a preemption before the blocks are computed again.
"""

from vllm_repro.vocabulary import *

SIZE = 2112  # 66 blocks; 45 steps of 47 tokens beside a request that decodes
GROWS = completion(name="grows", prompt=1, max_tokens=90, ignore_eos=True)
FILLS = completion(name="fills the cache", prompt=2100, max_tokens=1)


REJECTED = completion(
    name="rejected",
    prompt=SIZE,
    shared=SIZE,
    max_tokens=16,
    logprobs=2,
    return_token_ids=True,
    kv_transfer_params={"reject": True},
    starts_after=0.05,
)
ALONE = completion(
    name="alone", prompt=SIZE, shared=SIZE, max_tokens=16, logprobs=2, return_token_ids=True
)

scenario = Scenario(
    id="kv-load-rejected-cached",
    issue="vllm-project/vllm#53298",
    title=(
        "Blocks whose KV load was rejected stay in the prefix cache: wrong answers after a"
        " preemption"
    ),
    command="""
        VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --enforce-eager
        --no-async-scheduling
        --enable-prefix-caching
        --enable-chunked-prefill
        --block-size 32
        --num-gpu-blocks-override 68
        --max-model-len 2144
        --max-num-seqs 4
        --max-num-batched-tokens 48
        --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.20.2"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._handle_invalid_blocks",
        "if sync_blocks_to_evict and not self.recompute_kv_load_failures:",
    ),
    workload=[
        together(GROWS, REJECTED),
        FILLS,
        ALONE,
    ],
    trigger=sent_with("kv_transfer_params"),
    output=checks(alike=[("alone", "rejected")]),
    arms=[
        arm("reported", errs),
        arm("room", lives, with_flags("--num-gpu-blocks-override 80"), why="nothing is preempted"),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="        if sync_blocks_to_evict and not self.recompute_kv_load_failures:\n",
                now="        if sync_blocks_to_evict:\n",
                why=(
                    "the blocks are taken out of the prefix cache, as with the policy `fail`; no"
                    " fix to propose: once computed again they are not put back"
                ),
            ),
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=2,
        weights="made",
        why="in the made weights a token depends on all before it, so a lost block shows",
        changes=[
            with_flags(
                late_connector(rejects=True),
                why="a connector that moves nothing, and rejects the load",
            ),
        ],
    ),
    related=["vllm-project/vllm#45138"],
)
