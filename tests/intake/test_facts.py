"""Title, number, release, model and hardware of an issue, in the forms in which texts state them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.intake.texts import SERVE, checked, drafted
from vllm_repro.scenario.scenario import Model
from vllm_repro_intake.facts import read_facts

HEADS = [
    ("[Bug]: it dies #41726\n\nbody", "it dies", "vllm-project/vllm#41726"),
    ("[Bug]: it dies · Issue #41726 · vllm-project/vllm\n", "it dies", "vllm-project/vllm#41726"),
    ("p - Fix [Bug]: it dies [2 pull requests, 1 comments]\n\nvllm-project/vllm#41726Fetched 2026", "it dies", "vllm-project/vllm#41726"),
    ("Subject: Re: [vllm-project/vllm] [Bug]: it dies (Issue #41726)\n", "it dies", "vllm-project/vllm#41726"),
    ("# It dies at night\n\nhttps://github.com/vllm-project/vllm/issues/41726", "It dies at night", "vllm-project/vllm#41726"),
    ("It dies at night\n\nsee #41726", "It dies at night", ""),
    ("INFO 01-01 00:00:00 [a.py:1] up", "", ""),
    ("vllm serve a/b", "", ""),
    ("# It dies at night\n\nvllm-project/vllm#41726 is another bug. https://github.com/vllm-project/vllm/pull/7", "It dies at night", ""),
]  # fmt: skip


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
        (f"vLLM Version   : 0.20.2rc1.dev35+g4845aee6b\n\n{SERVE}\n\nIt worked with vLLM 0.19.0.", "0.20.2rc1.dev35+g4845aee6b"),
        (f"{SERVE}\n\nFlashInfer 0.6.8 and transformers 0.5.1", ""),
    ],
)  # fmt: skip
def test_the_release(text: str, release: str) -> None:
    made = drafted(text)
    scenario = checked(made)
    assert (scenario.try_with, scenario.status.bad) == (
        release or "0.33.0",
        f"=={release or '0.33.0'}",
    )
    assert any("the release is not stated" in gap for gap in made.gaps) == (not release)
    assert checked(drafted(text, version="0.32.0")).try_with == "0.32.0"


@pytest.mark.parametrize(
    ("said", "flags", "needs"),
    [
        ("GPU: NVIDIA GeForce RTX 5080", "", "1 GPU, 16 GB each"),
        ("On 8x H20 141GB", "-tp 4", "4 GPUs, 141 GB each"),
        ("Testing on 4 L40s GPUs", "-tp 2 -pp 2", "4 GPUs, 48 GB each"),
        ("2x A100", "", "1 GPU"),
        ("", "-tp 2 --nnodes 2", "2 GPUs, 2 nodes"),
        ("INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.23.0) with config: device_config=cpu", "-tp 2", "CPU"),
    ],
)  # fmt: skip
def test_hardware(said: str, flags: str, needs: str) -> None:
    assert str(checked(drafted(f"{SERVE} {flags}\n\n{said}")).needs) == needs


def test_the_model_is_stated_or_known_or_a_gap() -> None:
    shape = (
        "num_attention_heads: 16, num_key_value_heads: 4, head_dim: 256, num_hidden_layers: 32,"
        " vocab_size: 1000"
    )
    known = Model("org/model", heads=8, kv_heads=2, head_dim=64, layers=3, vocab_size=9)

    def sizes(text: str, models: Sequence[Model] = ()) -> tuple[tuple[int, ...], int]:
        made = drafted(f"{SERVE}\n\n{text}", models=models)
        model = checked(made).model
        return (model.heads, model.kv_heads, model.head_dim, model.layers, model.vocab_size), len(
            made.gaps
        )

    most = sizes("")[1]
    assert sizes(shape) == ((16, 4, 256, 32, 1000), most - 1)
    assert sizes("", [known]) == ((8, 2, 64, 3, 9), most - 1)
    assert sizes(f"{shape}\n\nvision: num_hidden_layers: 27") == ((16, 4, 256, 1, 1000), most)
    assert sizes("num_attention_heads: 7, num_key_value_heads: 2") == ((1, 1, 1, 1, 1), most)
    made = drafted("vllm serve /models/x --enforce-eager\n\nModel: org/public")
    assert checked(made).model.name == "org/public"
    assert any("org/public" in guess for guess in made.guesses)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("server hangs with long prompts", "hangs"),
        ("gibberish after a cache hit", "errs"),
        ("engine crashes, then hangs", "dies"),
    ],
)
def test_the_symptom_without_a_traceback(title: str, expected: str) -> None:
    scenario = checked(drafted(f"# [Bug]: {title}\n\n{SERVE}"))
    assert scenario.arms[0].expected == expected
    assert (scenario.signature is None) == (expected != "dies")


def test_variables_outside_of_the_command_are_only_quoted() -> None:
    made = drafted(
        f"## Your environment\n\nVLLM_A=1\n\n## Bug\n\n{SERVE}\n\nIt helps to set VLLM_USE_V1=0: no"
        " crash."
    )
    assert checked(made).reported().env == ()
    assert [guess for guess in made.guesses if "VLLM_" in guess] == [
        "named outside of the command: VLLM_USE_V1=0: “It helps to set VLLM_USE_V1=0: no crash.”"
    ]
