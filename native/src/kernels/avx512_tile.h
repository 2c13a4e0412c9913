// AVX-512 products of 16 rows with many activations. A tile holds, per block, four elements of each row side by side in a register: with four elements
// of an activation broadcast over it, one instruction multiplies 64 bytes and adds them up per row.
#pragma once

#include "avx512_blocks.h"

namespace edgemoe {

namespace {

// Activations that share one pass over the tile: as many as leave every sum in a register.
constexpr int tokens_per_pass = 8;

inline __m512i broadcast_4_bytes(const void * p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// 16 rows of 64 bytes, `stride` apart, to 16 registers of 4 bytes per row. Rows are loaded in quarters, which leaves half of the shuffles to the load ports.
inline void interleave(const uint8_t * rows, size_t stride, uint8_t * out) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i a[4], b[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const uint8_t * at = rows + (size_t) r * stride + 16*c;
            // The masks keep the compiler from loading each quarter by itself and shuffling it into place.
            a[r] = _mm512_castsi128_si512(load128(at));
            a[r] = _mm512_mask_broadcast_i32x4(a[r], 0x00F0, load128(at + 4*stride));
            a[r] = _mm512_mask_broadcast_i32x4(a[r], 0x0F00, load128(at + 8*stride));
            a[r] = _mm512_mask_broadcast_i32x4(a[r], 0xF000, load128(at + 12*stride));
        }
        // 128 bits of a[r]: columns 4c to 4c + 3 of one of the rows r, r + 4, r + 8, r + 12.
        b[0] = _mm512_unpacklo_epi32(a[0], a[1]);
        b[1] = _mm512_unpackhi_epi32(a[0], a[1]);
        b[2] = _mm512_unpacklo_epi32(a[2], a[3]);
        b[3] = _mm512_unpackhi_epi32(a[2], a[3]);
        _mm512_store_si512(out + 64*(4*c),     _mm512_unpacklo_epi64(b[0], b[2]));
        _mm512_store_si512(out + 64*(4*c + 1), _mm512_unpackhi_epi64(b[0], b[2]));
        _mm512_store_si512(out + 64*(4*c + 2), _mm512_unpacklo_epi64(b[1], b[3]));
        _mm512_store_si512(out + 64*(4*c + 3), _mm512_unpackhi_epi64(b[1], b[3]));
    }
}

// Calls pass<8>, and a smaller one for what is left.
template <typename P> void in_passes(const void * tile, int64_t n, int n_rows, const void * const * q, int64_t n_tokens, float * const * y) {
    for (; n_tokens >= tokens_per_pass; n_tokens -= tokens_per_pass, q += tokens_per_pass, y += tokens_per_pass) {
        P::template pass<tokens_per_pass>(tile, n, n_rows, q, y);
    }
    switch (n_tokens) {
        case 1: return P::template pass<1>(tile, n, n_rows, q, y);
        case 2: return P::template pass<2>(tile, n, n_rows, q, y);
        case 3: return P::template pass<3>(tile, n, n_rows, q, y);
        case 4: return P::template pass<4>(tile, n, n_rows, q, y);
        case 5: return P::template pass<5>(tile, n, n_rows, q, y);
        case 6: return P::template pass<6>(tile, n, n_rows, q, y);
        case 7: return P::template pass<7>(tile, n, n_rows, q, y);
    }
}

template <int n_tokens> void store_sums(const __m512 * acc, int n_rows, float * const * y) {
    const __mmask16 rows = (__mmask16) ((1u << n_rows) - 1);
#pragma GCC unroll 8
    for (int t = 0; t < n_tokens; t++) {
        _mm512_mask_storeu_ps(y[t], rows, acc[t]);
    }
}

// sum[t] += products of `bytes` elements of each row, from `w` on, with those of q[t].
template <int n_tokens, int bytes> void add_products(__m512i * sum, const uint8_t * w, const int8_t * const * q) {
#pragma GCC unroll 8
    for (int k = 0; k < bytes / 4; k++) {
        const __m512i rows = load512(w + 64*k);
#pragma GCC unroll 8
        for (int t = 0; t < n_tokens; t++) {
            sum[t] = _mm512_dpbusd_epi32(sum[t], rows, broadcast_4_bytes(q[t] + 4*k));
        }
    }
}

// ---- blocks of 256 ----

template <typename T> struct tile_256 {
    static constexpr int n_groups = 256 / T::group;

    struct block {
        uint8_t values[256 * tile_rows];
        float   scales[n_groups][tile_rows];         // d * scale
        int16_t mins[n_groups / 2][tile_rows][2];
        float   dmin[tile_rows];
    };

    static size_t bytes(int64_t n) { return (size_t) (n / 256) * sizeof(block); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(64) uint8_t values[tile_rows][256];
        alignas(64) int16_t scales[tile_rows][2][16];   // scales and mins of a row, to be interleaved as pairs
        alignas(64) int16_t pairs[16][tile_rows][2];
        alignas(64) float   d[tile_rows];
        block * out = (block *) tile;
        for (int64_t i = 0; i < n / 256; i++, out++) {
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                const typename T::block & x = ((const typename T::block *) ((const char *) w + (size_t) row * row_bytes))[i];
                __m512i v[4];
                T::values(x, v);
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    _mm512_store_si512(values[r] + 64*k, v[k]);
                }
                scales_of(x, scales[r][0], scales[r][1]);
                d[r] = T::d(x);
                out->dmin[r] = T::dmin(x);
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                interleave(values[0] + 64*k, 256, out->values + 64*tile_rows*k);
            }
            interleave((const uint8_t *) scales, 64, (uint8_t *) pairs);
            const __m512 d16 = _mm512_load_ps(d);
#pragma GCC unroll 8
            for (int g = 0; g < n_groups / 2; g++) {
                const __m512i pair = load512(pairs[g]);
                _mm512_storeu_ps(out->scales[2*g],     _mm512_mul_ps(d16, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pair, 16), 16))));
                _mm512_storeu_ps(out->scales[2*g + 1], _mm512_mul_ps(d16, _mm512_cvtepi32_ps(_mm512_srai_epi32(pair, 16))));
                _mm512_storeu_si512(out->mins[g], load512(pairs[8 + g]));
            }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        const block * x = (const block *) tile;
        __m512 acc[n_tokens];
        for (int t = 0; t < n_tokens; t++) {
            acc[t] = _mm512_setzero_ps();
        }
        for (int64_t i = 0; i < n / 256; i++, x++) {
            __m512  scaled[n_tokens];
            __m512i sum[n_tokens];
            const int8_t * qs[n_tokens];
            // The mins first: they are few.
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                const act_256 & a = ((const act_256 *) q[t])[i];
                sum[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
                for (int g = 0; g < n_groups / 2; g++) {
                    sum[t] = _mm512_dpwssd_epi32(sum[t], load512(x->mins[g]), broadcast_4_bytes((T::group == 32 ? a.sums32 : a.sums16) + 2*g));
                }
                scaled[t] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum[t]), _mm512_loadu_ps(x->dmin), _mm512_setzero_ps());
            }
            for (int g = 0; g < n_groups; g++) {
#pragma GCC unroll 8
                for (int t = 0; t < n_tokens; t++) {
                    sum[t] = _mm512_setzero_si512();
                    qs[t]  = ((const act_256 *) q[t])[i].qs + T::group*g;
                }
                add_products<n_tokens, T::group>(sum, x->values + T::group*tile_rows*g, qs);
                const __m512 scale = _mm512_loadu_ps(x->scales[g]);
#pragma GCC unroll 8
                for (int t = 0; t < n_tokens; t++) {
                    scaled[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[t]), scale, scaled[t]);
                }
            }
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                acc[t] = _mm512_fmadd_ps(scaled[t], _mm512_set1_ps(((const act_256 *) q[t])[i].d), acc[t]);
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }

private:
    template <typename B> static void scales_of(const B & x, int16_t * s, int16_t * mins) { q45_k<B>::scales(x, s, mins); }
    static void scales_of(const block_q6_k & x, int16_t * s, int16_t * mins)   { with_mins(_mm256_cvtepi8_epi16(T::bytes_of_scales(x)), s, mins); }
    static void scales_of(const block_q3_k & x, int16_t * s, int16_t * mins)   { with_mins(_mm256_cvtepi8_epi16(T::bytes_of_scales(x)), s, mins); }
    static void scales_of(const block_iq4_xs & x, int16_t * s, int16_t * mins) {
        const __m128i narrow = _mm256_cvtepi32_epi16(T::wide_scales(x));
        _mm_storeu_si128((__m128i *) s, narrow);
        _mm_storeu_si128((__m128i *) mins, _mm_mullo_epi16(narrow, _mm_set1_epi16(T::offset)));
    }
    static void with_mins(__m256i scales, int16_t * s, int16_t * mins) {
        _mm256_storeu_si256((__m256i *) s, scales);
        _mm256_storeu_si256((__m256i *) mins, _mm256_mullo_epi16(scales, _mm256_set1_epi16(T::offset)));
    }
};

template <typename T> tile_kernel tiles_of_256() { return { tile_256<T>::bytes, tile_256<T>::unpack, in_passes<tile_256<T>> }; }

