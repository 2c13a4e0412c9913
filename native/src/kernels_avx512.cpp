// AVX-512 kernels (F, BW, VL, DQ, VNNI). Everything but the table has internal linkage, and nothing of the C++ library is used: code of this
// file must not end up in a program's shared inline functions, which also run on CPUs without AVX-512.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

namespace edgemoe {

namespace {

// Decode reads every weight once, from memory; the hardware prefetcher alone leaves a fifth of the bandwidth unused.
constexpr int prefetch_ahead = 1024;

template <size_t bytes> inline void prefetch(const void * block) {
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *) block + prefetch_ahead + i, _MM_HINT_T0);
    }
}

inline __m128i load128(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
inline __m256i load256(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
inline __m512i load512(const void * p) { return _mm512_loadu_si512(p); }

inline __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m512i twice(const void * p) {
    return _mm512_broadcast_i64x4(load256(p));
}

inline __m512i bytes_of_halves(int low, int high) {
    return join(_mm256_set1_epi8((char) low), _mm256_set1_epi8((char) high));
}

inline float half(uint16_t h) {
    return _cvtsh_ss(h);
}

inline float sum4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// ---- types with blocks of 32: two blocks fill a register; weights are made unsigned by an offset that the activation's bias takes back ----

// Byte j holds elements j and j + 16.
inline __m512i nibbles(const uint8_t * a, const uint8_t * b) {
    const __m512i both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load128(a)), 0xFF00, load128(b));
    return _mm512_and_si512(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), _mm512_set1_epi8(15));
}

// Bit j belongs to element j, so that the bits are the mask.
inline __m512i with_fifth_bit(__m512i low, const uint8_t * a, const uint8_t * b) {
    uint32_t bits[2];
    memcpy(bits, a, 4);
    memcpy(bits + 1, b, 4);
    const __mmask64 mask = (uint64_t) bits[1] << 32 | bits[0];
    return _mm512_mask_add_epi8(low, mask, low, _mm512_set1_epi8(16));
}

inline __m128 half_pair(uint16_t a, uint16_t b) {
    return _mm_cvtph_ps(_mm_cvtsi32_si128((int) ((uint32_t) b << 16 | a)));
}

// kvalues_iq4nl + 128
inline __m512i iq4_values(__m512i index) {
    const __m128i table = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}

// Half of 2^(e - 127), since the table of values is doubled.
inline float e8m0_half(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t) (e - 1) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

template <typename B> struct blocks_with_half {
    using block = B;
    static __m128 scales(const B & a, const B & b) { return half_pair(a.d, b.d); }
    static __m128 mins(const B &, const B &)       { return _mm_setzero_ps(); }
};

template <typename B> struct blocks_with_min : blocks_with_half<B> {
    static __m128 mins(const B & a, const B & b) { return half_pair(a.m, b.m); }
};

struct q4_0 : blocks_with_half<block_q4_0> {
    static __m512i values(const block & a, const block & b) { return nibbles(a.qs, b.qs); }
};

struct q4_1 : blocks_with_min<block_q4_1> {
    static __m512i values(const block & a, const block & b) { return nibbles(a.qs, b.qs); }
};

struct q5_0 : blocks_with_half<block_q5_0> {
    static __m512i values(const block & a, const block & b) { return with_fifth_bit(nibbles(a.qs, b.qs), a.qh, b.qh); }
};

struct q5_1 : blocks_with_min<block_q5_1> {
    static __m512i values(const block & a, const block & b) { return with_fifth_bit(nibbles(a.qs, b.qs), a.qh, b.qh); }
};

struct q8_0 : blocks_with_half<block_q8_0> {
    static __m512i values(const block & a, const block & b) {
        return _mm512_xor_si512(join(load256(a.qs), load256(b.qs)), _mm512_set1_epi8(-128));
    }
};

struct iq4_nl : blocks_with_half<block_iq4_nl> {
    static __m512i values(const block & a, const block & b) { return iq4_values(nibbles(a.qs, b.qs)); }
};

