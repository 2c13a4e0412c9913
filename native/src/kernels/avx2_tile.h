// AVX2 products of 16 rows with many activations. A tile holds, per block, four elements of each row side by side, eight rows to a register: with four
// elements of an activation broadcast over it, a register of products is added up per row.
#pragma once

#include "avx2_blocks.h"

namespace edgemoe {

namespace {

#ifndef HALVES
#define HALVES 2
#endif
#ifndef TOKENS
#define TOKENS 4
#endif
#ifndef FTOKENS
#define FTOKENS 6
#endif
constexpr int halves = HALVES;
constexpr int lanes  = 8 * halves;

inline __m256i broadcast_4_bytes(const void * p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

// GCC would add up in another order, with all terms of a sum alive at once, more than there are registers.
inline void in_order(__m256i & sum) {
    __asm__("" : "+x"(sum));
}

// 8 rows of 32 bytes, `stride` apart, to 8 registers of 4 bytes per row, which go to every `step`-th register of `out`.
inline void interleave(const void * rows, size_t stride, void * out, size_t step) {
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        a[r] = load256((const char *) rows + (size_t) r * stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        b[r]     = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        a[r]     = _mm256_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    // a[4i + c] holds columns c and c + 4 of rows 4i to 4i + 3, a column per 128 bits.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        store256((char *) out + (size_t) c * step, _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
        store256((char *) out + (size_t) (c + 4) * step, _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
    }
}

// Calls pass<most>, and a smaller one for what is left.
template <typename P> void in_passes(const void * tile, int64_t n, int n_rows, const void * const * q, int64_t n_tokens, float * const * y) {
    constexpr int most = P::tokens_per_pass;
    for (int first = 0; first < n_rows; first += lanes) {
    int64_t left = n_tokens;
    const void * const * qq = q;
    float * const * yy = y;
    for (; left >= most; left -= most, qq += most, yy += most) {
        P::template pass<most>(tile, n, n_rows, first, qq, yy);
    }
    switch (left) {
        case 1: P::template pass<1>(tile, n, n_rows, first, qq, yy); break;
        case 2: P::template pass<2>(tile, n, n_rows, first, qq, yy); break;
        case 3: P::template pass<3>(tile, n, n_rows, first, qq, yy); break;
        case 4: P::template pass<most < 4 ? 1 : 4>(tile, n, n_rows, first, qq, yy); break;
        case 5: P::template pass<most < 5 ? 1 : 5>(tile, n, n_rows, first, qq, yy); break;
        case 6: P::template pass<most < 6 ? 1 : 6>(tile, n, n_rows, first, qq, yy); break;
        case 7: P::template pass<most < 7 ? 1 : 7>(tile, n, n_rows, first, qq, yy); break;
    }
    tile = (const char *) tile + P::bytes(n) / (2 / halves);
    }
}

template <int n_tokens> void store_sums(const __m256 * acc, int n_rows, int first, float * const * y) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
        const int f = first + 8*h;
        const __m256i rows = _mm256_cmpgt_epi32(_mm256_set1_epi32(n_rows - f), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        if (n_rows <= f) return;
#pragma GCC unroll 8
        for (int t = 0; t < n_tokens; t++) {
            _mm256_maskstore_ps(y[t] + f, rows, acc[t*halves + h]);
        }
    }
}

// sum[t] += products of `bytes` elements of each row, from `w` on, with those of q[t]. Without VNNI each is times its row's factor of 16 bits, which
// costs nothing: pairs of 16-bit sums must be multiplied by something, if only by one.
template <typename T, int n_tokens, int bytes> inline void add_products(__m256i * sum, const uint8_t * w, const int8_t * const * q, const __m256i * factors) {
    constexpr int n_steps = bytes / 4;
    constexpr int run = has_vnni ? n_steps : sums_in_16_bits(T::largest) < n_steps ? sums_in_16_bits(T::largest) : n_steps;
#pragma GCC unroll 8
    for (int from = 0; from < n_steps; from += run) {
        __m256i pairs[n_tokens*halves];
#pragma GCC unroll 8
        for (int k = from; k < from + run; k++) {
            __m256i rows[halves];
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                rows[h] = load256(w + 32*(k*halves + h));
            }
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                const __m256i y = broadcast_4_bytes(q[t] + 4*k);
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    const int i = t*halves + h;
                    if (has_vnni) {
                        sum[i] = add_fours<T::largest>(sum[i], rows[h], y);
                    } else {
                        const __m256i p = products<T::largest>(rows[h], y);
                        pairs[i] = k == from ? p : _mm256_add_epi16(pairs[i], p);
                        in_order(pairs[i]);
                    }
                }
            }
        }
        if (!has_vnni) {
#pragma GCC unroll 8
            for (int i = 0; i < n_tokens*halves; i++) {
                sum[i] = add_pairs(sum[i], pairs[i], factors[i % halves]);
                in_order(sum[i]);
            }
        }
    }
}

