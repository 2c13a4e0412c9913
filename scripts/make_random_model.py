#!/usr/bin/env python3
"""A random Mixture-of-Experts GGUF of full size, for measuring speed: its text is noise, its shape, its bytes per token and its arithmetic are real.

    .venv/bin/python scripts/make_random_model.py OUT.gguf [--type Q4_K_M] [--layers 16]

The shape is that of Qwen3-30B-A3B (128 experts of 768, 8 per token, width 2048) with fewer layers: 16 layers of Q4_K are 6 GB. Weights are rows that
ggml's quantiser made of random numbers, drawn again and again: real blocks, without the hours that quantising every row would take.
"""

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_models import GGMLType, quantize  # noqa: E402

N_VOCAB, N_EMBD, N_FF, N_EXPERT, N_USED = 151936, 2048, 768, 128, 8
N_HEAD, N_HEAD_KV, N_EMBD_HEAD = 32, 4, 128
N_DRAWN = 512  # different rows per length and type

# What llama.cpp's quantiser does for the name: type of most matrices, of the output and embedding, and of what gets more bits.
MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q4_0": ("Q4_0", "Q6_K", "Q4_0"),
    "MXFP4": ("Q8_0", "Q8_0", "MXFP4"),
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


def matrices(layer: int):
    """(name, rows, columns, experts) of one layer; 0 experts: not stacked."""
    yield "attn_q", N_HEAD * N_EMBD_HEAD, N_EMBD, 0
    yield "attn_k", N_HEAD_KV * N_EMBD_HEAD, N_EMBD, 0
    yield "attn_v", N_HEAD_KV * N_EMBD_HEAD, N_EMBD, 0
    yield "attn_output", N_EMBD, N_HEAD * N_EMBD_HEAD, 0
    yield "ffn_gate_exps", N_FF, N_EMBD, N_EXPERT
    yield "ffn_up_exps", N_FF, N_EMBD, N_EXPERT
    yield "ffn_down_exps", N_EMBD, N_FF, N_EXPERT


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


def write_metadata(writer: gguf.GGUFWriter, n_layers: int) -> None:
    writer.add_name("random qwen3moe")
    writer.add_block_count(n_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(N_EMBD_HEAD)
    writer.add_value_length(N_EMBD_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_USED)
    writer.add_expert_feed_forward_length(N_FF)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    n_words = N_VOCAB - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"w{i}" for i in range(n_words)])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * n_words)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=[*MIXES, *SINGLE], default="Q4_K_M", help="a mix as llama.cpp's quantiser makes it, or one type for all matrices")
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()

    rows, random = Rows(), np.random.default_rng(1)
    partial = options.out.with_name(options.out.name + ".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    write_metadata(writer, options.layers)
    tensors = []  # (name, make, shape in bytes or floats, type)

    def matrix(name: str, layer: int, prefix: str, n_rows: int, n_cols: int, n_expert: int = 0) -> None:
        kind = type_of(options.type, name, layer, options.layers)
        block, size = gguf.GGML_QUANT_SIZES[GGMLType[kind]]
        shape = ((n_expert,) if n_expert else ()) + (n_rows, n_cols // block * size)
        make = lambda: rows.tensor(kind, n_rows * max(n_expert, 1), n_cols)  # noqa: E731
        tensors.append((f"{prefix}{name}.weight", make, shape, np.dtype(np.uint8), GGMLType[kind]))

    def floats(name: str, make, *shape: int) -> None:
        tensors.append((name, make, shape, np.dtype(np.float32), None))

    matrix("token_embd", -1, "", N_VOCAB, N_EMBD)
    matrix("output", -1, "", N_VOCAB, N_EMBD)
    floats("output_norm.weight", lambda: np.ones(N_EMBD, np.float32), N_EMBD)
    for layer in range(options.layers):
        prefix = f"blk.{layer}."
        for name, n in (("attn_norm", N_EMBD), ("ffn_norm", N_EMBD), ("attn_q_norm", N_EMBD_HEAD), ("attn_k_norm", N_EMBD_HEAD)):
            floats(f"{prefix}{name}.weight", lambda n=n: np.ones(n, np.float32), n)
        router = lambda: random.standard_normal((N_EXPERT, N_EMBD), dtype=np.float32) * np.float32(3 * N_EMBD**-0.5)  # noqa: E731
        floats(f"{prefix}ffn_gate_inp.weight", router, N_EXPERT, N_EMBD)
        for name, n_rows, n_cols, n_expert in matrices(layer):
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
