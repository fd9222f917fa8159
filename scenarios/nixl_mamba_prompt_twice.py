"""NIXL prefill server with Mamba layers: some prompts crash the engine when sent twice.

A decode server computes the last prompt token of a Mamba model itself. So the connector of the
prefill server drops that token from each request, but only after the scheduler has looked the
prompt up in its prefix cache. If the prompt is one token longer than whole blocks and all blocks
are cached, no token is left to compute: an assertion fails. 0.29.0 drops the token when the request
arrives, before the lookup.

With blocks of 16 tokens, a prompt of 65 tokens crashes the engine; 64 and 66 do not. In the lab no
model runs and NIXL sends nothing. On GPUs the prefill server alone has the bug too, with NIXL
installed; vLLM may enlarge the blocks there.
"""

from vllm_repro.vocabulary import *

KILLS = flag("--block-size") * 4 + 1
LIVES = flag("--block-size") * 4 + 2
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

scenario = Scenario(
    id="nixl-mamba-prompt-twice",
    issue="vllm-project/vllm#53706",
    title=(
        "Mamba N-1 truncation after a full local prefix-cache hit makes num_new_tokens zero and"
        " crashes the prefill EngineCore"
    ),
    command="""
        vllm serve Qwen/Qwen3.5-9B
        --block-size 64
        --max-model-len 8192
        --max-num-batched-tokens 8192
        --enable-prefix-caching
        --mamba-cache-mode all
        --no-disable-hybrid-kv-cache-manager
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
    """,
    model=public_model(
        "Qwen/Qwen3.5-9B",
        why=(
            "the report's KimiK3ForConditionalGeneration needs four GPUs; this model has linear"
            " attention in three of four layers too"
        ),
    ),
    needs=Needs(gpus=1, gpu_memory_gb=24),
    status=Status(bad=">=0.20.2,<0.29.0", good=">=0.29.0"),
    try_with="0.28.0",
    defect=source_line(
        "vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py",
        "NixlPullConnectorScheduler.get_num_new_matched_tokens",
        "self._truncate_mamba_request_for_prefill(request)",
    ),
    workload=[
        completion(
            name="first", prompt=KILLS, shared=KILLS, max_tokens=1, kv_transfer_params=TO_DECODE
        ),
        completion(
            name="again", prompt=KILLS, shared=KILLS, max_tokens=1, kv_transfer_params=TO_DECODE
        ),
    ],
    trigger=prefix_hit(),
    signature=assertion("num_new_tokens > 0", frames=["schedule"]),
    arms=[
        arm("reported", dies),
        arm(
            "one-token-more",
            lives,
            workload=[
                completion(
                    name="first",
                    prompt=LIVES,
                    shared=LIVES,
                    max_tokens=1,
                    kv_transfer_params=TO_DECODE,
                ),
                completion(
                    name="again",
                    prompt=LIVES,
                    shared=LIVES,
                    max_tokens=1,
                    kv_transfer_params=TO_DECODE,
                ),
            ],
            why="one token is left after the last is dropped",
        ),
        arm(
            "truncated-first",
            lives,
            patched(
                "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py",
                was="""\
        params = request.kv_transfer_params
        # NOTE (NickLucche) This excludes request meant for P, ie heartbeats are
""",
                now="""\
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_decode") and self._has_mamba:
            self._truncate_mamba_request_for_prefill(request)
        # NOTE (NickLucche) This excludes request meant for P, ie heartbeats are
""",
                why="drop the token when the request arrives, as 0.29.0 does",
            ),
        ),
    ],
    lab=scheduler_lab(
        with_flags("--block-size 16", why="the tiny model's blocks keep this size"),
        with_flags(
            '--hf-overrides \'{"layer_types":["full_attention","linear_attention"]}\'',
            why="the lab's worker gives the second layer a Mamba state",
        ),
        family="qwen3",
    ),
    related=["vllm-project/vllm#53514", "vllm-project/vllm#53523"],
)