// ---- blocks of 256 ----

template <typename T> struct tile_256 {
    static constexpr int tokens_per_pass = TOKENS;
    static constexpr int  n_groups = 256 / T::group;
    static constexpr bool has_min  = !is_signed(T::largest);

    struct block {
        uint8_t values[256 * lanes];
        int32_t scales[n_groups][lanes];        // with VNNI the float d * scale, otherwise the scale twice, in 16 bits
        int16_t mins[n_groups / 2][lanes][2];
        float   d[lanes], dmin[lanes];
    };

    static size_t bytes(int64_t n) { return (size_t) (n / 256) * sizeof(block) * (2 / halves); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) uint8_t values[8][256];
        for (int first = 0; first < n_rows; first += 8) {
        for (int64_t i = 0; i < n / 256; i++) {
            block * out = (block *) tile + (halves == 2 ? i : i + n / 256 * (first / 8));
            const int lane = first % lanes;
            for (int r = 0; r < 8; r++) {
                const int row = first + r < n_rows ? first + r : n_rows - 1;
                const typename T::block & x = ((const typename T::block *) ((const char *) w + (size_t) row * row_bytes))[i];
                __m256i v[8];
                T::values(x, v);
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) {
                    store256(values[r] + 32*k, v[k]);
                }
                int16_t scales[n_groups], mins[n_groups];
                T::scales(x, scales, mins);
                const float d = T::d(x);
#pragma GCC unroll 16
                for (int g = 0; g < n_groups; g++) {
                    if (has_vnni) {
                        const float scale = d * (float) scales[g];
                        memcpy(&out->scales[g][lane + r], &scale, 4);
                    } else {
                        out->scales[g][lane + r] = (int32_t) ((uint32_t) (uint16_t) scales[g] * 0x10001u);
                    }
                    out->mins[g/2][lane + r][g%2] = mins[g];
                }
                out->d[lane + r]    = d;
                out->dmin[lane + r] = T::dmin(x);
            }
            for (int k = 0; k < 8; k++) {
                interleave(values[0] + 32*k, 256, out->values + 32*lanes*k + 4*lane, 4*lanes);
            }
        }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, int first, const void * const * q, float * const * y) {
        const block * x = (const block *) tile;
        constexpr int N = n_tokens * halves;
        __m256 acc[N];
        for (int t = 0; t < N; t++) {
            acc[t] = _mm256_setzero_ps();
        }
        for (int64_t i = 0; i < n / 256; i++, x++) {
            __m256  scaled[N];
            __m256i sum[N];
            const int8_t * qs[n_tokens];
            // The mins first: they are few.
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                const act_256 & a = ((const act_256 *) q[t])[i];
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    __m256i & s = sum[t*halves + h];
                    s = _mm256_setzero_si256();
                    if (has_min) {
#pragma GCC unroll 8
                        for (int g = 0; g < n_groups / 2; g++) {
                            s = add_pairs(s, load256(x->mins[g][8*h]), broadcast_4_bytes((T::group == 32 ? a.sums32 : a.sums16) + 2*g));
                            in_order(s);
                        }
                    }
                    scaled[t*halves + h] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(s), _mm256_loadu_ps(x->dmin + 8*h), _mm256_setzero_ps());
                    s = _mm256_setzero_si256();
                }
            }
            for (int g = 0; g < n_groups; g++) {
#pragma GCC unroll 8
                for (int t = 0; t < n_tokens; t++) {
                    qs[t]  = ((const act_256 *) q[t])[i].qs + T::group*g;
                }
                __m256i scale[halves];
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    scale[h] = load256(x->scales[g] + 8*h);
                }
                if (has_vnni) {
#pragma GCC unroll 16
                    for (int t = 0; t < N; t++) {
                        sum[t] = _mm256_setzero_si256();
                    }
                }
                add_products<T, n_tokens, T::group>(sum, x->values + T::group*lanes*g, qs, scale);
                if (has_vnni) {
#pragma GCC unroll 16
                    for (int t = 0; t < N; t++) {
                        scaled[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t]), _mm256_castsi256_ps(scale[t % halves]), scaled[t]);
                    }
                }
            }
#pragma GCC unroll 16
            for (int t = 0; t < N; t++) {
                if (!has_vnni) {
                    scaled[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t]), _mm256_loadu_ps(x->d + 8*(t % halves)), scaled[t]);
                }
                acc[t] = _mm256_fmadd_ps(scaled[t], _mm256_set1_ps(((const act_256 *) q[t / halves])[i].d), acc[t]);
            }
        }
        store_sums<n_tokens>(acc, n_rows, first, y);
    }
};

template <typename T> tile_kernel tiles_of_256() { return { tile_256<T>::bytes, tile_256<T>::unpack, in_passes<tile_256<T>> }; }

// ---- blocks of 32 ----

