"""`config.json` of a tiny model, by family. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_repro.releases.tiny_tokenizer import END_OF_TURN, IMAGE, PAD, added_tokens, special_id
from vllm_repro.tiny_model import Family, Kind, TinyModel

# `compress_ratios` of DeepSeek-V4
_COMPRESS: Mapping[Kind, int] = {"sliding": 0, "sparse": 4, "compressed": 128}
_PIXELS = 224  # width and height of an image, as in the published BLIP-2 models
_IMAGE_TOKENS = 32
_YARN = 16  # DeepSeek-V4 was trained on 1/16 of its maximum length


def model_config(model: TinyModel) -> dict[str, Any]:
    """Return the content of `config.json` for a tiny model."""
    common: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": 2 * min(model.width, 256),  # a larger one only costs time
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
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
    return common | _SETTINGS[model.family](model)


def _mimo(model: TinyModel) -> dict[str, Any]:
    """Return the part of `config.json` for MiMo: a Qwen2 with draft layers."""
    # vLLM's MiMo is its Qwen2 plus draft layers. transformers has no class for it and would need
    # code from the checkpoint; the model_type qwen2 avoids that.
    drafter = {"num_nextn_predict_layers": model.drafts, "tie_word_embeddings": False}
    return _dense("MiMoForCausalLM", "qwen2") | {"use_sliding_window": False} | drafter


def _dense(architecture: str, model_type: str) -> dict[str, Any]:
    """Return the part of `config.json` for a dense model, such as Llama or Qwen3."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
    }


def _blip2(model: TinyModel) -> dict[str, Any]:
    """Return the part of `config.json` for BLIP-2: a Llama that reads images."""
    # BLIP-2's processor in transformers does not need torchvision, which is not installed here.
    layers = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    return {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "num_query_tokens": _IMAGE_TOKENS,
        "image_token_index": added_tokens(image=True).index(IMAGE),
        "vision_config": (
            layers
            | {
                "model_type": "blip_2_vision_model",
                "num_hidden_layers": 1,
                "image_size": _PIXELS,
            }
        ),
        "qformer_config": (
            layers
            | {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 2,
                "encoder_hidden_size": 64,
            }
        ),
        "text_config": model_config(replace(model, family="llama")),
    }


def image_processor(model: TinyModel) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the image processor, by name; empty for a model without images."""
    if model.family != "blip2":
        return {}
    size = {"height": _PIXELS, "width": _PIXELS}
    return {
        "preprocessor_config.json": {"image_processor_type": "BlipImageProcessor", "size": size},
        "processor_config.json": {
            "processor_class": "Blip2Processor",
            "num_query_tokens": _IMAGE_TOKENS,
        },
    }


def _gemma3(model: TinyModel) -> dict[str, Any]:
    """Return the part of `config.json` for Gemma 3: layers with a sliding window."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": model.window,
        # older transformers versions read it; layer_types overrides it
        "sliding_window_pattern": 6,
        "layer_types": [f"{kind}_attention" for kind in model.kinds],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _granite_hybrid(model: TinyModel) -> dict[str, Any]:
    """Return the part of `config.json` for a Granite hybrid: attention and Mamba layers."""
    return _dense("GraniteMoeHybridForCausalLM", "granitemoehybrid") | {
        "layer_types": ["attention" if kind == "full" else kind for kind in model.kinds],
        "num_local_experts": 0,
        "shared_intermediate_size": 2 * min(model.width, 256),
        "mamba_n_heads": model.heads,
        "mamba_d_state": 16,
    }


def _deepseek_v4(model: TinyModel) -> dict[str, Any]:
    """Return the part of `config.json` for DeepSeek-V4: compressed attention and experts."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "qk_rope_head_dim": 64,
        "sliding_window": model.window,
        "compress_ratios": [_COMPRESS[kind] for kind in model.kinds],
        # The size of the indexer's workspace depends on these two: keep the real model's values.
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        # vLLM's routing needs this number of experts; a small intermediate size keeps them cheap.
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_nextn_predict_layers": model.drafts,
        "rope_theta": 10_000.0,
        "compress_rope_theta": 160_000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": _YARN,
            "original_max_position_embeddings": max(1, model.max_position // _YARN),
            "beta_fast": 32,
            "beta_slow": 1,
            "rope_theta": 10_000.0,
        },
    }
    return config | (_DEEPSEEK_V4_ON_A_GPU if model.fp8 else _DEEPSEEK_V4_NARROW)


_DEEPSEEK_V4_NARROW: dict[str, Any] = {
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "index_n_heads": 8,
    "moe_intermediate_size": 128,
}
_DEEPSEEK_V4_ON_A_GPU: dict[str, Any] = {
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "moe_intermediate_size": 512,  # a quarter of the real model's
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
"""Sizes of DeepSeek-V4-Flash, except the width of its experts.

The GPU kernels may not support others.
"""

_SETTINGS: Mapping[Family, Callable[[TinyModel], dict[str, Any]]] = {
    "qwen3": lambda _: _dense("Qwen3ForCausalLM", "qwen3") | {"use_sliding_window": False},
    "llama": lambda _: _dense("LlamaForCausalLM", "llama"),
    "gemma3": _gemma3,
    "mimo": _mimo,
    "deepseek_v4": _deepseek_v4,
    "blip2": _blip2,
    "granite_hybrid": _granite_hybrid,
}
