"""What a draft takes from an issue: command, facts, requests, signature."""

from __future__ import annotations

from typing import Any

import pytest

from tests.intake.texts import ISSUES, SERVE, checked, drafted
from vllm_repro.command.parse import parse
from vllm_repro.errors import UsageError
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Model, Scenario
from vllm_repro.scenario.workload import requests_of
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.signature import How, compare
from vllm_repro_intake.facts import read_facts

COMPOSE = """
```yaml
services:
  llm:
    image: vllm/vllm-openai:${TAG:-v0.24.0}
    environment:
      - VLLM_LOGGING_LEVEL=DEBUG
      - HF_TOKEN=hf_abcDEF123456789xyz
    command: >
      --model org/model
      --tensor-parallel-size ${TP:-2}
```
"""
KUBERNETES = """
```yaml
kind: Deployment
spec:
  containers:
  - name: llm
    image: vllm/vllm-openai:v0.23.0
    args: ["--model", "org/model",
           "--tensor-parallel-size", "2"]
    env:
    - name: NCCL_DEBUG
      value: "INFO"
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: hf, key: token}}
```
"""
SCRIPT = """
```
containers:
- image: vllm/vllm-openai:v0.23.0
  command: ["/bin/sh", "-c"]
  args: ["pip list; exec vllm serve org/model --tensor-parallel-size 2"]
```
"""
JSON = '```json\n["serve", "org/model",\n "--served-model-name", "a", "b", "--enforce-eager"]\n```'
PYTHON = """
```python
MODEL = load("x")
llm = LLM(
    model="org/model", tensor_parallel_size=2, enforce_eager=True, enable_prefix_caching=False,
    speculative_config={"method": "mtp", "num_speculative_tokens": 1}, seed=os.getpid(),
)
```
"""
LOG = (
    "\u2502 (APIServer pid=1) INFO 10-20 03:21:02 [utils.py:328] non-default args: {'model_tag':"
    " 'org/model', \u2502\n\u2502 'api_key': ['sk-abcdefgh12345678'], 'tensor_parallel_size':"
    " \u2502\n\u2502 2, 'enforce_eager': True, 'served_model_name': ['a', 'b']} \u2502\n"
)
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
MAIL = '> vllm serve org/model\n> --speculative-config\n> \'{"method":\n> "mtp"}\''
NOTED = (
    "```bash\nvllm serve org/model \\\n  -tp 2 \\   # <--- needed\n  --enforce-eager\nINFO 04-28"
    " 02:37:03 [a.py:1] up\n```"
)
EXPORTED = (
    "```console\n$ export VLLM_LOGGING_LEVEL=DEBUG\n$ export M=org/model\n$ vllm serve ${M} -tp"
    " 2\n```"
)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            COMPOSE,
            (
                "docker run -e VLLM_LOGGING_LEVEL=DEBUG -e HF_TOKEN vllm/vllm-openai:v0.24.0"
                " --model org/model -tp 2"
            ),
        ),
        (
            KUBERNETES,
            "docker run -e NCCL_DEBUG=INFO vllm/vllm-openai:v0.23.0 --model org/model -tp 2",
        ),
        (SCRIPT, "docker run vllm/vllm-openai:v0.23.0 org/model -tp 2"),
        (JSON, "vllm serve org/model --served-model-name a b --enforce-eager"),
        (
            PYTHON,
            (
                f"vllm serve org/model -tp 2 --enforce-eager --no-enable-prefix-caching"
                f" --speculative-config '{MTP}'"
            ),
        ),
        (LOG, "vllm serve org/model -tp 2 --enforce-eager --served-model-name a b"),
        (NOTED, "vllm serve org/model -tp 2 --enforce-eager"),
        (EXPORTED, "VLLM_LOGGING_LEVEL=DEBUG vllm serve org/model -tp 2"),
        (
            "```\nroot@6aa49b1572ea:~/x# vllm serve org/model -tp 2\n```",
            "vllm serve org/model -tp 2",
        ),
        ("`uv run vllm serve org/model -tp 2`", "vllm serve org/model -tp 2"),
        ("I run `vllm serve org/model -tp 2` and it dies.", "vllm serve org/model -tp 2"),
        (MAIL, 'vllm serve org/model --speculative-config \'{"method":\n "mtp"}\''),
    ],
    ids=[
        "compose",
        "kubernetes",
        "script",
        "json",
        "python",
        "log",
        "note",
        "export",
        "prompt",
        "uv",
        "inline",
        "mail",
    ],
)
def test_every_form_gives_the_command(text: str, command: str) -> None:
    drafted_command, expected = checked(drafted(text)).reported(), parse(command)
    assert {flag.name: "".join((flag.text or "").split()) for flag in drafted_command.flags} == {
        flag.name: "".join((flag.text or "").split()) for flag in expected.flags
    }
    assert drafted_command.model == expected.model
    assert (drafted_command.env, drafted_command.container) == (expected.env, expected.container)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve crashes when I send a request",
        "vllm serve crashes",
        "docker run --rm -it nvidia/cuda:12.4 nvidia-smi",
        "vllm bench serve --model org/model --num-prompts 4",
        "```\nexport IMAGE=x\ndocker run -itd $IMAGE\n```",
        "",
    ],
)
def test_prose_and_other_programs_are_no_command(text: str) -> None:
    with pytest.raises(UsageError, match="no vLLM command"):
        drafted(text)


