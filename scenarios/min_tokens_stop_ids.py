"""A request with `min_tokens` and a stop token id outside the vocabulary crashes the engine.

vLLM validated every list of token ids in a request against the vocabulary except `stop_token_ids`.
With `min_tokens` set, the sampler masks the logits of these ids until enough tokens are generated.
An id past the end of the row raises an IndexError on a CPU and a device-side assertion on a GPU;
either one crashes the engine for all clients. Without `min_tokens` the same request is harmless,
because no code indexes with the id. Releases up to 0.28.0 have the bug; from 0.29.0 on the server
refuses such a request with a 400.

The issue gives the request but no server command. The command here is a plain one for a small
public model; any model shows the bug, because it is in the sampler. The model runs in float32: with
bfloat16 on a machine with AMX, the first request to such a small model crashes with an illegal
instruction in vLLM's attention (0.28.0, 0.29.0).
"""

from vllm_repro.vocabulary import *

BEYOND_ANY_VOCABULARY = 999999

scenario = Scenario(
    id="min-tokens-stop-ids",
    issue="vllm-project/vllm#54195",
    title="Out-of-vocabulary stop_token_ids kill the engine when min_tokens is set",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 8192
        --max-num-batched-tokens 512
        --max-num-seqs 8
        --enforce-eager
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
            "near-miss",
            untriggered,
            workload=[
                completion(
                    name="completion without min_tokens",
                    prompt="hello",
                    max_tokens=4,
                    stop_token_ids=[BEYOND_ANY_VOCABULARY],
                )
            ],
            why="the same stop token, but no code indexes with it",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/sampling_params.py",
                was="        self._validate_logit_bias(model_config)\n",
                now=(
                    "        self._validate_logit_bias(model_config)\n        vocab_size ="
                    " model_config.get_vocab_size()\n        beyond = [token for token in"
                    " self.stop_token_ids or () if not 0 <= token < vocab_size]\n        if"
                    " beyond:\n            raise VLLMValidationError(\n               "
                    ' f"stop_token_ids {beyond} are not below {vocab_size}",'
                    ' parameter="stop_token_ids", value=beyond\n            )\n'
                ),
                why=(
                    "refuse a stop token outside the vocabulary, as vLLM does for ids in logit_bias"
                ),
            ),
            why="the check of 0.29.0, written for the source of 0.20.0 to 0.28.0",
        ),
    ],
    related=["vllm-project/vllm#54196"],
)
