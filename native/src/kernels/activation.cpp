// Quantises activations, with the instructions that every x86-64 has.
#include "blocks.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace edgemoe {

#if defined(__x86_64__)

static __m128 abs4(__m128 x) {
    return _mm_andnot_ps(_mm_set1_ps(-0.0f), x);
}

struct magnitude {
    float max;
    bool  has_nan;
};

static magnitude max_abs(const float * x, int n) {
    __m128 max = _mm_setzero_ps();
    __m128 nan = _mm_setzero_ps();
    for (int i = 0; i < n; i += 4) {
        const __m128 v = _mm_loadu_ps(x + i);
        max = _mm_max_ps(abs4(v), max);   // of a NaN and a number this keeps the second, the number
        nan = _mm_or_ps(nan, _mm_cmpunord_ps(v, v));
    }
    max = _mm_max_ps(max, _mm_movehl_ps(max, max));
    max = _mm_max_ss(max, _mm_shuffle_ps(max, max, 1));
    return { _mm_cvtss_f32(max), _mm_movemask_ps(nan) != 0 };
}

// 16 rounded products, to the nearest, ties to even; returns their sum.
static int round_16(const float * x, float scale, int8_t * q) {
    const __m128 s = _mm_set1_ps(scale);
    const __m128i a = _mm_packs_epi32(_mm_cvtps_epi32(_mm_mul_ps(s, _mm_loadu_ps(x))),     _mm_cvtps_epi32(_mm_mul_ps(s, _mm_loadu_ps(x + 4))));
    const __m128i b = _mm_packs_epi32(_mm_cvtps_epi32(_mm_mul_ps(s, _mm_loadu_ps(x + 8))), _mm_cvtps_epi32(_mm_mul_ps(s, _mm_loadu_ps(x + 12))));
    const __m128i bytes = _mm_packs_epi16(a, b);
    _mm_storeu_si128((__m128i *) q, bytes);
    // The sum of bytes + 128, eight at a time, is one instruction.
    const __m128i sum = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sum) + _mm_extract_epi16(sum, 4) - 16 * 128;
}

// ggml scales by the first element of the largest magnitude, with its sign.
static float first_of_magnitude(const float * x, float max) {
    for (int i = 0; ; i += 4) {
        const __m128 v = _mm_loadu_ps(x + i);
        const int hits = _mm_movemask_ps(_mm_cmpeq_ps(abs4(v), _mm_set1_ps(max)));
        if (hits) {
            return x[i + __builtin_ctz((unsigned) hits)];
        }
    }
}

static void quantize_256(const float * x, void * q, int64_t n) {
    act_256 * y = (act_256 *) q;
    for (int64_t i = 0; i < n / 256; i++, x += 256, y++) {
        const magnitude m = max_abs(x, 256);
        memset(y, 0, sizeof(*y));
        if (m.max != 0) {
            const float scale = -127.0f / first_of_magnitude(x, m.max);
            for (int j = 0; j < 16; j++) {
                y->sums16[j] = (int16_t) round_16(x + 16*j, scale, y->qs + 16*j);
                y->sums32[j/2] = (int16_t) (y->sums32[j/2] + y->sums16[j]);
            }
            y->d = 1 / scale;
        }
        if (m.has_nan) {
            y->d = NAN;   // ggml loses it here; a broken input should show
        }
    }
}

static void quantize_32(const float * x, void * q, int64_t n) {
    act_16x32 * y = (act_16x32 *) q;
    memset(q, 0, activation_bytes(rounding::q8_32, n));
    for (int64_t i = 0; i < n / 32; i++, x += 32) {
        act_16x32 & to = y[i/16];
        const int64_t b = i % 16;
        const magnitude m = max_abs(x, 32);
        const float d     = m.has_nan ? NAN : m.max / 127.0f;
        const float scale = m.max != 0 ? 127.0f / m.max : 0.0f;
        const int sum = round_16(x, scale, to.qs + 32*b) + round_16(x + 16, scale, to.qs + 32*b + 16);
        to.d[b]  = ggml_fp16_to_fp32(ggml_fp32_to_fp16(d));
        to.s[b]  = ggml_fp16_to_fp32(ggml_fp32_to_fp16(d * (float) sum));
        to.ds[b] = to.d[b] * (float) sum;
    }
}

size_t activation_bytes(rounding how, int64_t n) {
    switch (how) {
        case rounding::q8_256: return (size_t) (n / 256) * sizeof(act_256);
        case rounding::q8_32:  return (size_t) ((n + 511) / 512) * sizeof(act_16x32);
        case rounding::none:   break;
    }
    return (size_t) n * sizeof(float);
}

void quantize(rounding how, const float * x, void * q, int64_t n) {
    switch (how) {
        case rounding::q8_256: return quantize_256(x, q, n);
        case rounding::q8_32:  return quantize_32(x, q, n);
        case rounding::none:   memcpy(q, x, (size_t) n * sizeof(float));
    }
}

#endif

} // namespace edgemoe