struct mxfp4 {
    using block = block_mxfp4;
    static __m128 scales(const block & a, const block & b) { return _mm_setr_ps(e8m0_half(a.e), e8m0_half(b.e), 0, 0); }
    static __m128 mins(const block &, const block &)       { return _mm_setzero_ps(); }
    static __m512i values(const block & a, const block & b) {
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);   // kvalues_fp4 + 12
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(a.qs, b.qs));
    }
};

template <typename T> float row_of_32(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_2x32 * y = (const act_2x32 *) q;
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512 acc = _mm512_setzero_ps();
    __m128 acc_min = _mm_setzero_ps();
    const int64_t last = n / 32 - 1;
    for (int64_t i = 0; i <= last; i += 2, y++) {
        // A last odd block is its own partner, times an activation of zero: nothing behind the row is read.
        const typename T::block & a = x[i];
        const typename T::block & b = x[i < last ? i + 1 : i];
        prefetch<64>(&a);
        const __m512i bias = _mm512_maskz_permutexvar_epi32(0x0101, halves, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *) y->bias)));
        const __m512i dot  = _mm512_dpbusd_epi32(bias, T::values(a, b), load512(y->qs));
        const __m128 d = _mm_mul_ps(T::scales(a, b), _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *) y->d)));
        acc = _mm512_fmadd_ps(_mm512_permutexvar_ps(halves, _mm512_castps128_ps512(d)), _mm512_cvtepi32_ps(dot), acc);
        acc_min = _mm_fmadd_ps(T::mins(a, b), _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *) y->s)), acc_min);
    }
    return _mm512_reduce_add_ps(acc) + sum4(acc_min);
}

// ---- K-quants: products of bytes, then of 16-bit sums with the scales; both are exact ----

// The 12 bytes hold 8 scales and 8 mins of 6 bits. In registers throughout: a detour over memory would stall on store forwarding.
inline __m256i scales_and_mins(const uint8_t * twelve) {
    const __m128i v    = load128(twelve);   // the block goes on behind the 12 bytes
    const __m128i low  = _mm_shuffle_epi8(v, _mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11));
    const __m128i high = _mm_shuffle_epi8(_mm_and_si128(_mm_srli_epi16(v, 2), _mm_set1_epi8(0x30)),
        _mm_setr_epi8(-1, -1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7));
    const __m128i nibble = _mm_blend_epi16(low, _mm_srli_epi16(low, 4), 0xC0);   // the last four mins are high nibbles
    const __m128i mask   = _mm_setr_epi8(63, 63, 63, 63, 15, 15, 15, 15, 63, 63, 63, 63, 15, 15, 15, 15);
    return _mm256_cvtepu8_epi16(_mm_or_si128(_mm_and_si128(nibble, mask), high));
}

// Shuffle that fills the lower half of a register with 16-bit scale a, the upper with b.
inline __m512i pick_scales(int a, int b) {
    return join(_mm256_set1_epi16((short) (2*a | (2*a + 1) << 8)), _mm256_set1_epi16((short) (2*b | (2*b + 1) << 8)));
}

// Groups a and b of 32 activations.
inline __m512i groups(const act_256 & y, int a, int b) {
    return join(load256(y.qs + 32*a), load256(y.qs + 32*b));
}

inline __m512i fifth_bits(const block_q4_k &) { return _mm512_setzero_si512(); }
inline __m512i fifth_bits(const block_q5_k & x) { return twice(x.qh); }

inline __m512i add_fifth(const block_q4_k &, __m512i low, __m512i, int, int) { return low; }

// Bit g of byte j of qh belongs to element j of group g.
inline __m512i add_fifth(const block_q5_k &, __m512i low, __m512i qh, int a, int b) {
    const __mmask64 mask = _mm512_test_epi8_mask(qh, bytes_of_halves(1 << a, 1 << b));
    return _mm512_mask_add_epi8(low, mask, low, _mm512_set1_epi8(16));
}

