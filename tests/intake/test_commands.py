"""The forms in which issues give a server command."""

from __future__ import annotations

import pytest

from tests.golden_files import missing
from tests.intake.texts import SERVE, checked, drafted
from vllm_repro.command.parse import parse
from vllm_repro.errors import UsageError

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
        (COMPOSE, "docker run -e VLLM_LOGGING_LEVEL=DEBUG -e HF_TOKEN vllm/vllm-openai:v0.24.0 --model org/model -tp 2"),
        (KUBERNETES, "docker run -e NCCL_DEBUG=INFO vllm/vllm-openai:v0.23.0 --model org/model -tp 2"),
        (SCRIPT, "docker run vllm/vllm-openai:v0.23.0 org/model -tp 2"),
        (JSON, "vllm serve org/model --served-model-name a b --enforce-eager"),
        (PYTHON, f"vllm serve org/model -tp 2 --enforce-eager --no-enable-prefix-caching --speculative-config '{MTP}'"),
        (LOG, "vllm serve org/model -tp 2 --enforce-eager --served-model-name a b"),
        (NOTED, "vllm serve org/model -tp 2 --enforce-eager"),
        (EXPORTED, "VLLM_LOGGING_LEVEL=DEBUG vllm serve org/model -tp 2"),
        ("```\nroot@6aa49b1572ea:~/x# vllm serve org/model -tp 2\n```", "vllm serve org/model -tp 2"),
        ("`uv run vllm serve org/model -tp 2`", "vllm serve org/model -tp 2"),
        ("I run `vllm serve org/model -tp 2` and it dies.", "vllm serve org/model -tp 2"),
        (MAIL, "vllm serve org/model --speculative-config '{\"method\":\n \"mtp\"}'"),
    ],
    ids=["compose", "kubernetes", "script", "json", "python", "log", "note", "export", "prompt", "uv", "inline", "mail"],
)  # fmt: skip
def test_every_form_gives_the_command(text: str, command: str) -> None:
    found, wanted = checked(drafted(text)).reported(), parse(command)
    assert {flag.name: "".join((flag.text or "").split()) for flag in found.flags} == {
        flag.name: "".join((flag.text or "").split()) for flag in wanted.flags
    }
    assert (found.model, found.env, found.container) == (wanted.model, wanted.env, wanted.container)


def test_what_is_no_literal_is_a_gap() -> None:
    assert "the value of 'seed' in that call is not a literal" in drafted(PYTHON).gaps


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


def test_the_repeated_command_counts_then_the_one_that_is_said_to_crash() -> None:
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
    assert not drafted(
        f"{SERVE} --brand-new 3", known_flags={"--max-num-batched-tokens", "--brand-new"}
    ).guesses
    assert "none of the releases known here" in drafted(f"{SERVE} --brand-new 3").guesses[0]


def test_what_check_refuses_is_left_out_and_named() -> None:
    made = drafted(
        f"LD_PRELOAD=/tmp/x.so VLLM_USE_V1=1 {SERVE} --api-key sk-0123456789abcdef0123 --swap-space"
        " 16 --max-mode-len 5 --sw"
    )
    command = checked(made).reported()
    assert (command.env, len(command.flags)) == ((("VLLM_USE_V1", "1"),), 1)
    for name in ("--api-key", "--swap-space", "--max-mode-len", "--sw", "LD_PRELOAD"):
        assert any("left out" in guess and name in guess for guess in made.guesses), name


def test_what_a_draft_cannot_hold_is_a_gap() -> None:
    made = drafted(
        "docker run reg.corp.internal:5000/vllm:v0.23.0 --model a/b --served-model-name ${NAME}"
    )
    assert "reg.corp" not in made.text
    assert (
        missing(
            made.gaps,
            "the image is of a private registry: --image names another one",
            "the value of the variable NAME is not stated",
        )
        == []
    )
