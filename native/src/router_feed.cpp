#include "router_feed.h"

#include <algorithm>

namespace edgemoe {

router_feed::router_feed(router_tap & tap, tier & to, std::vector<int> layers, head_feed * learned) : tap(tap), to(to), learned(learned), layers(std::move(layers)) { tap.add(*this); }

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

size_t router_feed::index_of(int layer) const { return (size_t) (std::find(layers.begin(), layers.end(), layer) - layers.begin()); }

bool router_feed::wants_hidden(int layer, const ggml_tensor * x) {
    const size_t index = index_of(layer);
    const bool for_heads = learned && index < layers.size() && learned->router_reads(index, x);
    return for_heads || to.needs_hidden();
}

void router_feed::routed(const routing_view & view) noexcept {
    const size_t index = index_of(view.layer);
    if (learned && index < layers.size() && view.hidden && view.n_tokens <= tier::MOST_DECODED && view.n_embd == learned->of->n_embd) {
        learned->heard(index, view.hidden, view.n_tokens);
    }
    if (index == layers.size() || !view.probs || view.n_expert != to.n_expert(index)) {
        return;   // the tier then goes by what was chosen
    }
    to.tell(index, mean_of(view.probs, view.n_tokens, (size_t) view.n_expert), view.hidden && to.needs_hidden() ? mean_of(view.hidden, view.n_tokens, (size_t) view.n_embd) : std::vector<float>());
}

} // namespace edgemoe