// Q4_K and Q5_K. A register of 64 bytes of qs holds groups g and g + 2 in its low nibbles, g + 1 and g + 3 in its high ones.
template <typename B> float row_of_q45_k(const void * w, const void * q, int64_t n) {
    const B * x = (const B *) w;
    const act_256 * y = (const act_256 *) q;
    const __m512i fifteen = _mm512_set1_epi8(15);
    __m512 acc = _mm512_setzero_ps();
    __m128 acc_min = _mm_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(B)>(x);
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

// Sum of scale * (value - 2^log_offset) * activation, for 16 groups of 16 with 8-bit scales. v[k] holds the values of groups 4k to 4k + 3.
inline __m512i dot_16_groups(const __m512i * v, __m128i scales, const act_256 & y, int log_offset) {
    // Each scale twice, as the two 16-bit halves of a 32-bit word.
    const __m512i twins = _mm512_shuffle_epi8(_mm512_cvtepi8_epi32(scales),
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13)));
    const __m256i offsets = _mm256_slli_epi32(_mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), load256(y.sums16)), log_offset);
    __m512i dot[2] = { _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_zextsi256_si512(offsets)), _mm512_setzero_si512() };
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const __m512i lanes = _mm512_setr_epi32(4*k, 4*k, 4*k, 4*k, 4*k + 1, 4*k + 1, 4*k + 1, 4*k + 1,
            4*k + 2, 4*k + 2, 4*k + 2, 4*k + 2, 4*k + 3, 4*k + 3, 4*k + 3, 4*k + 3);
        dot[k%2] = _mm512_dpwssd_epi32(dot[k%2], _mm512_maddubs_epi16(v[k], load512(y.qs + 64*k)), _mm512_permutexvar_epi32(lanes, twins));
    }
    return _mm512_add_epi32(dot[0], dot[1]);
}

float row_of_q6_k(const void * w, const void * q, int64_t n) {
    const block_q6_k * x = (const block_q6_k *) w;
    const act_256 * y = (const act_256 *) q;
    const __m512i fifteen = _mm512_set1_epi8(15);
    const __m512i upper   = _mm512_set1_epi8(0x30);
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        __m512i v[4];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            // 128 elements: 64 low nibbles and then 64 high ones; the upper two bits of element l are bits 2*(l/32) of byte l%32.
            const __m512i ql  = load512(x->ql + 64*h);
            const __m512i qh  = twice(x->qh + 32*h);
            const __m512i qh0 = _mm512_sllv_epi64(qh, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
            const __m512i qh1 = _mm512_srlv_epi64(qh, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
            v[2*h]     = _mm512_or_si512(_mm512_and_si512(ql, fifteen), _mm512_and_si512(qh0, upper));
            v[2*h + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(ql, 4), fifteen), _mm512_and_si512(qh1, upper));
        }
        const __m512i dot = dot_16_groups(v, load128(x->scales), *y, 5);
        acc = _mm512_fmadd_ps(_mm512_set1_ps(half(x->d) * y->d), _mm512_cvtepi32_ps(dot), acc);
    }
    return _mm512_reduce_add_ps(acc);
}

// 16 scales of 6 bits: the low nibbles are those of bytes 0 to 7, low ones first; the upper bits are those of bytes 8 to 11.
inline __m128i q3_k_scales(const uint8_t * twelve) {
    uint32_t last;
    memcpy(&last, twelve + 8, 4);
    const __m128i first = _mm_loadl_epi64((const __m128i *) twelve);
    const __m128i low   = _mm_and_si128(_mm_unpacklo_epi64(first, _mm_srli_epi16(first, 4)), _mm_set1_epi8(15));
    const __m128i high  = _mm_and_si128(_mm_srlv_epi32(_mm_set1_epi32((int) last), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
}

float row_of_q3_k(const void * w, const void * q, int64_t n) {
    const block_q3_k * x = (const block_q3_k *) w;
    const act_256 * y = (const act_256 *) q;
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m512i hmask = twice(x->hmask);
        __m512i v[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            // Group g of 32 elements: bits 2*(g%4) of the bytes of its half, and bit g of hmask.
            const int shift = 4*(k%2);
            const __m512i qs = _mm512_srlv_epi64(twice(x->qs + 32*(k/2)),
                _mm512_setr_epi64(shift, shift, shift, shift, shift + 2, shift + 2, shift + 2, shift + 2));
            const __m512i low = _mm512_and_si512(qs, _mm512_set1_epi8(3));
            v[k] = _mm512_mask_add_epi8(low, _mm512_test_epi8_mask(hmask, bytes_of_halves(1 << 2*k, 2 << 2*k)), low, _mm512_set1_epi8(4));
        }
        const __m512i dot = dot_16_groups(v, q3_k_scales(x->scales), *y, 2);
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
        uint32_t low;
        memcpy(&low, x->scales_l, 4);
        const __m256i l = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
            _mm256_set1_epi32(15));
        const __m256i h = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(x->scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
            _mm256_set1_epi32(3));
        const __m256i scales = _mm256_sub_epi32(_mm256_or_si256(l, _mm256_slli_epi32(h, 4)), _mm256_set1_epi32(32));
        // The values are 128 too large.
        const __m256i offsets = _mm256_slli_epi32(_mm256_mullo_epi32(scales, _mm256_cvtepi16_epi32(load128(y->sums32))), 7);
        __m512i dot = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_zextsi256_si512(offsets));
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const __m512i v = iq4_values(nibbles(x->qs + 32*k, x->qs + 32*k + 16));
            const __m512i halves = join(_mm256_set1_epi32(2*k), _mm256_set1_epi32(2*k + 1));
            const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, load512(y->qs + 64*k));
            dot = _mm512_add_epi32(dot, _mm512_mullo_epi32(products, _mm512_permutexvar_epi32(halves, _mm512_castsi256_si512(scales))));
        }
        acc = _mm512_fmadd_ps(_mm512_set1_ps(half(x->d) * y->d), _mm512_cvtepi32_ps(dot), acc);
    }
    return _mm512_reduce_add_ps(acc);
}

