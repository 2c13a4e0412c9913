// Which experts lie in slots, and who has to go when another comes. No I/O, no threads, no ggml: whoever owns a residency guards it.
//
// The operators update and refine are those of the Temporal / Spatio-Temporal Router paper (algorithms 1 and 2): update brings in what an event has loaded, refine
// brings in what is expected to be needed. Both look at scores only; where these come from is the policy's affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgemoe {

// The experts of all layers, numbered through: key = first[layer] + expert. Slots belong to a pool: to one layer each, or all to all layers.
struct expert_space {
    std::vector<int32_t> first;      // of each layer, and the number of all
    bool                 shared;     // one pool

    explicit expert_space(const std::vector<int32_t> & n_expert, bool shared = false);
    size_t  n_layers() const { return first.size() - 1; }
    int32_t n_all() const { return first.back(); }
    int32_t n_expert(size_t layer) const { return first[layer + 1] - first[layer]; }
    size_t  pool_of(size_t layer) const { return shared ? 0 : layer; }
    size_t  layer_of(int32_t expert) const;

    // For each pool of slots one of its layers, and the keys [first, end) that share it.
    template <typename F> void for_each_pool(F && f) const {
        if (shared) {
            f((size_t) 0, (int32_t) 0, n_all());
            return;
        }
        for (size_t layer = 0; layer < n_layers(); layer++) {
            f(layer, first[layer], first[layer + 1]);
        }
    }
};

// One layer in one step: the distinct experts that its tokens need, ascending, and how many tokens need each. Experts are keys.
struct event {
    size_t               layer;
    std::vector<int32_t> experts, n_tokens_of;
    int64_t              n_tokens;
    // What the router said, where it is known: per expert of the layer, the mean over the tokens.
    const float *        probs = nullptr;
    // The router's input, the mean over the tokens; what learned heads say about this layer's next event, and about the next layer.
    const float *        hidden = nullptr, * next = nullptr, * successor = nullptr;
    size_t               n_embd = 0;   // of hidden
};

// What victims are chosen by, per key: the lowest score goes; of equal ones the least recently used, then the lower key.
struct scores {
    std::vector<double>   score;
    std::vector<uint64_t> last_use;   // number of the event
    std::vector<uint64_t> n_uses;     // tokens that used it

    explicit scores(int32_t n) : score((size_t) n, 0.0), last_use((size_t) n, 0), n_uses((size_t) n, 0) {}
    bool lower(int32_t a, int32_t b) const {
        const size_t i = (size_t) a, j = (size_t) b;
        if (score[i] != score[j]) {
            return score[i] < score[j];
        }
        return last_use[i] != last_use[j] ? last_use[i] < last_use[j] : a < b;
    }
};

// Whether an expert may take the place of another after it was used. An empty slot takes anyone.
struct admission {
    enum class rule { anyone, used_more, scored_higher };   // than the one it replaces
    rule    by           = rule::anyone;
    int32_t most_inserts = INT32_MAX;   // per event; demand loads are free of it

    bool admits(int32_t expert, int32_t victim, const scores & s) const;
};

struct residency {
    struct insertion { int32_t expert, slot, evicted; };   // evicted: -1 when the slot was empty

    residency(const expert_space & space, int32_t n_slots_per_layer);
    // A pool of all layers within a budget, where an expert of a layer takes `cost[layer]` of it. Of cheaper experts there are then more in it.
    residency(const expert_space & space, const std::vector<int64_t> & cost, int64_t budget);

    // Of the layer's pool.
    int32_t n_slots(size_t layer) const { return pools[space.pool_of(layer)].n; }
    int32_t n_present(size_t layer) const { return pools[space.pool_of(layer)].n_filled; }
    // An expert of this layer costs another its place.
    bool    full(size_t layer) const { const pool & p = pools[space.pool_of(layer)]; return p.n_filled == p.n || p.spent + cost[layer] > p.budget; }
    int64_t spent(size_t layer) const { return pools[space.pool_of(layer)].spent; }

    // The slot in the expert's pool whose bytes may be used, or -1.
    int32_t slot_of(int32_t expert) const;
    // In a slot, or on its way there.
    bool    present(int32_t expert) const { return slot_of_expert[(size_t) expert] >= 0; }

    // A pinned expert stays, and so does one that is on its way. Pins are counted; only what is present can be pinned.
    void pin(int32_t expert);
    void unpin(int32_t expert);
    // These stay as well, until others are named.
    void protect(const std::vector<int32_t> & experts);
    // This one does not come in, since an event has it elsewhere.
    void exclude(int32_t expert, bool out) { excluded[(size_t) expert] = out; }

    // Begins the load of `expert`, which is not present, in an empty slot or in the place of the lowest. False when nothing may be replaced, or not by this one, or it is excluded. Where
    // the lowest costs less than the newcomer, more of them go: these are added to `gone`.
    bool insert(size_t layer, int32_t expert, const scores & by, insertion & done, const admission & rule = {});
    // After an event: brings in those of `candidates` that are absent, in their order. No member of the event is evicted, unless the members need not stay.
    void update(const event & e, const std::vector<int32_t> & candidates, const scores & by, const admission & rule, bool keep_members, std::vector<insertion> & done);
    // Before an event: of the `budget` best keys from first to end, an absent one replaces the lowest resident of the layer's pool whose score is lower, or takes an
    // empty slot if its score is above 0.
    void refine(size_t layer, int32_t first, int32_t end, const scores & by, int32_t budget, std::vector<insertion> & done);
    // Before an event: those of `wanted` that are absent come in, in their order, in the places of the lowest that are not wanted.
    void bring(size_t layer, const std::vector<int32_t> & wanted, const scores & by, std::vector<insertion> & done);

    // Whom an insertion has evicted beside the one whose slot it took, since this was last emptied.
    std::vector<int32_t> gone;

    // The bytes of a slot are there, or will not come.
    void finish(size_t layer, int32_t slot, bool loaded);

private:
    struct slot { int32_t expert = -1; int32_t n_pins = 0; bool loading = false; };
    struct pool { size_t first; int32_t n, n_filled; int64_t budget, spent; };

    size_t lowest(const pool & p, const scores & by) const;   // a slot with somebody in it, or NO_SLOT
    size_t empty(const pool & p) const;                       // there is one
    void   leave(pool & p, slot & at);
    int64_t cost_of(int32_t expert) const;

    static constexpr size_t NO_SLOT = SIZE_MAX;

    expert_space          space;
    std::vector<slot>     slots;
    std::vector<pool>     pools;
    std::vector<int64_t>  cost;             // of an expert, per layer
    std::vector<int32_t>  slot_of_expert;   // in its pool
    std::vector<size_t>   first_slot;       // of the expert's pool
    std::vector<uint64_t> protection;       // == now: protected
    std::vector<bool>     excluded;
    uint64_t              now = 1;
};

} // namespace edgemoe
