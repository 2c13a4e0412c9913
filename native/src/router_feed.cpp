#include "router_feed.h"

#include <algorithm>

namespace edgemoe {

router_feed::router_feed(router_tap & tap, tier & to, std::vector<int> layers) : tap(tap), to(to), layers(std::move(layers)) { tap.add(*this); }

router_feed::~router_feed() { tap.remove(*this); }

// The mean over the tokens of half floats, as a trace has them: a simulation of the recorded trace decides as the engine did.
static std::vector<float> mean_of(const float * rows, int64_t n_rows, size_t width) {
    std::vector<float> sum(width, 0.0f);
    for (int64_t r = 0; r < n_rows; r++) {
        for (size_t i = 0; i < width; i++) {
            const float half = ggml_fp16_to_fp32(ggml_fp32_to_fp16(rows[(size_t) r * width + i]));
            sum[i] = n_rows == 1 ? half : sum[i] + half / (float) n_rows;
        }
    }
    return sum;
}

void router_feed::routed(const routing_view & view) noexcept {
    const size_t index = (size_t) (std::find(layers.begin(), layers.end(), view.layer) - layers.begin());
    if (index == layers.size() || !view.probs || view.n_expert != to.n_expert(index)) {
        return;   // the tier then goes by what was chosen
    }
    to.tell(index, mean_of(view.probs, view.n_tokens, (size_t) view.n_expert), view.hidden ? mean_of(view.hidden, view.n_tokens, (size_t) view.n_embd) : std::vector<float>());
}

} // namespace edgemoe
