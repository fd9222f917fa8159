"""Folders of tiny models: configuration and tokenizer, and weights only on request.

Without weights a server needs `--load-format dummy`.

Bugs in scheduling, batching, caching and request handling do not depend on the model's output, so a
few kilobytes are enough. The files are written without torch or transformers, and are identical on
every machine.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_repro.releases.disk import cache_root, replace_file
from vllm_repro.releases.families import image_processor, model_config
from vllm_repro.releases.tiny_tokenizer import END_OF_TURN, PAD, special_id, tokenizer_json
from vllm_repro.releases.weights import safetensors
from vllm_repro.tiny_model import TinyModel

_CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' }}{%- for tool in tools -%}{{ tool | tojson }}{{"
    " '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}{%- for message in messages -%}{{"
    " '<|im_start|>' + message['role'] + '\\n' }}{%- if message['content'] is string -%}{{"
    " message['content'] }}{%- elif message['content'] -%}{%- for part in message['content'] -%}{{"
    " part['text'] if part['type'] == 'text' else '' }}{%- endfor -%}{%- endif -%}{%- for call in"
    " message['tool_calls'] or [] -%}{{ '<tool_call>' + call['function']['name'] }}{{"
    " call['function']['arguments'] | tojson }}{{ '</tool_call>' }}{%- endfor -%}{{ '<|im_end|>\\n'"
    " }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_tiny_model(folder: Path, model: TinyModel) -> Path:
    """Write configuration and tokenizer of a tiny model to `folder`, and return the folder.

    Each file is replaced atomically, and only if it differs, so that parallel runs can make the
    same folder.
    """
    files = {
        "config.json": model_config(model),
        "tokenizer.json": tokenizer_json(model.vocab, image=model.family == "blip2"),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END_OF_TURN,
            "pad_token": PAD,
            "unk_token": None,
            "model_max_length": model.max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {
            "eos_token_id": special_id(END_OF_TURN),
            "pad_token_id": special_id(PAD),
            "do_sample": True,
            "temperature": 1.0,
        },
    } | image_processor(model)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        # Without an indent in the long file: Python's slower encoder would take 20 ms of each run.
        text = (
            json.dumps(content, indent=None if name == "tokenizer.json" else 1, ensure_ascii=True)
            + "\n"
        )
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            replace_file(path, text.encode())
    return folder


def cached_model(model: TinyModel, *, weights: bool = False) -> Path:
    """Return the folder of a tiny model in the cache, made on first use.

    weights: include `model.safetensors`; raises `ValueError` for a family without made weights.
    """
    folder = make_tiny_model(
        cache_root() / "models" / (model.slug + ("-weights" if weights else "")), model
    )
    if weights and not (folder / "model.safetensors").exists():
        replace_file(
            folder / "model.safetensors",
            safetensors(model, model_config(model)["intermediate_size"]),
        )
    return folder
