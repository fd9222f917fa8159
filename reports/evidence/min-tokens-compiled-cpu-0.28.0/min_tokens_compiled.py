"""The crash of min-tokens-stop-ids with the compiler on, and its price against `--enforce-eager`.

The bug is that of `scenarios/min_tokens_stop_ids.py`, which runs eagerly. This one compiles, so
that a run shows what eager mode costs on this machine.
"""

from vllm_repro.vocabulary import *

BEYOND_ANY_VOCABULARY = 999999

scenario = Scenario(
    id="min-tokens-compiled",
    issue="vllm-project/vllm#54195",
    title="Out-of-vocabulary stop_token_ids kill the engine when min_tokens is set",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 8192
        --max-num-batched-tokens 512
        --max-num-seqs 8
    """,
    model=Model(
        "Qwen/Qwen3-0.6B",
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocab_size=151936,
        max_position=40960,
        tiny_will_do=True,
        why="the bug is in the sampler and does not depend on weights",
    ),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.19.1,<0.29.0", good=">=0.29.0"),
    try_with="0.28.0",
    defect=source_line(
        "vllm/v1/sample/logits_processor/builtin.py",
        "MinTokensLogitsProcessor.apply",
        "logits.index_put_(self.logits_slice, self.neg_inf_tensor)",
    ),
    workload=[
        completion(name="ordinary completion", prompt="hello", max_tokens=4),
        completion(
            name="completion with an unknown stop token",
            prompt="hello",
            max_tokens=4,
            min_tokens=1,
            stop_token_ids=[BEYOND_ANY_VOCABULARY],
        ),
    ],
    trigger=sent_with("min_tokens", "stop_token_ids"),
    signature=signature(
        phase="request",
        exception="IndexError",
        message="index {index} is out of bounds for dimension 1 with size {vocabulary}",
        frames=["sample_tokens", "_sample", "apply_logits_processors", "apply"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "eager",
            untriggered,
            with_flags("--enforce-eager"),
            workload=[
                completion(
                    name="completion without min_tokens",
                    prompt="hello",
                    max_tokens=4,
                    stop_token_ids=[BEYOND_ANY_VOCABULARY],
                )
            ],
            why="the baseline: the same stop token, but no code indexes with it",
        ),
    ],
    throughput=throughput(prompt=128, output=128, concurrency=[1, 4], baseline="eager"),
    same_death_as="min-tokens-stop-ids",
    related=["vllm-project/vllm#54196"],
)
