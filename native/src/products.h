// The work of one split in steps that all threads of ggml's own pool run together: between two steps ggml lets the threads meet. No thread is
// started here, so there is never a second pool beside llama.cpp's.
//
// Threads: a step is made by one thread before ggml starts its pool. Within run() threads meet only in the step's atomic counters, from which they
// take pieces of work; what each writes belongs to its pieces. Buffers of one thread are thread_local and last.
#pragma once

#include "elementwise.h"
#include "kernels/kernels.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace edgemoe {

// From so many activations on, turning rows into a tile pays.
constexpr int64_t TILE_MIN = 3;

// Memory for one computation: handed out in pieces, taken back all at once, kept.
struct workspace {
    ~workspace();
    void * take(size_t bytes);      // 64-byte aligned
    void   clear();

private:
    void free_chunks();

    struct chunk { char * at; size_t bytes, used; };
    std::vector<chunk> chunks;
};

struct step {
    virtual ~step() = default;
    virtual void run(int thread, int n_threads) = 0;
};

// Weight rows in place: row r of expert e starts at data + e * expert_stride + r * row_bytes.
struct matrix {
    const kernel * k;
    const char *   data;
    size_t         row_bytes, expert_stride;
    int64_t        n_in, n_out;

    const char * row(int64_t expert, int64_t r) const { return data + (size_t) expert * expert_stride + (size_t) r * row_bytes; }
};

// Rows of floats, each quantised into a row of its own.
struct quantized_rows {
    rounding      how;
    int64_t       n;
    std::vector<const float *> from;
    char *        to;
    size_t        row_bytes;

    quantized_rows(workspace & memory, rounding how, int64_t n, std::vector<const float *> rows);
    const void * row(int64_t i) const { return to + (size_t) i * row_bytes; }
};

struct quantize_step : step {
    explicit quantize_step(quantized_rows & rows) : rows(rows) {}
    void run(int thread, int n_threads) override;

    quantized_rows & rows;
    std::atomic<int64_t> next{0};
};

// y = W x for several W and one x.
struct dense_step : step {
    struct product {
        matrix w;
        std::vector<float *> y;    // per row of x
    };
    dense_step(const quantized_rows & x, std::vector<product> products, int n_threads);
    void run(int thread, int n_threads) override;

private:
    const quantized_rows & x;
    std::vector<product>   products;
    std::vector<int64_t>   first_piece;   // of each product; then the number of all
    std::vector<int64_t>   rows_per_piece;
    std::vector<const void *> qs;
    std::atomic<int64_t>   next{0};
};

// The routed pairs of one layer, sorted by expert.
struct routing {
    struct pair  { int32_t token, k; };
    struct group { int32_t expert, first, n; };   // pairs [first, first + n)

    std::vector<pair>  pairs;
    std::vector<group> groups;
    int64_t            n_used, n_tokens;
};

// First half of an expert: its hidden values, quantised for the second half.
struct hidden_step : step {
    // Rows [offset + r, ...) of a product; a fused gate_up tensor is two of these.
    struct stream { matrix w; int64_t offset; };

    hidden_step(const routing & r, const quantized_rows & x, bool x_per_pair, std::vector<stream> streams, std::vector<elementwise> chain, int result,
        int64_t n_hidden, quantized_rows & hidden, float * hidden_floats, int n_threads);
    void run(int thread, int n_threads) override;

private:
    void compute_piece(const routing::group & g, int64_t row, int n_rows);

    const routing &          route;
    const quantized_rows &   x;
    bool                     x_per_pair;
    std::vector<stream>      streams;
    std::vector<elementwise> chain;
    int                      result;          // the value of the chain that is the hidden one
    int64_t                  n_hidden, rows_per_piece, pieces_per_group;
    quantized_rows &         hidden;          // one row per pair, in the order of route.pairs
    float *                  hidden_floats;   // [pairs][n_hidden]
    std::vector<const void *> qs;             // per pair
    std::atomic<int64_t>     next{0};
    std::unique_ptr<std::atomic<int64_t>[]> pieces_left;   // per group: who finishes it quantises its rows
};

// Second half: down rows, with bias and router weight, per pair or summed over the experts of a token. Also any single product of routed pairs.
struct down_step : step {
    struct output {
        char * data;
        size_t pair_stride, token_stride;   // bytes; pair_stride is not used when summed
        bool   summed;
        const float * weights;              // per pair in the order of route.pairs, or NULL
        const ggml_tensor * bias;           // [n_out, n_expert], F32, or NULL
    };
    // inputs: the quantised row of each pair, in the order of route.pairs.
    down_step(const routing & r, const matrix & w, std::vector<const void *> inputs, const output & out, int n_threads);
    void run(int thread, int n_threads) override;

private:
    void compute_piece(int64_t row, int n_rows);

    const routing &           route;
    matrix                    w;
    output                    out;
    int64_t                   rows_per_piece;
    std::vector<const void *> qs;
    std::atomic<int64_t>      next{0};
};

// What down_step does with its products, for rows [n_tokens, n_used, n_out] that are there already (with their bias). The same bits come out.
struct weigh_step : step {
    weigh_step(const routing & r, const float * rows, int64_t n_out, const float * weights, const down_step::output & out, int n_threads);
    void run(int thread, int n_threads) override;

private:
    const routing &   route;
    const float *     rows;
    int64_t           n_out, rows_per_piece;
    const float *     weights;
    down_step::output out;
    std::atomic<int64_t> next{0};
};

} // namespace edgemoe
