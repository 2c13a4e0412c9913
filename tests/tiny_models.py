"""Tiny random MoE models that plain llama.cpp loads: one small GGUF for every way an expert layer can be built.

A family is a `Recipe`: the facts of one architecture, as a table. A variant is the same recipe with fields replaced,
so every field of `Recipe` is a keyword of `tiny_model`:

    tiny_model(path, "qwen3moe", "Q4_K", n_expert_used=1, tied=True)

Weights depend on the seed and on the tensor's name only. Two calls give the same bytes, and two variants differ in
nothing but what they name. The text a model writes is noise; its tokenizer is real and round-trips any text.
"""

import ctypes
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from llama_cpp import llama_cpp

# The smallest template that real models use.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """One model. Sizes count elements; every field may be overridden in a call of `tiny_model`."""

    arch: str
    peculiarity: str

    n_layer: int = 2
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_embd_head: int = 64
    n_ff: int = 256                 # width of a dense FFN
    n_ff_exp: int = 0               # width of an expert; 0: the default of the expert type
    n_ff_shexp: int = 0             # width of the shared expert; 0: none, -1: like a routed one
    n_expert: int = 16
    n_expert_used: int = 4

    n_layer_dense_lead: int = 0     # the first layers are dense
    moe_layer_step: int = 1         # 2: every second layer is MoE, as llama4 counts (layer 1, 3, ...)
    attention: str = "gqa"          # or "mla", as DeepSeek V3
    qk_norm: str = ""               # "head": one norm for all heads; "full": over the whole row
    sinks: bool = False             # gpt-oss: attention sinks, and biases on all of attention
    expert_bias: bool = False       # gpt-oss: biases of router, gate, up and down
    expert_scale: bool = False      # one scale per expert and projection (qwen3moe and llama apply them)
    selection_bias: bool = False    # exp_probs_b: moves the choice of experts, not their weights
    n_expert_groups: int = 0
    n_group_used: int = 0
    gating: str = ""                # "SOFTMAX" or "SIGMOID"; "": the architecture's own
    weights_scale: float = 0.0
    weights_norm: bool = False
    fused_gate_up: bool = False     # ffn_gate_up_exps: gate rows first, then up rows
    gated: bool = True              # False: no gate projection at all (llama and ernie4_5-moe take it)
    ffn_norm: str = "ffn_norm"
    may_tie: bool = True            # False: llama.cpp insists on output.weight

    tied: bool = False              # no output.weight: the embedding is used twice
    tokenizer: str = "bpe"          # or "none": no vocabulary at all
    chat_template: str | None = CHATML
    expert_type: str = "Q4_0"
    down_type: str = ""             # real K-quant files mix types; "": like expert_type
    dense_type: str = "Q8_0"        # of everything that is neither expert nor router
    router_type: str = "F32"        # "F64" crashes llama.cpp: for tests of our refusal only
    alignment: int = 32             # bytes; of every tensor in the file
    seed: int = 0


FAMILIES = {
    "qwen3moe": Recipe("qwen3moe", "softmax over all experts, then top-k, then normalised; norms on q and k",
                       qk_norm="head"),
    "gpt-oss": Recipe("gpt-oss", "expert biases, attention sinks, clamped swiglu_oai, softmax over the chosen only",
                      sinks=True, expert_bias=True, ffn_norm="post_attention_norm", may_tie=False),
    "llama": Recipe("llama", "Mixtral: few experts, top-2, nothing beside them", n_expert=8, n_expert_used=2),
    "olmoe": Recipe("olmoe", "routed weights are not normalised; q and k norms over the whole row",
                    n_head_kv=4, qk_norm="full", may_tie=False),
    "deepseek2": Recipe("deepseek2", "MLA, dense first layer, shared expert, sigmoid gating with selection bias, "
                        "expert groups, weights normalised and scaled by 2.5",
                        n_layer=3, n_layer_dense_lead=1, attention="mla", n_ff_shexp=-1, selection_bias=True,
                        n_expert_groups=4, n_group_used=2, gating="SIGMOID", weights_scale=2.5, weights_norm=True),
    "deepseek2-fused": Recipe("deepseek2", "as deepseek2, with gate and up of an expert fused into one tensor",
                              n_layer=3, n_layer_dense_lead=1, attention="mla", n_ff_shexp=-1, selection_bias=True,
                              n_expert_groups=4, n_group_used=2, gating="SIGMOID", weights_scale=2.5,
                              weights_norm=True, fused_gate_up=True),
    "ernie4_5-moe": Recipe("ernie4_5-moe", "dense first layer, shared expert of another width, selection bias",
                           n_layer=3, n_layer_dense_lead=1, n_ff_shexp=128, selection_bias=True),
    "llama4": Recipe("llama4", "every second layer dense, shared expert, top-1; the routed weight multiplies the "
                     "expert's input, so each chosen expert of a token has its own input row",
                     n_layer=4, moe_layer_step=2, n_ff_shexp=-1, n_expert_used=1),
}

