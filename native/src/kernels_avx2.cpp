// AVX2 kernels (with FMA and F16C). As in kernels_avx512.cpp everything but the table has internal linkage, so that no shared inline function
// is compiled with this file's flags.
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

inline float half(uint16_t h) {
    return _cvtsh_ss(h);
}

inline float sum4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline float sum8(__m256 x) {
    return sum4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// `bit` in each byte that has the bit of `mask`, 0 in the others.
inline __m256i where_set(__m256i bytes, __m256i mask, int bit) {
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask), _mm256_set1_epi8((char) bit));
}

// ---- types with blocks of 32 ----

// Byte j holds elements j and j + 16.
inline __m256i nibbles(const uint8_t * qs) {
    const __m128i x = load128(qs);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
}

// Bit j belongs to element j.
inline __m256i fifth_bits(const uint8_t * qh) {
    uint32_t bits;
    memcpy(&bits, qh, 4);
    const __m256i its_byte = _mm256_shuffle_epi8(_mm256_set1_epi32((int) bits),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    return where_set(its_byte, _mm256_set1_epi64x((long long) 0x8040201008040201), 16);
}

inline __m256i iq4_values(__m256i index) {
    const __m128i table = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);   // kvalues_iq4nl
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

// Sums of neighbouring products, for weights with an offset that keeps them in 0 to 31 (no sum saturates) ...
inline __m256i products_unsigned(__m256i w, __m256i y) {
    return _mm256_maddubs_epi16(w, y);
}

// ... and for weights from -128 to 127: their sign goes over to the activation, which is never -128.
inline __m256i products_signed(__m256i w, __m256i y) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
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
    static float scale(const B & x) { return half(x.d); }
    static float min(const B &)     { return 0; }
};

template <typename B> struct blocks_with_min : blocks_with_half<B> {
    static float min(const B & x) { return half(x.m); }
};

struct q4_0 : blocks_with_half<block_q4_0> {
    static __m256i products(const block & x, __m256i y) { return products_unsigned(nibbles(x.qs), y); }
};

struct q4_1 : blocks_with_min<block_q4_1> {
    static __m256i products(const block & x, __m256i y) { return products_unsigned(nibbles(x.qs), y); }
};

struct q5_0 : blocks_with_half<block_q5_0> {
    static __m256i products(const block & x, __m256i y) { return products_unsigned(_mm256_or_si256(nibbles(x.qs), fifth_bits(x.qh)), y); }
};

struct q5_1 : blocks_with_min<block_q5_1> {
    static __m256i products(const block & x, __m256i y) { return products_unsigned(_mm256_or_si256(nibbles(x.qs), fifth_bits(x.qh)), y); }
};

struct q8_0 : blocks_with_half<block_q8_0> {
    static __m256i products(const block & x, __m256i y) { return products_signed(load256(x.qs), y); }
};

struct iq4_nl : blocks_with_half<block_iq4_nl> {
    static __m256i products(const block & x, __m256i y) { return products_signed(iq4_values(nibbles(x.qs)), y); }
};

struct mxfp4 {
    using block = block_mxfp4;
    static float scale(const block & x) { return e8m0_half(x.e); }
    static float min(const block &)     { return 0; }
    static __m256i products(const block & x, __m256i y) {
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);   // kvalues_fp4 + 12
        return products_unsigned(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(x.qs)), y);
    }
};

template <typename T> float row_of_32(const void * w, const void * q, int64_t n) {
    const typename T::block * x = (const typename T::block *) w;
    const act_2x32 * y = (const act_2x32 *) q;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 acc[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    float acc_min = 0;
    const int64_t n_blocks = n / 32;
    const auto one = [&](const typename T::block & b, const act_2x32 & a, int h) {
        const __m256i bias = _mm256_zextsi128_si256(_mm_cvtsi32_si128(a.bias[h]));
        const __m256i dot  = _mm256_add_epi32(bias, _mm256_madd_epi16(T::products(b, load256(a.qs + 32*h)), ones));
        acc[h] = _mm256_fmadd_ps(_mm256_set1_ps(T::scale(b) * a.d[h]), _mm256_cvtepi32_ps(dot), acc[h]);
        acc_min += T::min(b) * a.s[h];
    };
    for (int64_t i = 0; i + 1 < n_blocks; i += 2, y++) {
        prefetch<64>(x + i);
        one(x[i], *y, 0);
        one(x[i + 1], *y, 1);
    }
    if (n_blocks % 2) {
        one(x[n_blocks - 1], *y, 0);
    }
    return sum8(_mm256_add_ps(acc[0], acc[1])) + acc_min;
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

// Fills each half of a register with its own 16-bit scale g.
inline __m256i pick_scale(__m256i scales, int g) {
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (2*g | (2*g + 1) << 8)));
}

inline __m256i add_fifth(const block_q4_k &, __m256i low, int) { return low; }

