// AVX2 products of rows with one activation, and the table of kernels. The source of both avx2.cpp and avxvnni.cpp.
#pragma once

#include "avx2_blocks.h"
#include "avx2_tile.h"

namespace edgemoe {

namespace {

// Up to 8 blocks, with the activations of blocks `at` to at + 7 of y. `last` is a constant wherever this is called.
template <typename T> inline __attribute__((always_inline)) void add_8_blocks(const typename T::block * x, int last, const act_16x32 & y, int at, __m256 * acc, __m256 & acc_offset) {
    const __m256 scale = T::scales(x, last);
    const __m256 d     = _mm256_mul_ps(scale, _mm256_loadu_ps(y.d + at));   // zero behind the last block
    if constexpr (T::has_min) {
        acc_offset = _mm256_fmadd_ps(T::mins(x, last), _mm256_loadu_ps(y.s + at), acc_offset);
    } else if constexpr (T::offset != 0) {
        acc_offset = _mm256_fmadd_ps(scale, _mm256_loadu_ps(y.ds + at), acc_offset);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        if (j <= last) {
            if (j % 2 == 0) {
                prefetch<64>(x + j);
            }
            const __m256i dot = add_fours<T::largest>(_mm256_setzero_si256(), T::values(x[j]), load256(y.qs + 32*(at + j)));
            acc[j%2] = _mm256_fmadd_ps(_mm256_permutevar8x32_ps(d, _mm256_set1_epi32(j)), _mm256_cvtepi32_ps(dot), acc[j%2]);
        }
    }
}

template <typename T> float row_of_32(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_16x32 * y = (const act_16x32 *) q;
    __m256 acc[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    __m256 acc_offset = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= n / 32; i += 8) {
        add_8_blocks<T>(x + i, 7, y[i/16], (int) (i % 16), acc, acc_offset);
    }
    // Rows of small experts are short: their end is no rest, it is most of the row.
    const auto add_rest = [&](int last) __attribute__((always_inline)) { add_8_blocks<T>(x + i, last, y[i/16], (int) (i % 16), acc, acc_offset); };
    switch (n / 32 - i) {
        case 1: add_rest(0); break;
        case 2: add_rest(1); break;
        case 3: add_rest(2); break;
        case 4: add_rest(3); break;
        case 5: add_rest(4); break;
        case 6: add_rest(5); break;
        case 7: add_rest(6); break;
    }
    return sum8(_mm256_fmadd_ps(acc_offset, _mm256_set1_ps(T::has_min ? 1.0f : -T::offset), _mm256_add_ps(acc[0], acc[1])));
}

// ---- K-quants: products of bytes, then of 16-bit sums with the scales; both are exact ----

// Fills each half of a register with its own 16-bit scale g.
inline __m256i pick_scale(__m256i scales, int g) {
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (2*g | (2*g + 1) << 8)));
}

template <typename T> float row_of_q45_k(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_256 * y = (const act_256 *) q;
    __m256 acc = _mm256_setzero_ps();
    __m128 acc_min = _mm_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m256i sm = scales_and_mins(x->scales);
        const __m256i scales = _mm256_broadcastsi128_si256(_mm256_castsi256_si128(sm));
        __m256i dot[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        __m256i v[8];
        T::values(*x, v);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            dot[g%2] = add_pairs(dot[g%2], products<T::largest>(v[g], load256(y->qs + 32*g)), pick_scale(scales, g));
        }
        const __m128i mins = _mm_madd_epi16(_mm256_extracti128_si256(sm, 1), load128(y->sums32));
        acc     = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(_mm256_add_epi32(dot[0], dot[1])), acc);
        acc_min = _mm_fmadd_ps(_mm_set1_ps(half(x->dmin) * y->d), _mm_cvtepi32_ps(mins), acc_min);
    }
    return sum8(acc) - sum4(acc_min);
}

// 16 groups of 16 with 8-bit scales: sum of scale * (value - offset) * activation.
template <typename T> float row_of_16_groups(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_256 * y = (const act_256 *) q;
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m128i scales = T::bytes_of_scales(*x);
        // Even groups lie in lower halves, odd ones in upper halves; so do their scales.
        const __m256i split = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
        const __m256i offsets = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(scales), _mm256_set1_epi16(-T::offset));
        __m256i dot[2] = { _mm256_madd_epi16(offsets, load256(y->sums16)), _mm256_setzero_si256() };
        __m256i v[8];
        T::values(*x, v);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            dot[k%2] = add_pairs(dot[k%2], products<T::largest>(v[k], load256(y->qs + 32*k)), pick_scale(split, k));
        }
        acc = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(_mm256_add_epi32(dot[0], dot[1])), acc);
    }
    return sum8(acc);
}

// Signed values also where VNNI has an unsigned form of them: that gives 32-bit sums, and multiplying those by the scales costs more.
float row_of_iq4_xs(const void * w, const void * q, int64_t n) {
    const block_iq4_xs * x = (const block_iq4_xs *) w;
    const act_256 * y = (const act_256 *) q;
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m256i scales = _mm256_broadcastsi128_si256(iq4_xs::words_of_scales(*x));
        __m256i dot[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m256i v = signed_iq4(nibbles(x->qs + 16*g));
            dot[g%2] = add_pairs(dot[g%2], signed_products(v, load256(y->qs + 32*g)), pick_scale(scales, g));
        }
        acc = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(_mm256_add_epi32(dot[0], dot[1])), acc);
    }
    return sum8(acc);
}

template <typename T> float row_of_float(const void * w, const void * q, int64_t n) {
    const char * x = (const char *) w;
    const float * y = (const float *) q;
    __m256 acc[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32, x += 32 * T::bytes) {
        prefetch<32 * T::bytes>(x);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            acc[k] = _mm256_fmadd_ps(T::load(x + 8*k * T::bytes), _mm256_loadu_ps(y + i + 8*k), acc[k]);
        }
    }
    float rest = 0;
    for (; i < n; i++, x += T::bytes) {
        rest += T::one(x) * y[i];
    }
    return sum8(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]))) + rest;
}

} // namespace

} // namespace edgemoe

#include "kernel_table.h"
