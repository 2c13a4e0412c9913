// AVX2: how each type's blocks become bytes and scales in registers. Compiled twice, the second time with AVX-VNNI, whose one instruction for the
// product of bytes takes the place of three. As for AVX-512 everything has internal linkage and nothing of the C++ library is used.
#pragma once

#include "x86_blocks.h"

namespace edgemoe {

namespace {

#ifdef __AVXVNNI__
constexpr bool has_vnni = true;
#else
constexpr bool has_vnni = false;
#endif

inline void    store256(void * p, __m256i x) { _mm256_storeu_si256((__m256i *) p, x); }

// 8 floats, from a 16-bit field of 8 blocks; zero behind the last block that may be read.
template <typename F> __m256 halves_of_8(int last, F field) {
    const auto h = [&](int j) { return j <= last ? field(j) : (uint16_t) 0; };
    const auto four = [&](int j) { return join_4(h(j), h(j + 1), h(j + 2), h(j + 3)); };
    return _mm256_cvtph_ps(_mm_set_epi64x(four(4), four(0)));
}

inline float sum8(__m256 x) {
    return sum4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// ---- products. `largest` is the largest weight of a type, made unsigned by an offset. Only VNNI has that also for 8 bits: without it two of their
// products would not fit in 16 bits, so they stay signed ----

constexpr bool is_signed(int largest) { return largest > 127 && !has_vnni; }

// 16-bit sums of two products. The sign of a signed weight goes over to the activation, which is never -128.
inline __m256i signed_products(__m256i w, __m256i y) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
}

template <int largest> inline __m256i products(__m256i w, __m256i y) {
    return is_signed(largest) ? signed_products(w, y) : _mm256_maddubs_epi16(w, y);
}

// How many of these sums can be added in 16 bits, to a power of two.
constexpr int sums_in_16_bits(int largest) {
    int n = 1;
    while (n < 8 && 2*n * 2*127*largest <= 32767) {
        n *= 2;
    }
    return n;
}

// sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of 16 bits
inline __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

// The same of four bytes.
template <int largest> inline __m256i add_fours(__m256i sum, __m256i w, __m256i y) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, w, y);
#else
    return add_pairs(sum, products<largest>(w, y), _mm256_set1_epi16(1));
#endif
}

// ---- types with blocks of 32 ----

// `bit` in each byte that has the bit of `mask`, 0 in the others.
inline __m256i where_set(__m256i bytes, __m256i mask, int bit) {
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask), _mm256_set1_epi8((char) bit));
}

// Byte j holds elements j and j + 16.
inline __m256i nibbles(const uint8_t * qs) {
    const __m128i x = load128(qs);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
}

