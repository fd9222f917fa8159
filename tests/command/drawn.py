"""Commands drawn by hypothesis, with values that a shell, YAML or JSON would take for something else."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from vllm_repro.command.command import Flag, ServeCommand

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab '\"\\{}$#`\n\t:é<>|&;", max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab .'", max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXTS = st.text("abz09 .,:;'\"\\{}[]$#`!*?~&|<>()=%-_/é\n\t", max_size=12) | st.sampled_from(
    [
        "",
        "-1",
        "-0.5",
        "--x",
        "-x",
        "$HOME",
        "null",
        "yes",
        "1e3",
        "- a",
        "# a",
        "a: b",
        "\n",
        " ",
        "$$",
        "${A}",
        "'",
    ]
)
NAMES = st.sampled_from(["--port", "--seed", "--dtype", "-q", "-tp", "--x-y", "--attention-config.flash_attn_version"])
SWITCH_NAMES = st.sampled_from(["--enforce-eager", "--no-enable-prefix-caching", "--headless", "--enable-lora"])
BARE = TEXTS.filter(lambda text: not text.startswith("-"))


@st.composite
def flags(draw: st.DrawFn) -> Flag:
    kind = draw(st.sampled_from(["value", "json", "switch", "several"]))
    separator = draw(st.sampled_from([" ", "="]))
    if kind == "switch":
        return Flag(draw(SWITCH_NAMES))
    if kind == "several":
        first, *more = draw(st.lists(BARE, min_size=1, max_size=3))
        return Flag("--served-model-name", first, tuple(more))
    if kind == "json":
        name = draw(st.sampled_from(["--speculative-config", "--compilation-config", "--hf-overrides"]))
        return Flag(name, json.dumps(draw(JSON_VALUES), indent=draw(st.sampled_from([None, 1]))), separator=separator)
    written = draw(NAMES)
    name = {"-q": "--quantization", "-tp": "--tensor-parallel-size"}.get(written, written)
    return Flag(name, draw(TEXTS), written=written, separator=separator)


@st.composite
def commands(draw: st.DrawFn) -> ServeCommand:
    chosen = tuple(draw(st.lists(flags(), max_size=5)))
    model = draw(st.none() | BARE.filter(bool))
    if model is not None and draw(st.booleans()):
        spelled = Flag("--model", model, separator=draw(st.sampled_from([" ", "="])))
        return ServeCommand(model, chosen, model_flag=spelled, model_at=draw(st.integers(0, len(chosen))))
    return ServeCommand(model, chosen)
