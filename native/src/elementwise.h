// What llama.cpp's graphs put between the products of an expert, on short runs of floats.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace edgemoe {

// One step of such a chain: value[out] = op(value[a], value[b]). Values are numbered; the first ones are the products.
struct elementwise {
    enum class kind { add_bias, glu, unary, sqr, mul, clamp, scale };
    kind    what;
    int     a, b;               // b: glu and mul only
    int     op;                 // ggml_glu_op or ggml_unary_op
    float   params[2];          // alpha and limit; least and largest; factor and summand
    const ggml_tensor * bias;   // add_bias: [n_rows, n_expert], F32
    int64_t bias_row;           // first row of it
};

bool glu_supported(ggml_glu_op op);
bool unary_supported(ggml_unary_op op);

// y[i] = step(a[i], b[i]) for n numbers, as ggml computes it. y may be a or b. `bias` are the n numbers of this expert.
void apply(const elementwise & step, const float * a, const float * b, const float * bias, float * y, int n);

} // namespace edgemoe
