// The kernels of one instruction set, from its rows and tiles: to be included behind both, once in each file of its own.
#pragma once

namespace edgemoe {

namespace {

template <float (*row)(const void *, const void *, int64_t)>
void rows(const void * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y) {
    for (int64_t r = 0; r < n_rows; r++) {
        y[r] = row((const char *) w + (size_t) r * row_bytes, q, n);
    }
}

template <float (*row)(const void *, const void *, int64_t)> kernel make(ggml_type type, rounding how, const tile_kernel & t) {
    return { type, how, rows<row>, t.tile_bytes, t.unpack, t.multiply };
}

template <typename T> kernel of_32(ggml_type type)        { return make<row_of_32<T>>(type, rounding::q8_32, tiles_of_32<T>()); }
template <typename T> kernel of_45(ggml_type type)        { return make<row_of_q45_k<T>>(type, rounding::q8_256, tiles_of_256<T>()); }
template <typename T> kernel of_16_groups(ggml_type type) { return make<row_of_16_groups<T>>(type, rounding::q8_256, tiles_of_256<T>()); }
template <typename T> kernel of_float(ggml_type type)     { return make<row_of_float<T>>(type, rounding::none, tiles_of_float<T>()); }

kernel_table all_kernels() {
    static const kernel table[] = {
        of_45<q45_k<block_q4_k>>(GGML_TYPE_Q4_K),
        of_45<q45_k<block_q5_k>>(GGML_TYPE_Q5_K),
        of_16_groups<q6_k>(GGML_TYPE_Q6_K),
        of_16_groups<q3_k>(GGML_TYPE_Q3_K),
        make<row_of_iq4_xs>(GGML_TYPE_IQ4_XS, rounding::q8_256, tiles_of_256<iq4_xs>()),
        of_32<q8_0>(GGML_TYPE_Q8_0),
        of_32<q4_0>(GGML_TYPE_Q4_0),
        of_32<q4_1>(GGML_TYPE_Q4_1),
        of_32<q5_0>(GGML_TYPE_Q5_0),
        of_32<q5_1>(GGML_TYPE_Q5_1),
        of_32<iq4_nl>(GGML_TYPE_IQ4_NL),
        of_32<mxfp4>(GGML_TYPE_MXFP4),
        of_float<f16>(GGML_TYPE_F16),
        of_float<bf16>(GGML_TYPE_BF16),
        of_float<f32>(GGML_TYPE_F32),
    };
    return { table, sizeof(table) / sizeof(table[0]) };
}

} // namespace

} // namespace edgemoe