// Bit g of byte j of qh belongs to element j of group g.
inline __m256i add_fifth(const block_q5_k & x, __m256i low, int g) {
    return _mm256_or_si256(low, where_set(load256(x.qh), _mm256_set1_epi8((char) (1 << g)), 16));
}

// Q4_K and Q5_K: 32 bytes of qs hold group g in the low nibbles and g + 1 in the high ones.
template <typename B> float row_of_q45_k(const void * w, const void * q, int64_t n) {
    const B * x = (const B *) w;
    const act_256 * y = (const act_256 *) q;
    const __m256i fifteen = _mm256_set1_epi8(15);
    __m256 acc = _mm256_setzero_ps();
    __m128 acc_min = _mm_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(B)>(x);
        const __m256i sm = scales_and_mins(x->scales);
        const __m256i scales = _mm256_broadcastsi128_si256(_mm256_castsi256_si128(sm));
        __m256i dot[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
#pragma GCC unroll 4
        for (int g = 0; g < 8; g += 2) {
            const __m256i qs   = load256(x->qs + 16*g);
            const __m256i low  = add_fifth(*x, _mm256_and_si256(qs, fifteen), g);
            const __m256i high = add_fifth(*x, _mm256_and_si256(_mm256_srli_epi16(qs, 4), fifteen), g + 1);
            const __m256i p0 = _mm256_maddubs_epi16(low, load256(y->qs + 32*g));
            const __m256i p1 = _mm256_maddubs_epi16(high, load256(y->qs + 32*g + 32));
            dot[0] = _mm256_add_epi32(dot[0], _mm256_madd_epi16(p0, pick_scale(scales, g)));
            dot[1] = _mm256_add_epi32(dot[1], _mm256_madd_epi16(p1, pick_scale(scales, g + 1)));
        }
        const __m128i mins = _mm_madd_epi16(_mm256_extracti128_si256(sm, 1), load128(y->sums32));
        acc     = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(_mm256_add_epi32(dot[0], dot[1])), acc);
        acc_min = _mm_fmadd_ps(_mm_set1_ps(half(x->dmin) * y->d), _mm_cvtepi32_ps(mins), acc_min);
    }
    return sum8(acc) - sum4(acc_min);
}

// Sum of scale * (value - 2^log_offset) * activation, for 16 groups of 16 with 8-bit scales. v[k] holds the values of groups 2k and 2k + 1.
inline __m256i dot_16_groups(const __m256i * v, __m128i scales, const act_256 & y, int log_offset) {
    // Even groups lie in lower halves, odd ones in upper halves; so do their scales.
    const __m256i split = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
    const __m256i offsets = _mm256_slli_epi32(_mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), load256(y.sums16)), log_offset);
    __m256i dot[2] = { _mm256_sub_epi32(_mm256_setzero_si256(), offsets), _mm256_setzero_si256() };
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        dot[k%2] = _mm256_add_epi32(dot[k%2], _mm256_madd_epi16(_mm256_maddubs_epi16(v[k], load256(y.qs + 32*k)), pick_scale(split, k)));
    }
    return _mm256_add_epi32(dot[0], dot[1]);
}

float row_of_q6_k(const void * w, const void * q, int64_t n) {
    const block_q6_k * x = (const block_q6_k *) w;
    const act_256 * y = (const act_256 *) q;
    const __m256i fifteen = _mm256_set1_epi8(15);
    const __m256i upper   = _mm256_set1_epi8(0x30);
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        __m256i v[8];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            // 128 elements: 64 low nibbles and then 64 high ones; the upper two bits of element l are bits 2*(l/32) of byte l%32.
            const __m256i a  = load256(x->ql + 64*h);
            const __m256i b  = load256(x->ql + 64*h + 32);
            const __m256i qh = load256(x->qh + 32*h);
            v[4*h]     = _mm256_or_si256(_mm256_and_si256(a, fifteen), _mm256_and_si256(_mm256_slli_epi16(qh, 4), upper));
            v[4*h + 1] = _mm256_or_si256(_mm256_and_si256(b, fifteen), _mm256_and_si256(_mm256_slli_epi16(qh, 2), upper));
            v[4*h + 2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 4), fifteen), _mm256_and_si256(qh, upper));
            v[4*h + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 4), fifteen), _mm256_and_si256(_mm256_srli_epi16(qh, 2), upper));
        }
        const __m256i dot = dot_16_groups(v, load128(x->scales), *y, 5);
        acc = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(dot), acc);
    }
    return sum8(acc);
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
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        const __m256i hmask = load256(x->hmask);
        __m256i v[8];
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            // Group g of 32 elements: bits 2*(g%4) of the bytes of its half, and bit g of hmask.
            const __m256i low = _mm256_and_si256(_mm256_srli_epi16(load256(x->qs + 32*(g/4)), 2*(g%4)), _mm256_set1_epi8(3));
            v[g] = _mm256_or_si256(low, where_set(hmask, _mm256_set1_epi8((char) (1 << g)), 4));
        }
        const __m256i dot = dot_16_groups(v, q3_k_scales(x->scales), *y, 2);
        acc = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(dot), acc);
    }
    return sum8(acc);
}