// ---- blocks of 32, two at a time ----

template <typename T> struct tile_32 {
    struct block {
        uint8_t values[64 * tile_rows];
        float   scales[2][tile_rows];
        float   mins[2][tile_rows];    // what to add per activation sum: the block's min, or -offset * scale
    };

    static size_t bytes(int64_t n) { return (size_t) ((n + 63) / 64) * sizeof(block); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(64) uint8_t values[tile_rows][64];
        block * out = (block *) tile;
        const int64_t last = n / 32 - 1;
        for (int64_t i = 0; i <= last; i += 2, out++) {
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                const typename T::block * x = (const typename T::block *) ((const char *) w + (size_t) row * row_bytes);
                // A last odd block is its own partner, times an activation of zero: nothing behind the row is read.
                const typename T::block & a = x[i];
                const typename T::block & b = x[i < last ? i + 1 : i];
                _mm512_store_si512(values[r], T::values(a, b));
                const float scale[] = { T::scale(a), T::scale(b) }, min[] = { T::min(a), T::min(b) };
                for (int h = 0; h < 2; h++) {
                    out->scales[h][r] = scale[h];
                    out->mins[h][r]   = T::has_min ? min[h] : -T::offset * scale[h];
                }
            }
            interleave(values[0], 64, out->values);
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        const block * x = (const block *) tile;
        __m512 acc[n_tokens];
        for (int t = 0; t < n_tokens; t++) {
            acc[t] = _mm512_setzero_ps();
        }
        for (int64_t i = 0; i < (n + 63) / 64; i++, x++) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m512i sum[n_tokens];
                const int8_t * qs[n_tokens];
#pragma GCC unroll 8
                for (int t = 0; t < n_tokens; t++) {
                    sum[t] = _mm512_setzero_si512();
                    qs[t]  = ((const act_16x32 *) q[t])[i/8].qs + 64*(i%8) + 32*h;
                }
                add_products<n_tokens, 32>(sum, x->values + 32*tile_rows*h, qs);
                const __m512 scale = _mm512_loadu_ps(x->scales[h]), min = _mm512_loadu_ps(x->mins[h]);
#pragma GCC unroll 8
                for (int t = 0; t < n_tokens; t++) {
                    const act_16x32 & a = ((const act_16x32 *) q[t])[i/8];
                    acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[t]), _mm512_mul_ps(scale, _mm512_set1_ps(a.d[2*(i%8) + h])), acc[t]);
                    acc[t] = _mm512_fmadd_ps(min, _mm512_set1_ps((T::has_min ? a.s : a.ds)[2*(i%8) + h]), acc[t]);
                }
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }
};

template <typename T> tile_kernel tiles_of_32() { return { tile_32<T>::bytes, tile_32<T>::unpack, in_passes<tile_32<T>> }; }

// ---- float weights ----

template <typename T> struct tile_float {
    static size_t bytes(int64_t n) { return (size_t) n * tile_rows * sizeof(float); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(64) float values[tile_rows][16];
        for (int64_t i = 0; i < n; i += 16) {
            const __mmask16 m = n - i < 16 ? (__mmask16) ((1u << (n - i)) - 1) : (__mmask16) 0xFFFF;
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                _mm512_store_ps(values[r], T::load(m, (const typename T::element *) ((const char *) w + (size_t) row * row_bytes) + i));
            }
            if (n - i < 16) {
                for (int64_t k = i; k < n; k++) {
                    for (int r = 0; r < tile_rows; r++) {
                        ((float *) tile)[k * tile_rows + r] = values[r][k - i];
                    }
                }
            } else {
                interleave((const uint8_t *) values, 64, (uint8_t *) tile + (size_t) i * tile_rows * sizeof(float));
            }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        const float * x = (const float *) tile;
        __m512 acc[n_tokens];
        for (int t = 0; t < n_tokens; t++) {
            acc[t] = _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < n; k++, x += tile_rows) {
            const __m512 rows = _mm512_loadu_ps(x);
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                acc[t] = _mm512_fmadd_ps(rows, _mm512_set1_ps(((const float *) q[t])[k]), acc[t]);
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }
};

template <typename T> tile_kernel tiles_of_float() { return { tile_float<T>::bytes, tile_float<T>::unpack, in_passes<tile_float<T>> }; }

} // namespace

} // namespace edgemoe