// Bit j belongs to element j.
inline __m256i with_fifth_bit(__m256i low, const uint8_t * qh) {
    int32_t bits;
    memcpy(&bits, qh, 4);
    const __m256i its_byte = _mm256_shuffle_epi8(_mm256_set1_epi32(bits),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    return _mm256_or_si256(low, where_set(its_byte, _mm256_set1_epi64x((long long) 0x8040201008040201), 16));
}

constexpr int offset_of_8_bits = has_vnni ? 128 : 0;

inline __m256i signed_iq4(__m256i index) {
    const __m128i table = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);   // kvalues_iq4nl
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

inline __m256i with_8_bit_offset(__m256i w) {
    return has_vnni ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
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
    static float  scale(const B & x)               { return half(x.d); }
    static __m256 scales(const B * x, int last)    { return halves_of_8(last, [x](int j) { return x[j].d; }); }
    static float  min(const B &)                   { return 0; }
    static __m256 mins(const B *, int)             { return _mm256_setzero_ps(); }
    static constexpr bool has_min = false;
};

template <typename B> struct blocks_with_min : blocks_with_half<B> {
    static float  min(const B & x)               { return half(x.m); }
    static __m256 mins(const B * x, int last)    { return halves_of_8(last, [x](int j) { return x[j].m; }); }
    static constexpr bool has_min = true;
    static constexpr int  offset  = 0;
};

struct q4_0 : blocks_with_half<block_q4_0> {
    static constexpr int offset = 8, largest = 15;
    static __m256i values(const block & x) { return nibbles(x.qs); }
};

struct q4_1 : blocks_with_min<block_q4_1> {
    static constexpr int largest = 15;
    static __m256i values(const block & x) { return nibbles(x.qs); }
};

struct q5_0 : blocks_with_half<block_q5_0> {
    static constexpr int offset = 16, largest = 31;
    static __m256i values(const block & x) { return with_fifth_bit(nibbles(x.qs), x.qh); }
};

struct q5_1 : blocks_with_min<block_q5_1> {
    static constexpr int largest = 31;
    static __m256i values(const block & x) { return with_fifth_bit(nibbles(x.qs), x.qh); }
};

struct q8_0 : blocks_with_half<block_q8_0> {
    static constexpr int offset = offset_of_8_bits, largest = 255;
    static __m256i values(const block & x) { return with_8_bit_offset(load256(x.qs)); }
};

struct iq4_nl : blocks_with_half<block_iq4_nl> {
    static constexpr int offset = offset_of_8_bits, largest = 255;
    static __m256i values(const block & x) { return with_8_bit_offset(signed_iq4(nibbles(x.qs))); }
};

struct mxfp4 {
    using block = block_mxfp4;
    static float  scale(const block & x)                   { return e8m0_half(x.e); }
    static __m256 scales(const block * x, int last) {
        const auto e  = [&](int j) { return j <= last ? x[j].e : 0; };
        const auto e2 = [&](int j) { return (uint16_t) (e(j) | e(j + 1) << 8); };
        const __m256i wide   = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(join_4(e2(0), e2(2), e2(4), e2(6))));
        const __m256i usual  = _mm256_slli_epi32(_mm256_sub_epi32(wide, _mm256_set1_epi32(1)), 23);
        const __m256i lowest = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), wide);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, lowest, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), wide)));
    }
    static float  min(const block &)                       { return 0; }
    static __m256 mins(const block *, int)                 { return _mm256_setzero_ps(); }
    static constexpr bool has_min = false;
    static constexpr int  offset  = 12, largest = 24;
    static __m256i values(const block & x) {
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);   // kvalues_fp4 + 12
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(x.qs));
    }
};

// ---- types with blocks of 256. `values` gives the elements in order, 32 to a register; `scales` the integer scales of the groups ----

constexpr int largest_of(const block_q4_k *) { return 15; }
constexpr int largest_of(const block_q5_k *) { return 31; }

inline __m256i add_fifth(const block_q4_k &, __m256i low, int) { return low; }

// Bit g of byte j of qh belongs to element j of group g.
inline __m256i add_fifth(const block_q5_k & x, __m256i low, int g) {
    return _mm256_or_si256(low, where_set(load256(x.qh), _mm256_set1_epi8((char) (1 << g)), 16));
}

// Q4_K and Q5_K: value = d * scale * v - dmin * min.
template <typename B> struct q45_k {
    using block = B;
    static constexpr int group = 32, largest = largest_of((const B *) nullptr);
    static void values(const B & x, __m256i v[8]) {
        const __m256i fifteen = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int g = 0; g < 8; g += 2) {
            // 32 bytes of qs hold group g in the low nibbles and g + 1 in the high ones.
            const __m256i qs = load256(x.qs + 16*g);
            v[g]     = add_fifth(x, _mm256_and_si256(qs, fifteen), g);
            v[g + 1] = add_fifth(x, _mm256_and_si256(_mm256_srli_epi16(qs, 4), fifteen), g + 1);
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

// T has `bytes_of_scales`, of 16 groups.
template <typename T> void scales_of_16(const typename T::block & x, int16_t s[16], int16_t mins[16]) {
    const __m256i scales = _mm256_cvtepi8_epi16(T::bytes_of_scales(x));
    store256(s, scales);
    store256(mins, _mm256_mullo_epi16(scales, _mm256_set1_epi16(T::offset)));
}

struct q6_k : with_offset<block_q6_k> {
    static constexpr int group = 16, offset = 32, largest = 63;
    static void values(const block & x, __m256i v[8]) {
        const __m256i fifteen = _mm256_set1_epi8(15);
        const __m256i upper   = _mm256_set1_epi8(0x30);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            // 128 elements: 64 low nibbles and then 64 high ones; the upper two bits of element l are bits 2*(l/32) of byte l%32.
            const __m256i a  = load256(x.ql + 64*h);
            const __m256i b  = load256(x.ql + 64*h + 32);
            const __m256i qh = load256(x.qh + 32*h);
            v[4*h]     = _mm256_or_si256(_mm256_and_si256(a, fifteen), _mm256_and_si256(_mm256_slli_epi16(qh, 4), upper));
            v[4*h + 1] = _mm256_or_si256(_mm256_and_si256(b, fifteen), _mm256_and_si256(_mm256_slli_epi16(qh, 2), upper));
            v[4*h + 2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 4), fifteen), _mm256_and_si256(qh, upper));
            v[4*h + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 4), fifteen), _mm256_and_si256(_mm256_srli_epi16(qh, 2), upper));
        }
    }
    static __m128i bytes_of_scales(const block & x) { return load128(x.scales); }
    static void scales(const block & x, int16_t s[16], int16_t mins[16]) { scales_of_16<q6_k>(x, s, mins); }
};