float row_of_iq4_xs(const void * w, const void * q, int64_t n) {
    const block_iq4_xs * x = (const block_iq4_xs *) w;
    const act_256 * y = (const act_256 *) q;
    __m256 acc = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / 256; i++, x++, y++) {
        prefetch<sizeof(*x)>(x);
        uint32_t low;
        memcpy(&low, x->scales_l, 4);
        const __m256i l = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
            _mm256_set1_epi32(15));
        const __m256i h = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(x->scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
            _mm256_set1_epi32(3));
        const __m256i wide = _mm256_sub_epi32(_mm256_or_si256(l, _mm256_slli_epi32(h, 4)), _mm256_set1_epi32(32));
        const __m256i scales = _mm256_broadcastsi128_si256(_mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
        __m256i dot[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m256i p = products_signed(iq4_values(nibbles(x->qs + 16*g)), load256(y->qs + 32*g));
            dot[g%2] = _mm256_add_epi32(dot[g%2], _mm256_madd_epi16(p, pick_scale(scales, g)));
        }
        acc = _mm256_fmadd_ps(_mm256_set1_ps(half(x->d) * y->d), _mm256_cvtepi32_ps(_mm256_add_epi32(dot[0], dot[1])), acc);
    }
    return sum8(acc);
}

// ---- float weights; the activation stays float ----

struct f32 {
    using element = float;
    static __m256 load(const float * p) { return _mm256_loadu_ps(p); }
    static float  one(const float * p)  { float f; memcpy(&f, p, 4); return f; }
};

struct f16 {
    using element = uint16_t;
    static __m256 load(const uint16_t * p) { return _mm256_cvtph_ps(load128(p)); }
    static float  one(const uint16_t * p)  { return half(*p); }
};

struct bf16 {
    using element = uint16_t;
    static __m256 load(const uint16_t * p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16)); }
    static float  one(const uint16_t * p)  { const uint32_t bits = (uint32_t) *p << 16; float f; memcpy(&f, &bits, 4); return f; }
};

template <typename T> float row_of_float(const void * w, const void * q, int64_t n) {
    const typename T::element * x = (const typename T::element *) w;
    const float * y = (const float *) q;
    __m256 acc[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        prefetch<32 * sizeof(*x)>(x + i);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            acc[k] = _mm256_fmadd_ps(T::load(x + i + 8*k), _mm256_loadu_ps(y + i + 8*k), acc[k]);
        }
    }
    float rest = 0;
    for (; i < n; i++) {
        rest += T::one(x + i) * y[i];
    }
    return sum8(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]))) + rest;
}

template <float (*row)(const void *, const void *, int64_t)>
void rows(const void * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y) {
    for (int64_t r = 0; r < n_rows; r++) {
        y[r] = row((const char *) w + (size_t) r * row_bytes, q, n);
    }
}

const kernel table[] = {
    { GGML_TYPE_Q4_K,   act_256_bytes,   quantize_256,    rows<row_of_q45_k<block_q4_k>> },
    { GGML_TYPE_Q5_K,   act_256_bytes,   quantize_256,    rows<row_of_q45_k<block_q5_k>> },
    { GGML_TYPE_Q6_K,   act_256_bytes,   quantize_256,    rows<row_of_q6_k> },
    { GGML_TYPE_Q3_K,   act_256_bytes,   quantize_256,    rows<row_of_q3_k> },
    { GGML_TYPE_IQ4_XS, act_256_bytes,   quantize_256,    rows<row_of_iq4_xs> },
    { GGML_TYPE_Q8_0,   act_32_bytes,    quantize_32<0>,  rows<row_of_32<q8_0>> },
    { GGML_TYPE_Q4_0,   act_32_bytes,    quantize_32<8>,  rows<row_of_32<q4_0>> },
    { GGML_TYPE_Q4_1,   act_32_bytes,    quantize_32<0>,  rows<row_of_32<q4_1>> },
    { GGML_TYPE_Q5_0,   act_32_bytes,    quantize_32<16>, rows<row_of_32<q5_0>> },
    { GGML_TYPE_Q5_1,   act_32_bytes,    quantize_32<0>,  rows<row_of_32<q5_1>> },
    { GGML_TYPE_IQ4_NL, act_32_bytes,    quantize_32<0>,  rows<row_of_32<iq4_nl>> },
    { GGML_TYPE_MXFP4,  act_32_bytes,    quantize_32<12>, rows<row_of_32<mxfp4>> },
    { GGML_TYPE_F16,    act_float_bytes, copy_float,      rows<row_of_float<f16>> },
    { GGML_TYPE_BF16,   act_float_bytes, copy_float,      rows<row_of_float<bf16>> },
    { GGML_TYPE_F32,    act_float_bytes, copy_float,      rows<row_of_float<f32>> },
};

} // namespace

kernel_table kernels_avx2() {
    return { table, sizeof(table) / sizeof(table[0]) };
}

} // namespace edgemoe

#endif
