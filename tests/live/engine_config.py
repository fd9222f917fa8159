"""Configuration that a release makes of command lines, as far as that works without a device.

Run by the release's interpreter. Read a JSON list of argument lists (what follows `vllm serve`)
from stdin, and print for each the facts read from the model folder, or the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def facts(words: list[str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    args.model = getattr(args, "model_tag", None) or args.model
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True)
    model, parallel = config.model_config, config.parallel_config
    tokenizer = get_tokenizer(model.tokenizer, tokenizer_mode=model.tokenizer_mode)
    if args.tool_call_parser:
        ToolParserManager.get_tool_parser(args.tool_call_parser)(tokenizer)
    if args.reasoning_parser:
        ReasoningParserManager.get_reasoning_parser(args.reasoning_parser)(tokenizer)
    talk = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    spec = config.speculative_config
    return {
        "architecture": model.architecture,
        "head_size": model.get_head_size(),
        "heads": model.get_num_attention_heads(parallel),
        "kv_heads": model.get_num_kv_heads(parallel),
        "layers": model.get_num_layers(parallel),
        "longest": model.max_model_len,
        "cache": config.cache_config.cache_dtype,
        "skipped": config.cache_config.kv_cache_dtype_skip_layers,
        "weights": str(config.load_config.load_format),
        "tokenizer_mode": model.tokenizer_mode,
        "chat": talk,
        "drafter": spec.draft_model_config.architecture if spec is not None else None,
    }


def main() -> None:
    found = []
    for words in json.load(sys.stdin):
        try:
            found.append(facts(words))
        except (Exception, SystemExit) as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
