// A recorded sequence through a tier that moves nothing: what the cache would have done.
#pragma once

#include "tier.h"

namespace edgemoe {

// Rows are tokens in their order; rows of equal `step` went through the layers together. Arrays are row-major; NULL where nothing is known.
struct trace_rows {
    size_t           n_rows = 0, n_used = 0;
    const uint16_t * ids = nullptr;         // [n_rows, n_layers, n_used]; NO_EXPERT: fewer
    const int32_t *  step = nullptr;        // [n_rows], not descending; NULL: each row its own
    const int32_t *  stage = nullptr;       // [n_rows]
    const int32_t *  token_ids = nullptr;   // [n_rows]
    const float *    chosen_probs = nullptr;   // [n_rows, n_layers, n_used]
    const float *    probs = nullptr;       // [n_rows, n_layers, n_expert]; n_expert is that of the first layer, as for the heads
    const float *    hidden = nullptr;      // [n_rows, n_layers, n_embd]
    size_t           n_embd = 0;
    const float *    next = nullptr, * successor = nullptr;   // [n_rows, n_layers, n_expert]
};

static constexpr uint16_t NO_EXPERT = UINT16_MAX;

// Replays one sequence. Throws std::invalid_argument for an expert that its layer does not have.
void simulate(tier & t, const trace_rows & rows);

} // namespace edgemoe