def test_the_repeated_command_counts_then_the_crashing_one() -> None:
    good, bad = "vllm serve org/good --enforce-eager", "vllm serve org/bad -tp 2"
    for text in (
        f"This works:\n\n```\n{good}\n```\n\nTo reproduce:\n\n```\n{bad}\n```",
        f"## Benchmark\n\n{good}\n\n## Steps\n\n{bad}\n",
        f"{good}\n\n{bad}\n\n{bad}\n",
        f"```\n# works\n{good}\n# crashes\n{bad}\n```",
    ):
        made = drafted(text)
        assert checked(made).reported() == parse(bad)
        assert any("not taken" in guess and "org/good" in guess for guess in made.guesses)
        assert not any("several commands" in gap for gap in made.gaps)
    assert any("several commands" in gap for gap in drafted(f"{good}\n\n{bad}").gaps)


def test_flags_are_compared_with_those_of_the_release() -> None:
    made = drafted(f"{SERVE} --brand-new 3", known_flags={"--max-num-batched-tokens"})
    assert checked(made).reported().get("--brand-new") == "3"
    assert made.guesses[0] == "--brand-new is not a flag of this release: “--brand-new 3”"
    known = drafted(
        f"{SERVE} --brand-new 3", known_flags={"--max-num-batched-tokens", "--brand-new"}
    )
    assert not any("--brand-new" in guess for guess in known.guesses)
    assert "none of the releases known here" in drafted(f"{SERVE} --brand-new 3").guesses[0]


def test_what_check_refuses_is_left_out_and_named() -> None:
    made = drafted(
        f"LD_PRELOAD=/tmp/x.so VLLM_USE_V1=1 {SERVE} --api-key sk-0123456789abcdef0123 --swap-space"
        " 16 --max-mode-len 5 --sw"
    )
    command = checked(made).reported()
    assert (command.env, len(command.flags)) == ((("VLLM_USE_V1", "1"),), 1)
    for name in ("--api-key", "--swap-space", "--max-mode-len", "--sw", "LD_PRELOAD"):
        assert any("left out" in note and name in note for note in made.guesses + made.gaps), name


