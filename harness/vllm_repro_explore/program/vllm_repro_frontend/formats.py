"""How models write reasoning and tool calls, by the name of vLLM's parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes its tool calls."""

    # text of a call, from its name, its arguments and its index in the answer
    call: Callable[[str, dict[str, Any], int], str]
    before: str = ""
    between: str = ""
    after: str = ""
    # most calls of an answer
    most: int = 3
    # False if a call is recognized only at the start of the answer
    after_text: bool = True
    # False if the model has no token for a tag
    tags_are_tokens: bool = True

    def text(self, calls: list[Call]) -> str:
        """Return the text of tool calls; empty without calls."""
        texts = [self.call(*call, index) for index, call in enumerate(calls)]
        return self.before + self.between.join(texts) + self.after if texts else ""


def dump(value: object) -> str:
    """Return a value as models write JSON."""
    return json.dumps(value, ensure_ascii=False)


def _raw(value: object) -> str:
    return value if isinstance(value, str) else dump(value)


def _json(before: str = "", after: str = "", key: str = "arguments") -> Callable[..., str]:
    """Return a writer of calls as JSON objects with the members `name` and `key`."""
    return lambda name, arguments, _: before + dump({"name": name, key: arguments}) + after


def _tags(head: str, parameter: str, tail: str) -> Callable[..., str]:
    """Return a writer of calls as tags. `NAME`, `KEY`, `VALUE` and `IS_TEXT` are replaced."""

    def write(name: str, arguments: dict[str, Any], _: int) -> str:
        parts = [
            parameter.replace("KEY", key)
            .replace("IS_TEXT", dump(isinstance(value, str)))
            .replace("VALUE", _raw(value))
            for key, value in arguments.items()
        ]
        return head.replace("NAME", name) + "".join(parts) + tail

    return write


