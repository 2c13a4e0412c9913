// What AVX2 and AVX-512 do alike: each file that includes this gets a copy of its own, compiled with its own instructions.
#pragma once

#include "blocks.h"

#include <immintrin.h>
#include <string.h>

namespace edgemoe {

namespace {

// Decode reads every weight once, from memory, and one core can have more lines on their way to its second-level cache than to its first: far ahead for
// that one, nearer for the other. Measured over other distances, and over the hardware's prefetcher alone (which leaves a third of the bandwidth unused).
template <size_t bytes> inline void prefetch(const void * block) {
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *) block + 4096 + i, _MM_HINT_T1);
        _mm_prefetch((const char *) block + 512 + i, _MM_HINT_T0);
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

// Four 16-bit numbers as one: put together in the integer units, which have less to do than the vector ones.
inline int64_t join_4(uint16_t a, uint16_t b, uint16_t c, uint16_t d) {
    return (int64_t) ((uint64_t) d << 48 | (uint64_t) c << 32 | (uint32_t) b << 16 | a);
}

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

// 16 scales of 6 bits: the low nibbles are those of bytes 0 to 7, low ones first; the upper bits are those of bytes 8 to 11.
inline __m128i q3_k_scales(const uint8_t * twelve) {
    uint32_t last;
    memcpy(&last, twelve + 8, 4);
    const __m128i first = _mm_loadl_epi64((const __m128i *) twelve);
    const __m128i low   = _mm_and_si128(_mm_unpacklo_epi64(first, _mm_srli_epi16(first, 4)), _mm_set1_epi8(15));
    const __m128i high  = _mm_and_si128(_mm_srlv_epi32(_mm_set1_epi32((int) last), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
}

} // namespace

} // namespace edgemoe