HEADS = [
    ("[Bug]: it dies #41726\n\nbody", "it dies", "vllm-project/vllm#41726"),
    ("[Bug]: it dies · Issue #41726 · vllm-project/vllm\n", "it dies", "vllm-project/vllm#41726"),
    (
        (
            "p - Fix [Bug]: it dies [2 pull requests, 1"
            " comments]\n\nvllm-project/vllm#41726Fetched 2026"
        ),
        "it dies",
        "vllm-project/vllm#41726",
    ),
    (
        "Subject: Re: [vllm-project/vllm] [Bug]: it dies (Issue #41726)\n",
        "it dies",
        "vllm-project/vllm#41726",
    ),
    (
        "# It dies at night\n\nhttps://github.com/vllm-project/vllm/issues/41726",
        "It dies at night",
        "vllm-project/vllm#41726",
    ),
    ("It dies at night\n\nsee #41726", "It dies at night", ""),
    ("INFO 01-01 00:00:00 [a.py:1] up", "", ""),
    ("vllm serve a/b", "", ""),
    ("### Your current environment\n\nvLLM 0.24.0", "", ""),
    ("## 🐛 Describe the bug\n\nIt dies.", "", ""),
    ("**Steps to reproduce**\n\nRun it.", "", ""),
    ("# Bug description:\n\nIt dies.", "", ""),
    ("**It dies at night**\n\nRun it.", "It dies at night", ""),
    ("# Model dies at night\n\nRun it.", "Model dies at night", ""),
    (
        (
            "# It dies at night\n\nvllm-project/vllm#41726 is another bug."
            " https://github.com/vllm-project/vllm/pull/7"
        ),
        "It dies at night",
        "",
    ),
]


@pytest.mark.parametrize(("text", "title", "issue"), HEADS)
def test_title_and_number(text: str, title: str, issue: str) -> None:
    facts = read_facts(text)
    assert (facts.title, facts.issue) == (title, issue)


def test_other_issues_are_related() -> None:
    text = (
        "# It dies\n\nSee #41726, vllm-project/vllm#40000 and https://github.com/a/b/pull/77. Step"
        " #2 of 3; &#12345;"
    )
    assert read_facts(text).related == (
        "vllm-project/vllm#41726",
        "vllm-project/vllm#40000",
        "a/b#77",
    )


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("docker run vllm/vllm-openai:v0.23.0 --model a/b --enforce-eager", "0.23.0"),
        (f"{SERVE}\n\npip: torch==2.11.0 vllm==0.24.0 flashinfer-python==0.6.8", "0.24.0"),
        (f"{SERVE}\n\nWith vLLM v0.22.1, FlashInfer 0.6.8", "0.22.1"),
        (f"# [Bug]: v0.19.1 crashes\n\n{SERVE}", "0.19.1"),
        (
            (
                f"vLLM Version   : 0.20.2rc1.dev35+g4845aee6b\n\n{SERVE}\n\nIt worked with vLLM"
                " 0.19.0."
            ),
            "0.20.2rc1.dev35+g4845aee6b",
        ),
        (f"{SERVE}\n\nFlashInfer 0.6.8 and transformers 0.5.1", ""),
    ],
)
def test_the_release(text: str, release: str) -> None:
    made = drafted(text)
    scenario = checked(made)
    assert (scenario.try_with, scenario.status.bad) == (
        release or "0.33.0",
        f"=={release or '0.33.0'}",
    )
    assert any("no release was read" in gap for gap in made.gaps) == (not release)
    assert checked(drafted(text, version="0.32.0")).try_with == "0.32.0"


@pytest.mark.parametrize(
    ("text", "flags", "needs"),
    [
        ("GPU: NVIDIA GeForce RTX 5080", "", "1 GPU, 16 GB each"),
        ("On 8x H20 141GB", "-tp 4", "4 GPUs, 141 GB each"),
        ("Testing on 4 L40s GPUs", "-tp 2 -pp 2", "4 GPUs, 48 GB each"),
        ("2x A100", "", "1 GPU"),
        ("", "-tp 2 --nnodes 2", "2 GPUs, 2 nodes"),
        (
            (
                "INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.23.0) with"
                " config: device_config=cpu"
            ),
            "-tp 2",
            "CPU",
        ),
    ],
)
def test_hardware(text: str, flags: str, needs: str) -> None:
    assert str(checked(drafted(f"{SERVE} {flags}\n\n{text}")).needs) == needs


SHAPE = (
    "num_attention_heads: 16, num_key_value_heads: 4, head_dim: 256, num_hidden_layers: 32,"
    " vocab_size: 1000"
)
KNOWN = Model("org/model", heads=8, kv_heads=2, head_dim=64, layers=3, vocab_size=9)