# Expert type: default width. It keeps every model under 8 MB, and both kinds of experts in the list: a Q4_K projection
# is a whole number of 4096-byte pages, one of Q4_0 or Q6_K is not (see `expert_bytes`).
EXPERT_TYPES = {
    "F32": 64, "F16": 96, "BF16": 96, "Q8_0": 128, "Q4_0": 128, "Q4_1": 128, "Q5_0": 128, "Q5_1": 128, "IQ4_NL": 128,
    "MXFP4": 128, "Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "IQ4_XS": 256,
}

# ggml quantises these at 2 to 5 million weights a second. Of them only four experts are drawn; the others are the same
# rows rotated, gate, up and down alike, which makes every expert another function without another second.
SLOW_TO_QUANTIZE = ("IQ4_NL", "IQ4_XS", "Q2_K", "Q4_K", "Q5_K")
N_DRAWN = 4

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>")      # one token each, yet printed as text, as Qwen3 has them

MERGED_WORDS = (
    " the", " of", " and", " to", " in", " is", " that", " it", " was", " for", "ing", "ed", "er", " a", " with",
    " expert", " token", " model", " step", "Alternatively", " Another", " way", "Wait", "Hello", " world", "The",
    "\u00e9", "\u00fc", "\u4f60",               # whole characters of two and three bytes
)
# Half a character: the first two of an emoji's four bytes are one token, as in real vocabularies.
MERGED_BYTES = (b"\xf0\x9f",)


