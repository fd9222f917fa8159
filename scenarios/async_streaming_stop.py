"""Asynchronous scheduling: a stop token crashes the engine while the next segment waits.

`/v1/realtime` sends the segments of an audio stream to one request; each segment gets an answer.
With asynchronous scheduling the next step of the request is in flight when a stop token ends an
answer. The scheduler still expects that step's token. It takes the waiting segment for a part of a
prompt, and expects no token of its answer. Both tokens arrive, so the counter of expected tokens
falls below zero and an assertion crashes the engine. A segment must wait when the answer stops.
None may wait when the step in flight ends, because that step stops the next answer too. 0.32.0
drops the step in flight.

On a GPU an audio model has the bug if a client sends segments faster than they are answered: in the
second report a session of 5 s chunks crashed after 16 s. The command alone does not show it. The
lab sends a text model two segments at once through its own route. A bias makes token 77, the stop
token, every answer.
"""

from vllm_repro.vocabulary import *

TWO_AND_A_PAUSE = [[11] * 40, [12] * 30, 1]
BIAS = {"77": 100}
SESSION = {
    "segments": TWO_AND_A_PAUSE,
    "max_tokens": 16,
    "temperature": 0,
    "logit_bias": BIAS,
    "stop_token_ids": [77],
}
ONE_TOKEN = {"segments": TWO_AND_A_PAUSE, "max_tokens": 1, "temperature": 0}

scenario = Scenario(
    id="async-streaming-stop",
    issue="vllm-project/vllm#35755",
    title=(
        "AsyncScheduler crashes with AssertionError during Realtime ASR streaming"
        " (num_output_placeholders underflow)"
    ),
    command="""
        vllm serve Qwen/Qwen3-ASR-0.6B
        --enforce-eager
        --max-model-len 8192
        --hf-overrides '{"architectures": ["Qwen3ASRRealtimeGeneration"]}'
    """,
    model=Model(
        "Qwen/Qwen3-ASR-0.6B",
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocab_size=151936,
        why="the reported family; the scheduler does not use weights",
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.20.2,<0.30.0", good=">=0.32.0"),
    try_with="0.29.0",
    defect=source_line(
        "vllm/v1/core/sched/async_scheduler.py",
        "AsyncScheduler._update_after_schedule",
        "if request.is_prefill_chunk:",
    ),
    workload=[request(name="session", path="/segments", body=SESSION)],
    trigger=answered("session", 200, 500),  # 500: the crash
    signature=assertion(
        "request.num_output_placeholders >= 0",
        frames=["update_from_output", "_update_request_with_output"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "sync",
            lives,
            with_flags("--no-async-scheduling"),
            why="no step is in flight when an answer stops",
        ),
        arm(
            "max-tokens-1",
            lives,
            workload=[request(name="session", path="/segments", body=ONE_TOKEN)],
            why="the scheduler knows where the answer ends and does not run ahead of it",
        ),
        arm(
            "backport",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="""\
        if not request.resumable:
            return True

        if request.streaming_queue:
""",
                now="""\
        if not request.resumable:
            return True

        request.num_computed_tokens -= request.num_output_placeholders
        request.num_output_placeholders = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        if request.streaming_queue:
""",
                why="forget the step in flight when an answer stops, as 0.32.0 does",
            ),
        ),
    ],
    lab=session_lab(without("--hf-overrides", why="the tiny model is a text model")),
    related=["vllm-project/vllm#30142", "vllm-project/vllm#50692"],
)
