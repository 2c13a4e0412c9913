#include "router_tap.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace edgemoe {

const char * gating_name(gating g) {
    switch (g) {
        case gating::softmax:           return "softmax over all";
        case gating::sigmoid:           return "sigmoid";
        case gating::sqrt_softplus:     return "square root of softplus";
        case gating::softmax_of_chosen: return "softmax over the chosen";
    }
    return "";
}

void router_tap::add(router_sink & sink) {
    sinks.push_back(&sink);
}

void router_tap::remove(router_sink & sink) {
    sinks.erase(std::remove(sinks.begin(), sinks.end(), &sink), sinks.end());
}

// The layer when `node` is called `prefix`-<layer> as llama.cpp's graph builder names its nodes; -1.
static int layer_named(const ggml_tensor * node, const char * prefix) {
    const size_t n = strlen(prefix);
    if (strncmp(node->name, prefix, n) != 0 || node->name[n] != '-') {
        return -1;
    }
    char * end;
    const long layer = strtol(node->name + n + 1, &end, 10);
    return *end == 0 && end != node->name + n + 1 ? (int) layer : -1;
}

// The layer when `node` multiplies with a router's weight; -1. By the weight's name: that of the product changes with what comes after it.
static int layer_of_router(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT) {
        return -1;
    }
    const char * block = strstr(node->src[0]->name, "blk.");   // a copy on another device is called <device>#blk....
    const char * name  = block ? strchr(block + 4, '.') : nullptr;
    const char * which = ".ffn_gate_inp.weight";
    return name && !strncmp(name, which, strlen(which)) ? atoi(block + 4) : -1;
}

// Which function makes the probabilities, read from the node called ffn_moe_probs.
static gating gating_of(const ggml_tensor * probs) {
    switch (probs->op) {
        case GGML_OP_SOFT_MAX: return gating::softmax;
        case GGML_OP_UNARY:    return gating::sigmoid;
        case GGML_OP_SQRT:     return gating::sqrt_softplus;
        default:               return gating::softmax_of_chosen;   // these are the logits themselves
    }
}

// Copies rows of a tensor, wherever it is and whatever its stride, behind one another.
template <typename T> static void read_rows(const ggml_tensor * t, int64_t n_row, int64_t n_rows, size_t row_stride, std::vector<uint8_t> & staging, std::vector<T> & to) {
    to.resize((size_t) (n_row * n_rows));
    if (to.empty()) {
        return;
    }
    const char * from = (const char *) t->data;
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    if (!ggml_backend_buffer_is_host(buffer)) {
        staging.resize(ggml_nbytes(t));   // in one piece: each transfer from a device is a round trip
        ggml_backend_tensor_get(t, staging.data(), 0, staging.size());
        from = (const char *) staging.data();
    }
    for (int64_t r = 0; r < n_rows; r++) {
        memcpy(to.data() + r * n_row, from + (size_t) r * row_stride, (size_t) n_row * sizeof(T));
    }
}

static void softmax(float * x, int64_t n) {
    const float largest = *std::max_element(x, x + n);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - largest);
        sum += x[i];
    }
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float) (x[i] / sum);
    }
}

// Chosen experts by falling probability; llama.cpp has them by what they were chosen for, which is another order where that includes a bias.
static void sort_row(int32_t * ids, float * p, int32_t n) {
    for (int32_t i = 1; i < n; i++) {
        const int32_t id = ids[i];
        const float   x  = p[i];
        int32_t at = i;
        for (; at > 0 && p[at - 1] < x; at--) {
            ids[at] = ids[at - 1];
            p[at]   = p[at - 1];
        }
        ids[at] = id;
        p[at]   = x;
    }
}

bool router_tap::eval(ggml_tensor * node, bool ask) noexcept {
    if (sinks.empty()) {
        return !ask;
    }
    if (ask) {
        return wanted(node);
    }
    if (layer_of_router(node) >= 0) {
        read_hidden(node);
    }
    if (layer_named(node, "ffn_moe_probs") >= 0) {
        read_probs(node);
        if (!want_chosen) {
            hand_out({ probs_layer, how, node->ne[1], 0, n_expert, n_embd, nullptr, nullptr, nullptr, nullptr });
        }
    }
    if (layer_named(node, "ffn_moe_weights") >= 0) {
        read_chosen(node);
    }
    return true;
}

bool router_tap::wanted(const ggml_tensor * node) {
    if (node->op == GGML_OP_MUL_MAT) {
        const int layer = layer_of_router(node);
        if (layer >= 0) {
            want_hidden = false;
            for (router_sink * s : sinks) {
                want_hidden = s->wants_hidden(layer, node->src[1]) || want_hidden;   // each is asked
            }
            return want_hidden;
        }
    }
    if (layer_named(node, "ffn_moe_probs") >= 0) {
        how        = gating_of(node);
        want_probs  = std::any_of(sinks.begin(), sinks.end(), [](const router_sink * s) { return s->wants_probs(); });
        want_chosen = !want_probs || std::any_of(sinks.begin(), sinks.end(), [](const router_sink * s) { return s->wants_chosen(); });
        return want_probs;
    }
    return want_chosen && node->op == GGML_OP_GET_ROWS && layer_named(node, "ffn_moe_weights") >= 0;
}

void router_tap::read_hidden(ggml_tensor * node) {
    const ggml_tensor * x = node->src[1];
    n_embd       = (int32_t) x->ne[0];
    hidden_layer = x->type == GGML_TYPE_F32 ? layer_of_router(node) : -1;
    if (hidden_layer >= 0) {
        read_rows(x, x->ne[0], ggml_nrows(x), x->nb[1], staging, hidden);
    }
}

void router_tap::read_probs(ggml_tensor * node) {
    n_expert    = (int32_t) node->ne[0];
    probs_layer = layer_named(node, "ffn_moe_probs");
    read_rows(node, node->ne[0], node->ne[1], node->nb[1], staging, probs);
    for (int64_t r = 0; r < node->ne[1] && how == gating::softmax_of_chosen; r++) {
        softmax(probs.data() + r * n_expert, n_expert);
    }
}

// The last of the three: it has been computed from the ids, which are therefore still there.
void router_tap::read_chosen(ggml_tensor * node) {
    const ggml_tensor * chosen_ids = node->src[1];
    const int     layer    = layer_named(node, "ffn_moe_weights");
    const int32_t n_used   = (int32_t) chosen_ids->ne[0];
    const int64_t n_tokens = chosen_ids->ne[1];
    assert(node->ne[0] == 1 && node->ne[1] == n_used && node->ne[2] == n_tokens && chosen_ids->type == GGML_TYPE_I32);
    read_rows(chosen_ids, n_used, n_tokens, chosen_ids->nb[1], staging, ids);
    read_rows(node, n_used, n_tokens, node->nb[2], staging, chosen);
    for (int64_t t = 0; t < n_tokens; t++) {
        float * p = chosen.data() + t * n_used;
        if (how == gating::softmax_of_chosen) {
            softmax(p, n_used);
        }
        sort_row(ids.data() + t * n_used, p, n_used);
    }
    hand_out({ layer, how, n_tokens, n_used, (int32_t) node->src[0]->ne[1], n_embd, ids.data(), chosen.data(), nullptr, nullptr });
}

// With what was read before.
void router_tap::hand_out(routing_view view) {
    view.probs  = want_probs && probs_layer == view.layer ? probs.data() : nullptr;
    view.hidden = want_hidden && hidden_layer == view.layer ? hidden.data() : nullptr;
    for (router_sink * sink : sinks) {
        sink->routed(view);
    }
}

} // namespace edgemoe
