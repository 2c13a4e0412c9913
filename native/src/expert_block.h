// What the experts of one layer compute, read from llama.cpp's graph: from the input of the first products to the rows that come out of the last one, per
// routed pair. The same description is computed by our kernels (products.h) and, for pairs in any order and experts in any place, by a ggml graph.
#pragma once

#include "elementwise.h"
#include "weights.h"

#include "ggml.h"

#include <vector>

namespace edgemoe {

// Of [n_used, n_tokens], which may be a strided view.
inline int32_t id_at(const ggml_tensor * ids, int64_t token, int64_t k) {
    return *(const int32_t *) ((const char *) ids->data + (size_t) token * ids->nb[1] + (size_t) k * ids->nb[0]);
}

struct expert_block {
    // Rows [offset, offset + n_hidden) of a product with x; a fused gate_up tensor is two of these.
    struct product { const owned_tensor * weight; int64_t offset; };

    const ggml_tensor *      x;            // [n_in, 1 or n_used, n_tokens]
    const ggml_tensor *      ids;          // [n_used, n_tokens]
    std::vector<product>     products;     // values 0 ... of the chain; none: x is the hidden value
    std::vector<elementwise> chain;        // the values after them
    int                      result;       // the value that is the hidden one
    int64_t                  n_hidden;
    const owned_tensor *     down;
    const ggml_tensor *      down_bias;    // [n_out, n_expert], or NULL
    const ggml_tensor *      output;       // [n_out, n_used, n_tokens]
    // What llama.cpp's graph does with these rows next, where it is done with them here: weighs them by [1, n_used, n_tokens], and adds up those of a token.
    const ggml_tensor *      router_weights = nullptr;
    const ggml_tensor *      weighted = nullptr;
    const ggml_tensor *      sum = nullptr;

    bool    x_per_pair() const { return x->ne[1] != 1; }
    int64_t n_used()     const { return ids->ne[0]; }
    int64_t n_tokens()   const { return ids->ne[1]; }
    int64_t n_in()       const { return x->ne[0]; }
    int64_t n_out()      const { return output->ne[0]; }
    size_t  layer()      const { return down->layer; }
    int32_t expert_of(int64_t token, int64_t k) const { return id_at(ids, token, k); }
    const float * x_row(int64_t token, int64_t k) const {
        return (const float *) ((const char *) x->data + (x_per_pair() ? (size_t) k * x->nb[1] : 0) + (size_t) token * x->nb[2]);
    }
    float * output_row(int64_t token, int64_t k) const {
        return (float *) ((char *) output->data + (size_t) k * output->nb[1] + (size_t) token * output->nb[2]);
    }
    // The biases in the order in which the chain and then the down product use them, each with its first row and number of rows.
    struct bias { const ggml_tensor * of; int64_t row, n_rows; };
    std::vector<bias> biases() const;
};

// The block as a ggml graph for n routed pairs.
struct block_graph {
    ggml_tensor * x;            // to be filled: [n_in, 1, n], or [n_in, 1, 1] when all pairs have one input
    ggml_tensor * ids;          // to be filled, I32: place of each pair's expert in `weights`
    ggml_tensor * bias_ids;     // to be filled, I32: its number; NULL without biases
    ggml_tensor * output;       // row i of the pair i
};

// weights: those of b.products and, last, of b.down, with experts in any order. biases: those of b.biases(), [n_rows, n_expert] each.
block_graph build_graph(ggml_context * c, const expert_block & b, const std::vector<ggml_tensor *> & weights, const std::vector<ggml_tensor *> & biases, int64_t n, bool one_input);

} // namespace edgemoe
