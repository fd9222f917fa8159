"""On a CPU, a request with `top_k` kills an engine that drafts tokens, in its first step.

An engine with drafts sends each step to the rejection sampler, also one without drafts, such as a
prompt's. (Up to 0.29.0 such a step went to the usual sampler.) The rejection sampler then has no
row of logits, and `apply_top_k_only` takes the largest `k` of none: PyTorch raises
`max(): Expected reduction dim to be specified for input.numel() == 0`. With `top_p` below 1 in the
step, or with Triton as on GPUs, other code is used.

Any `--speculative-config` will do, and any request with `top_k`. With this mended, `top_k` meets
#55005 in the next step with drafts: the CPU's stand-in for a kernel of Triton drops its output.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="cpu-drafts-top-k",
    issue="vllm-project/vllm#55005",
    filed=False,
    title="CPU backend: a request with top_k kills an engine with speculative decoding",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 8192
        --max-num-batched-tokens 512
        --max-num-seqs 8
        --enforce-eager
        --speculative-config '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B",
        tiny_will_do=True,
        why="the bug is in the sampler and does not depend on weights",
    ),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.32.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/sample/ops/topk_topp_sampler.py",
        "apply_top_k_only",
        "max_top_k = k.max()",
    ),
    workload=[
        completion(name="greedy", prompt=20, max_tokens=4),
        completion(name="with top_k", prompt=20, max_tokens=1, temperature=1, top_k=5),
    ],
    trigger=sent_with("top_k", name="with top_k"),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="max(): Expected reduction dim to be specified for input.numel() == 0.",
        source="max_top_k = k.max()",
        frames=["forward", "apply_sampling_constraints", "apply_top_k_only"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "no-spec-decode",
            lives,
            without("--speculative-config"),
            why="the usual sampler has a row for each request",
        ),
        arm(
            "near-miss",
            untriggered,
            workload=[completion(name="top_p alone", prompt=20, temperature=1, top_p=0.9)],
            why="the same step without top_k",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/sample/ops/topk_topp_sampler.py",
                was="    no_top_k_mask = k == logits.shape[1]\n",
                now=(
                    "    if logits.shape[0] == 0:\n        return logits\n"
                    "    no_top_k_mask = k == logits.shape[1]\n"
                ),
                why="a step without drafts has no row to mask",
            ),
        ),
    ],
    related=["vllm-project/vllm#15063", "vllm-project/vllm#55005"],
)
