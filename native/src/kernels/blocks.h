// What the instruction sets share: the blocks of a GGUF and of quantised activations. Only plain structs and declarations: an inline function here
// would be compiled with AVX-512 in one file and without in another, and the linker would keep either.
#pragma once

#include "kernels.h"

namespace edgemoe {

struct kernel_table {
    const kernel * first;
    size_t         n;
};
kernel_table kernels_avx2();
kernel_table kernels_avxvnni();
kernel_table kernels_avx512();

// The tile side of a kernel, from the file of the instruction set that has it.
struct tile_kernel {
    size_t (*tile_bytes)(int64_t n);
    void   (*unpack)(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile);
    void   (*multiply)(const void * tile, int64_t n, int n_rows, const void * const * q, int64_t n_tokens, float * const * y);
};

// 256 activations, rounded as ggml's Q8_K.
struct act_256 {
    int8_t  qs[256];
    int16_t sums16[16];   // sums of 16 consecutive qs
    int16_t sums32[8];    // sums of 32
    float   d;
    int32_t unused[3];    // blocks start on 64 bytes when the row does
};

// 16 blocks of 32 activations, rounded as ggml's Q8_0 and Q8_1; what a row has not is zero.
struct act_16x32 {
    int8_t  qs[512];
    float   d[16];        // rounded to f16
    float   s[16];        // d * sum of the qs, rounded to f16 (Q8_1)
    float   ds[16];       // not rounded: what unsigned weights (value + offset) count too much is offset times this
};

// Rows are only 2-byte aligned (1-byte for MXFP4), hence no member wider than 16 bits.
struct block_q4_0   { uint16_t d;       uint8_t qs[16]; };
struct block_q4_1   { uint16_t d, m;    uint8_t qs[16]; };
struct block_q5_0   { uint16_t d;       uint8_t qh[4], qs[16]; };
struct block_q5_1   { uint16_t d, m;    uint8_t qh[4], qs[16]; };
struct block_q8_0   { uint16_t d;       int8_t  qs[32]; };
struct block_iq4_nl { uint16_t d;       uint8_t qs[16]; };
struct block_mxfp4  { uint8_t  e;       uint8_t qs[16]; };
struct block_q3_k   { uint8_t hmask[32], qs[64], scales[12]; uint16_t d; };
struct block_q4_k   { uint16_t d, dmin; uint8_t scales[12], qs[128]; };
struct block_q5_k   { uint16_t d, dmin; uint8_t scales[12], qh[32], qs[128]; };
struct block_q6_k   { uint8_t ql[128], qh[64]; int8_t scales[16]; uint16_t d; };
struct block_iq4_xs { uint16_t d, scales_h; uint8_t scales_l[4], qs[128]; };

static_assert(sizeof(block_q5_1) == 24 && sizeof(block_mxfp4) == 17 && sizeof(block_q8_0) == 34, "blocks have no padding");
static_assert(sizeof(block_q3_k) == 110 && sizeof(block_q4_k) == 144 && sizeof(block_q5_k) == 176, "blocks have no padding");
static_assert(sizeof(block_q6_k) == 210 && sizeof(block_iq4_xs) == 136, "blocks have no padding");
static_assert(sizeof(act_256) == 320 && sizeof(act_16x32) == 704, "activations keep their alignment");

} // namespace edgemoe