def tiny_model(path, family="qwen3moe", expert_type="Q4_0", **variant):
    """Write the tiny model `family` to `path` and return it as a Path.

    `family` is a key of FAMILIES, `expert_type` the ggml type of the routed experts, and each further keyword replaces
    one field of `Recipe`. Raises ValueError for what llama.cpp could never load.
    """
    recipe = _checked(replace(FAMILIES[family], expert_type=expert_type, **variant))
    path = Path(path)
    writer = gguf.GGUFWriter(path, recipe.arch)
    model = _Model(writer, recipe)
    _write_hyperparameters(writer, recipe)
    n_vocab = _write_tokenizer(writer, recipe)
    _add_tensors(model, recipe, n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _checked(recipe):
    width = recipe.n_ff_exp or EXPERT_TYPES[recipe.expert_type]
    recipe = replace(
        recipe, n_ff_exp=width, down_type=recipe.down_type or recipe.expert_type,
        n_ff_shexp=width if recipe.n_ff_shexp == -1 else recipe.n_ff_shexp,
    )
    if recipe.tied and not recipe.may_tie:
        raise ValueError(f"{recipe.arch}: llama.cpp wants output.weight, it cannot be tied")
    for kind, n_cols in ((recipe.expert_type, recipe.n_embd), (recipe.down_type, recipe.n_ff_exp)):
        block, _ = gguf.GGML_QUANT_SIZES[GGMLType[kind]]
        if n_cols % block:
            raise ValueError(f"{kind}: a row of {n_cols} is not a multiple of its block of {block}")
    return recipe


def expert_bytes(expert_type, n_rows, n_cols):
    """Bytes of one projection of one expert: `n_rows` rows of `n_cols` weights."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLType[expert_type]]
    return n_rows * n_cols // block * size


# --- metadata

def _write_hyperparameters(writer, r):
    writer.add_name(f"tiny {r.arch}")
    writer.add_custom_alignment(r.alignment)
    writer.add_block_count(r.n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(r.n_embd)
    writer.add_head_count(r.n_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    # Mixtral and OLMoE have no key for the width of an expert: theirs is the FFN width.
    writer.add_feed_forward_length(r.n_ff_exp if r.arch in ("llama", "olmoe") else r.n_ff)
    writer.add_expert_feed_forward_length(r.n_ff_exp)
    writer.add_expert_count(r.n_expert)
    writer.add_expert_used_count(r.n_expert_used)
    if r.attention == "mla":
        # llama.cpp computes MLA as attention with one KV head over the compressed row.
        writer.add_head_count_kv(1)
        writer.add_q_lora_rank(MLA.q_rank)
        writer.add_kv_lora_rank(MLA.kv_rank)
        writer.add_key_length(MLA.kv_rank + MLA.rope)
        writer.add_value_length(MLA.kv_rank)
        writer.add_key_length_mla(MLA.nope + MLA.rope)
        writer.add_value_length_mla(MLA.value)
        writer.add_rope_dimension_count(MLA.rope)
    else:
        writer.add_head_count_kv(r.n_head_kv)
        writer.add_key_length(r.n_embd_head)
        writer.add_value_length(r.n_embd_head)
        writer.add_rope_dimension_count(r.n_embd_head)
    if r.n_layer_dense_lead:
        writer.add_leading_dense_block_count(r.n_layer_dense_lead)
    if r.arch in ("ernie4_5-moe", "llama4"):
        writer.add_interleave_moe_layer_step(r.moe_layer_step)
    if r.arch == "deepseek2":
        writer.add_expert_shared_count(r.n_ff_shexp // r.n_ff_exp)
    elif r.n_ff_shexp:
        writer.add_expert_shared_feed_forward_length(r.n_ff_shexp)
    if r.arch == "gpt-oss":
        writer.add_sliding_window(32)
    if r.n_expert_groups:
        writer.add_expert_group_count(r.n_expert_groups)
        writer.add_expert_group_used_count(r.n_group_used)
    if r.gating:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[r.gating])
    if r.weights_scale:
        writer.add_expert_weights_scale(r.weights_scale)
    if r.weights_norm:
        writer.add_expert_weights_norm(True)


class MLA:
    """Ranks and head sizes of DeepSeek's compressed attention, scaled down."""

    q_rank, kv_rank, nope, rope, value = 64, 64, 32, 32, 64


def byte_symbols():
    """GPT-2's printable stand-in for each of the 256 byte values."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {b: chr(b) for b in printable}
    hidden = (b for b in range(256) if b not in symbols)
    symbols.update((b, chr(256 + i)) for i, b in enumerate(hidden))
    return symbols


def vocabulary():
    """(tokens, token types, merges): 256 bytes, the pieces that lead to the merged words, the special tokens."""
    symbol = byte_symbols()
    tokens = [symbol[b] for b in range(256)]
    merges = []
    for word in [w.encode() for w in MERGED_WORDS] + list(MERGED_BYTES):
        left = symbol[word[0]]
        for byte in word[1:]:
            if left + symbol[byte] not in tokens:
                merges.append(f"{left} {symbol[byte]}")
                tokens.append(left + symbol[byte])
            left += symbol[byte]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types += [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.USER_DEFINED] * len(USER_DEFINED)
    return tokens + list(CONTROL) + list(USER_DEFINED), types, merges


def _write_tokenizer(writer, r):
    tokens, types, merges = vocabulary()
    if r.tokenizer == "none":
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(len(tokens))
        return len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    if r.chat_template is not None:
        writer.add_chat_template(r.chat_template)
    return len(tokens)


# --- tensors

class _Model:
    """Names, draws, quantises and collects tensors. Shapes are (..., rows, columns), as numpy sees them."""

    def __init__(self, writer, recipe):
        self.writer = writer
        self.seed = recipe.seed
        self.dense_type = recipe.dense_type

    def _draw(self, name, shape):
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)

    def matrix(self, name, *shape, kind="", scale=None):
        """Random weights; by default a row of them keeps the size of a normalised input."""
        kind = kind or self.dense_type
        weights = self._draw(name, shape) * np.float32(shape[-1] ** -0.5 if scale is None else scale)
        if kind == "F64":
            self.writer.add_tensor(f"{name}.weight", weights.astype(np.float64))
        else:
            self.writer.add_tensor(f"{name}.weight", quantize(weights, kind), raw_dtype=GGMLType[kind])

    def experts(self, name, n_expert, n_rows, n_cols, kind):
        if kind not in SLOW_TO_QUANTIZE or n_expert <= N_DRAWN:
            return self.matrix(name, n_expert, n_rows, n_cols, kind=kind)
        drawn = quantize(self._draw(name, (N_DRAWN, n_rows, n_cols)) * np.float32(n_cols ** -0.5), kind)
        rotated = [np.roll(drawn[e % N_DRAWN], e // N_DRAWN, axis=0) for e in range(n_expert)]
        self.writer.add_tensor(f"{name}.weight", np.stack(rotated), raw_dtype=GGMLType[kind])

    def norm(self, name, n):
        self.writer.add_tensor(f"{name}.weight", 1 + np.float32(0.1) * self._draw(name, n))

    def vector(self, name, *shape, centre=0.0, spread=0.1):
        """`name` with its ending: a bias, a scale, sinks."""
        self.writer.add_tensor(name, (np.float32(centre) + np.float32(spread) * self._draw(name, shape)))


def quantize(weights, kind):
    """`weights` (f32, rows last but one) as the bytes of ggml type `kind`, by ggml's own quantiser.

    The gguf library cannot write K-quants. libllama's handle finds ggml's symbols too, so no second copy of libggml
    is loaded.
    """
    if kind == "F32":
        return weights
    block, size = gguf.GGML_QUANT_SIZES[GGMLType[kind]]
    n_cols = weights.shape[-1]
    n_rows = weights.size // n_cols
    source = np.ascontiguousarray(weights, dtype=np.float32)
    out = np.empty((*weights.shape[:-1], n_cols // block * size), np.uint8)
    chunk = llama_cpp._lib.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    n_bytes = chunk(
        ctypes.c_int(GGMLType[kind]), source.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0), ctypes.c_int64(n_rows), ctypes.c_int64(n_cols), None,
    )
    assert n_bytes == out.nbytes, (kind, n_bytes, out.nbytes)
    return out


def is_moe_layer(recipe, layer):
    return layer >= recipe.n_layer_dense_lead and (layer + 1) % recipe.moe_layer_step == 0


def _add_tensors(model, r, n_vocab):
    # With tied embeddings a row of the embedding is also a row of the output: keep the logits near 1.
    model.matrix("token_embd", n_vocab, r.n_embd, scale=r.n_embd ** -0.5 if r.tied else 1.0)
    model.norm("output_norm", r.n_embd)
    if not r.tied:
        model.matrix("output", n_vocab, r.n_embd)
    for layer in range(r.n_layer):
        blk = f"blk.{layer}."
        model.norm(blk + "attn_norm", r.n_embd)
        model.norm(blk + r.ffn_norm, r.n_embd)
        if r.attention == "mla":
            _add_mla(model, r, blk)
        else:
            _add_gqa(model, r, blk)
        if is_moe_layer(r, layer):
            _add_experts(model, r, blk)
        else:
            _add_ffn(model, r, blk, "", r.n_ff)


def _add_gqa(model, r, blk):
    n_q, n_kv = r.n_head * r.n_embd_head, r.n_head_kv * r.n_embd_head
    for name, n_rows, n_cols in (("attn_q", n_q, r.n_embd), ("attn_k", n_kv, r.n_embd), ("attn_v", n_kv, r.n_embd),
                                 ("attn_output", r.n_embd, n_q)):
        model.matrix(blk + name, n_rows, n_cols)
        if r.sinks:
            model.vector(f"{blk}{name}.bias", n_rows)
    if r.sinks:
        model.vector(blk + "attn_sinks.weight", r.n_head, spread=1.0)
    if r.qk_norm:
        model.norm(blk + "attn_q_norm", r.n_embd_head if r.qk_norm == "head" else n_q)
        model.norm(blk + "attn_k_norm", r.n_embd_head if r.qk_norm == "head" else n_kv)


def _add_mla(model, r, blk):
    model.matrix(blk + "attn_q_a", MLA.q_rank, r.n_embd)
    model.norm(blk + "attn_q_a_norm", MLA.q_rank)
    model.matrix(blk + "attn_q_b", r.n_head * (MLA.nope + MLA.rope), MLA.q_rank)
    model.matrix(blk + "attn_kv_a_mqa", MLA.kv_rank + MLA.rope, r.n_embd)
    model.norm(blk + "attn_kv_a_norm", MLA.kv_rank)
    model.matrix(blk + "attn_k_b", r.n_head, MLA.kv_rank, MLA.nope)
    model.matrix(blk + "attn_v_b", r.n_head, MLA.value, MLA.kv_rank)
    model.matrix(blk + "attn_output", r.n_embd, r.n_head * MLA.value)


def _add_ffn(model, r, blk, ending, width):
    model.matrix(f"{blk}ffn_gate{ending}", width, r.n_embd)
    model.matrix(f"{blk}ffn_up{ending}", width, r.n_embd)
    model.matrix(f"{blk}ffn_down{ending}", r.n_embd, width)


def _add_experts(model, r, blk):
    # Router logits spread by 3: the chosen experts differ clearly in weight and from token to token.
    model.matrix(blk + "ffn_gate_inp", r.n_expert, r.n_embd, kind=r.router_type, scale=3 * r.n_embd ** -0.5)
    if r.fused_gate_up:
        projections = [("gate_up", 2 * r.n_ff_exp, r.n_embd, r.expert_type)]
    else:
        projections = [("gate", r.n_ff_exp, r.n_embd, r.expert_type)] if r.gated else []
        projections += [("up", r.n_ff_exp, r.n_embd, r.expert_type)]
    projections += [("down", r.n_embd, r.n_ff_exp, r.down_type)]
    for name, n_rows, n_cols, kind in projections:
        model.experts(f"{blk}ffn_{name}_exps", r.n_expert, n_rows, n_cols, kind)
        if r.expert_bias:
            model.vector(f"{blk}ffn_{name}_exps.bias", r.n_expert, n_rows)
        if r.expert_scale:
            model.vector(f"{blk}ffn_{name}_exps.scale", r.n_expert, centre=1.0, spread=0.2)
    if r.expert_bias:
        model.vector(blk + "ffn_gate_inp.bias", r.n_expert, spread=1.0)
    if r.selection_bias:
        model.vector(blk + "exp_probs_b.bias", r.n_expert, spread=0.2)
    if r.n_ff_shexp:
        _add_ffn(model, r, blk, "_shexp", r.n_ff_shexp)


# --- shards and tokens

def write_shards(path, out_dir, n_shards, name=None, first_without_tensors=False):
    """Split the GGUF `path` into `n_shards` files NAME-00001-of-0000N.gguf in `out_dir`; return their paths in order.

    As llama.cpp's own splitter does it: the first shard holds all metadata, every shard its number. With
    `first_without_tensors` the first shard holds nothing else.
    """
    reader = gguf.GGUFReader(path)
    n_with_tensors = n_shards - first_without_tensors
    parts = [list(part) for part in np.array_split(np.arange(len(reader.tensors)), n_with_tensors)]
    if first_without_tensors:
        parts.insert(0, [])
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    paths = []
    for number, part in enumerate(parts):
        shard = Path(out_dir) / f"{name or Path(path).stem}-{number + 1:05d}-of-{n_shards:05d}.gguf"
        writer = gguf.GGUFWriter(shard, "")
        writer.kv_data[0].clear()       # the later shards carry no architecture, as in real files
        if number == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n_shards)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for i in part:
            tensor = reader.tensors[i]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(shard)
    return paths


def copy_metadata(reader, writer, keep=lambda key: True):
    """Every key of `reader` that `keep` wants, with its type, except what the writer derives itself."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or not keep(key):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
        if key == "general.alignment":
            writer.data_alignment = field.contents()


def rewritten(source, target, change, keep=lambda key: True):
    """Copy the GGUF `source` to `target`: change(name, data) gives each tensor's new name and data, or None to leave it out; `keep` chooses the keys."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer, keep)
    for tensor in reader.tensors:
        if changed := change(tensor.name, np.array(tensor.data)):
            name, data = changed
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def random_tokens(n_vocab, n, seed=0):
    """`n` token ids in 0 ... n_vocab - 1."""
    return [int(token) for token in np.random.default_rng(seed).integers(n_vocab, size=n)]
