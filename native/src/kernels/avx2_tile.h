// AVX2 products of 16 rows with many activations. A tile holds, per block, four elements of each row side by side, in two registers of eight rows:
// with four elements of an activation broadcast over them, 64 products are made and added up per row.
#pragma once

#include "avx2_blocks.h"

namespace edgemoe {

namespace {

// Activations that share one pass over the tile, each with two registers of sums: as many as leave those of the innermost loop in registers.
constexpr int tokens_per_pass       = 3;
constexpr int float_tokens_per_pass = 6;

inline __m256i broadcast_4_bytes(const void * p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

// GCC would change the order of additions, with all terms of a sum alive at once: more than there are registers.
inline void in_order(__m256i & sum) {
    __asm__("" : "+x"(sum));
}

// 16 rows of 32 bytes, `stride` apart, to 16 registers of 4 bytes per row.
inline void interleave(const void * rows, size_t stride, void * out) {
    for (int half = 0; half < 2; half++) {
        __m256i a[8], b[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            a[r] = load256((const char *) rows + (size_t) (8*half + r) * stride);
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
            store256((char *) out + 64*c + 32*half,       _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
            store256((char *) out + 64*(c + 4) + 32*half, _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
        }
    }
}

// Calls pass<at_most>, and smaller ones for what is left.
template <typename P, int at_most>
void in_passes(const void * tile, int64_t n, int n_rows, const void * const * q, int64_t n_tokens, float * const * y) {
    for (; n_tokens >= at_most; n_tokens -= at_most, q += at_most, y += at_most) {
        P::template pass<at_most>(tile, n, n_rows, q, y);
    }
    if constexpr (at_most > 1) {
        in_passes<P, at_most - 1>(tile, n, n_rows, q, n_tokens, y);
    }
}

// Throughout, [2*t + h] belongs to activation t and rows 8*h to 8*h + 7.
template <int n_sums> void clear(__m256 * acc) {
#pragma GCC unroll 12
    for (int i = 0; i < n_sums; i++) {
        acc[i] = _mm256_setzero_ps();
    }
}

template <int n_tokens> void store_sums(const __m256 * acc, int n_rows, float * const * y) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const __m256i rows = _mm256_cmpgt_epi32(_mm256_set1_epi32(n_rows - 8*h), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
#pragma GCC unroll 6
        for (int t = 0; t < n_tokens; t++) {
            _mm256_maskstore_ps(y[t] + (n_rows > 8*h ? 8*h : 0), rows, acc[2*t + h]);
        }
    }
}

// sum[i] += products of `bytes` elements of each row, from `w` on, with those of q[i/2]. Without VNNI they are multiplied by factor[i%2] as well, 16
// bits each: that is free, as 16-bit sums become 32-bit ones by a multiplication, if only by one.
template <typename T, int n_tokens, int bytes>
inline void add_products(__m256i * sum, const uint8_t * w, const int8_t * const * q, const __m256i * factor) {
    constexpr int n_steps = bytes / 4;
    constexpr int run     = sums_in_16_bits(T::largest) < n_steps ? sums_in_16_bits(T::largest) : n_steps;
#pragma GCC unroll 8
    for (int from = 0; from < n_steps; from += run) {
        __m256i sum16[2*n_tokens];
#pragma GCC unroll 8
        for (int k = from; k < from + run; k++) {
            const __m256i rows[2] = { load256(w + 64*k), load256(w + 64*k + 32) };
#pragma GCC unroll 6
            for (int i = 0; i < 2*n_tokens; i++) {
                const __m256i a = broadcast_4_bytes(q[i/2] + 4*k);
                if (has_vnni) {
                    sum[i] = add_fours<T::largest>(sum[i], rows[i%2], a);
                    continue;
                }
                const __m256i p = products<T::largest>(rows[i%2], a);
                sum16[i] = k == from ? p : _mm256_add_epi16(sum16[i], p);
                in_order(sum16[i]);
            }
        }
        if (!has_vnni) {
#pragma GCC unroll 6
            for (int i = 0; i < 2*n_tokens; i++) {
                sum[i] = add_pairs(sum[i], sum16[i], factor[i%2]);
                in_order(sum[i]);
            }
        }
    }
}

// ---- blocks of 256 ----

template <typename T> struct tile_256 {
    static constexpr int  n_groups = 256 / T::group;
    static constexpr bool has_min  = !is_signed(T::largest);

    struct block {
        uint8_t values[256 * tile_rows];
        int32_t scales[n_groups][tile_rows];         // with VNNI the float d * scale, otherwise twice the scale, in 16 bits
        int16_t mins[n_groups / 2][tile_rows][2];
        float   d[tile_rows];
        float   dmin[tile_rows];
    };

    static size_t bytes(int64_t n) { return (size_t) (n / 256) * sizeof(block); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) uint8_t values[tile_rows][256];
        block * out = (block *) tile;
        for (int64_t i = 0; i < n / 256; i++, out++) {
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                const typename T::block & x = ((const typename T::block *) ((const char *) w + (size_t) row * row_bytes))[i];
                __m256i v[8];
                T::values(x, v);
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) {
                    store256(values[r] + 32*k, v[k]);
                }
                int16_t scales[n_groups], mins[n_groups];
                T::scales(x, scales, mins);
                out->d[r]    = T::d(x);
                out->dmin[r] = T::dmin(x);
#pragma GCC unroll 16
                for (int g = 0; g < n_groups; g++) {
                    out->scales[g][r] = has_vnni ? bits_of(out->d[r] * (float) scales[g]) : twice_in_16_bits(scales[g]);
                    out->mins[g/2][r][g%2] = mins[g];
                }
            }
            for (int k = 0; k < 8; k++) {
                interleave(values[0] + 32*k, 256, out->values + 32*tile_rows*k);
            }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        constexpr int n_sums = 2*n_tokens;
        const block * x = (const block *) tile;
        __m256 acc[n_sums];
        clear<n_sums>(acc);
        for (int64_t i = 0; i < n / 256; i++, x++) {
            __m256  scaled[n_sums];
            __m256i sum[n_sums];
            const int8_t * qs[n_tokens];
            // The mins first: they are few.
#pragma GCC unroll 6
            for (int s = 0; s < n_sums; s++) {
                const act_256 & a = ((const act_256 *) q[s/2])[i];
                sum[s] = _mm256_setzero_si256();
#pragma GCC unroll 8
                for (int g = 0; g < (has_min ? n_groups / 2 : 0); g++) {
                    sum[s] = add_pairs(sum[s], load256(x->mins[g][8*(s%2)]), broadcast_4_bytes((T::group == 32 ? a.sums32 : a.sums16) + 2*g));
                    in_order(sum[s]);
                }
                scaled[s] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(sum[s]), _mm256_loadu_ps(x->dmin + 8*(s%2)), _mm256_setzero_ps());
                sum[s] = _mm256_setzero_si256();
            }
            for (int g = 0; g < n_groups; g++) {
#pragma GCC unroll 3
                for (int t = 0; t < n_tokens; t++) {
                    qs[t] = ((const act_256 *) q[t])[i].qs + T::group*g;
                }
#pragma GCC unroll 6
                for (int s = 0; s < (has_vnni ? n_sums : 0); s++) {
                    sum[s] = _mm256_setzero_si256();
                }
                const __m256i * scales = (const __m256i *) x->scales[g];
                add_products<T, n_tokens, T::group>(sum, x->values + T::group*tile_rows*g, qs, scales);
#pragma GCC unroll 6
                for (int s = 0; s < (has_vnni ? n_sums : 0); s++) {
                    scaled[s] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[s]), _mm256_castsi256_ps(scales[s%2]), scaled[s]);
                }
            }
#pragma GCC unroll 6
            for (int s = 0; s < n_sums; s++) {
                if (!has_vnni) {
                    scaled[s] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[s]), _mm256_loadu_ps(x->d + 8*(s%2)), scaled[s]);
                }
                acc[s] = _mm256_fmadd_ps(scaled[s], _mm256_set1_ps(((const act_256 *) q[s/2])[i].d), acc[s]);
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }

