// Learned heads (Cache-Aware Router paper): p = softmax(W h + b) per layer, h being the input of its router. `next` predicts the layer's own next event, `successor` that of
// the layer that comes next (after the last one the first, of the next token). They say what experts are worth, never what is computed.
//
// Read-only once made, so any thread may evaluate. h is rounded to a half float before, and p after, as both are in a trace: what a simulation reads is what an engine hears.
#pragma once

#include "kernels/kernels.h"
#include "products.h"

#include <atomic>
#include <memory>
#include <vector>

namespace edgemoe {

struct heads {
    // Of one layer, with as many rows of n_embd weights as what it predicts has experts. No bias: NULL.
    struct weights { ggml_type type; const void * data; const float * bias; };

    // Copies. n_expert: per layer. `next` and `successor` have a head for each layer, or are empty. Throws std::invalid_argument.
    heads(std::vector<uint32_t> n_expert, int64_t n_embd, const std::vector<weights> & next, const std::vector<weights> & successor);

    size_t  n_layers() const { return n_expert.size(); }
    bool    has_next() const { return !nexts.empty(); }
    bool    has_successor() const { return !successors.empty(); }

    const std::vector<uint32_t> n_expert;
    const int64_t               n_embd;

private:
    friend struct head_step;
    struct matrix {
        ggml_type          type;
        const kernel *     k;       // NULL: ggml's own conversion
        const char *       data;
        size_t             row_bytes;
        int64_t            n_out;
        std::vector<float> bias;
    };
    matrix copied(const weights & from, int64_t n_out);

    workspace           memory;
    std::vector<matrix> nexts, successors;
};

// The heads of one layer for some rows, as a step that threads may share.
struct head_step : step {
    // hidden: n_rows rows of n_embd floats, `stride` bytes apart; they are copied.
    head_step(const heads & of, size_t layer, bool next, bool successor, const float * hidden, size_t stride, int64_t n_rows);
    void run(int thread, int n_threads) override;
    // Once all threads have run it: probabilities [n_rows][n_out] as half floats hold them; all 0 in a row whose input is not finite. Empty when it was not asked for.
    std::vector<float> next() const { return probs_of(0); }
    std::vector<float> successor() const { return probs_of(1); }

private:
    struct product { const heads::matrix * w = nullptr; std::vector<float> z; };

    std::vector<float> probs_of(size_t i) const;

    const int64_t      n_embd, n_rows;
    std::vector<float> x;                      // rounded
    std::vector<char>  q[2];                   // as the kernels of the two want it
    product            products[2];
    int64_t            n_pieces = 0;
    std::atomic<int64_t> next_piece{0};
};

// The mean of rows over the tokens of an event; of one row the row itself.
std::vector<float> mean_of_rows(const std::vector<float> & rows, size_t width);
float              as_half(float x);

} // namespace edgemoe
