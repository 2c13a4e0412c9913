// AVX-512: how each type's blocks become bytes and scales in registers. Everything has internal linkage, and nothing of the C++ library is used: code
// compiled for AVX-512 must not end up in a program's shared inline functions, which also run on CPUs without it.
#pragma once

#include "x86_blocks.h"

namespace edgemoe {

namespace {

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

// ---- types with blocks of 32: two blocks fill a register; weights are made unsigned by an offset ----

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

// kvalues_iq4nl + 128
inline __m512i iq4_values(__m512i index) {
    const __m128i table = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}

// 16 floats, from a 16-bit field of 16 blocks; zero behind the last block that may be read.
template <typename F> __m512 halves_of_16(int last, F field) {
    const auto h = [&](int j) { return j <= last ? field(j) : (uint16_t) 0; };
    const auto four = [&](int j) { return join_4(h(j), h(j + 1), h(j + 2), h(j + 3)); };
    return _mm512_cvtph_ps(_mm256_setr_epi64x(four(0), four(4), four(8), four(12)));
}

template <typename B> struct blocks_with_half {
    using block = B;
    static float  scale(const B & x)             { return half(x.d); }
    static void   scales(const B * x, int last, __m512 & d, __m512 &) { d = halves_of_16(last, [x](int j) { return x[j].d; }); }
    static float  min(const B &)                 { return 0; }
    static constexpr bool has_min = false;
};

template <typename B> struct blocks_with_min : blocks_with_half<B> {
    static float  min(const B & x)               { return half(x.m); }
    static void   scales(const B * x, int last, __m512 & d, __m512 & m) {
        d = halves_of_16(last, [x](int j) { return x[j].d; });
        m = halves_of_16(last, [x](int j) { return x[j].m; });
    }
    static constexpr bool has_min = true;
    static constexpr int  offset  = 0;
};

struct q4_0 : blocks_with_half<block_q4_0> {
    static constexpr int offset = 8;
    static __m512i values(const block & a, const block & b) { return nibbles(a.qs, b.qs); }
};

struct q4_1 : blocks_with_min<block_q4_1> {
    static __m512i values(const block & a, const block & b) { return nibbles(a.qs, b.qs); }
};

struct q5_0 : blocks_with_half<block_q5_0> {
    static constexpr int offset = 16;
    static __m512i values(const block & a, const block & b) { return with_fifth_bit(nibbles(a.qs, b.qs), a.qh, b.qh); }
};

struct q5_1 : blocks_with_min<block_q5_1> {
    static __m512i values(const block & a, const block & b) { return with_fifth_bit(nibbles(a.qs, b.qs), a.qh, b.qh); }
};

struct q8_0 : blocks_with_half<block_q8_0> {
    static constexpr int offset = 128;
    static __m512i values(const block & a, const block & b) {
        return _mm512_xor_si512(join(load256(a.qs), load256(b.qs)), _mm512_set1_epi8(-128));
    }
};

struct iq4_nl : blocks_with_half<block_iq4_nl> {
    static constexpr int offset = 128;
    static __m512i values(const block & a, const block & b) { return iq4_values(nibbles(a.qs, b.qs)); }
};

struct mxfp4 {
    using block = block_mxfp4;
    static constexpr bool has_min = false;
    static constexpr int  offset  = 12;
    // Half of 2^(e - 127), since the table of values is doubled.
    static __m512 powers(__m512i e) {
        const __m512i usual = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(usual, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), _mm512_set1_epi32(0x00200000), e));
    }
    static float  scale(const block & x) { return _mm512_cvtss_f32(powers(_mm512_set1_epi32(x.e))); }
    static float  min(const block &)     { return 0; }
    static void   scales(const block * x, int last, __m512 & d, __m512 &) {
        const auto e  = [&](int j) { return j <= last ? x[j].e : 0; };
        const auto e2 = [&](int j) { return (uint16_t) (e(j) | e(j + 1) << 8); };
        d = powers(_mm512_cvtepu8_epi32(_mm_set_epi64x(join_4(e2(8), e2(10), e2(12), e2(14)), join_4(e2(0), e2(2), e2(4), e2(6)))));
    }
    static __m512i values(const block & a, const block & b) {
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);   // kvalues_fp4 + 12
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(a.qs, b.qs));
    }
};

// ---- types with blocks of 256. `values` gives the elements in order, made unsigned; `scales` the integer scales of the groups ----

inline __m512i fifth_bits(const block_q4_k &) { return _mm512_setzero_si512(); }
inline __m512i fifth_bits(const block_q5_k & x) { return twice(x.qh); }

inline __m512i add_fifth(const block_q4_k &, __m512i low, __m512i, int, int) { return low; }

