"""Streaming session: draft tokens beyond a turn's end crash the engine or hide the next input.

A turn of a session ends at `max_tokens`. If its last step accepts draft tokens beyond that, they
are taken off the answer, but they stay counted as computed. The next input of the session is
appended behind the answer, so its first tokens count as computed as well. If the input has no more
tokens than were taken off, nothing is left to schedule, and a bare assertion crashes the engine. A
longer input loses its first tokens. A search saw that, and the inputs here, of one token, do not
show it.

The session's turns here end after 6 to 9 tokens, so some of them end within the drafts of a step,
and each input is one token. The lab feeds a text model through a route of its own: /v1/realtime
serves audio models. 0.33.0 keeps all tokens of a turn but the last. The fix proposed in #44526
lowers the count to the new length of the prompt: the crash becomes a session that waits for ever,
and the hidden input stays hidden.
"""

from vllm_repro.vocabulary import *

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
SEGMENTS = [[11] * 64, 2, [12], 2, [12], 1]

scenario = Scenario(
    id="session-drafts-outlive-turn",
    issue="vllm-project/vllm#44526",
    title=(
        "Streaming session with speculative decoding: drafts accepted beyond the end of a turn kill"
        " the engine"
    ),
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --enforce-eager
        --max-model-len 4096
        --no-async-scheduling
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    """,  # noqa: E501  # one flag is one word
    model=public_model(
        "Qwen/Qwen3-0.6B", max_position=131072, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.20.2,<0.33.0", good=">=0.33.0"),
    try_with="0.32.0",
    defect=source_line(
        SCHEDULER,
        "Scheduler._update_request_as_session",
        "num_computed_tokens = session.num_computed_tokens",
    ),
    workload=[
        request(
            name="turns of 6 tokens",
            path="/segments",
            body={"segments": SEGMENTS, "max_tokens": 6, "temperature": 0, "ignore_eos": True},
        ),
        request(
            name="turns of 7 tokens",
            path="/segments",
            body={"segments": SEGMENTS, "max_tokens": 7, "temperature": 0, "ignore_eos": True},
        ),
        request(
            name="turns of 8 tokens",
            path="/segments",
            body={"segments": SEGMENTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True},
        ),
        request(
            name="turns of 9 tokens",
            path="/segments",
            body={"segments": SEGMENTS, "max_tokens": 9, "temperature": 0, "ignore_eos": True},
        ),
    ],
    trigger=drafting(),
    signature=assertion("num_new_tokens > 0", frames=["step", "schedule"]),
    arms=[
        arm("reported", dies),
        arm(
            "no-drafts",
            untriggered,
            without("--speculative-config"),
            why="a step computes no token beyond the end of a turn",
        ),
        arm(
            "patched",
            lives,
            patched(
                SCHEDULER,
                was=(
                    "        num_computed_tokens = session.num_computed_tokens\n       "
                    " kept_output_tokens"
                ),
                now=(
                    "        num_computed_tokens = min(session.num_computed_tokens,"
                    " session.num_tokens - 1)\n        session.num_computed_tokens ="
                    " num_computed_tokens\n        kept_output_tokens"
                ),
                why="what was taken off the answer is not computed",
            ),
        ),
    ],
    lab=session_lab(),
    related=["vllm-project/vllm#28973", "vllm-project/vllm#53130"],
)
