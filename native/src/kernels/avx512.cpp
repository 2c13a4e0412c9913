// AVX-512 products of rows with one activation (F, BW, VL, DQ, VNNI).
#include "avx512_blocks.h"
#include "avx512_tile.h"

#if defined(__x86_64__)

namespace edgemoe {

namespace {

// Up to 16 blocks that share one activation block. `last` is a constant wherever this is called, so that nothing is decided while it runs.
template <typename T> inline __attribute__((always_inline)) void add_16_blocks(const typename T::block * x, int last, const act_16x32 & y, __m512 & acc, __m512 & acc_offset) {
    __m512 scale, min;
    T::scales(x, last, scale, min);   // zero behind the last block
    const __m512 d = _mm512_mul_ps(scale, _mm512_loadu_ps(y.d));
    if constexpr (T::has_min) {
        acc_offset = _mm512_fmadd_ps(min, _mm512_loadu_ps(y.s), acc_offset);
    } else {
        acc_offset = _mm512_fmadd_ps(scale, _mm512_loadu_ps(y.ds), acc_offset);
    }
#pragma GCC unroll 8
    for (int p = 0; p < 16; p += 2) {
        if (p <= last) {
            // A last odd block is its own partner, times an activation of zero: nothing behind the row is read.
            const typename T::block & a = x[p];
            const typename T::block & b = x[p < last ? p + 1 : p];
            prefetch<64>(&a);
            const __m512i dot    = _mm512_dpbusd_epi32(_mm512_setzero_si512(), T::values(a, b), load512(y.qs + 32*p));
            const __m512i halves = _mm512_setr_epi32(p, p, p, p, p, p, p, p, p + 1, p + 1, p + 1, p + 1, p + 1, p + 1, p + 1, p + 1);
            acc = _mm512_fmadd_ps(_mm512_permutexvar_ps(halves, d), _mm512_cvtepi32_ps(dot), acc);
        }
    }
}

template <typename T> float row_of_32(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_16x32 * y = (const act_16x32 *) q;
    __m512 acc = _mm512_setzero_ps(), acc_offset = _mm512_setzero_ps();
    int64_t left = n / 32;
    for (; left >= 16; left -= 16, x += 16, y++) {
        add_16_blocks<T>(x, 15, *y, acc, acc_offset);
    }
    // Rows of small experts are short: their end is no rest, it is most of the row.
    const auto add_rest = [&](int last) __attribute__((always_inline)) { add_16_blocks<T>(x, last, *y, acc, acc_offset); };
    switch (left) {
        case 1:  add_rest(0); break;
        case 2:  add_rest(1); break;
        case 3:  add_rest(2); break;
        case 4:  add_rest(3); break;
        case 5:  add_rest(4); break;
        case 6:  add_rest(5); break;
        case 7:  add_rest(6); break;
        case 8:  add_rest(7); break;
        case 9:  add_rest(8); break;
        case 10: add_rest(9); break;
        case 11: add_rest(10); break;
        case 12: add_rest(11); break;
        case 13: add_rest(12); break;
        case 14: add_rest(13); break;
        case 15: add_rest(14); break;
    }
    return _mm512_reduce_add_ps(_mm512_fmadd_ps(acc_offset, _mm512_set1_ps(T::has_min ? 1.0f : -T::offset), acc));
}

// ---- K-quants: products of bytes, then of 16-bit sums with the scales; both are exact ----

// Shuffle that fills the lower half of a register with 16-bit scale a, the upper with b.
inline __m512i pick_scales(int a, int b) {
    return join(_mm256_set1_epi16((short) (2*a | (2*a + 1) << 8)), _mm256_set1_epi16((short) (2*b | (2*b + 1) << 8)));
}

// Groups a and b of 32 activations.
inline __m512i groups(const act_256 & y, int a, int b) {
    return join(load256(y.qs + 32*a), load256(y.qs + 32*b));
}

// Q4_K and Q5_K. A register of 64 bytes of qs holds groups g and g + 2 in its low nibbles, g + 1 and g + 3 in its high ones.
template <typename T> float row_of_q45_k(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_256 * y = (const act_256 *) q;
    const __m512i fifteen = _mm512_set1_epi8(15);
    __m512 acc = _mm512_setzero_ps();
    __m128 acc_min = _mm_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m256i sm = scales_and_mins(x->scales);
        const __m512i scales = _mm512_broadcast_i32x4(_mm256_castsi256_si128(sm));
        const __m512i qh = fifth_bits(*x);
        __m512i dot[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };
#pragma GCC unroll 2
        for (int g = 0; g < 8; g += 4) {
            const __m512i qs   = load512(x->qs + 16*g);
            const __m512i even = add_fifth(*x, _mm512_and_si512(qs, fifteen), qh, g, g + 2);
            const __m512i odd  = add_fifth(*x, _mm512_and_si512(_mm512_srli_epi16(qs, 4), fifteen), qh, g + 1, g + 3);
            dot[0] = _mm512_dpwssd_epi32(dot[0], _mm512_maddubs_epi16(even, groups(*y, g, g + 2)),
                _mm512_shuffle_epi8(scales, pick_scales(g, g + 2)));
            dot[1] = _mm512_dpwssd_epi32(dot[1], _mm512_maddubs_epi16(odd, groups(*y, g + 1, g + 3)),
                _mm512_shuffle_epi8(scales, pick_scales(g + 1, g + 3)));
        }
        const __m128i mins = _mm_madd_epi16(_mm256_extracti128_si256(sm, 1), load128(y->sums32));
        acc     = _mm512_fmadd_ps(_mm512_set1_ps(half(x->d) * y->d), _mm512_cvtepi32_ps(_mm512_add_epi32(dot[0], dot[1])), acc);
        acc_min = _mm_fmadd_ps(_mm_set1_ps(half(x->dmin) * y->d), _mm_cvtepi32_ps(mins), acc_min);
    }
    return _mm512_reduce_add_ps(acc) - sum4(acc_min);
}

// Sum of scale * (value - offset) * activation, for 16 groups of 16 with 8-bit scales. v[k] holds the values of groups 4k to 4k + 3.
template <int offset> __m512i dot_16_groups(const __m512i * v, __m128i scales, const act_256 & y) {
    // Each scale twice, as the two 16-bit halves of a 32-bit word.
    const __m512i twins = _mm512_shuffle_epi8(_mm512_cvtepi8_epi32(scales),
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13)));
    const __m256i offsets = _mm256_mullo_epi32(_mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), load256(y.sums16)), _mm256_set1_epi32(offset));
    __m512i dot[2] = { _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_zextsi256_si512(offsets)), _mm512_setzero_si512() };
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const __m512i lanes = _mm512_setr_epi32(4*k, 4*k, 4*k, 4*k, 4*k + 1, 4*k + 1, 4*k + 1, 4*k + 1,
            4*k + 2, 4*k + 2, 4*k + 2, 4*k + 2, 4*k + 3, 4*k + 3, 4*k + 3, 4*k + 3);
        dot[k%2] = _mm512_dpwssd_epi32(dot[k%2], _mm512_maddubs_epi16(v[k], load512(y.qs + 64*k)), _mm512_permutexvar_epi32(lanes, twins));
    }
    return _mm512_add_epi32(dot[0], dot[1]);
}

