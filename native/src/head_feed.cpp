#include "head_feed.h"

#include <algorithm>

namespace edgemoe {

head_feed::head_feed(std::shared_ptr<const heads> of, size_t n_layers) : of(std::move(of)), layers(n_layers) {}

bool head_feed::wants_next() const { return std::any_of(tiers.begin(), tiers.end(), [](const tier * t) { return t->needs_next(); }); }

bool head_feed::wants_successor() const { return std::any_of(tiers.begin(), tiers.end(), [](const tier * t) { return t->needs_successor(); }); }

// The tensor whose numbers these are, in another shape.
static const ggml_tensor * origin_of(const ggml_tensor * t) {
    while ((t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW) && ggml_nelements(t) == ggml_nelements(t->src[0])) {
        t = t->src[0];
    }
    return t;
}

bool head_feed::router_reads(size_t layer, const ggml_tensor * x) {
    const int64_t n_tokens = ggml_nrows(x);
    std::lock_guard<std::mutex> lock(mutex);
    layer_state & l = layers[layer];
    l.rows.clear();
    l.router_input = nullptr;
    if (n_tokens > tier::MOST_DECODED || x->ne[0] != of->n_embd || !(wants_next() || wants_successor())) {
        return false;   // of a prompt nothing is predicted
    }
    l.router_input = origin_of(x);
    l.by           = std::this_thread::get_id();
    return !l.is_experts_input;
}

void head_feed::heard(size_t layer, const float * rows, int64_t n_rows) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].rows.assign(rows, rows + n_rows * of->n_embd);
}

void head_feed::tell(size_t layer, const ggml_tensor * product, const std::function<void(step &)> & run) {
    std::vector<float> rows;
    const ggml_tensor * x = product->src[1];
    {
        std::lock_guard<std::mutex> lock(mutex);
        layer_state & l = layers[layer];
        if (!l.router_input || l.by != std::this_thread::get_id()) {
            return;
        }
        l.is_experts_input = origin_of(x) == l.router_input && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[0] == of->n_embd && x->ne[1] == 1 && x->ne[3] == 1;
        rows = std::move(l.rows);
        l.rows.clear();
        l.router_input = nullptr;
        if (rows.empty() && !l.is_experts_input) {
            return;   // it was until now: from the next step on the graph is stopped again
        }
    }
    const bool heard = !rows.empty();
    const int64_t n_rows = heard ? (int64_t) rows.size() / of->n_embd : x->ne[2];
    head_step both(*of, layer, wants_next(), wants_successor(), heard ? rows.data() : (const float *) x->data, heard ? (size_t) of->n_embd * sizeof(float) : x->nb[2], n_rows);
    run(both);
    const std::vector<float> next = mean_of_rows(both.next(), of->n_expert[layer]);
    const std::vector<float> successor = mean_of_rows(both.successor(), of->n_expert[(layer + 1) % of->n_layers()]);
    for (tier * t : tiers) {
        t->tell_heads(layer, next, successor);
    }
}

} // namespace edgemoe
