// Listens to the routers of a running graph: for each layer of each micro-batch it hands out which experts were chosen for which token, with their probabilities
// and what the router saw, before the experts are computed.
//
// A tap is the user data of llama_context_params::cb_eval, which llama.cpp calls for every node: first with ask = true (shall the graph stop behind it?), then,
// having stopped there, with ask = false. A tensor is read at a stop right behind it or behind its first reader, never later: its memory may be used again then.
// Threads: a tap belongs to one context; it is called by the thread that decodes, which also adds and removes sinks.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

namespace edgemoe {

// How a model makes probabilities of router logits.
enum class gating { softmax, sigmoid, sqrt_softplus, softmax_of_chosen };

const char * gating_name(gating g);

// One layer of one micro-batch. Rows are tokens in the order of the batch; in the last layer llama.cpp may leave out those whose output nobody wants.
struct routing_view {
    int             layer;      // blk.<layer>
    edgemoe::gating gating;
    int64_t         n_tokens;
    int32_t         n_used, n_expert, n_embd;
    const int32_t * ids;        // [n_tokens][n_used], by falling probability; NULL: no sink wants the chosen
    const float *   chosen;     // [n_tokens][n_used]: their probabilities, before llama.cpp normalises or scales them; NULL like ids
    const float *   probs;      // [n_tokens][n_expert], softmax over all where the model takes it over the chosen; NULL: no sink wants them
    const float *   hidden;     // [n_tokens][n_embd], the input of the router; NULL: no sink wants it
};

struct router_sink {
    virtual ~router_sink() = default;
    // Asked for every graph; each costs a stop per layer.
    virtual bool wants_chosen() const { return true; }
    virtual bool wants_probs()  const = 0;
    // Of the router of this layer, which is about to read `x`: [n_embd, n_tokens].
    virtual bool wants_hidden(int layer, const ggml_tensor * x) = 0;
    // The view is valid during the call. Nothing may be thrown: ggml is C.
    virtual void routed(const routing_view & view) noexcept = 0;
};

struct router_tap {
    void add(router_sink & sink);
    void remove(router_sink & sink);

    // ggml_backend_sched_eval_callback. Always true: a graph is not given up halfway (llama.cpp's abort callback does that).
    bool eval(ggml_tensor * node, bool ask) noexcept;

private:
    bool wanted(const ggml_tensor * node);
    void read_probs(ggml_tensor * node);
    void read_hidden(ggml_tensor * node);
    void read_chosen(ggml_tensor * node);
    void hand_out(routing_view view);

    std::vector<router_sink *> sinks;
    bool                       want_probs = false, want_hidden = false, want_chosen = true;
    gating                     how = gating::softmax;
    int                        probs_layer = -1, hidden_layer = -1;   // whose values are in the buffers
    std::vector<uint8_t>       staging;
    std::vector<int32_t>       ids;
    std::vector<float>         chosen, probs, hidden;
    int32_t                    n_expert = 0, n_embd = 0;
};

} // namespace edgemoe
