"""A seeded request whose prompt takes two steps kills the engine of vLLM's CPU backend.

A step that computes a part of a prompt samples a token all the same, and drops it. For a request
with `seed` it then sets the random generator back, by moving its offset. Only CUDA's generators
have an offset: PyTorch raises `CPU Generator does not use offset`, which nothing catches. The line
came with #10097 and is in the first model runner. The CPU backend uses it without a Triton for
CPUs, which the published packages do not bring; by its source, the second one is not affected.

It needs no flag: the default budget of a step is 2,048 tokens on a CPU, or less if other prompts
are in the step. A prompt of one step is harmless, and so is one whose beginning is in the prefix
cache.
"""

from vllm_repro.vocabulary import *

scenario = Scenario(
    id="cpu-seed-in-two-steps",
    issue="vllm-project/vllm#10097",
    filed=False,
    title="CPU backend: a request with seed whose prompt takes two steps kills the engine",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 8192
        --max-num-batched-tokens 512
        --max-num-seqs 8
        --enforce-eager
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B",
        tiny_will_do=True,
        why="the bug is in the model runner and does not depend on weights",
    ),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.20.0"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/worker/gpu_model_runner.py",
        "GPUModelRunner._bookkeeping_sync",
        "gen.set_offset(gen.get_offset() - 4)",
    ),
    workload=[
        completion(name="seed, one step", prompt=20, max_tokens=4, seed=1, temperature=1),
        completion(name="seed, two steps", prompt=600, max_tokens=4, seed=1, temperature=1),
    ],
    trigger=sent_with("seed", name="seed, two steps") & chunked_prefill(chunks=2),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="CPU Generator does not use offset",
        source="gen.set_offset(gen.get_offset() - 4)",
        frames=["sample_tokens", "_bookkeeping_sync"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "without-seed",
            untriggered,
            workload=[completion(name="no seed", prompt=600, max_tokens=4, temperature=1)],
            why="a request without seed has no generator of its own",
        ),
        arm(
            "one-step",
            untriggered,
            with_flags("--max-num-batched-tokens 2048"),
            why="the whole prompt fits one step",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/worker/gpu_model_runner.py",
                was=(
                    "            if gen is not None:\n"
                    "                gen.set_offset(gen.get_offset() - 4)\n"
                ),
                now=(
                    '            if gen is not None and gen.device.type == "cpu":\n'
                    "                gen.manual_seed(gen.initial_seed())\n"
                    "            elif gen is not None:\n"
                    "                gen.set_offset(gen.get_offset() - 4)\n"
                ),
                why=(
                    "a prompt's first steps keep no token, so the generator starts anew; one that"
                    " is computed again after a preemption would repeat its random numbers"
                ),
            ),
        ),
    ],
    related=["vllm-project/vllm#9945", "vllm-project/vllm#10097"],
)
