// A sink that writes what routers chose into arrays of its caller, one batch at a time.
#pragma once

#include "router_tap.h"

#include <cstdint>
#include <string>
#include <vector>

namespace edgemoe {

// Where the rows of one batch go: L layers, K experts used, E experts, D the width of the router's input. `n_tokens` rows each, prepared with what stands for
// absent: a row that llama.cpp does not compute is left as it is. Probabilities and hidden states are IEEE half floats.
struct recording {
    int64_t         n_tokens;
    const int8_t *  outputs;    // [n_tokens]: whose logits are wanted
    uint16_t *      ids;        // [n_tokens][L][K]
    uint16_t *      chosen;     // [n_tokens][L][K]; NULL: not wanted
    uint16_t *      probs;      // [n_tokens][L][E]; NULL: not wanted
    uint16_t *      hidden;     // [n_tokens][L][D]; NULL: not wanted
};

struct recorder : router_sink {
    // `layers`: block numbers of the layers with experts. `n_ubatch`: tokens that are computed together.
    recorder(router_tap & tap, std::vector<int> layers, int32_t n_used, int32_t n_expert, int32_t n_embd, int64_t n_ubatch);
    ~recorder() override;

    // All that is computed from begin to end is one batch. end throws when something was not as expected, and returns the micro-batches that were seen.
    void    begin(const recording & to);
    int64_t end();

    bool wants_probs()  const override { return active && to.probs; }
    bool wants_hidden(int, const ggml_tensor *) override { return active && to.hidden; }
    void routed(const routing_view & view) noexcept override;

    gating how = gating::softmax;   // of the last batch

private:
    bool place(const routing_view & view, size_t index);
    void fail(const routing_view & view, const std::string & found_and_wanted);

    router_tap &         tap;
    std::vector<int>     layers;
    int32_t              n_used, n_expert, n_embd;
    int64_t              n_ubatch;
    recording            to = {};
    bool                 active = false;
    int64_t              step = -1;        // micro-batch of the batch
    size_t               next_layer = 0;   // index in layers
    std::vector<int64_t> rows;             // of the batch, for the rows of a view
    std::string          problem;
};

} // namespace edgemoe