@pytest.mark.parametrize(
    ("text", "models", "sizes", "closed"),
    [
        (SHAPE, [], (16, 4, 256, 32, 1000), 1),
        ("", [KNOWN], (8, 2, 64, 3, 9), 1),
        (f"{SHAPE}\n\nvision: num_hidden_layers: 27", [], (16, 4, 256, 0, 1000), 0),
        ("num_attention_heads: 7, num_key_value_heads: 2", [], (0, 0, 0, 0, 0), 0),
    ],
)
def test_the_model_is_stated_or_known_or_a_gap(
    text: str, models: list[Model], sizes: tuple[int, ...], closed: int
) -> None:
    made = drafted(f"{SERVE}\n\n{text}", models=models)
    model = checked(made).model
    shape = (model.heads, model.kv_heads, model.head_dim, model.layers, model.vocab_size)
    assert shape == sizes
    stated = not any("copy them from the model's config.json" in gap for gap in made.gaps)
    assert stated == bool(closed)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("server hangs with long prompts", "hangs"),
        ("gibberish after a cache hit", "errs"),
        ("engine crashes, then hangs", "dies"),
        ("HTTP 500 for each image", "errs"),
        ("slow", "dies"),
    ],
)
def test_the_symptom_without_a_traceback(title: str, expected: str) -> None:
    made = drafted(f"# [Bug]: {title} on a box\n\n{SERVE}")
    assert checked(made).arms[0].expected == expected
    assert ("signature=unstated()" in made.text) == (expected == "dies")
    assert any("dies stands for it" in gap for gap in made.gaps) == (title == "slow")


def workload(text: str) -> list[str]:
    return [str(step) for step in checked(drafted(f"{SERVE}\n\n{text}")).workload]


def named(*sizes: int) -> list[str]:
    return [f"request {at} of {size} tokens" for at, size in enumerate(sizes, 1)]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (
            (
                "The first request has a prompt of 20,000 tokens and succeeds. The second"
                " request (6k tokens) crashes."
            ),
            (20000, 6000),
        ),
        (
            (
                "- Request S0 (≈90k tokens): succeeds\n- Request S1 (≈90k tokens): 500\n\nEach"
                " ~90k-token prompt fills the pool."
            ),
            (90000, 90000),
        ),
        ("It needs a ~1.3K-token prompt. Later: the same 1,304-token prompt again.", (1304,)),
        ("Send two requests of 3,000 tokens each.", (3000, 3000)),
        ("Prompts longer than 7593 tokens kill it.", (7594,)),
        ("Requests with more than 8k input tokens die.", (8001,)),
        ("Send 2 requests with 20k-token prompts and 1k-token outputs.", (20000, 20000)),
        ("It dies at a 25 002-token prompt.", (25002,)),
        ("It dies at a 25'002-token prompt.", (25002,)),
        ("It dies at a prompt of 25.002 tokens.", (25002,)),
        ("It dies at a prompt of 25_002 tokens.", (25002,)),
        ("It dies at a prompt of 0.1M tokens.", (100000,)),
        ("A 9,000-token prompt dies. Lowering the prompt to 800 tokens makes it stable.", (9000,)),
        ("A prompt of 4k tokens works, one with 9,000 input tokens dies.", ()),
        (
            (
                "GPU KV cache size: 145,274 tokens. Throughput 900 tokens/s. The input exceeds"
                " max_num_batched_tokens of 2048 tokens."
            ),
            (),
        ),
        (
            (
                "It resumed the request with 3497 prompt tokens after the first 4096 prompt"
                " tokens were computed."
            ),
            (),
        ),
    ],
)
def test_sizes_in_prose(text: str, sizes: tuple[int, ...]) -> None:
    assert workload(text) == (named(*sizes) if sizes else ["chat/completions of 100 tokens"])


def test_requests_at_once() -> None:
    assert workload("The client sends 3 concurrent requests of 500 tokens each.") == [
        " beside ".join(named(500, 500, 500))
    ]
    bench = (
        "```\nvllm bench serve --random-input-len 700 --random-output-len 20 --max-concurrency"
        " 2\n```"
    )
    assert workload(bench) == [" beside ".join(named(700, 700))]
    steps: Any = checked(drafted(f"{SERVE}\n\n{bench}")).workload
    assert all(request.max_tokens == 20 for request in requests_of(steps))


