"""Asynchronous scheduling: a session preempted before its turn's last token waits for ever.

The scheduler runs a step ahead, so a session may be preempted for lack of blocks before the last
token of its turn arrives. When it arrives, the session is put into the queue of sessions that wait
for input. The same function then takes every request that stopped while it was preempted out of the
queues. The next input of the session is never scheduled: that session stops, while others are
served and /health answers 200. It would also continue without its history, because a preempted
session has no computed tokens.

The pool has room for three requests, of which the second needs another block in its first step of
decoding. The session is the last of the three, so it loses its blocks. A long prompt keeps the
engine busy while the others arrive, so that they enter in one step. The lab feeds a text model
through a route of its own: /v1/realtime serves audio models. We found no report. The issue named
here is another way in which a session waits for ever. 0.33.0 puts such sessions into their queue
last.
"""

from vllm_repro.vocabulary import *

SESSION = {"segments": [[11] * 49, 2, [12] * 30, 1], "max_tokens": 1, "temperature": 0}

scenario = Scenario(
    id="session-preempted-at-turn-end",
    issue="vllm-project/vllm#53130",
    filed=False,
    title=(
        "A streaming session that is preempted while its last token is in flight is never scheduled"
        " again"
    ),
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --enforce-eager
        --max-model-len 4120
        --block-size 32
        --num-gpu-blocks-override 130
        --max-num-batched-tokens 2048
        --max-num-seqs 8
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B", max_position=131072, why="the scheduler does not use weights"
    ),
    needs=Needs(gpus=1, gpu_memory_gb=8),
    status=Status(bad=">=0.24.0,<0.33.0", good=">=0.33.0"),
    try_with="0.32.0",
    defect=source_line(
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        "self.waiting.remove_requests(stopped_preempted_reqs)",
    ),
    workload=[
        together(
            completion(name="keeps it busy", prompt=3990, max_tokens=8, ignore_eos=True),
            completion(name="grows", prompt=64, max_tokens=8, ignore_eos=True, starts_after=0.1),
            request(name="session", path="/segments", body=SESSION, starts_after=0.2),
        )
    ],
    trigger=preempted(),
    arms=[
        arm("reported", hangs),
        arm(
            "sync",
            lives,
            with_flags("--no-async-scheduling"),
            why="a session is preempted only when its token is there",
        ),
        arm(
            "patched",
            lives,
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was="            self.deferred_waiting.difference_update(stopped_preempted_reqs)\n",
                now="""\
            self.deferred_waiting.difference_update(stopped_preempted_reqs)
            for request in stopped_preempted_reqs:
                if not request.is_finished():
                    self._enqueue_waiting_request(request)
""",
                why="a session that goes on is in one queue",
            ),
            patched(
                "vllm/v1/core/sched/scheduler.py",
                was=(
                    "        num_computed_tokens = session.num_computed_tokens\n       "
                    " kept_output_tokens"
                ),
                now=(
                    "        num_computed_tokens = session.num_tokens - 1\n       "
                    " kept_output_tokens"
                ),
                why="a preempted session keeps its history",
            ),
        ),
    ],
    lab=session_lab(),
    related=["vllm-project/vllm#49439"],
)
