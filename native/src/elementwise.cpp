#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

// The compiler makes a version per instruction set of the loops that decide the speed.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PER_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PER_CPU
#endif

namespace edgemoe {

// e^x to 2 units in the last place, in a form that compilers turn into vectors: e^x = 2^n e^r with r in ±ln(2)/2, and a Taylor polynomial for e^r.
static inline float exp_of(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;   // ln(2) in two parts
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = ((int32_t) n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

PER_CPU static void swiglu(const float * gate, const float * up, float * y, int n) {
    for (int i = 0; i < n; i++) {
        y[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
    }
}

PER_CPU static void swiglu_limited(const float * gate, const float * up, float * y, int n, float alpha, float limit, float plus) {
    for (int i = 0; i < n; i++) {
        const float g = std::min(gate[i], limit);
        const float u = std::max(std::min(up[i], limit), -limit);
        y[i] = g / (1.0f + exp_of(-alpha * g)) * (u + plus);
    }
}

PER_CPU static void silu(const float * x, float * y, int n) {
    for (int i = 0; i < n; i++) {
        y[i] = x[i] / (1.0f + exp_of(-x[i]));
    }
}

PER_CPU static void sigmoid(const float * x, float * y, int n) {
    for (int i = 0; i < n; i++) {
        y[i] = 1.0f / (1.0f + exp_of(-x[i]));
    }
}

static float gelu_tanh(float x)  { return 0.5f * x * (1.0f + std::tanh(0.79788456f * x * (1.0f + 0.044715f * x * x))); }
static float gelu_quick(float x) { return x / (1.0f + std::exp(-1.702f * x)); }
static float gelu_erf(float x)   { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }

// ggml looks these two up by the F16 value of x; so do we, or results would differ by that rounding.
struct half_table {
    explicit half_table(float (*f)(float)) : y(new float[1 << 16]) {
        for (int i = 0; i < 1 << 16; i++) {
            y[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(f(ggml_fp16_to_fp32((ggml_fp16_t) i))));
        }
    }
    float operator()(float x) const { return y[ggml_fp32_to_fp16(x)]; }
    std::unique_ptr<float[]> y;
};

static float gelu_of(float x) {
    static const half_table table(gelu_tanh);
    return x <= -10.0f ? 0.0f : x >= 10.0f ? x : table(x);
}

static float gelu_quick_of(float x) {
    static const half_table table(gelu_quick);
    return table(x);
}

template <typename F> static void gated(const float * gate, const float * up, float * y, int n, F f) {
    for (int i = 0; i < n; i++) {
        y[i] = f(gate[i]) * up[i];
    }
}

template <typename F> static void each(const float * x, float * y, int n, F f) {
    for (int i = 0; i < n; i++) {
        y[i] = f(x[i]);
    }
}

bool glu_supported(ggml_glu_op op) {
    return op == GGML_GLU_OP_REGLU || op == GGML_GLU_OP_GEGLU || op == GGML_GLU_OP_SWIGLU || op == GGML_GLU_OP_SWIGLU_OAI || op == GGML_GLU_OP_GEGLU_ERF ||
           op == GGML_GLU_OP_GEGLU_QUICK || op == GGML_GLU_OP_SWIGLU_CLAMP;
}

static void apply_glu(const elementwise & s, const float * a, const float * b, float * y, int n) {
    switch ((ggml_glu_op) s.op) {
        case GGML_GLU_OP_SWIGLU:       return swiglu(a, b, y, n);
        case GGML_GLU_OP_SWIGLU_OAI:   return swiglu_limited(a, b, y, n, s.params[0], s.params[1], 1.0f);
        case GGML_GLU_OP_SWIGLU_CLAMP: return swiglu_limited(a, b, y, n, 1.0f, s.params[1], 0.0f);
        case GGML_GLU_OP_REGLU:        return gated(a, b, y, n, [](float x) { return x > 0 ? x : 0.0f; });
        case GGML_GLU_OP_GEGLU:        return gated(a, b, y, n, gelu_of);
        case GGML_GLU_OP_GEGLU_QUICK:  return gated(a, b, y, n, gelu_quick_of);
        case GGML_GLU_OP_GEGLU_ERF:    return gated(a, b, y, n, gelu_erf);
        default:                       break;
    }
}

bool unary_supported(ggml_unary_op op) {
    return op == GGML_UNARY_OP_SILU || op == GGML_UNARY_OP_GELU || op == GGML_UNARY_OP_GELU_QUICK || op == GGML_UNARY_OP_GELU_ERF || op == GGML_UNARY_OP_RELU ||
           op == GGML_UNARY_OP_TANH || op == GGML_UNARY_OP_SIGMOID;
}

static void apply_unary(ggml_unary_op op, const float * x, float * y, int n) {
    switch (op) {
        case GGML_UNARY_OP_SILU:       return silu(x, y, n);
        case GGML_UNARY_OP_SIGMOID:    return sigmoid(x, y, n);
        case GGML_UNARY_OP_GELU:       return each(x, y, n, gelu_of);
        case GGML_UNARY_OP_GELU_QUICK: return each(x, y, n, gelu_quick_of);
        case GGML_UNARY_OP_GELU_ERF:   return each(x, y, n, gelu_erf);
        case GGML_UNARY_OP_RELU:       return each(x, y, n, [](float v) { return v > 0 ? v : 0.0f; });
        case GGML_UNARY_OP_TANH:       return each(x, y, n, [](float v) { return std::tanh(v); });
        default:                       break;
    }
}

void apply(const elementwise & s, const float * a, const float * b, const float * bias, float * y, int n) {
    switch (s.what) {
        case elementwise::kind::glu:   return apply_glu(s, a, b, y, n);
        case elementwise::kind::unary: return apply_unary((ggml_unary_op) s.op, a, y, n);
        case elementwise::kind::sqr:   return each(a, y, n, [](float v) { return v * v; });
        case elementwise::kind::mul:   return gated(a, b, y, n, [](float v) { return v; });
        case elementwise::kind::clamp: return each(a, y, n, [&](float v) { return v < s.params[0] ? s.params[0] : v > s.params[1] ? s.params[1] : v; });
        case elementwise::kind::scale: return each(a, y, n, [&](float v) { return v * s.params[0] + s.params[1]; });
        case elementwise::kind::add_bias:
            for (int i = 0; i < n; i++) {
                y[i] = a[i] + bias[i];
            }
    }
}

} // namespace edgemoe