private:
    static int32_t bits_of(float f) {
        int32_t bits;
        memcpy(&bits, &f, 4);
        return bits;
    }
    static int32_t twice_in_16_bits(int16_t s) { return (int32_t) ((uint32_t) (uint16_t) s * 0x10001u); }
};

template <typename T> tile_kernel tiles_of_256() { return { tile_256<T>::bytes, tile_256<T>::unpack, in_passes<tile_256<T>, tokens_per_pass> }; }

// ---- blocks of 32 ----

template <typename T> struct tile_32 {
    struct block {
        uint8_t values[32 * tile_rows];
        float   scales[tile_rows];
        float   mins[tile_rows];    // what to add per activation sum: the block's min, or -offset * scale
    };

    static size_t bytes(int64_t n) { return (size_t) (n / 32) * sizeof(block); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) uint8_t values[tile_rows][32];
        block * out = (block *) tile;
        for (int64_t i = 0; i < n / 32; i++, out++) {
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                const typename T::block & x = ((const typename T::block *) ((const char *) w + (size_t) row * row_bytes))[i];
                store256(values[r], T::values(x));
                out->scales[r] = T::scale(x);
                out->mins[r]   = T::has_min ? T::min(x) : -T::offset * out->scales[r];
            }
            interleave(values[0], 32, out->values);
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        constexpr int n_sums = 2*n_tokens;
        const block * x = (const block *) tile;
        const __m256i ones[2] = { _mm256_set1_epi16(1), _mm256_set1_epi16(1) };
        __m256 acc[n_sums];
        clear<n_sums>(acc);
        for (int64_t i = 0; i < n / 32; i++, x++) {
            __m256i sum[n_sums];
            const int8_t * qs[n_tokens];
#pragma GCC unroll 6
            for (int s = 0; s < n_sums; s++) {
                sum[s]  = _mm256_setzero_si256();
                qs[s/2] = ((const act_16x32 *) q[s/2])[i/16].qs + 32*(i%16);
            }
            add_products<T, n_tokens, 32>(sum, x->values, qs, ones);
#pragma GCC unroll 6
            for (int s = 0; s < n_sums; s++) {
                const act_16x32 & a = ((const act_16x32 *) q[s/2])[i/16];
                const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(x->scales + 8*(s%2)), _mm256_set1_ps(a.d[i%16]));
                acc[s] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[s]), scale, acc[s]);
                if (T::has_min || T::offset != 0) {
                    acc[s] = _mm256_fmadd_ps(_mm256_loadu_ps(x->mins + 8*(s%2)), _mm256_set1_ps((T::has_min ? a.s : a.ds)[i%16]), acc[s]);
                }
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }
};