def _python(name: str, arguments: dict[str, Any], _: int) -> str:
    """Write a call as in Python."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma(name: str, arguments: dict[str, Any], _: int) -> str:
    texts = [
        f"{key}:" + (f"<escape>{value}<escape>" if isinstance(value, str) else dump(value))
        for key, value in arguments.items()
    ]
    return f"<start_function_call>call:{name}{{{','.join(texts)}}}<end_function_call>"


_IN_TAGS = _json("<tool_call>\n", "\n</tool_call>")
_QWEN = ToolFormat(
    call=_tags(
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    between="\n",
)
_PAIRS = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_GLM = ToolFormat(call=_tags("<tool_call>NAME\n", _PAIRS, "</tool_call>"), between="\n")
_GLM_SHORT = ToolFormat(
    call=_tags("<tool_call>NAME", _PAIRS.replace("\n", ""), "</tool_call>"), between="\n"
)
_INVOKE = _tags('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>")
_DSML = _tags(
    '<｜DSML｜invoke name="NAME">\n',
    '<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>",
)
_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

TOOL_FORMATS = {
    "apertus": ToolFormat(
        call=lambda name, arguments, _: dump({name: arguments}),
        before="<|tools_prefix|>[",
        between=", ",
        after="]<|tools_suffix|>",
    ),
    "deepseek_v3": ToolFormat(
        call=lambda name, arguments, _: (
            f"{_CALL[0]}function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```{_CALL[1]}"
        ),
        before=_CALLS[0],
        between="\n",
        after=_CALLS[1],
    ),
    "deepseek_v31": ToolFormat(
        call=lambda name, arguments, _: (
            f"{_CALL[0]}{name}<｜tool▁sep｜>{dump(arguments)}{_CALL[1]}"
        ),
        before=_CALLS[0],
        after=_CALLS[1],
    ),
    "deepseek_v32": ToolFormat(
        call=_DSML,
        before="<｜DSML｜function_calls>\n",
        between="\n",
        after="\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": ToolFormat(
        call=_DSML,
        before="<｜DSML｜tool_calls>\n",
        between="\n",
        after="\n</｜DSML｜tool_calls>",
    ),
    "dots": ToolFormat(
        call=_INVOKE,
        before="<dots_function_call>\n",
        between="\n",
        after="\n</dots_function_call>",
    ),
    "ernie45": ToolFormat(call=_json("<tool_call>\n", "\n</tool_call>\n")),
    "functiongemma": ToolFormat(call=_gemma),
    "glm45": _GLM,
    "glm47": _GLM_SHORT,
    "granite": ToolFormat(call=_json(), before="<|tool_call|>[", between=", ", after="]"),
    "granite-20b-fc": ToolFormat(call=_json("<function_call> "), between=" "),
    "granite4": ToolFormat(call=_IN_TAGS, between="\n"),
    "hermes": ToolFormat(call=_IN_TAGS, between="\n"),
    "hunyuan_a13b": ToolFormat(
        call=_json(),
        before="<tool_calls>[",
        between=", ",
        after="]\n</tool_calls>",
        tags_are_tokens=False,
    ),
    "hy_v3": ToolFormat(
        call=_tags("<tool_call>NAME<tool_sep>\n", _PAIRS, "</tool_call>"),
        before="<tool_calls>\n",
        between="\n",
        after="\n</tool_calls>",
    ),
    "internlm": ToolFormat(
        call=_json(key="parameters"),
        before="<|action_start|><|plugin|>\n",
        after="<|action_end|>\n",
        most=1,
    ),
    "jamba": ToolFormat(
        call=_json(), before="<tool_calls>[\n", between=",\n", after="\n]</tool_calls>"
    ),
    "kimi_k2": ToolFormat(
        call=lambda name, arguments, index: (
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
            f"{dump(arguments)}<|tool_call_end|>"
        ),
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "lfm2": ToolFormat(
        call=_python, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"
    ),
    "ling3": _GLM_SHORT,
    "llama3_json": ToolFormat(call=_json(key="parameters"), between="; ", after_text=False),
    "llama4_pythonic": ToolFormat(
        call=_python, before="[", between=", ", after="]", after_text=False
    ),
    "longcat": ToolFormat(call=_json("<longcat_tool_call>", "</longcat_tool_call>"), between="\n"),
    "minicpm5": ToolFormat(
        call=_tags('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>")
    ),
    "minimax_m2": ToolFormat(
        call=_INVOKE, before="<minimax:tool_call>\n", between="\n", after="\n</minimax:tool_call>"
    ),
    "olmo3": ToolFormat(
        call=_python, before="<function_calls>", between="\n", after="</function_calls>"
    ),
    "phi4_mini_json": ToolFormat(
        call=_json(), before="functools[", between=", ", after="]", after_text=False
    ),
    "poolside_v1": _GLM,
    "pythonic": ToolFormat(call=_python, before="[", between=", ", after="]", after_text=False),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": ToolFormat(
        call=_tags("<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>"),
        before="<seed:tool_call>\n",
        between="\n",
        after="\n</seed:tool_call>",
    ),
    "step3": ToolFormat(
        call=_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        before="<｜tool_calls_begin｜>",
        after="<｜tool_calls_end｜>",
    ),
    "step3p5": _QWEN,
    "step5": _QWEN,
    "xlam": ToolFormat(call=_json(), before="[", between=", ", after="]", after_text=False),
}
"""Format of each tool parser. An answer that the parser does not read as written is not judged."""

_THINK = "<think>", "</think>"
REASONING = {
    "deepseek_r1": _THINK,
    "ernie45": _THINK,
    "glm45": _THINK,
    "granite": ("Here is my thought process:", "Here is my response:"),
    "granite_thinking_parser": _THINK,
    "holo2": _THINK,
    "hy_v4": _THINK,
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_k2": _THINK,
    "ling3": _THINK,
    "mimo": _THINK,
    "minimax_m2": _THINK,
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "nemotron_v3": _THINK,
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "qwen3": _THINK,
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "step3p5": _THINK,
    "step5": _THINK,
}
"""Start and end of the reasoning of each reasoning parser.

Left out are parsers of models that have no tokens for them, and compare other tokens: hunyuan_a13b
has the ids of its model in its code, olmo3 looks for parts of `</think>`.
"""
STARTED_BY_PROMPT = ("ernie45", "holo2", "hy_v4", "step5")
"""Reasoning parsers of models whose prompt has the start of the reasoning."""

PAIRS = (
    ("ernie45", "ernie45"),
    ("glm45", "glm45"),
    ("hermes", "qwen3"),
    ("kimi_k2", "kimi_k2"),
    ("llama3_json", "deepseek_r1"),
    ("minimax_m2", "minimax_m2"),
    ("pythonic", "deepseek_r1"),
    ("qwen3_coder", "nemotron_v3"),
    ("qwen3_coder", "qwen3"),
    ("seed_oss", "seed_oss"),
    ("step5", "step5"),
)
"""Tool and reasoning parsers that serve the same model."""
