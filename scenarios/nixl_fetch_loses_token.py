"""NIXL decode server: at certain prompt lengths each sliding-window layer loses one token.

The decode server fetches the blocks of the whole prompt and computes its last token again. Both
servers keep blocks for the window of the token after the prompt, but the window of the last prompt
token begins one token earlier. If (prompt - window + 1) is a multiple of the block size, that token
is in a block that the prefill server has freed and the decode server never allocated. The layer
reads the null block in its place. The answer is then wrong sometimes, with status 200: the wider
the window, the less one token weighs. With blocks of 16 tokens this holds for one of 16 prompt
lengths.

In the lab one server is both: it fetches from the blocks that its own first request left.
`remote_block_ids` are those that the answer to that request names, first the sliding layer's. Its
window of two tokens makes one lost token change each answer: in 16 of 16 prompts of 65 and 97
tokens, and in none of 8 of 66. With windows of 4 and 32 tokens it was 7 of 16 and 2 of 12. On GPUs
the command alone shows nothing: a second server must send the blocks. The pull request named here
brought NIXL to such models; we know of no report.
"""

from vllm_repro.vocabulary import *

LOSES = 65
LIVES = 66

FILE = "vllm/v1/core/single_type_kv_cache_manager.py"
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
PREFILL = remote_prefill("prefill", 5600, blocks=[[0, 3], [4, 5, 6]])
KEPT = remote_prefill("prefill", 5600, blocks=[[2, 3], [4, 5, 6]])

scenario = Scenario(
    id="nixl-fetch-loses-token",
    issue="vllm-project/vllm#32204",
    filed=False,
    title=(
        "NIXL: a fetched prompt loses one token of each sliding window if that token is the last of"
        " a block"
    ),
    command="""
        vllm serve google/gemma-3-1b-it
        --max-model-len 2048
        --block-size 32
        --no-enable-prefix-caching
        --no-disable-hybrid-kv-cache-manager
        --enforce-eager
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","engine_id":"prefill"}'
    """,  # noqa: E501  # one flag is one word
    model=Model(
        "google/gemma-3-1b-it",
        architecture="Gemma3ForCausalLM",
        heads=4,
        kv_heads=2,
        head_dim=32,
        layers=2,
        vocab_size=4096,
        block_size=32,
        max_position=32768,
        why="a small model with sliding windows",
    ),
    needs=Needs(gpus=2, gpu_memory_gb=4),
    status=Status(bad=">=0.20.2"),
    try_with="0.33.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._update_waiting_for_remote_kv",
        "request.num_computed_tokens = request.num_tokens - 1",
    ),
    workload=[
        completion(
            name="prefill", prompt=LOSES, shared=LOSES, max_tokens=1, kv_transfer_params=TO_DECODE
        ),
        completion(
            name="fetched",
            prompt=LOSES,
            shared=LOSES,
            logprobs=2,
            return_token_ids=True,
            kv_transfer_params=PREFILL,
        ),
        completion(name="alone", prompt=LOSES, shared=LOSES, logprobs=2, return_token_ids=True),
    ],
    trigger=answered("fetched", 200),
    output=checks(alike=[("alone", "fetched")]),
    arms=[
        arm("reported", errs),
        arm(
            "one-token-more",
            lives,
            workload=[
                completion(
                    name="prefill",
                    prompt=LIVES,
                    shared=LIVES,
                    max_tokens=1,
                    kv_transfer_params=TO_DECODE,
                ),
                completion(
                    name="fetched",
                    prompt=LIVES,
                    shared=LIVES,
                    logprobs=2,
                    return_token_ids=True,
                    kv_transfer_params=PREFILL,
                ),
                completion(
                    name="alone", prompt=LIVES, shared=LIVES, logprobs=2, return_token_ids=True
                ),
            ],
            why="the window of the last token begins with a block",
        ),
        arm(
            "patched",
            lives,
            patched(
                FILE,
                was=(
                    "            num_computed_tokens - self.sliding_window + 1 -"
                    " self.extra_retained_tokens,\n"
                ),
                now=(
                    "            num_computed_tokens - self.sliding_window -"
                    " self.extra_retained_tokens,\n"
                ),
                why=(
                    "keep one token more, on both servers; no fix to propose: it keeps the token"
                    " for every user of sliding windows, without a larger bound for admission"
                    " (#39734), and with OffloadingConnector the engine of 0.33.0 then dies (Chunk"
                    " not found in cache)"
                ),
            ),
            workload=[
                completion(
                    name="prefill",
                    prompt=LOSES,
                    shared=LOSES,
                    max_tokens=1,
                    kv_transfer_params=TO_DECODE,
                ),
                completion(
                    name="fetched",
                    prompt=LOSES,
                    shared=LOSES,
                    logprobs=2,
                    return_token_ids=True,
                    kv_transfer_params=KEPT,
                ),
                completion(
                    name="alone", prompt=LOSES, shared=LOSES, logprobs=2, return_token_ids=True
                ),
            ],
            why=(
                "the answer to the first request then names the sliding layer's block before the"
                " last, too"
            ),
        ),
    ],
    lab=Lab(
        mechanism="nixl",
        family="gemma3",
        layers=["sliding", "full"],
        window=2,
        weights="made",
        why=(
            "in the made weights a token depends on all before it, and with a window of two tokens"
            " a lost one shows in each answer; with 32 tokens 2 of 12 answers differed. One server"
            " is both: it fetches the blocks of its own first request"
        ),
        changes=[with_flags("--dtype float32", why="a difference is then no rounding")],
    ),
)