template <typename T> struct tile_32 {
    static constexpr int tokens_per_pass = TOKENS;
    struct block {
        uint8_t values[32 * lanes];
        float   scales[lanes];
        float   mins[lanes];    // what to add per activation sum: the block's min, or -offset * scale
    };

    static size_t bytes(int64_t n) { return (size_t) (n / 32) * sizeof(block) * (2 / halves); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) uint8_t values[8][32];
        for (int first = 0; first < n_rows; first += 8) {
        for (int64_t i = 0; i < n / 32; i++) {
            block * out = (block *) tile + (halves == 2 ? i : i + n / 32 * (first / 8));
            const int lane = first % lanes;
            for (int r = 0; r < 8; r++) {
                const int row = first + r < n_rows ? first + r : n_rows - 1;
                const typename T::block & x = ((const typename T::block *) ((const char *) w + (size_t) row * row_bytes))[i];
                store256(values[r], T::values(x));
                out->scales[lane + r] = T::scale(x);
                out->mins[lane + r]   = T::has_min ? T::min(x) : -T::offset * T::scale(x);
            }
            interleave(values[0], 32, out->values + 4*lane, 4*lanes);
        }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, int first, const void * const * q, float * const * y) {
        const block * x = (const block *) tile;
        constexpr int N = n_tokens * halves;
        __m256 acc[N];
        for (int t = 0; t < N; t++) {
            acc[t] = _mm256_setzero_ps();
        }
        const __m256i ones[2] = { _mm256_set1_epi16(1), _mm256_set1_epi16(1) };
        for (int64_t i = 0; i < n / 32; i++, x++) {
            __m256i sum[N];
            const int8_t * qs[n_tokens];
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                qs[t] = ((const act_2x32 *) q[t])[i/2].qs + 32*(i%2);
            }
#pragma GCC unroll 16
            for (int t = 0; t < N; t++) {
                sum[t] = _mm256_setzero_si256();
            }
            add_products<T, n_tokens, 32>(sum, x->values, qs, ones);
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
                const act_2x32 & a = ((const act_2x32 *) q[t])[i/2];
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    __m256 & s = acc[t*halves + h];
                    s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t*halves + h]), _mm256_mul_ps(_mm256_loadu_ps(x->scales + 8*h), _mm256_set1_ps(a.d[i%2])), s);
                    if (T::has_min || T::offset) {
                        s = _mm256_fmadd_ps(_mm256_loadu_ps(x->mins + 8*h), _mm256_set1_ps((T::has_min ? a.s : a.ds)[i%2]), s);
                    }
                }
            }
        }
        store_sums<n_tokens>(acc, n_rows, first, y);
    }
};

template <typename T> tile_kernel tiles_of_32() { return { tile_32<T>::bytes, tile_32<T>::unpack, in_passes<tile_32<T>> }; }

// ---- float weights ----

template <typename T> struct tile_float {
    static constexpr int tokens_per_pass = FTOKENS;
    static size_t bytes(int64_t n) { return (size_t) n * tile_rows * sizeof(float); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) float values[8][8];
        for (int first = 0; first < n_rows; first += 8) {
            float * out = (float *) tile + (halves == 2 ? first : first * n);
            for (int64_t i = 0; i < n; i += 8, out += 8*lanes) {
                for (int r = 0; r < 8; r++) {
                    const int row = first + r < n_rows ? first + r : n_rows - 1;
                    const char * x = (const char *) w + (size_t) row * row_bytes + (size_t) i * T::bytes;
                    if (i + 8 <= n) {
                        _mm256_store_ps(values[r], T::load(x));
                    } else {
                        for (int k = 0; k < n - i; k++) {
                            out[k*lanes + r] = T::one(x + (size_t) k * T::bytes);
                        }
                    }
                }
                if (i + 8 <= n) {
                    interleave(values, 32, out, 4*lanes);
                }
            }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, int first, const void * const * q, float * const * y) {
        const float * x = (const float *) tile;
        constexpr int N = n_tokens * halves;
        __m256 acc[N];
        for (int t = 0; t < N; t++) {
            acc[t] = _mm256_setzero_ps();
        }
        for (int64_t k = 0; k < n; k++, x += lanes) {
            __m256 rows[halves];
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                rows[h] = _mm256_loadu_ps(x + 8*h);
            }
#pragma GCC unroll 8
            for (int t = 0; t < n_tokens; t++) {
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    acc[t*halves + h] = _mm256_fmadd_ps(rows[h], _mm256_set1_ps(((const float *) q[t])[k]), acc[t*halves + h]);
                }
            }
        }
        store_sums<n_tokens>(acc, n_rows, first, y);
    }
};

template <typename T> tile_kernel tiles_of_float() { return { tile_float<T>::bytes, tile_float<T>::unpack, in_passes<tile_float<T>> }; }

} // namespace

} // namespace edgemoe
