"""Arguments are read, and refused, as the release does it."""

from __future__ import annotations

import pytest
from rehearsal.arguments import ServeArgs, UsageError
from rehearsal.flags import parse
from rehearsal.release import Release


def read(*words: str, version: str = "0.23.0") -> ServeArgs:
    return parse(["serve", "some/model", *words], Release.parse(version))


def test_docker_style_and_serve_style_mean_the_same() -> None:
    release = Release.parse("0.23.0")
    assert parse(["--model", "a/b", "--port", "1"], release).model == "a/b"
    assert parse(["serve", "a/b", "--port=1"], release).model == "a/b"
    assert parse(["serve", "--port", "1", "a/b"], release).port == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--enforce-eager"],
        ["--compilation-config.cudagraph_mode", "none"],
        ["--compilation-config.cudagraph_mode=NONE"],
        ["--compilation-config", '{"cudagraph_mode": "NONE"}'],
        ["--compilation_config", '{"cudagraph_mode": "none"}'],
        ["-cc.cudagraph_mode=none"],
        ["-cc", '{"cudagraph_mode":"NONE"}'],
        ["-O.cudagraph_mode=none"],
        ["-O0"],
    ],
)
def test_every_way_to_turn_graphs_off(words: list[str]) -> None:
    assert read(*words).cudagraph_mode == "NONE"


def test_graphs_are_on_by_default() -> None:
    assert read().cudagraph_mode == "FULL_AND_PIECEWISE"
    assert read("-O2").cudagraph_mode == "FULL_AND_PIECEWISE"
    assert read("-cc.mode=0").cudagraph_mode == "FULL_AND_PIECEWISE"


def test_numbers_and_switches() -> None:
    args = read("--max-model-len", "8K", "--max-num-batched-tokens", "4k", "--no-enable-prefix-caching", "-tp", "2")
    assert (args.max_model_len, args.max_num_batched_tokens(8192)) == (8192, 4000)
    assert not args.prefix_caching
    assert args.chunked_prefill
    assert args.options["tensor-parallel-size"] == "2"
    assert read("--max-model-len", "-1").max_model_len is None
    assert read("--served-model-name", "a", "b", "--port", "1").served_names == ("a", "b")


@pytest.mark.parametrize(
    ("flag", "first", "last"),
    [
        ("--spec-method", "0.22.0", None),
        ("--watermark", "0.24.0", None),
        ("--max-num-scheduled-tokens", "0.26.0", None),
        ("--max-num-partial-prefills", None, "0.26.0"),
        ("--return-sampling-mask", "0.28.0", None),
        ("--override-attention-dtype", None, "0.27.1"),
        ("--max-num-queued-reqs", "0.29.0", None),
        ("--log-level", "0.31.0", None),
        ("--custom-histogram-buckets", "0.32.0", None),
    ],
)
def test_flags_come_and_go(flag: str, first: str | None, last: str | None) -> None:
    for version in ("0.19.1", "0.20.2", "0.22.0", "0.24.0", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.31.0", "0.32.0"):
        number = Release.parse(version).number
        known = (not first or number >= Release.parse(first).number) and (
            not last or number <= Release.parse(last).number
        )
        words = [flag] if flag == "--return-sampling-mask" else [flag, "1"]
        if known:
            read(*words, version=version)
        else:
            with pytest.raises(UsageError, match=f"error: unrecognized arguments: {flag}"):
                read(*words, version=version)


@pytest.mark.parametrize("version", ["0.19.1", "0.25.1", "0.32.0"])
@pytest.mark.parametrize("flag", ["--disable-log-requests", "--use-v2-block-manager", "--foo"])
def test_never_known_flags(version: str, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(flag, version=version)
    # as recorded from a real server: the top parser speaks, not the one of `serve`
    assert str(caught.value) == (
        "usage: vllm [-h] [-v]\n            {chat,complete,serve,launch,bench,collect-env,run-batch} ...\n"
        f"vllm: error: unrecognized arguments: {flag}"
    )


def test_turboquant_is_no_choice_before_it_exists() -> None:
    with pytest.raises(UsageError, match=r"vllm serve: error: argument --kv-cache-dtype: invalid choice: 'turbo"):
        read("--kv-cache-dtype", "turboquant_4bit_nc", version="0.19.1")
    assert read("--kv-cache-dtype", "turboquant_4bit_nc", version="0.20.2").turboquant


@pytest.mark.parametrize("words", [["--max-num-seqs", "many"], ["--port"], ["--compilation-config", "{bad"]])
def test_bad_values(words: list[str]) -> None:
    with pytest.raises(UsageError, match="vllm serve: error: argument --"):
        read(*words)
