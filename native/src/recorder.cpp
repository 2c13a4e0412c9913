#include "recorder.h"

#include <algorithm>
#include <stdexcept>

namespace edgemoe {

recorder::recorder(router_tap & tap, std::vector<int> layers, int32_t n_used, int32_t n_expert, int32_t n_embd, int64_t n_ubatch)
    : tap(tap), layers(std::move(layers)), n_used(n_used), n_expert(n_expert), n_embd(n_embd), n_ubatch(n_ubatch) {
    tap.add(*this);
}

recorder::~recorder() { tap.remove(*this); }

void recorder::begin(const recording & where) {
    to         = where;
    active     = true;
    step       = -1;
    next_layer = layers.size();
    problem.clear();
}

int64_t recorder::end() {
    active = false;
    if (problem.empty() && next_layer != layers.size()) {
        problem = "recording: the router of layer " + std::to_string(layers[next_layer]) + " was not seen";
    }
    if (problem.empty() && (step + 1) * n_ubatch < to.n_tokens) {
        problem = "recording: " + std::to_string(step + 1) + " micro-batches of up to " + std::to_string(n_ubatch) + " tokens, wanted " + std::to_string(to.n_tokens) + " tokens";
    }
    if (!problem.empty()) {
        throw std::runtime_error(problem);
    }
    return step + 1;
}

void recorder::fail(const routing_view & view, const std::string & found_and_wanted) {
    if (problem.empty()) {
        problem = "recording: layer " + std::to_string(view.layer) + ": " + found_and_wanted;
    }
}

// Which rows of the batch a view's rows are: all of its micro-batch, or in the last layer those whose logits are wanted.
bool recorder::place(const routing_view & view, size_t index) {
    const bool   complete = next_layer == layers.size();
    const size_t expected = complete ? 0 : next_layer;
    if (index != expected) {
        fail(view, "found out of turn, wanted layer " + std::to_string(layers[expected]));
        return false;
    }
    step      += index == 0;
    next_layer = index + 1;
    rows.clear();
    const int64_t first = step * n_ubatch, end = std::min(first + n_ubatch, to.n_tokens);
    for (int64_t t = first; t < end; t++) {
        if (view.n_tokens == end - first || to.outputs[t]) {
            rows.push_back(t);
        }
    }
    if ((int64_t) rows.size() != view.n_tokens) {
        fail(view, std::to_string(view.n_tokens) + " rows in micro-batch " + std::to_string(step) + ", wanted " + std::to_string(std::max<int64_t>(end - first, 0)) + " or " +
            std::to_string(rows.size()));
        return false;
    }
    return true;
}

void recorder::routed(const routing_view & view) noexcept {
    if (!active || !problem.empty()) {
        return;
    }
    const size_t index = (size_t) (std::find(layers.begin(), layers.end(), view.layer) - layers.begin());
    if (index == layers.size()) {
        return;   // experts that are not ours
    }
    if (!place(view, index) || rows.empty()) {
        return;
    }
    if (view.n_used != n_used || view.n_expert > n_expert || (to.hidden && (!view.hidden || view.n_embd != n_embd)) || (to.probs && !view.probs)) {
        fail(view, std::to_string(view.n_used) + " of " + std::to_string(view.n_expert) + " experts, wanted " + std::to_string(n_used) + " of " + std::to_string(n_expert) +
            (to.hidden ? " and " + std::to_string(n_embd) + " hidden values, found " + std::to_string(view.hidden ? view.n_embd : 0) : ""));
        return;
    }
    how = view.gating;
    for (size_t r = 0; r < rows.size(); r++) {
        const int64_t at = rows[r] * (int64_t) layers.size() + (int64_t) index, from = (int64_t) r;
        for (int32_t k = 0; k < n_used; k++) {
            to.ids[at * n_used + k] = (uint16_t) view.ids[from * n_used + k];
        }
        const auto halves = [&](const float * values, int64_t n, uint16_t * where, int64_t stride) {
            if (where) {
                ggml_fp32_to_fp16_row(values + from * n, (ggml_fp16_t *) where + at * stride, n);
            }
        };
        halves(view.chosen, n_used, to.chosen, n_used);
        halves(view.probs, view.n_expert, to.probs, n_expert);
        halves(view.hidden, n_embd, to.hidden, n_embd);
    }
}

} // namespace edgemoe
