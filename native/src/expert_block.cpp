#include "expert_block.h"

#include <cstring>

namespace edgemoe {

std::vector<expert_block::bias> expert_block::biases() const {
    std::vector<bias> all;
    for (const elementwise & e : chain) {
        if (e.what == elementwise::kind::add_bias) {
            all.push_back({ e.bias, e.bias_row, n_hidden });
        }
    }
    if (down_bias) {
        all.push_back({ down_bias, 0, n_out() });
    }
    return all;
}

block_graph build_graph(ggml_context * c, const expert_block & b, const std::vector<ggml_tensor *> & weights, const std::vector<ggml_tensor *> & biases, int64_t n, bool one_input) {
    // One pair per row with one id, as batches of routed pairs are computed without repeated ids in a row; a single token takes its experts in one row.
    block_graph g = {};
    const int64_t n_ids = one_input ? n : 1, n_rows = one_input ? 1 : n;
    g.x   = ggml_new_tensor_3d(c, GGML_TYPE_F32, b.n_in(), 1, n_rows);
    g.ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, n_ids, n_rows);
    g.bias_ids = biases.empty() ? nullptr : ggml_new_tensor_2d(c, GGML_TYPE_I32, n_ids, n_rows);
    for (ggml_tensor * t : { g.x, g.ids, g.bias_ids }) {
        if (t) {
            ggml_set_input(t);
        }
    }
    std::vector<ggml_tensor *> value, made(b.products.size(), nullptr);
    for (size_t p = 0; p < b.products.size(); p++) {
        // Two halves of one product are computed once.
        size_t first = 0;
        while (b.products[first].weight != b.products[p].weight) {
            first++;
        }
        ggml_tensor *& product = made[first];
        product = product ? product : ggml_mul_mat_id(c, weights[first], g.x, g.ids);
        const bool whole = product->ne[0] == b.n_hidden;
        value.push_back(whole ? product : ggml_view_3d(c, product, b.n_hidden, n_ids, n_rows, product->nb[1], product->nb[2], (size_t) b.products[p].offset * sizeof(float)));
    }
    if (b.products.empty()) {
        value.push_back(g.x);
    }
    size_t next_bias = 0;
    for (const elementwise & e : b.chain) {
        ggml_tensor * x = value[(size_t) e.a], * y = nullptr;
        switch (e.what) {
            case elementwise::kind::add_bias: y = ggml_add_id(c, x, biases[next_bias++], g.bias_ids); break;
            case elementwise::kind::unary:    y = ggml_unary(c, x, (ggml_unary_op) e.op); break;
            case elementwise::kind::sqr:      y = ggml_sqr(c, x); break;
            case elementwise::kind::mul:      y = ggml_mul(c, x, value[(size_t) e.b]); break;
            case elementwise::kind::clamp:    y = ggml_clamp(c, x, e.params[0], e.params[1]); break;
            case elementwise::kind::scale:    y = ggml_scale_bias(c, x, e.params[0], e.params[1]); break;
            case elementwise::kind::glu:
                y = ggml_glu_split(c, x, value[(size_t) e.b], (ggml_glu_op) e.op);
                memcpy(y->op_params + 2, e.params, sizeof(e.params));
                break;
        }
        value.push_back(y);
    }
    g.output = ggml_mul_mat_id(c, weights.back(), value[(size_t) b.result], g.ids);
    if (b.down_bias) {
        g.output = ggml_add_id(c, g.output, biases.back(), g.bias_ids);
    }
    ggml_set_output(g.output);
    return g;
}

} // namespace edgemoe