// Bit g of byte j of qh belongs to element j of group g.
inline __m512i add_fifth(const block_q5_k &, __m512i low, __m512i qh, int a, int b) {
    const __mmask64 mask = _mm512_test_epi8_mask(qh, bytes_of_halves(1 << a, 1 << b));
    return _mm512_mask_add_epi8(low, mask, low, _mm512_set1_epi8(16));
}

// Q4_K and Q5_K: value = d * scale * v - dmin * min.
template <typename B> struct q45_k {
    using block = B;
    static constexpr int group = 32;
    static void values(const B & x, __m512i v[4]) {
        const __m256i fifteen = _mm256_set1_epi8(15);
        const __m512i qh = fifth_bits(x);
        for (int k = 0; k < 4; k++) {
            const __m256i qs = load256(x.qs + 32*k);
            v[k] = add_fifth(x, join(_mm256_and_si256(qs, fifteen), _mm256_and_si256(_mm256_srli_epi16(qs, 4), fifteen)), qh, 2*k, 2*k + 1);
        }
    }
    static void scales(const B & x, int16_t s[8], int16_t mins[8]) {
        const __m256i sm = scales_and_mins(x.scales);
        _mm_storeu_si128((__m128i *) s, _mm256_castsi256_si128(sm));
        _mm_storeu_si128((__m128i *) mins, _mm256_extracti128_si256(sm, 1));
    }
    static float d(const B & x)    { return half(x.d); }
    static float dmin(const B & x) { return half(x.dmin); }
};

// The others: value = d * scale * (v - offset), hence a min of scale * offset.
template <typename B> struct with_offset {
    using block = B;
    static float d(const B & x)    { return half(x.d); }
    static float dmin(const B & x) { return half(x.d); }
};

struct q6_k : with_offset<block_q6_k> {
    static constexpr int group = 16, offset = 32;
    static void values(const block & x, __m512i v[4]) {
        const __m512i fifteen = _mm512_set1_epi8(15);
        const __m512i upper   = _mm512_set1_epi8(0x30);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            // 128 elements: 64 low nibbles and then 64 high ones; the upper two bits of element l are bits 2*(l/32) of byte l%32.
            const __m512i ql  = load512(x.ql + 64*h);
            const __m512i qh  = twice(x.qh + 32*h);
            const __m512i qh0 = _mm512_sllv_epi64(qh, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
            const __m512i qh1 = _mm512_srlv_epi64(qh, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
            v[2*h]     = _mm512_or_si512(_mm512_and_si512(ql, fifteen), _mm512_and_si512(qh0, upper));
            v[2*h + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(ql, 4), fifteen), _mm512_and_si512(qh1, upper));
        }
    }
    static __m128i bytes_of_scales(const block & x) { return load128(x.scales); }
};

struct q3_k : with_offset<block_q3_k> {
    static constexpr int group = 16, offset = 4;
    static void values(const block & x, __m512i v[4]) {
        const __m512i hmask = twice(x.hmask);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            // Group g of 32 elements: bits 2*(g%4) of the bytes of its half, and bit g of hmask.
            const int shift = 4*(k%2);
            const __m512i qs = _mm512_srlv_epi64(twice(x.qs + 32*(k/2)),
                _mm512_setr_epi64(shift, shift, shift, shift, shift + 2, shift + 2, shift + 2, shift + 2));
            const __m512i low = _mm512_and_si512(qs, _mm512_set1_epi8(3));
            v[k] = _mm512_mask_add_epi8(low, _mm512_test_epi8_mask(hmask, bytes_of_halves(1 << 2*k, 2 << 2*k)), low, _mm512_set1_epi8(4));
        }
    }
    static __m128i bytes_of_scales(const block & x) { return q3_k_scales(x.scales); }
};

struct iq4_xs : with_offset<block_iq4_xs> {
    static constexpr int group = 32, offset = 128;
    static void values(const block & x, __m512i v[4]) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            v[k] = iq4_values(nibbles(x.qs + 32*k, x.qs + 32*k + 16));
        }
    }
    // 8 scales of 6 bits: low nibbles, and two upper bits each in scales_h.
    static __m256i wide_scales(const block & x) {
        uint32_t low;
        memcpy(&low, x.scales_l, 4);
        const __m256i l = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
            _mm256_set1_epi32(15));
        const __m256i h = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(x.scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
            _mm256_set1_epi32(3));
        return _mm256_sub_epi32(_mm256_or_si256(l, _mm256_slli_epi32(h, 4)), _mm256_set1_epi32(32));
    }
};

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

} // namespace

} // namespace edgemoe
