"""Hypothesis strategies for commands with values that shells and JSON could misread."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import Flag, canonical

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text("ab '\"\\{}$#`\n\t:é<>|&;", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text("ab .'", max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
ODD = [
    "",
    "-1",
    "-0.5",
    "--x",
    "-x",
    "$HOME",
    "null",
    "1e3",
    "- a",
    "# a",
    "\n",
    " ",
    "$$",
    "${A}",
    "'",
]
TEXTS = st.text("abz09 .,:;'\"\\{}[]$#`!*?~&|<>()=%-_/é\n\t", max_size=12) | st.sampled_from(ODD)
NAMES = st.sampled_from(
    ["--port", "--seed", "--dtype", "-q", "-tp", "--x-y", "--attention-config.flash_attn_version"]
)
SWITCH_NAMES = st.sampled_from(
    ["--enforce-eager", "--no-enable-prefix-caching", "--headless", "--enable-lora"]
)
BARE = TEXTS.filter(lambda text: not text.startswith("-"))


@st.composite
def flags(draw: st.DrawFn) -> Flag:
    kind = draw(st.sampled_from(["value", "json", "switch", "several"]))
    separator = draw(st.sampled_from([" ", "="]))
    if kind == "switch":
        return Flag(name=draw(SWITCH_NAMES))
    if kind == "several":
        return Flag(
            name="--served-model-name", values=tuple(draw(st.lists(BARE, min_size=1, max_size=3)))
        )
    if kind == "json":
        name = draw(
            st.sampled_from(["--speculative-config", "--compilation-config", "--hf-overrides"])
        )
        value = json.dumps(draw(JSON_VALUES), indent=draw(st.sampled_from([None, 1])))
        return Flag(name=name, values=(value,), separator=separator)
    written = draw(NAMES)
    return Flag(
        name=canonical(written), values=(draw(TEXTS),), written=written, separator=separator
    )


@st.composite
def commands(draw: st.DrawFn) -> ServeCommand:
    chosen = draw(st.lists(flags(), max_size=5))
    model = draw(st.none() | BARE.filter(bool))
    if model is not None and draw(st.booleans()):
        spelled = Flag(name="--model", values=(model,), separator=draw(st.sampled_from([" ", "="])))
        chosen.insert(draw(st.integers(0, len(chosen))), spelled)
        model = None
    return ServeCommand(model_argument=model, flags=tuple(chosen))