template <typename T> float row_of_16_groups(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_256 * y = (const act_256 *) q;
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        __m512i v[4];
        T::values(*x, v);
        const __m512i dot = dot_16_groups<T::offset>(v, T::bytes_of_scales(*x), *y);
        acc = _mm512_fmadd_ps(_mm512_set1_ps(half(x->d) * y->d), _mm512_cvtepi32_ps(dot), acc);
    }
    return _mm512_reduce_add_ps(acc);
}

float row_of_iq4_xs(const void * w, const void * q, int64_t n) {
    const block_iq4_xs * x = (const block_iq4_xs *) w;
    const act_256 * y = (const act_256 *) q;
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m256i scales  = iq4_xs::wide_scales(*x);
        const __m256i offsets = _mm256_mullo_epi32(_mm256_mullo_epi32(scales, _mm256_cvtepi16_epi32(load128(y->sums32))), _mm256_set1_epi32(iq4_xs::offset));
        __m512i dot = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_zextsi256_si512(offsets));
        __m512i v[4];
        iq4_xs::values(*x, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const __m512i halves = join(_mm256_set1_epi32(2*k), _mm256_set1_epi32(2*k + 1));
            const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v[k], load512(y->qs + 64*k));
            dot = _mm512_add_epi32(dot, _mm512_mullo_epi32(products, _mm512_permutexvar_epi32(halves, _mm512_castsi256_si512(scales))));
        }
        acc = _mm512_fmadd_ps(_mm512_set1_ps(half(x->d) * y->d), _mm512_cvtepi32_ps(dot), acc);
    }
    return _mm512_reduce_add_ps(acc);
}

template <typename T> float row_of_float(const void * w, const void * q, int64_t n) {
    const typename T::element * x = (const typename T::element *) w;
    const float * y = (const float *) q;
    __m512 acc[4] = { _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps() };
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        prefetch<64 * sizeof(*x)>(x + i);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            acc[k] = _mm512_fmadd_ps(T::load(0xFFFF, x + i + 16*k), _mm512_loadu_ps(y + i + 16*k), acc[k]);
        }
    }
    for (; i < n; i += 16) {
        const __mmask16 m = n - i < 16 ? (__mmask16) ((1u << (n - i)) - 1) : (__mmask16) 0xFFFF;
        acc[0] = _mm512_fmadd_ps(T::load(m, x + i), _mm512_maskz_loadu_ps(m, y + i), acc[0]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])));
}

} // namespace

} // namespace edgemoe

#include "kernel_table.h"

namespace edgemoe {

kernel_table kernels_avx512() {
    return all_kernels();
}

} // namespace edgemoe

#endif
