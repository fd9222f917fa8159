"""A prompt of embeddings with a penalty crashes the engine if another request had its row.

A request with `prompt_embeds` has no token ids, so the model runner writes none into its row of the
batch. A penalty reads the row all the same. With asynchronous scheduling, the default on GPUs, the
row of a finished request has -1 for each token of its answer. A prompt of embeddings that is longer
than the prompt before it in this row reads them as token ids: an index error on a CPU, on a GPU the
reported device-side assertion (`scatter gather kernel index out of bounds`). Without asynchronous
scheduling the engine lives and answers wrongly (`prompt-embeds-penalty-leak`).

The issue gives the requests but no server command. The lab lets the CPU platform schedule
asynchronously. The embeddings are for models with 256 hidden dimensions, which the tiny model has.
On a GPU the exception is CUDA's, so a crash there is reported as another crash.
"""

from vllm_repro.vocabulary import *

# 300 embeddings of ones: torch.save(torch.ones(1, 1).expand(300, 256)) in base64
EMBEDS = (
    "gAKKCmz8nEb5IGqoUBkugAJN6QMugAJ9cQAoWBAAAABwcm90b2NvbF92ZXJzaW9ucQFN6QNYDQAAAGxpdHRsZV9lbmRpYW5xAohYCgAAAHR5cG"
    "Vfc2l6ZXNxA31xBChYBQAAAHNob3J0cQVLAlgDAAAAaW50cQZLBFgEAAAAbG9uZ3EHSwR1dS6AAmN0b3JjaC5fdXRpbHMKX3JlYnVpbGRfdGVu"
    "c29yX3YyCnEAKChYBwAAAHN0b3JhZ2VxAWN0b3JjaApGbG9hdFN0b3JhZ2UKcQJYDgAAADk0MDExMDE2NTkyNDAwcQNYAwAAAGNwdXEESwFOdH"
    "EFUUsATSwBTQABhnEGSwBLAIZxB4ljY29sbGVjdGlvbnMKT3JkZXJlZERpY3QKcQgpUnEJdHEKUnELLoACXXEAWA4AAAA5NDAxMTAxNjU5MjQw"
    "MHEBYS4BAAAAAAAAAAAAgD8="
)

LONG_ANSWER = completion(name="long answer", prompt=[5] * 10, max_tokens=320, ignore_eos=True)

scenario = Scenario(
    id="prompt-embeds-penalty-async",
    issue="vllm-project/vllm#57719",
    title="prompt_embeds + any penalty kills the engine with a device-side assert",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --enable-prompt-embeds
        --max-model-len 4096
        --enforce-eager
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B",
        tiny_will_do=True,
        why="the bug is in the batch of the model runner and does not depend on weights",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.19.1"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/worker/gpu_input_batch.py",
        "InputBatch._make_prompt_token_ids_cpu_tensor",
        "prompt_token_ids[:] = self.token_ids_cpu[:num_reqs, :max_prompt_len]",
    ),
    workload=[
        LONG_ANSWER,
        request(
            name="embeddings",
            path="/v1/completions",
            body={
                "prompt_embeds": EMBEDS,
                "max_tokens": 4,
                "temperature": 0,
                "repetition_penalty": 1.5,
            },
        ),
    ],
    trigger=answered("long answer", 200)
    & sent_with("prompt_embeds", "repetition_penalty", name="embeddings"),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="index -1 is out of bounds for dimension {dimension} with size {size}",
        frames=["apply_penalties", "get_token_bin_counts_and_mask"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "sync",
            lives,
            with_flags("--no-async-scheduling"),
            why="the row has token ids instead of -1",
        ),
        arm(
            "near-miss",
            untriggered,
            workload=[
                LONG_ANSWER,
                request(
                    name="embeddings",
                    path="/v1/completions",
                    body={"prompt_embeds": EMBEDS, "max_tokens": 4, "temperature": 0},
                ),
            ],
            why="without a penalty nothing reads the row",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/worker/gpu_input_batch.py",
                was=(
                    "        prompt_token_ids[:] = self.token_ids_cpu[:num_reqs, :max_prompt_len]\n"
                ),
                now=(
                    "        prompt_token_ids[:] = self.token_ids_cpu[:num_reqs, :max_prompt_len]\n"
                    "        prompt_token_ids[~self.is_token_ids[:num_reqs, :max_prompt_len]] ="
                    " self.vocab_size\n"
                ),
                why="give positions without a token id the padding value, which no penalty reads",
            ),
        ),
    ],
    lab=Lab(
        mechanism="async", layers=2, why="the batch of the model runner does not depend on weights"
    ),
)
