#pragma once

// Matrix-vector products for decode, straight from the rows as they lie in a GGUF file (no repacking).
// One activation row is quantised once and then multiplied with many weight rows. The rounding is the one ggml uses for that weight type, so
// that results differ from ggml's only by the order of float additions.

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace edgemoe {

// What a kernel needs: avx2 = AVX2, FMA and F16C; avx512 = that and AVX-512 F, BW, VL, DQ and VNNI.
enum class isa { none, avx2, avx512 };

// The best level of this CPU and operating system.
isa best_isa();

struct kernel {
    ggml_type weight;                                                  // type of the rows
    size_t (*activation_bytes)(int64_t n);                             // room for one quantised activation row of n floats
    void   (*quantize)(const float * x, void * q, int64_t n);          // q: 4-byte aligned, best 64
    // y[r] = row r of w times q, for n_rows rows that lie row_bytes apart. n is a multiple of the type's block size.
    void   (*dot)(const void * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y);
};

// The best kernel for these rows at this level or below. NULL: use ggml.
const kernel * find_kernel(ggml_type weight, isa level);

// Below: what kernels.cpp and the files of the instruction sets share. Only plain structs and declarations: an inline function here would be
// compiled with AVX-512 in one file and without in another, and the linker would keep either.

struct kernel_table {
    const kernel * first;
    size_t         n;
};
kernel_table kernels_avx2();
kernel_table kernels_avx512();

// 256 activations, rounded as ggml's Q8_K.
struct act_256 {
    int8_t  qs[256];
    int16_t sums16[16];   // sums of 16 consecutive qs
    int16_t sums32[8];    // sums of 32
    float   d;
    int32_t unused[3];    // blocks start on 64 bytes when the row does
};

// Two blocks of 32 activations, rounded as ggml's Q8_0 and Q8_1. The second of a last odd block is all zero.
struct act_2x32 {
    int8_t  qs[64];
    float   d[2];         // rounded to f16
    int32_t bias[2];      // -offset * sum(qs): what unsigned weights (value + offset) count too much
    float   s[2];         // d * sum(qs), rounded to f16 (Q8_1)
    float   unused[2];
};

size_t act_256_bytes(int64_t n);
size_t act_32_bytes(int64_t n);
size_t act_float_bytes(int64_t n);
void quantize_256(const float * x, void * q, int64_t n);
template <int offset> void quantize_32(const float * x, void * q, int64_t n);   // offset: 0, 8, 12, 16 or 128
void copy_float(const float * x, void * q, int64_t n);

// The GGUF blocks. Rows are only 2-byte aligned, hence no member wider than 16 bits.
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
static_assert(sizeof(act_256) == 320 && sizeof(act_2x32) == 96, "activations keep their alignment");

} // namespace edgemoe
