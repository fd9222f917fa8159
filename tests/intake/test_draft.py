"""The draft's own parts: the signature's template and frames, and what stands for a gap."""

from __future__ import annotations

import pytest

from tests.intake.texts import SERVE, checked, drafted
from vllm_repro_diagnosis.diagnosis import diagnose
from vllm_repro_diagnosis.signature import How, compare


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
    assert "the text shows no frames: fill them in from the report of a run" in none.gaps


def test_a_text_without_an_exception_has_a_signature_that_matches_nothing() -> None:
    made = drafted(f"# [Bug]: it crashes\n\n{SERVE}")
    signature = checked(made).signature
    assert signature is not None
    for text in (traceback("KeyError: 'x'"), traceback("ValueError: no")):
        assert compare(signature, diagnose(text)).how is How.OTHER
    assert (
        "the text holds no exception of the engine: fill in the signature from the report of a run"
        in made.gaps
    )


def test_the_same_text_gives_the_same_file() -> None:
    text = (
        traceback("KeyError: 'x'")
        + "num_attention_heads: 16 head_dim: 4\n\nWith --enforce-eager it works. See #41726."
    )
    assert drafted(text).text == drafted(text).text
    assert drafted(text.replace("\n", "\r\n")).text == drafted(text).text
