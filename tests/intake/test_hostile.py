"""Hostile texts: they try to make the draft run code, leak secrets, or take long."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.intake.texts import ISSUES, SERVE, checked, drafted
from tests.secrets_planted import SECRETS
from vllm_repro.errors import UsageError
from vllm_repro.scenario.vocabulary import __all__ as words
from vllm_repro_intake.draft import Draft

RUN = "__import__('os').system('touch ran')"
NASTY = [
    RUN,
    f'"""\n{RUN}\n"""',
    f"'''\n{RUN}",
    f"\\\n{RUN}",
    f"\\\\\\'\n{RUN}",
    f'")\n{RUN}\n#',
    "{" + RUN + "}",
    f"%({RUN})s",
    "\\N{DASH}",
    "\\x41\\u0041\\777",
    "a\x00b",
    "a\x1b[2Jb",
    "a\u2028b\u2029c",
    "a\x0cb\x0bc\x85d",
    "\u202eabc",
    "a\rb",
    "\ud800",
    "\ufeff",
    "$(touch ran)",
    "`touch ran`",
    "; touch ran",
    "| touch ran",
    "${IFS}",
    "!!python/object/apply:os.system [touch ran]",
    "{{7*7}}",
    "<script>",
    "%s%n",
    "lambda: 0",
    "f(x)\nimport os",
    "# noqa\nscenario = 1",
    "]" * 50,
    "(" * 50,
]
PLACES = {
    "title": "# [Bug]: {}\n\n" + SERVE,
    "model": "vllm serve 'org/{}' --enforce-eager",
    "value": SERVE + " --served-model-name '{}'",
    "flag": SERVE + " --x{} 3",
    "variable": "VLLM_X='{}' " + SERVE,
    "image": "docker run -e VLLM_X='{}' 'a/vllm:{}' --model org/model --enforce-eager",
    "yaml": "```yaml\n- image: vllm\n  args:\n  - --model=org/model\n  - --revision={}\n```",
    "json": '```json\n["--model", "org/model", "--revision", "{}"]\n```',
    "python": "```python\nLLM(model='org/model', seed={}, dtype='{}')\n```",
    "log": (
        SERVE
        + "\n\nINFO 01-01 00:00:00 [a.py:1] non-default args: {{'model': 'a/b', 'revision': {}}}"
    ),
    "message": (
        SERVE + '\n\n```\nFile "/x/vllm/v1/core/sched/scheduler.py", line 1, in schedule\n   '
        " f()\nRuntimeError: {}\n```"
    ),
    "source": (
        SERVE
        + '\n\n```\nFile "/x/vllm/v1/core/sched/scheduler.py", line 1, in schedule\n    assert'
        " {}\nAssertionError\n```"
    ),
    "body": SERVE + '\n\n```\ncurl http://h/v1/completions -d \'{{"prompt": "{}", "{}": 1}}\'\n```',
    "words": (
        SERVE
        + "\n\nWith --max-num-seqs 3 {} it works. The first request has a prompt of 900 tokens {}."
    ),
    "hardware": SERVE + "\n\nGPU: 2x H100 {}",
}


def safe(made: Draft) -> None:
    """Check that a draft is data: one import, one assignment, and calls with constants."""
    tree = ast.parse(made.text)
    assert [type(statement) for statement in tree.body] == [ast.Expr, ast.ImportFrom, ast.Assign]
    allowed = (
        *(
            ast.Module,
            ast.Expr,
            ast.ImportFrom,
            ast.alias,
            ast.Assign,
            ast.Name,
            ast.Load,
            ast.Store,
            ast.Call,
            ast.keyword,
        ),
        *(ast.Constant, ast.List, ast.Dict, ast.BinOp, ast.BitOr, ast.UnaryOp, ast.USub),
    )
    for node in ast.walk(tree):
        assert isinstance(node, allowed), ast.dump(node)
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            assert node.func.id in words
    assert all(char.isprintable() or char == "\n" for char in made.text)
    checked(made)


@pytest.mark.parametrize("place", PLACES)
def test_no_text_becomes_code(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drafts = 0
    for nasty in NASTY:
        try:
            made = drafted(PLACES[place].replace("{}", nasty).replace("{{", "{").replace("}}", "}"))
        except UsageError:
            continue  # the command cannot be read
        drafts += 1
        safe(made)
    assert drafts > len(NASTY) // 3
    assert not list(tmp_path.iterdir())


@given(
    st.lists(
        st.sampled_from(
            [*NASTY, *PLACES.values(), "\n", "```", "\n\n", "'", '"', "| ", "> ", " \\\n"]
        ),
        max_size=12,
    )
)
def test_any_mixture_gives_a_safe_draft_or_a_message(parts: Sequence[str]) -> None:
    try:
        made = drafted("".join(parts))
    except UsageError:
        return
    safe(made)


@given(st.integers(0, 3), st.data())
def test_a_damaged_issue_gives_a_safe_draft_or_a_message(which: int, data: st.DataObject) -> None:
    text = sorted(ISSUES.iterdir())[which].read_text(encoding="utf-8")
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(text)))
        text = (
            text[:start]
            + data.draw(st.sampled_from(["", *NASTY]))
            + text[start + data.draw(st.integers(0, 200)) :]
        )
    try:
        made = drafted(text)
    except UsageError:
        return
    safe(made)


NUMBERS = [
    SERVE + " --tensor-parallel-size " + "9" * 500,
    SERVE + " --nnodes 99999999 -tp 0 -pp -3",
    SERVE
    + " --max-model-len -1\n\nA prompt of 0 tokens. A prompt of 99999999999999999999999 tokens.",
    SERVE + "\n\nnum_attention_heads: 7, num_key_value_heads: 2, head_dim: 0, vocab_size: 00000000",
    SERVE + "\n\nmax_tokens=0, max_tokens=999999999999 A prompt of 1,,,2 tokens. A prompt of 1.2.3"
    " tokens",
    SERVE
    + '\n\n```\ncurl http://h/v1/completions -d \'{"prompt": "x", "max_tokens": 1e999, "n": NaN,'
    ' "seed": -Infinity}\'\n```',
    "docker run vllm/vllm-openai:v999999999999.0.0rc99999 --model a/b --enforce-eager",
    SERVE
    + "\n\nvLLM 0.99.99.dev0+\u0661\u0662 and 64x H100 of 999 GB, 99 concurrent requests of 10"
    " tokens",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_impossible_numbers_are_not_drafted(text: str) -> None:
    safe(drafted(text))


LONG = [
    "vllm serve " * 5_000,
    SERVE + " --a" * 5_000,
    SERVE + "\n" + "--x \\\n" * 5_000,
    SERVE + " '" + "a" * 75_000,
    " " * 125_000 + SERVE,
    "A=b " * 15_000 + SERVE,
    "a: &a [--x, --y]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1 or ''}, *a{n - 1 or ''}]\n" for n in range(1, 60))
    + "\n\n"
    + SERVE,
    *(
        f"{SERVE}\n\n{repeated * times}{last}"
        for repeated, times, last in [
            ("LLM(", 5_000, ""),
            (")", 25_000, ""),
            ("- [", 750, "\n--x"),
            ("[", 25_000, "--x"),
            ("prompt ", 15_000, "tokens"),
            ("1", 75_000, " tokens"),
            ("1,1.", 15_000, " tokens prompt"),
            ("with --a ", 7_500, "works"),
            ("`", 50_000, ""),
            ("```\n", 5_000, ""),
            ("> ", 50_000, ""),
            ("non-default args: {", 5_000, ""),
            ("RTX ", 15_000, ""),
            ("/", 75_000, ""),
            ("#1", 25_000, ""),
            ("vLLM ", 15_000, ""),
            ("<1", 12_500, "<tokens"),
            ("a-", 25_000, "github.com/"),
            ("curl http://h/v1/completions -d '{' ", 1_250, ""),
        ]
    ),
]


@pytest.mark.parametrize("which", range(len(LONG)))
def test_no_text_takes_long(which: int) -> None:
    begun = time.process_time()
    with contextlib.suppress(UsageError):
        drafted(LONG[which])
    assert time.process_time() - begun < 1.5


def test_secrets_and_private_names_are_left_out() -> None:
    for plant in SECRETS.values():
        secret = plant.written
        texts = [
            (
                f"HF_TOKEN={secret} VLLM_API_KEY='{secret}' {SERVE} --api-key"
                f" '{secret}'\n\n{secret} works with --max-num-seqs 3"
            ),
            (
                f"docker run -e HF_TOKEN={secret} vllm/vllm-openai:v0.23.0 --model a/b"
                f" --enforce-eager\n\nRuntimeError: {secret}"
            ),
        ]
        for text in texts:
            try:
                made = drafted(text)
            except UsageError:
                continue
            assert plant.hidden not in made.text, plant
            assert not any(plant.hidden in comment for comment in (*made.gaps, *made.guesses)), (
                plant
            )
    private = (
        "vllm serve /home/alice/models/m --master-addr 10.1.2.3 --enforce-eager\n\n"
        "With --max-num-seqs 4 it works on node7.corp.internal of bob@example.org.\n\n"
        '```\nFile "/home/alice/vllm/v1/core/sched/scheduler.py", line 1, in schedule\n    f()\n'
        "RuntimeError: 10.1.2.3 closed /home/alice/x\n```\n"
    )
    made = drafted(private)
    safe(made)
    for hidden in ("alice", "10.1.2.3", "node7", "bob@"):
        assert hidden not in made.text