def test_requests_as_sent() -> None:
    body = '{"model":"m","prompt":"a \\u0027b\\u0027","max_tokens":5,"logprobs":2}'
    curl = f"```\n$ time curl -s http://h:8000/v1/completions -d '{body}'\n```"
    steps: Any = checked(drafted(f"{SERVE}\n\n{curl}\n\n{curl}")).workload
    (step,) = steps
    assert step.endpoint == "/v1/completions"
    assert step.fields == {"prompt": "a 'b'", "max_tokens": 5, "logprobs": 2}
    client = (
        '```python\nclient.chat.completions.create(model=m, messages=[{"role": "user", "content":'
        ' "hi"}], max_tokens=4)\n```'
    )
    assert "messages" in workload(client)[0]


@pytest.mark.parametrize(
    "text",
    [
        "```\nvllm bench serve --random-input-len 0\n```",
        "```\nprompt_token_ids_len=0 in SchedulerOutput(\n```",
        """```\ncurl http://h/v1/completions -d '{"prompt": "<0 tokens of A>"}'\n```""",
    ],
)
def test_no_request_has_a_prompt_of_0_tokens(text: str) -> None:
    steps: Any = checked(drafted(f"{SERVE}\n\n{text}")).workload
    assert all(step.prompt or step.fields for step in steps)


def curl_with(prompt: str) -> str:
    body = f'{{"prompt": "{prompt}", "max_tokens": 5}}'
    return f"```\ncurl http://h:8000/v1/completions -d '{body}'\n```"


def python_with(prompt: str) -> str:
    return f"```python\nclient.completions.create(model=m, prompt={prompt}, max_tokens=5)\n```"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # the release, however it is introduced
        *(
            (text, 'bad="==0.24.0"')
            for text in (
                "Version: 0.24.0, no docker.",
                "- version = 0.24.0",
                "| Version | 0.24.0 |",
                "vLLM: `0.24.0`",
                "Running 0.24.0 on a GH200 (96GB).",
                "I run 0.24.0 here.",
            )
        ),
        # an engine that survives
        *(
            (f"It answers with an error. {text}", 'arm("reported", errs)')
            for text in (
                "The engine survives, next request is served normally.",
                "EngineCore keeps running and later requests are answered.",
                "It does not crash the engine, only this request fails.",
                "The server is fine afterwards.",
            )
        ),
        *(
            (text, 'arm("reported", dies)')
            for text in (
                "The engine crashes. With --enforce-eager the server stays up.",
                "The server is fine at first, then it crashes.",
                "It crashes; on 0.22.0 the engine survives.",
            )
        ),
        # variables in a request
        (curl_with("$P"), "# GAP: request 1: $P stands for a value that was not read"),
        (curl_with("$(cat long.txt)"), "# GAP: request 1: $(cat long.txt) stands for"),
        (python_with('f"the number {i}."'), "# GAP: request 1: {i} stands for"),
        (python_with('f"{word * 3000} hello"'), "# GAP: request 1: {word * 3000} stands for"),
        (python_with('f"the number {i}."'), '"the number {i}."'),
        # numbers of requests at once, beside the same number of something else
        *(
            (f"--block-size 16\n```python\n{line}\n```", line)
            for line in (
                "sem = asyncio.Semaphore(16)",
                "with ThreadPoolExecutor(max_workers=16) as pool:",
                "pool = Pool(16)",
            )
        ),
        ("```\nsleep 2\n```", "not read: “sleep 2”"),
        # a load of more requests than a file would list
        (
            "```\nvllm bench serve --random-input-len 512 --max-concurrency 160\n```",
            "at_once(160, prompt=[512]",
        ),
        # what avoids it, and what does not have it
        *(
            (f"It dies. {text}", text.rstrip("."))
            for text in (
                "Removing the option cures it.",
                "Single requests are OK.",
                "Qwen3-1.7B works under identical flags.",
                "Workaround: we filter ids in our gateway.",
                "Every text alone is fine.",
                "Setting the override to 8192 stops it.",
            )
        ),
        # memory is no number of GPUs
        ("(EngineCore pid=9) GPU KV cache: 0 GPU hit tokens", "no GPU was read"),
        ("2 GPU blocks left, GH200", "no GPU was read"),
        # a name of the server's own
        (
            f"--served-model-name q\n{curl_with('hi')}".replace('{"p', '{"model": "q", "p'),
            'name="request 1"',
        ),
        # no request was read
        (python_with("make(i)"), "no request of the text was read with its prompt"),
        ("It dies.", "the length of the answers was not read: 8 tokens"),
    ],
)
def test_what_is_read_or_quoted(text: str, shown: str) -> None:
    lines = f"{SERVE} {text}" if text.startswith("--") else f"{SERVE}\n\n{text}"
    made = drafted(lines).text
    assert shown in made
    assert "names another model" not in made