struct q3_k : with_offset<block_q3_k> {
    static constexpr int group = 16, offset = 4, largest = 7;
    static void values(const block & x, __m256i v[8]) {
        const __m256i hmask = load256(x.hmask);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            // Group g of 32 elements: bits 2*(g%4) of the bytes of its half, and bit g of hmask.
            const __m256i low = _mm256_and_si256(_mm256_srli_epi16(load256(x.qs + 32*(g/4)), 2*(g%4)), _mm256_set1_epi8(3));
            v[g] = _mm256_or_si256(low, where_set(hmask, _mm256_set1_epi8((char) (1 << g)), 4));
        }
    }
    static __m128i bytes_of_scales(const block & x) { return q3_k_scales(x.scales); }
    static void scales(const block & x, int16_t s[16], int16_t mins[16]) { scales_of_16<q3_k>(x, s, mins); }
};

struct iq4_xs : with_offset<block_iq4_xs> {
    static constexpr int group = 32, offset = offset_of_8_bits, largest = 255;
    static void values(const block & x, __m256i v[8]) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            v[g] = with_8_bit_offset(signed_iq4(nibbles(x.qs + 16*g)));
        }
    }
    // 8 scales of 6 bits: low nibbles, and two upper bits each in scales_h.
    static __m128i words_of_scales(const block & x) {
        uint32_t low;
        memcpy(&low, x.scales_l, 4);
        const __m256i l = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
            _mm256_set1_epi32(15));
        const __m256i h = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(x.scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
            _mm256_set1_epi32(3));
        const __m256i wide = _mm256_sub_epi32(_mm256_or_si256(l, _mm256_slli_epi32(h, 4)), _mm256_set1_epi32(32));
        return _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    }
    static void scales(const block & x, int16_t s[8], int16_t mins[8]) {
        const __m128i words = words_of_scales(x);
        _mm_storeu_si128((__m128i *) s, words);
        _mm_storeu_si128((__m128i *) mins, _mm_mullo_epi16(words, _mm_set1_epi16(offset)));
    }
};

// ---- float weights; the activation stays float ----

struct f32 {
    static constexpr size_t bytes = 4;
    static __m256 load(const char * p) { return _mm256_loadu_ps((const float *) p); }
    static float  one(const char * p)  { float f; memcpy(&f, p, 4); return f; }
};

struct f16 {
    static constexpr size_t bytes = 2;
    static __m256 load(const char * p) { return _mm256_cvtph_ps(load128(p)); }
    static float  one(const char * p)  { uint16_t h; memcpy(&h, p, 2); return half(h); }
};

struct bf16 {
    static constexpr size_t bytes = 2;
    static __m256 load(const char * p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16)); }
    static float  one(const char * p)  { uint32_t bits = 0; memcpy((char *) &bits + 2, p, 2); float f; memcpy(&f, &bits, 4); return f; }
};

} // namespace

} // namespace edgemoe
