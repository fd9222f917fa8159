"""Priorities: a request preempted in the step that scheduled it leaves uncomputed cached blocks.

With `--scheduling-policy priority` a request may lose its blocks to a more important one in the
step for which it is already scheduled. It is taken out of the step, but the blocks that this step
would have filled are already in the prefix cache. The request resumes, finds them there, and
continues after tokens whose keys and values were never written. The server returns 200.

The pool has room for three parts of the long prompt and two short requests. In the step of the
third part both short ones need another block. One prompt is sent twice, beside them and alone, and
both answers should be equal. Between the two another prompt takes the blocks. The pull request
named here takes such blocks out of the cache, and is open. #57580 has the same for Mamba states, in
a unit test. 0.28.0 has the same lines, but caps the steps of a request that is alone: this workload
does not reach them.
"""

from vllm_repro.vocabulary import *

SIZE = 2112  # steps of 1024, 512, 512 and 64 tokens
VICTIM = completion(
    name="less important",
    prompt=SIZE,
    shared=SIZE,
    max_tokens=16,
    logprobs=2,
    return_token_ids=True,
    priority=9,
)
FILLS = completion(name="fills the cache", prompt=2100, max_tokens=1)
ALONE = completion(
    name="alone",
    prompt=SIZE,
    shared=SIZE,
    max_tokens=16,
    logprobs=2,
    return_token_ids=True,
    priority=9,
)

scenario = Scenario(
    id="priority-uncomputed-blocks",
    issue="vllm-project/vllm#43569",
    title=(
        "Priority preemption leaves blocks in the prefix cache that were never computed: wrong"
        " answers"
    ),
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --enforce-eager
        --scheduling-policy priority
        --enable-prefix-caching
        --enable-chunked-prefill
        --block-size 32
        --num-gpu-blocks-override 69
        --max-model-len 2144
        --max-num-seqs 4
        --max-num-batched-tokens 1024
        --long-prefill-token-threshold 512
        --enable-logging-iteration-details
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B", tiny_will_do=True, why="the scheduler does not use weights"
    ),
    needs=Needs(),
    status=Status(bad=">=0.32.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        "if preempted_req in scheduled_running_reqs:",
    ),
    workload=[
        together(
            VICTIM,
            completion(name="important", prompt=64, max_tokens=8, starts_after=0.1),
            completion(name="important, too", prompt=64, max_tokens=8, starts_after=0.1),
        ),
        FILLS,
        ALONE,
    ],
    trigger=preempted(),
    output=checks(alike=[("alone", "less important")]),
    arms=[
        arm("reported", errs),
        arm(
            "no-prefix-caching",
            lives,
            with_flags("--no-enable-prefix-caching"),
            why="a request that comes back finds no blocks",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/kv_cache_manager.py",
                was="        self.block_pool.evict_blocks(block_ids)\n",
                now="""\
        self.block_pool.evict_blocks(block_ids)

    def evict_uncomputed_blocks(self, request: Request) -> None:
        for manager in self.coordinator.single_type_managers:
            first = request.num_computed_tokens // manager.block_size
            blocks = manager.req_to_blocks.get(request.request_id, ())[first:]
            self.evict_blocks({block.block_id for block in blocks if not block.is_null})
""",
            ),
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="                            req_to_new_blocks.pop(preempted_req_id)\n",
                now="""\
                            req_to_new_blocks.pop(preempted_req_id)
                            self.kv_cache_manager.evict_uncomputed_blocks(preempted_req)
""",
                why=(
                    "blocks that the step no longer fills leave the prefix cache, as in the pull"
                    " request named here; a request that shares such a block in the same step was"
                    " not tried"
                ),
            ),
        ),
    ],
    lab=Lab(
        mechanism="offload",
        layers=2,
        weights="made",
        why=(
            "nothing that runs here is replaced; in the made weights a token depends on all before"
            " it, so a lost block shows"
        ),
    ),
    related=["vllm-project/vllm#57580"],
)
