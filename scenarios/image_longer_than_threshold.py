"""Two images longer than the long-prefill threshold wait for each other if none may be split.

With several requests, `--long-prefill-token-threshold` limits the tokens of each in one step. With
`--disable-chunked-mm-input` the scheduler does not split an image: if a step would cover only a
part, it stops before the image. So a step that begins at an image longer than the threshold gives
its request no token. A request alone has no limit, but two such requests are never alone: each step
is empty, both wait for ever, and `/health` is 200. The boot compares the largest image with
`--max-num-batched-tokens` only.

Up to 0.32.0 the rule did not apply to a step that begins at the image: it was split, which is the
report. 0.33.0 compares as #52412 proposed. On GPUs vLLM sets the flag itself for models whose image
tokens see each other in both directions. Here an image takes 32 tokens.
"""

from vllm_repro.vocabulary import *

CHAT = "/v1/chat/completions"
RED = [{"role": "user", "content": [image("red")]}]
GREEN = [{"role": "user", "content": [image("green")]}]
SCHEDULER = "vllm/v1/core/sched/scheduler.py"

scenario = Scenario(
    id="image-longer-than-threshold",
    issue="vllm-project/vllm#52306",
    filed=False,
    title="Two images longer than the long-prefill threshold wait for each other for ever",
    command="""
        vllm serve Salesforce/blip2-opt-2.7b
        --enforce-eager
        --max-model-len 256
        --max-num-batched-tokens 64
        --long-prefill-token-threshold 16
        --disable-chunked-mm-input
    """,
    model=public_model(
        "Salesforce/blip2-opt-2.7b",
        tiny_will_do=True,
        why="an image takes 32 tokens; the weights do not matter",
    ),
    needs=Needs(),
    status=Status(bad=">=0.33.0"),
    try_with="0.33.0",
    defect=source_line(
        SCHEDULER,
        "Scheduler._try_schedule_encoder_inputs",
        "and num_computed_tokens <= start_pos",
    ),
    workload=[
        together(
            # while it answers, neither image is alone
            completion(name="busy", prompt=10, max_tokens=200, ignore_eos=True),
            request(
                name="red",
                path=CHAT,
                body={"messages": RED, "max_tokens": 4},
                starts_after=0.3,
            ),
            request(
                name="green",
                path=CHAT,
                body={"messages": GREEN, "max_tokens": 4},
                starts_after=0.3,
            ),
        ),
    ],
    trigger=sent_with("messages", name="green"),
    arms=[
        arm("reported", hangs),
        arm(
            "image-fits",
            lives,
            with_flags("--long-prefill-token-threshold 40"),
            why="the image fits into one step",
        ),
        arm(
            "images-split",
            lives,
            with_flags("--no-disable-chunked-mm-input"),
            why="a step may cover a part of the image",
        ),
        arm(
            "patched",
            lives,
            patched(
                SCHEDULER,
                was="                and num_computed_tokens <= start_pos\n",
                now=(
                    "                and num_computed_tokens <= start_pos\n"
                    "                and not 0"
                    " < self.scheduler_config.long_prefill_token_threshold"
                    " < num_encoder_tokens\n"
                ),
                why=(
                    "an image longer than the threshold is split; no fix to propose: it is split"
                    " also where it would fit, and for models whose image tokens see each other in"
                    " both directions, for which vLLM sets the flag on GPUs"
                ),
            ),
        ),
    ],
    related=["vllm-project/vllm#52412"],
)
