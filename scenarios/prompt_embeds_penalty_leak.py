"""A prompt given as embeddings is penalised for the tokens of another client's request.

A request with `prompt_embeds` has no token ids, so the model runner writes none into its row of the
batch. A penalty reads the row all the same, with the tokens of the request before it. The answer
has status 200 and is wrong. It reveals whether the other prompt had a certain token. The issue
reports the crash that the same lines cause with asynchronous scheduling
(`prompt-embeds-penalty-async`). Without it, as on vLLM's CPU platform, the engine lives and answers
wrongly.

Here a bias makes token 73 the first choice and 74 the second. A penalty on 73 makes 74 the first.
The two equal requests have no token ids, but the prompt between them consists of 73. Each try needs
a new boot: on the same server the next first request finds that prompt, too. The issue gives the
requests but no server command. The embeddings are for models with 256 hidden dimensions, which the
tiny model has.
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

PENALISED = {
    "prompt_embeds": EMBEDS,
    "max_tokens": 1,
    "temperature": 0,
    "repetition_penalty": 2.0,
    "logit_bias": {"73": 100, "74": 75},
}
PLAIN = {
    "prompt_embeds": EMBEDS,
    "max_tokens": 1,
    "temperature": 0,
    "logit_bias": {"73": 100, "74": 75},
}

scenario = Scenario(
    id="prompt-embeds-penalty-leak",
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
    needs=Needs(),
    status=Status(bad=">=0.20.2"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/worker/gpu_input_batch.py",
        "InputBatch._make_prompt_token_ids_cpu_tensor",
        "prompt_token_ids[:] = self.token_ids_cpu[:num_reqs, :max_prompt_len]",
    ),
    workload=[
        request(name="first", path="/v1/completions", body=PENALISED),
        completion(name="another client", prompt=[73] * 1000, max_tokens=1),
        request(name="again", path="/v1/completions", body=PENALISED),
    ],
    output=checks(alike=[("first", "again")]),
    trigger=answered("another client", 200)
    & sent_with("prompt_embeds", "repetition_penalty", name="again"),
    arms=[
        arm("reported", errs),
        arm(
            "no-penalty",
            lives,
            workload=[
                request(name="first", path="/v1/completions", body=PLAIN),
                completion(name="another client", prompt=[73] * 1000, max_tokens=1),
                request(name="again", path="/v1/completions", body=PLAIN),
            ],
            trigger=answered("another client", 200) & sent_with("prompt_embeds", name="again"),
            why="nothing reads the row",
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
)
