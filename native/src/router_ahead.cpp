#include "router_ahead.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace edgemoe {

router_ahead::router_ahead(const source & s, const store & from, isa level) : s(s), from(from), level(level) {}

std::vector<int32_t> router_ahead::guess(size_t layer, const float * x, size_t stride, int64_t n_in, int64_t n_tokens, int64_t n_used) const {
    if (layer + 1 >= s.layers.size()) {
        return {};   // the first layer sees another token
    }
    const expert_layer & next = s.layers[layer + 1];
    const router & r = next.chosen_by;
    const kernel * k = r.weight.bytes ? find_kernel(r.weight.type, level) : nullptr;
    const auto is_float = [](const router::tensor & t) { return !t.bytes || t.type == GGML_TYPE_F32; };
    if (!k || r.n_in != n_in || !is_float(r.bias) || !is_float(r.selection_bias)) {
        return {};
    }
    const size_t n_expert = next.n_expert, n = std::min((size_t) n_used, n_expert);
    std::vector<char>    q(activation_bytes(k->activation, n_in));
    std::vector<float>   z(n_expert), worth(n_expert, -HUGE_VALF);
    std::vector<int32_t> order(n_expert);
    std::iota(order.begin(), order.end(), 0);
    std::vector<bool>    wanted(n_expert, false);
    for (int64_t t = 0; t < n_tokens; t++) {
        quantize(k->activation, (const float *) ((const char *) x + (size_t) t * stride), q.data(), n_in);
        k->dot(from.at(r.weight), ggml_row_size(r.weight.type, n_in), q.data(), n_in, (int64_t) n_expert, z.data());
        for (size_t e = 0; e < n_expert; e++) {
            z[e] += r.bias.bytes ? ((const float *) from.at(r.bias))[e] : 0.0f;
            if (r.selection_bias.bytes) {
                z[e] = 1 / (1 + std::exp(-z[e])) + ((const float *) from.at(r.selection_bias))[e];
            }
        }
        std::partial_sort(order.begin(), order.begin() + (ptrdiff_t) n, order.end(), [&](int32_t a, int32_t b) { return z[(size_t) a] > z[(size_t) b]; });
        for (size_t i = 0; i < n; i++) {
            const size_t e = (size_t) order[i];
            wanted[e] = true;
            worth[e]  = std::max(worth[e], z[e]);
        }
    }
    std::vector<int32_t> guessed;
    for (size_t e = 0; e < n_expert; e++) {
        if (wanted[e]) {
            guessed.push_back((int32_t) e);
        }
    }
    std::sort(guessed.begin(), guessed.end(), [&](int32_t a, int32_t b) { return worth[(size_t) a] > worth[(size_t) b]; });
    return guessed;
}

} // namespace edgemoe
