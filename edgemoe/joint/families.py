"""Which tensor of a GGUF lies where in a Hugging Face style checkpoint, for the architectures that can be trained: one table for both directions.

Each tensor of a GGUF is a *view* of one parameter of the transformers class (as it is in memory, transformers 5): the whole of it, or, of experts whose gate and up are one
parameter there, a part. To export is to write through the view, to come back is to read through it. Rotary positions need no reordering: all four architectures have the same
order in both worlds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgemoe.errors import EdgemoeError


class CheckpointError(EdgemoeError):
    """A model that cannot become a checkpoint, or a checkpoint that does not belong to a model."""


@dataclass(frozen=True)
class Place:
    """parameter: its name in the transformers class. shape: of the parameter, from that of the GGUF's tensor. view: of the parameter, an array of the GGUF tensor's shape."""

    parameter: str
    shape: Callable[[tuple], tuple] = lambda shape: shape
    view: Callable[[np.ndarray], np.ndarray] = lambda a: a


def _whole(name: str) -> Place:
    return Place(name)


def _row(name: str) -> Place:
    """A vector that is a matrix of one row there."""
    return Place(name, lambda s: (1, *s), lambda a: a[0])


def _half(name: str, second: bool) -> Place:
    """Rows of gate before rows of up: [E, 2F, D]."""
    return Place(name, lambda s: (s[0], 2 * s[1], s[2]), lambda a: a[:, a.shape[1] // 2 :] if second else a[:, : a.shape[1] // 2])


def _woven(name: str, second: bool) -> Place:
    """gpt-oss: [E, D, 2F], columns of gate and up in turn."""
    return Place(name, lambda s: (s[0], s[2], 2 * s[1]), lambda a: a[:, :, int(second) :: 2].transpose(0, 2, 1))


def _woven_bias(name: str, second: bool) -> Place:
    return Place(name, lambda s: (s[0], 2 * s[1]), lambda a: a[:, int(second) :: 2])


def _turned(name: str) -> Place:
    return Place(name, lambda s: (s[0], s[2], s[1]), lambda a: a.transpose(0, 2, 1))


TOP = {"token_embd.weight": _whole("model.embed_tokens.weight"), "output_norm.weight": _whole("model.norm.weight"), "output.weight": _whole("lm_head.weight")}
ATTENTION = {
    "attn_norm.weight": _whole("input_layernorm.weight"),
    **{f"attn_{a}.{part}": _whole(f"self_attn.{b}_proj.{part}") for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")) for part in ("weight", "bias")},
}
STACKED = {
    "ffn_gate_exps.weight": _half("mlp.experts.gate_up_proj", False),
    "ffn_up_exps.weight": _half("mlp.experts.gate_up_proj", True),
    "ffn_down_exps.weight": _whole("mlp.experts.down_proj"),
}
QWEN = {
    **ATTENTION, **STACKED, "ffn_norm.weight": _whole("post_attention_layernorm.weight"), "ffn_gate_inp.weight": _whole("mlp.gate.weight"),
    **{f"ffn_{kind}.weight": _whole(f"mlp.{kind}_proj.weight") for kind in ("gate", "up", "down")},
}


def _shared(name: str) -> dict[str, Place]:
    return {f"ffn_{kind}_shexp.weight": _whole(f"mlp.{name}.{kind}_proj.weight") for kind in ("gate", "up", "down")}


@dataclass(frozen=True)
class Family:
    """architecture: in a GGUF. model_type, class_name: in transformers. layer: places of a layer's tensors. config: what config.json says beside the common keys."""

    architecture: str
    model_type: str
    class_name: str
    layer: dict[str, Place]
    config: Callable[[Keys], dict]
    router: str  # its parameters begin so
    zero: str = ""  # a tensor of layers with experts that a GGUF may leave out, which then adds nothing

    def place(self, name: str) -> Place | None:
        """Of a GGUF's tensor; None where there is none."""
        if name in TOP:
            return TOP[name]
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        found = self.layer.get(match[2]) if match else None
        return found and Place(f"model.layers.{match[1]}.{found.parameter}", found.shape, found.view)


class Keys:
    """A GGUF's metadata, by names without the architecture's prefix. value(key, default): its value."""

    def __init__(self, value: Callable, where: str):
        self.value, self.where = value, where
        self.architecture = value("general.architecture", "")

    def get(self, key: str, default=None):
        return self.value(f"{self.architecture}.{key}", default)

    def need(self, key: str):
        found = self.get(key)
        if found is None:
            raise CheckpointError(f"{self.where}: key {self.architecture}.{key} is missing")
        return found