def test_a_public_model_has_its_own_shape_and_not_that_of_a_scenario() -> None:
    known = [scenario.model for scenario in all_scenarios()]
    made = drafted("vllm serve google/gemma-3-1b-it", models=known).text
    assert "vocab_size=262144" in made


TRIED = [
    ("With --enforce-eager it works.", {"with --enforce-eager": "lives"}),
    ("--enforce-eager does not help.", {"with --enforce-eager": "dies"}),
    (
        "With --enforce-eager it works, with --max-num-seqs 8 it still crashes.",
        {"with --enforce-eager": "lives", "with --max-num-seqs 8": "dies"},
    ),
    (
        "Both `--enforce-eager` or `--max-num-seqs 8` avoids it: no crash.",
        {"with --enforce-eager": "lives", "with --max-num-seqs 8": "lives"},
    ),
    ("Tried `--enforce-eager`: same.", {"with --enforce-eager": "dies"}),
    ("Removing `--kv-cache-dtype` avoids the crash.", {"without --kv-cache-dtype": "lives"}),
    ("It is fine without speculative decoding.", {"without --speculative-config": "lives"}),
    ("- no cache (dropping `--kv-cache-dtype`) → fine", {"without --kv-cache-dtype": "lives"}),
    ("It works with --enforce-eager in 0.22.1.", {}),
    ("Disabling prefix caching resolves it.", {"with --no-enable-prefix-caching": "lives"}),
    ("| `--no-async-scheduling` | works |", {"with --no-async-scheduling": "lives"}),
    ("I cannot reproduce it with `--enforce-eager`.", {"with --enforce-eager": "lives"}),
    ("The crash disappears with --max-num-seqs 8.", {"with --max-num-seqs 8": "lives"}),
    ("Adding --enforce-eager makes the crash go away.", {"with --enforce-eager": "lives"}),
    ("The error persists with --enforce-eager.", {"with --enforce-eager": "dies"}),
    ("It never happens with --enforce-eager.", {"with --enforce-eager": "lives"}),
    ("enforce_eager=True is fine.", {"with --enforce-eager": "lives"}),
    ("With `max_num_seqs=8` it works.", {"with --max-num-seqs 8": "lives"}),
    ("It is not solved by --enforce-eager.", {"with --enforce-eager": "dies"}),
    (
        "Setting async_scheduling=False did not help, nor did --max-num-seqs 8.",
        {"with --no-async-scheduling": "dies", "with --max-num-seqs 8": "dies"},
    ),
    (
        "It crashes, but with --enforce-eager it works.",
        {"with --enforce-eager": "lives"},
    ),
    (
        "With --enforce-eager it works, but --max-num-seqs 8 hangs.",
        {"with --enforce-eager": "lives"},
    ),
    ("--max-num-seqs 8 crashes, --enforce-eager works.", {"with --enforce-eager": "lives"}),
    # unclear, not tried, or no change of the command
    ("| --enforce-eager | right |", {"with --enforce-eager": "lives"}),
    ("| `--max-num-seqs 8` | crash |", {"with --max-num-seqs 8": "dies"}),
    ("With --enforce-eager it crashes as well.", {"with --enforce-eager": "dies"}),
    ("It ran for days without --kv-cache-dtype. the size makes no difference.", {}),
    ("With --enforce-eager, as told. the other one works.", {}),
    (
        "It works with --enforce-eager. the other one crashes as well.",
        {"with --enforce-eager": "lives"},
    ),
    ("With --max-num-seqs 8 it crashes.", {}),
    ("With some_option=True it works.", {}),
    ("VLLM_USE_DEEP_GEMM=0 with --enforce-eager works.", {}),
    ("With --enforce-eager it works sometimes, still crashes at night.", {}),
    ("Does it work with --enforce-eager?", {}),
    ("Please try --enforce-eager, it works for others.", {}),
    ("It works after --max-num-batched-tokens was raised.", {}),
    ("It works with --max-num-batched-tokens 4096.", {}),
    ("Raising --max-num-seqs and adding --enforce-eager works.", {}),
    ("Removing --pipeline-parallel-size works.", {}),
]


