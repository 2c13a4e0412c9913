// Products of weight rows as they lie in a GGUF file with activations: nothing is repacked at load.
//
// Activations are quantised once, with the rounding that ggml uses for the type of the weights, so results differ from ggml's only by the order of
// float additions. Two forms of product: `dot` streams rows past one activation (decode, where each weight is read once, from memory), and
// unpack + multiply turns 16 rows into an interleaved tile that many activations share (prompts, where arithmetic is the limit).
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace edgemoe {

// What a kernel needs. avx2: AVX2, FMA and F16C; avxvnni: that and AVX-VNNI; avx512: AVX2's and AVX-512 F, BW, VL, DQ and VNNI.
enum class isa { none, avx2, avxvnni, avx512 };

const char * isa_name(isa level);

// The best level of this CPU and operating system. An AVX-512 CPU may be asked for less: every level below runs as well, but for avxvnni, which is an
// extension of its own; isa_supported tells.
isa  best_isa();
bool isa_supported(isa level);

// How activations are rounded: not at all, in blocks of 32 (ggml's Q8_0 and Q8_1), or of 256 (Q8_K).
enum class rounding { none, q8_32, q8_256 };

size_t activation_bytes(rounding how, int64_t n);
// q: 4-byte aligned, best 64. n is a multiple of the block size. A NaN or infinity in x ends up in every product with q.
void   quantize(rounding how, const float * x, void * q, int64_t n);

constexpr int tile_rows = 16;

struct kernel {
    ggml_type weight;   // type of the rows
    rounding  activation;

    // y[r] = row r of w times q, for n_rows rows that lie row_bytes apart. n is a multiple of the type's block size.
    void (*dot)(const void * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y);

    // NULL where ggml's prompt products are faster.
    size_t (*tile_bytes)(int64_t n);
    // 1 to 16 rows into a tile (64-byte aligned).
    void (*unpack)(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile);
    // y[t][r] = row r of the tile times q[t]. Writes n_rows numbers of each y[t].
    void (*multiply)(const void * tile, int64_t n, int n_rows, const void * const * q, int64_t n_tokens, float * const * y);
};

// The kernel for these rows at this level. NULL: use ggml.
const kernel * find_kernel(ggml_type weight, isa level);

} // namespace edgemoe