def _common(keys: Keys) -> dict:
    n_head, n_embd = keys.need("attention.head_count"), keys.need("embedding_length")
    return {
        "num_hidden_layers": keys.need("block_count"), "hidden_size": n_embd, "num_attention_heads": n_head, "num_key_value_heads": keys.get("attention.head_count_kv", n_head),
        "head_dim": keys.get("attention.key_length", n_embd // n_head), "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"), "max_position_embeddings": keys.need("context_length"),
        "rope_parameters": _rope(keys), "hidden_act": "silu", "bos_token_id": keys.value("tokenizer.ggml.bos_token_id"), "eos_token_id": keys.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None, "num_experts_per_tok": keys.need("expert_used_count"),
    }


def _rope(keys: Keys) -> dict:
    found = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)}
    scaling = keys.get("rope.scaling.type", "none")
    if scaling == "yarn":
        found |= {
            "rope_type": "yarn", "factor": keys.need("rope.scaling.factor"), "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0), "truncate": False,
        }
    elif scaling != "none":
        raise CheckpointError(f"{keys.where}: rope scaling {scaling!r}, wanted none or yarn")
    return found


def _qwen3(keys: Keys) -> dict:
    return {
        "num_experts": keys.need("expert_count"), "moe_intermediate_size": keys.need("expert_feed_forward_length"), "intermediate_size": keys.need("feed_forward_length"),
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }


def _qwen2(keys: Keys) -> dict:
    return {**_qwen3(keys), "norm_topk_prob": False, "shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"), "qkv_bias": True}


def _ernie(keys: Keys) -> dict:
    width, shared = keys.need("expert_feed_forward_length"), keys.get("expert_shared_feed_forward_length", 0)
    if shared % width:
        raise CheckpointError(f"{keys.where}: a shared expert of {shared} neurons, wanted a multiple of the {width} of a routed one, as the transformers class has it")
    if keys.get("interleave_moe_layer_step", 1) != 1:
        raise CheckpointError(f"{keys.where}: experts in every {keys.get('interleave_moe_layer_step')}nd layer only, wanted in all from the first one on that has them")
    return {
        "moe_num_experts": keys.need("expert_count"), "moe_k": keys.need("expert_used_count"), "moe_intermediate_size": width, "moe_num_shared_experts": shared // width,
        "intermediate_size": keys.need("feed_forward_length"), "moe_layer_start_index": keys.get("leading_dense_block_count", 0), "moe_layer_end_index": -1, "moe_layer_interval": 1,
    }


def _gpt_oss(keys: Keys) -> dict:
    return {"num_local_experts": keys.need("expert_count"), "intermediate_size": keys.need("expert_feed_forward_length"), "sliding_window": keys.need("attention.sliding_window")}


FAMILIES = {
    family.architecture: family
    for family in (
        Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", {**QWEN, **{f"attn_{x}_norm.weight": _whole(f"self_attn.{x}_norm.weight") for x in "qk"}}, _qwen3, "mlp.gate."),
        Family(
            "qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", {**QWEN, **_shared("shared_expert"), "ffn_gate_inp_shexp.weight": _row("mlp.shared_expert_gate.weight")}, _qwen2, "mlp.gate."
        ),
        Family(
            "ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
            {**QWEN, **_shared("shared_experts"), "exp_probs_b.bias": _row("mlp.gate.moe_statics.e_score_correction_bias")}, _ernie, "mlp.gate.weight",
            "exp_probs_b.bias",
        ),
        Family(
            "gpt-oss", "gpt_oss", "GptOssForCausalLM",
            {
                **ATTENTION, "post_attention_norm.weight": _whole("post_attention_layernorm.weight"), "attn_sinks.weight": _whole("self_attn.sinks"),
                "ffn_gate_inp.weight": _whole("mlp.router.weight"), "ffn_gate_inp.bias": _whole("mlp.router.bias"),
                "ffn_gate_exps.weight": _woven("mlp.experts.gate_up_proj", False), "ffn_up_exps.weight": _woven("mlp.experts.gate_up_proj", True),
                "ffn_down_exps.weight": _turned("mlp.experts.down_proj"),
                "ffn_gate_exps.bias": _woven_bias("mlp.experts.gate_up_proj_bias", False), "ffn_up_exps.bias": _woven_bias("mlp.experts.gate_up_proj_bias", True),
                "ffn_down_exps.bias": _whole("mlp.experts.down_proj_bias"),
            },
            _gpt_oss, "mlp.router.",
        ),
    )
}


def family_of(architecture: str, where: str) -> Family:
    """Raises CheckpointError."""
    if architecture not in FAMILIES:
        raise CheckpointError(f"{where}: architecture {architecture!r}, wanted one of {', '.join(FAMILIES)}: others cannot be trained jointly yet")
    return FAMILIES[architecture]


def config_of(keys: Keys, n_vocab: int, tied: bool) -> dict:
    """config.json of a GGUF's checkpoint. Raises CheckpointError."""
    family = family_of(keys.architecture, keys.where)
    return {
        "architectures": [family.class_name], "model_type": family.model_type, "dtype": "float32", "vocab_size": n_vocab, "tie_word_embeddings": tied, **_common(keys), **family.config(keys),
    }


def parameter_groups(family: Family, parameter: str) -> str:
    """"routers", "experts" or "other": what a parameter belongs to."""
    inner = re.sub(r"^model\.layers\.\d+\.", "", parameter)
    if inner.startswith(family.router):
        return "routers"
    return "experts" if inner.startswith("mlp.experts.") else "other"
