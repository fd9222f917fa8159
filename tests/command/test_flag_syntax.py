"""How flags are spelled: short forms, several values, numbers with units, JSON."""

from __future__ import annotations

import pytest

from tests.command.texts import assert_refused
from vllm_repro.command.command import parse
from vllm_repro.errors import CommandError


def test_short_forms_and_levels_have_long_names() -> None:
    command = parse("vllm serve m -tp 2 -O3 -cc.cudagraph_mode none -q fp8")
    assert command.get("--tensor-parallel-size") == "2"
    assert command.get("-O") == command.get("--optimization-level") == "3"
    assert command.get("--compilation-config.cudagraph_mode") == "none"
    assert command.argv() == ("m", "-tp", "2", "-O3", "-cc.cudagraph_mode", "none", "-q", "fp8")
    assert command == parse(
        "vllm serve m --tensor-parallel-size=2 --optimization-level 3"
        " --compilation-config.cudagraph_mode=none --quantization fp8"
    )


def test_several_values_stay_together() -> None:
    command = parse("vllm serve m --served-model-name a b --cudagraph-capture-sizes 1 2 4 --port 1")
    assert command.get("--served-model-name") == "a b"
    assert command.flags[1].values == ("1", "2", "4")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("2G", 2 * 1024**3),
        ("-1", -1),
    ],
)
def test_numbers_as_vllm_reads_them(text: str, number: int) -> None:
    assert parse(f"vllm serve m --max-model-len {text}").number("max_model_len") == number


@pytest.mark.parametrize("text", ["4096 tokens", "25.6K", "many", "", "1.5"])
def test_other_numbers_are_refused(text: str) -> None:
    command = parse("vllm serve m").with_flags(f"--max-num-seqs '{text}'")
    with pytest.raises(CommandError, match="not a whole number"):
        command.number("--max-num-seqs")


def test_auto_length_is_not_an_error() -> None:
    assert parse("vllm serve m --max-model-len auto").get("--max-model-len") == "auto"


def test_numbers_with_units_inside_json() -> None:
    text = 'vllm serve m --kv-transfer-config \'{"cpu_bytes_to_use": 80m, "x": "8q"}\''
    assert parse(text).get("--kv-transfer-config") is not None


def test_typographic_quotes_are_named() -> None:
    with pytest.raises(CommandError) as caught:
        parse("vllm serve m --hf-overrides '{\u201ca\u201d: 1}'")
    assert "typographic" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("vllm serve m \\\n --port 1 2", 2, "belongs to no flag"),
        ("vllm serve m --enforce-eager true", 1, "belongs to no flag"),
        ("vllm serve a \\\n --model b", 2, "two models"),
        ("vllm serve m\n--port 1\n--max-model-len long", 3, "not a whole number"),
        ('vllm serve m\n--speculative-config {"method":"mtp"}', 2, "is not JSON"),
        ("vllm serve m --kv-transfer-config '{\u201ca\u201d: 1}'", 1, "is not JSON"),
    ],
)
def test_each_points_at_its_line(text: str, line: int, message: str) -> None:
    assert_refused(text, line, message)