template <typename T> tile_kernel tiles_of_32() { return { tile_32<T>::bytes, tile_32<T>::unpack, in_passes<tile_32<T>, tokens_per_pass> }; }

// ---- float weights ----

template <typename T> struct tile_float {
    static size_t bytes(int64_t n) { return (size_t) n * tile_rows * sizeof(float); }

    static void unpack(const void * w, size_t row_bytes, int64_t n, int n_rows, void * tile) {
        alignas(32) float values[tile_rows][8];
        float * out = (float *) tile;
        for (int64_t i = 0; i < n; i += 8, out += 8*tile_rows) {
            const bool whole = n - i >= 8;
            for (int r = 0; r < tile_rows; r++) {
                const int row = r < n_rows ? r : n_rows - 1;
                const char * x = (const char *) w + (size_t) row * row_bytes + (size_t) i * T::bytes;
                if (whole) {
                    _mm256_store_ps(values[r], T::load(x));
                }
                for (int k = 0; k < (whole ? 0 : n - i); k++) {
                    out[k*tile_rows + r] = T::one(x + (size_t) k * T::bytes);
                }
            }
            if (whole) {
                interleave(values, 32, out);
            }
        }
    }

    template <int n_tokens> static void pass(const void * tile, int64_t n, int n_rows, const void * const * q, float * const * y) {
        const float * x = (const float *) tile;
        __m256 acc[2*n_tokens];
        clear<2*n_tokens>(acc);
        for (int64_t k = 0; k < n; k++, x += tile_rows) {
            const __m256 rows[2] = { _mm256_loadu_ps(x), _mm256_loadu_ps(x + 8) };
#pragma GCC unroll 12
            for (int s = 0; s < 2*n_tokens; s++) {
                acc[s] = _mm256_fmadd_ps(rows[s%2], _mm256_set1_ps(((const float *) q[s/2])[k]), acc[s]);
            }
        }
        store_sums<n_tokens>(acc, n_rows, y);
    }
};

template <typename T> tile_kernel tiles_of_float() {
    return { tile_float<T>::bytes, tile_float<T>::unpack, in_passes<tile_float<T>, float_tokens_per_pass> };
}

} // namespace

} // namespace edgemoe