@pytest.mark.parametrize(("words", "arms"), TRIED, ids=[words for words, _ in TRIED])
def test_a_tried_workaround_with_a_clear_result_is_an_arm(words: str, arms: dict[str, str]) -> None:
    command = f'{SERVE} --kv-cache-dtype fp8 --speculative-config \'{{"method":"mtp"}}\''
    made = drafted(f"{command}\n\n{words}")
    tried = checked(made).arms[1:]
    assert {" and ".join(map(str, arm.edits)): str(arm.expected) for arm in tried} == arms
    assert words in made.text or not tried


SEEDS = {
    "41726.txt": "tq_chunked_prefill",
    "40807.md": "tq_mtp_cudagraphs",
    "41700.txt": "dsv4_tp2",
    "42085.md": "sco_hybrid",
}
SILENT = {"dsv4_tp2": ("get_simultaneous", "_ensure_workspace_size")}
"""Functions of a signature that the issue does not show: its traceback is the message alone."""


@pytest.fixture(params=SEEDS)
def pair(request: pytest.FixtureRequest) -> tuple[str, Scenario, Scenario]:
    """Return the text, its draft and the scenario written by hand."""
    text = (ISSUES / request.param).read_text(encoding="utf-8")
    by_hand = [load_file(path) for path in sorted(scenario_folder().glob("*.py"))]
    name = SEEDS[request.param]
    hand = next(scenario for scenario in by_hand if scenario.id == name.replace("_", "-"))
    return text, checked(drafted(text, models=[scenario.model for scenario in by_hand])), hand


def test_flags_and_environment_are_those_of_the_scenario(
    pair: tuple[str, Scenario, Scenario],
) -> None:
    _, made, hand = pair
    ours, theirs = made.reported(), hand.reported()
    assert ours.flags == theirs.flags
    assert (ours.env, ours.container) == (theirs.env, theirs.container)
    assert ours.model == (theirs.model or "").replace("/home/yk/", "/home/[user]/")


def test_the_signature_is_that_of_the_scenario(pair: tuple[str, Scenario, Scenario]) -> None:
    text, made, hand = pair
    ours, theirs = made.signature, hand.signature
    assert ours is not None
    assert theirs is not None
    assert (ours.exception, ours.source) == (theirs.exception, theirs.source)
    phases = (
        Phase.BOOT if phase is Phase.WARMUP else phase for phase in (ours.phase, theirs.phase)
    )
    assert set(phases) == {theirs.phase}
    frames = [
        name for name in theirs.frames if name not in SILENT.get(hand.id.replace("-", "_"), ())
    ]
    assert frames[-len(ours.frames) :] == [name for name in ours.frames if name in frames]
    assert compare(ours, diagnose(text)).how is How.MATCH
    assert compare(theirs, diagnose(text)).how is How.MATCH


def test_the_other_fields(pair: tuple[str, Scenario, Scenario]) -> None:
    _, made, hand = pair
    stated = {
        "tq-chunked-prefill": (["request 1 of 7593 tokens"], "0.20.2rc1.dev35+g4845aee6b", 1),
        "tq-mtp-cudagraphs": (["chat/completions of 100 tokens"], "0.19.2rc1.dev21+g893611813", 1),
        "dsv4-tp2": (["request 1 of 1304 tokens"], "0.20.1rc1.dev12+g363ffa145", 2),
        "sco-hybrid": ([f"request {n} of 90000 tokens" for n in (1, 2)], "0.20.2rc1.dev73", 2),
    }
    workload, release, gpus = stated[hand.id]
    assert [str(step) for step in made.workload] == workload
    assert (made.try_with, made.needs.gpus, made.needs.nodes) == (release, gpus, hand.needs.nodes)
    # that text names no number
    assert made.issue == ("not stated" if hand.id == "sco-hybrid" else hand.issue)
    arms = {arm.name: arm for arm in made.arms}
    for name, theirs in (
        ("enforce-eager", "eager"),
        ("compilation-config-cudagraph-mode-none", "cudagraph-none"),
    ):
        if name in arms and (same := hand.arm(theirs)):
            assert made.command_of(arms[name]).flags == hand.command_of(same).flags


