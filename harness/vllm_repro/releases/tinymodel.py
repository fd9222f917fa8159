"""Tiny models to serve: a folder with a configuration and a tokenizer, and no weights (`--load-format
dummy`).

Scheduling, batching, caching and request handling do not depend on what a model says, so a model of a few
kilobytes is enough for every bug in them. The folder is written with the standard library alone and is the
same, byte for byte, on every machine: neither torch nor transformers is needed until vLLM itself reads it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from vllm_repro.releases.tinytokenizer import END_OF_TURN, PAD, special_id, tokenizer_json

FAMILIES = ("qwen3", "llama", "gemma3")

Kind = Literal["full", "sliding"]
"""What a layer's attention looks at: everything before a token, or a window."""

_SLIDING_WINDOW = 512
_SLIDING_PER_FULL = 5  # Gemma 3 has five layers with a window to one that sees everything

_CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\n' }}{%- for tool in tools -%}{{ tool | tojson }}{{ '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{{ part['text'] if part['type'] == 'text' else '' }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{ '<tool_call>' + call['function']['name'] }}{{ call['function']['arguments'] | tojson }}{{ '</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_tiny_model(
    folder: Path,
    *,
    family: str = "qwen3",
    layers: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int | None = None,
    vocab: int = 4096,
    max_position: int = 32768,
    kinds: Sequence[Kind] = (),
    window: int | None = None,
) -> Path:
    """Writes the model folder and returns it.

    family: "qwen3", "llama" or "gemma3" (a hybrid: five sliding-window layers to one full one). layers: 2
    unless given, 6 for gemma3. vocab: up to about 9,500 every token id is a piece of text; ids beyond that
    decode to nothing. hidden: width between the layers, heads x head_dim unless given; a narrow one makes
    wide attention cheap. kinds: gemma3's layers one by one, in place of five to one. window: of the sliding
    ones, in tokens; 512 unless given.

    Writing is atomic file by file and a file that is right already is left alone, so runs side by side may
    make the same folder. Raises `ValueError` for a shape that no model has.
    """
    files = {
        "config.json": model_config(
            family,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            vocab=vocab,
            max_position=max_position,
            kinds=kinds,
            window=window,
        ),
        "tokenizer.json": tokenizer_json(vocab),
        "tokenizer_config.json": _tokenizer_config(max_position),
        "generation_config.json": {
            "eos_token_id": special_id(END_OF_TURN),
            "pad_token_id": special_id(PAD),
            "do_sample": True,
            "temperature": 1.0,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _write(folder / name, json.dumps(content, indent=1, ensure_ascii=True) + "\n")
    return folder


def model_config(
    family: str,
    *,
    layers: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int | None = None,
    vocab: int = 4096,
    max_position: int = 32768,
    kinds: Sequence[Kind] = (),
    window: int | None = None,
) -> dict[str, Any]:
    """What `config.json` holds; the arguments are those of `make_tiny_model`."""
    if family not in FAMILIES:
        raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    if kinds and (family != "gemma3" or layers not in (None, len(kinds))):
        raise ValueError("kinds names each layer of a gemma3, and layers is their number")
    usual = len(kinds) or (_SLIDING_PER_FULL + 1 if family == "gemma3" else 2)
    count = usual if layers is None else layers
    width = heads * head_dim if hidden is None else hidden
    if min(count, heads, kv_heads, head_dim, width, vocab, max_position, 1 if window is None else window) < 1:
        raise ValueError("layers, heads, sizes and lengths count from 1")
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": special_id(END_OF_TURN),
        "pad_token_id": special_id(PAD),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the name that transformers 4 reads
    }
    every = kinds or [_kind(index) for index in range(count)]
    return config | dict(_family_settings(family, every, _SLIDING_WINDOW if window is None else window))


def _family_settings(family: str, kinds: Sequence[Kind], window: int) -> Iterator[tuple[str, Any]]:
    if family == "gemma3":
        yield "architectures", ["Gemma3ForCausalLM"]
        yield "model_type", "gemma3_text"
        yield "hidden_activation", "gelu_pytorch_tanh"
        yield "query_pre_attn_scalar", 32
        yield "sliding_window", window
        yield "sliding_window_pattern", _SLIDING_PER_FULL + 1
        yield "layer_types", [f"{kind}_attention" for kind in kinds]
        yield "rope_theta", 1_000_000.0
        yield "rope_local_base_freq", 10_000.0
        yield "attn_logit_softcapping", None
        yield "final_logit_softcapping", None
        return
    yield "architectures", ["Qwen3ForCausalLM" if family == "qwen3" else "LlamaForCausalLM"]
    yield "model_type", family
    yield "hidden_act", "silu"
    yield "rope_theta", 10_000.0
    if family == "qwen3":
        yield "use_sliding_window", False


def _kind(index: int) -> Kind:
    return "full" if index % (_SLIDING_PER_FULL + 1) == _SLIDING_PER_FULL else "sliding"


def _tokenizer_config(max_position: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "unk_token": None,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
