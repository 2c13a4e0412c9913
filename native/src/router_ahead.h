// A guess at the experts of the next layer: what its router would choose for the input of this one. Layers change the residual stream little, so the guess is mostly right,
// and there is time to read what is missing. No policy: it knows no more than this one input.
#pragma once

#include "kernels/kernels.h"
#include "store.h"

#include <vector>

namespace edgemoe {

struct router_ahead {
    // `s` and `from` must outlive it. Where there is no kernel for a router's weights nothing is guessed.
    router_ahead(const source & s, const store & from, isa level);

    // Experts of layer + 1 by falling worth, n_used of each of n_tokens inputs, each once; empty when there is nothing to go by. Rows of x are n_in floats, `stride` bytes apart.
    // May be called from any thread.
    std::vector<int32_t> guess(size_t layer, const float * x, size_t stride, int64_t n_in, int64_t n_tokens, int64_t n_used) const;

private:
    const source & s;
    const store &  from;
    isa            level;
};

} // namespace edgemoe