def test_arms_are_what_the_reporter_tried() -> None:
    def arms(name: str) -> dict[str, str]:
        made = checked(drafted((ISSUES / name).read_text(encoding="utf-8")))
        return {" ".join(map(str, arm.edits)): str(arm.expected) for arm in made.arms[1:]}

    assert arms("41700.txt") == {"with --enforce-eager": "lives"}
    assert arms("40807.md") == {
        "with --performance-mode interactivity --async-scheduling"
        " --attention-config.flash_attn_version 2": "dies",
        "with --compilation-config.cudagraph_mode none": "lives",
    }


def traceback(
    last: str,
    functions: str = "execute_model forward _update_states",
    file: str = "vllm/v1/worker/a.py",
) -> str:
    frames = "".join(
        f'  File "/x/{file}", line 7, in {name}\n    go()\n' for name in functions.split()
    )
    return (
        f"{SERVE}\n\n```\nEngineCore encountered a fatal error.\nTraceback (most recent call"
        f" last):\n{frames}{last}\n```\n"
    )


@pytest.mark.parametrize(
    ("message", "template"),
    [
        ("KeyError: 'cmpl-0a1b2c3d4e5f-0'", "'{}'"),
        (
            "ValueError: expected 16 of 1,024 in /home/alice/x/y.py: {a}",
            "expected {} of {} in {}: {{a}}",
        ),
        ("RuntimeError: at 0x7f00aa of sm_120, 1.5 GB", "at {} of sm_120, {} GB"),
        ("ValueError: " + "One sentence here. " * 20, ("One sentence here. " * 8).strip()),
    ],
)
def test_the_template_of_a_message(message: str, template: str) -> None:
    text = traceback(message)
    signature = checked(drafted(text)).signature
    assert signature is not None
    assert signature.message.rstrip(".") == template.rstrip(".")
    assert compare(signature, diagnose(text)).how in (How.MATCH, How.NEAR)


def test_frames_are_the_innermost_of_vllm() -> None:
    def frames(text: str) -> tuple[str, ...]:
        signature = checked(drafted(text)).signature
        assert signature is not None
        return signature.frames

    assert frames(traceback("KeyError: 'x'")) == ("execute_model", "_update_states")
    assert frames(traceback("KeyError: 'x'", "a b b c d e run_busy_loop")) == ("b", "c", "d", "e")
    made = drafted(
        f"{SERVE}\n\nEngineCore encountered a fatal error.\n\nAssertionError: 'a.py:12:_prefill'"
        " needs more\n"
    )
    assert frames(f"{SERVE}\n\nAssertionError: 'a.py:12:_prefill' needs more\n") == ("_prefill",)
    assert any("this function is from the message" in guess for guess in made.guesses)
    none = drafted(f"{SERVE}\n\nValueError: it is too long\n")
    assert "no frames were read: fill them in from the report of a run" in none.gaps


def test_the_same_text_gives_the_same_file() -> None:
    text = (
        traceback("KeyError: 'x'")
        + "num_attention_heads: 16 head_dim: 4\n\nWith --enforce-eager it works. See #41726."
    )
    assert drafted(text).text == drafted(text).text
    assert drafted(text.replace("\n", "\r\n")).text == drafted(text).text


def test_an_exception_without_its_traceback_is_named_in_the_gap() -> None:
    made = drafted("`vllm serve a/b` 0.28.0 dies with `IndexError: index 6 is out of bounds`.")
    assert "engine was read, only IndexError: index 6 is out of bounds: fill in" in str(made.gaps)