// ---- float weights; the activation stays float ----

struct f32 {
    using element = float;
    static __m512 load(__mmask16 m, const void * p) { return _mm512_maskz_loadu_ps(m, p); }
};

struct f16 {
    using element = uint16_t;
    static __m512 load(__mmask16 m, const void * p) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
};

struct bf16 {
    using element = uint16_t;
    static __m512 load(__mmask16 m, const void * p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
    }
};

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

template <float (*row)(const void *, const void *, int64_t)>
void rows(const void * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y) {
    for (int64_t r = 0; r < n_rows; r++) {
        y[r] = row((const char *) w + (size_t) r * row_bytes, q, n);
    }
}

const kernel table[] = {
    { GGML_TYPE_Q4_K,   act_256_bytes,   quantize_256,     rows<row_of_q45_k<block_q4_k>> },
    { GGML_TYPE_Q5_K,   act_256_bytes,   quantize_256,     rows<row_of_q45_k<block_q5_k>> },
    { GGML_TYPE_Q6_K,   act_256_bytes,   quantize_256,     rows<row_of_q6_k> },
    { GGML_TYPE_Q3_K,   act_256_bytes,   quantize_256,     rows<row_of_q3_k> },
    { GGML_TYPE_IQ4_XS, act_256_bytes,   quantize_256,     rows<row_of_iq4_xs> },
    { GGML_TYPE_Q8_0,   act_32_bytes,    quantize_32<128>, rows<row_of_32<q8_0>> },
    { GGML_TYPE_Q4_0,   act_32_bytes,    quantize_32<8>,   rows<row_of_32<q4_0>> },
    { GGML_TYPE_Q4_1,   act_32_bytes,    quantize_32<0>,   rows<row_of_32<q4_1>> },
    { GGML_TYPE_Q5_0,   act_32_bytes,    quantize_32<16>,  rows<row_of_32<q5_0>> },
    { GGML_TYPE_Q5_1,   act_32_bytes,    quantize_32<0>,   rows<row_of_32<q5_1>> },
    { GGML_TYPE_IQ4_NL, act_32_bytes,    quantize_32<128>, rows<row_of_32<iq4_nl>> },
    { GGML_TYPE_MXFP4,  act_32_bytes,    quantize_32<12>,  rows<row_of_32<mxfp4>> },
    { GGML_TYPE_F16,    act_float_bytes, copy_float,       rows<row_of_float<f16>> },
    { GGML_TYPE_BF16,   act_float_bytes, copy_float,       rows<row_of_float<bf16>> },
    { GGML_TYPE_F32,    act_float_bytes, copy_float,       rows<row_of_float<f32>> },
};

} // namespace

kernel_table kernels_avx512() {
    return { table, sizeof(table) / sizeof(table[0]) };
}

} // namespace edgemoe

#endif
