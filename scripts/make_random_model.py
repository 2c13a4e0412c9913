#!/usr/bin/env python3
"""A random Mixture-of-Experts GGUF of full size, for measuring speed: its text is noise, its shape, its bytes per token and its arithmetic are real.

    .venv/bin/python scripts/make_random_model.py OUT.gguf [--type Q4_K_M] [--layers 16]
    .venv/bin/python scripts/make_random_model.py OUT.gguf --shape demo

The shape is that of Qwen3-30B-A3B (128 experts of 768, 8 per token, width 2048) with fewer layers: 16 layers of Q4_K are 6 GB. `--shape demo` is models/demo.gguf
in every size and type (128 experts of 384, 8 per token, a shared one of 1152, width 576, 30 layers: 1.6 GB), for machines that cannot download its parent.
Weights are rows that ggml's quantiser made of random numbers, drawn again and again: real blocks, without the hours that quantising every row would take.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_models import GGMLType, quantize  # noqa: E402


@dataclass(frozen=True)
class Shape:
    arch: str
    mix: str  # type of the weights where no other is asked for
    n_layer: int
    n_vocab: int
    n_embd: int
    n_ff: int  # of an expert
    n_ff_shared: int  # of the shared expert; 0: none
    n_expert: int
    n_used: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    rope_base: float
    qk_norm: bool
    tied: bool  # the embedding is the output, too


SHAPES = {
    "qwen3": Shape("qwen3moe", "Q4_K_M", 16, 151936, 2048, 768, 0, 128, 8, 32, 4, 128, 1e6, qk_norm=True, tied=False),
    "demo": Shape("ernie4_5-moe", "DEMO", 30, 49152, 576, 384, 1152, 128, 8, 9, 3, 64, 1e5, qk_norm=False, tied=True),
}
N_DRAWN = 512  # different rows per length and type

# What llama.cpp's quantiser does for the name: type of most matrices, of the output and embedding, and of what gets more bits.
MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q4_0": ("Q4_0", "Q6_K", "Q4_0"),
    "MXFP4": ("Q8_0", "Q8_0", "MXFP4"),
    "DEMO": ("Q4_1", "Q8_0", "Q4_1"),
}
SINGLE = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "F16", "BF16", "F32")


def type_of(mix: str, name: str, layer: int, n_layers: int) -> str:
    """MXFP4 files keep everything but the experts in Q8_0; Q4_K_M gives half of the down and value matrices more bits."""
    usual, ends, more = MIXES.get(mix, (mix, mix, mix))
    if name in ("token_embd", "output"):
        return ends
    if mix == "MXFP4":
        return more if name.endswith("_exps") else usual
    gets_more = layer < n_layers // 8 or layer >= n_layers - n_layers // 8 or layer % 3 == 2
    return more if gets_more and name in ("attn_v", "ffn_down_exps") else usual


def matrices(s: Shape):
    """(name, rows, columns, experts) of one layer; 0 experts: not stacked."""
    yield "attn_q", s.n_head * s.n_embd_head, s.n_embd, 0
    yield "attn_k", s.n_head_kv * s.n_embd_head, s.n_embd, 0
    yield "attn_v", s.n_head_kv * s.n_embd_head, s.n_embd, 0
    yield "attn_output", s.n_embd, s.n_head * s.n_embd_head, 0
    yield "ffn_gate_exps", s.n_ff, s.n_embd, s.n_expert
    yield "ffn_up_exps", s.n_ff, s.n_embd, s.n_expert
    yield "ffn_down_exps", s.n_embd, s.n_ff, s.n_expert
    if s.n_ff_shared:
        yield "ffn_gate_shexp", s.n_ff_shared, s.n_embd, 0
        yield "ffn_up_shexp", s.n_ff_shared, s.n_embd, 0
        yield "ffn_down_shexp", s.n_embd, s.n_ff_shared, 0


class Rows:
    """Quantised random rows, made once per type and length."""

    def __init__(self, seed: int = 0):
        self.random = np.random.default_rng(seed)
        self.drawn = {}

    def tensor(self, kind: str, n_rows: int, n_cols: int) -> np.ndarray:
        """[n_rows, bytes per row]"""
        if (kind, n_cols) not in self.drawn:
            weights = self.random.standard_normal((N_DRAWN, n_cols), dtype=np.float32) * np.float32(n_cols**-0.5)
            self.drawn[kind, n_cols] = quantize(weights, kind)
        return self.drawn[kind, n_cols][self.random.integers(0, N_DRAWN, n_rows)]


def write_metadata(writer: gguf.GGUFWriter, s: Shape, n_layers: int) -> None:
    writer.add_name(f"random {s.arch}")
    writer.add_block_count(n_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(s.n_embd)
    writer.add_feed_forward_length(s.n_ff + s.n_ff_shared)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.n_embd_head)
    writer.add_value_length(s.n_embd_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_expert_count(s.n_expert)
    writer.add_expert_used_count(s.n_used)
    writer.add_expert_feed_forward_length(s.n_ff)
    if s.n_ff_shared:
        writer.add_expert_shared_feed_forward_length(s.n_ff_shared)
        writer.add_leading_dense_block_count(0)
        writer.add_interleave_moe_layer_step(1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    n_words = s.n_vocab - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"w{i}" for i in range(n_words)])
    writer.add_token_scores([0.0] * s.n_vocab)
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * n_words)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3", help="default %(default)s")
    parser.add_argument("--type", choices=[*MIXES, *SINGLE], help="a mix as llama.cpp's quantiser makes it, or one type for all matrices (qwen3: Q4_K_M; demo: DEMO, Q4_1 and Q8_0)")
    parser.add_argument("--layers", type=int, help="default: qwen3 16, demo 30")
    options = parser.parse_args()
    s = SHAPES[options.shape]
    mix, n_layers = options.type or s.mix, options.layers or s.n_layer

    rows, random = Rows(), np.random.default_rng(1)
    partial = options.out.with_name(options.out.name + ".partial")
    writer = gguf.GGUFWriter(partial, s.arch)
    write_metadata(writer, s, n_layers)
    tensors = []  # (name, make, shape in bytes or floats, type)

    def matrix(name: str, layer: int, prefix: str, n_rows: int, n_cols: int, n_expert: int = 0) -> None:
        kind = type_of(mix, name, layer, n_layers)
        block, size = gguf.GGML_QUANT_SIZES[GGMLType[kind]]
        if n_cols % block:
            sys.exit(f"{name} in {kind}: rows of {n_cols}, wanted a multiple of {block}; --type chooses another")
        shape = ((n_expert,) if n_expert else ()) + (n_rows, n_cols // block * size)
        make = lambda: rows.tensor(kind, n_rows * max(n_expert, 1), n_cols)  # noqa: E731
        tensors.append((f"{prefix}{name}.weight", make, shape, np.dtype(np.uint8), GGMLType[kind]))

    def floats(name: str, make, *shape: int) -> None:
        tensors.append((name, make, shape, np.dtype(np.float32), None))

    matrix("token_embd", -1, "", s.n_vocab, s.n_embd)
    if not s.tied:
        matrix("output", -1, "", s.n_vocab, s.n_embd)
    norms = [("attn_norm", s.n_embd), ("ffn_norm", s.n_embd)] + [("attn_q_norm", s.n_embd_head), ("attn_k_norm", s.n_embd_head)] * s.qk_norm
    floats("output_norm.weight", lambda: np.ones(s.n_embd, np.float32), s.n_embd)
    for layer in range(n_layers):
        prefix = f"blk.{layer}."
        for name, n in norms:
            floats(f"{prefix}{name}.weight", lambda n=n: np.ones(n, np.float32), n)
        router = lambda: random.standard_normal((s.n_expert, s.n_embd), dtype=np.float32) * np.float32(3 * s.n_embd**-0.5)  # noqa: E731
        floats(f"{prefix}ffn_gate_inp.weight", router, s.n_expert, s.n_embd)
        for name, n_rows, n_cols, n_expert in matrices(s):
            matrix(name, layer, prefix, n_rows, n_cols, n_expert)

    for name, _, shape, dtype, kind in tensors:
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, make, _, _, _ in tqdm(tensors, desc=options.out.name, unit="tensor", disable=not sys.stderr.isatty()):
        writer.write_tensor_data(make())
    writer.close()
    partial.rename(options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
