// A set that is chosen anew every so many tokens, and one that stays. Where misses are computed in place, moving rarely keeps about the hit rate of LRU at a small part of
// its traffic.
#include "chosen_set.h"

#include <algorithm>
#include <stdexcept>

namespace edgemoe {

// Chosen anew every so many tokens: counts since the last choice, plus decay times the score so far, plus a bonus for residents. A new sequence starts with few counts,
// so the first choices can come early: after `early` tokens, twice as many, and so on up to `every`. The defaults were chosen on traces of gpt-oss and DeepSeek-V2-Lite
// (docs/results/policies.md).
struct placement : chosen_set {
    placement(const expert_space & space, const residency & in, int64_t every, double decay, double bonus, int64_t early)
        : chosen_set(space, in, decay, bonus), every(every), early(std::min(early, every)), n_tokens(space.n_layers(), 0) {}

    void observe(const event & e) override {
        chosen_set::observe(e);
        n_tokens[e.layer] += e.n_tokens;
    }

    // A prompt is as good as the last tokens before a choice, and no better: hundreds of its tokens would outweigh the answer for long.
    void observe_prompt(const event & e) override {
        policy::observe(e);
        count(e, std::min(1.0, (double) every / (double) e.n_tokens));
        n_tokens[e.layer] += e.n_tokens;
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        if (n_tokens[e.layer] < next[e.layer] || (space.shared && e.layer + 1 < space.n_layers())) {
            return;
        }
        n_tokens[e.layer] = 0;
        next[e.layer]     = std::min(2 * next[e.layer], every);
        if (space.shared) {
            choose_all(wishes);
        } else {
            choose(e.layer, space.first[e.layer], space.first[e.layer + 1], wishes);
        }
    }

    void foresee_prompt(const event & e, std::vector<wish> & wishes) override { foresee(e, wishes); }

    void begin_sequence(const future * known) override {
        chosen_set::begin_sequence(known);
        next.assign(space.n_layers(), early ? early : every);
        if (early) {
            n_tokens.assign(space.n_layers(), 0);
        }
    }

    void reset() override {
        chosen_set::reset();
        n_tokens.assign(space.n_layers(), 0);
    }

    int64_t every, early;
    std::vector<int64_t> n_tokens, next;   // per layer: since the last choice; at the next one
};

// The set that training text used most, from the first token on.
struct static_set : policy {
    static_set(const expert_space & space, const residency & in, const tables & learned) : policy(space, in) {
        const auto found = learned.find("usage");
        if (found == learned.end() || found->second.shape.size() != 2 || found->second.shape[0] != space.n_layers() || found->second.data.size() != by.score.size()) {
            throw std::invalid_argument("policy static: wanted a table usage [layers, experts], which fitting on a trace makes");
        }
        usage = found->second.data;
    }

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        begun = false;
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        policy::begin_pass(s, wishes);
        if (begun) {
            return;
        }
        begun = true;
        std::copy(usage.begin(), usage.end(), by.score.begin());
        space.for_each_pool([&](size_t layer, int32_t first, int32_t end) { wishes.push_back({ wish::how::refine, layer, {}, &by, first, end, in.n_slots(layer) }); });
    }

    bool admits_misses() const override { return false; }

    bool begun = false;
    std::vector<float> usage;
};

std::vector<policy_kind> placement_policies() {
    using P = std::unique_ptr<policy>;
    return {
        { "placement", { { "every", { 8, 1, 1e9 } }, { "decay", { 0.9, 0, 1 } }, { "bonus", { 1, 0, 1e9 } }, { "early", { 2, 0, 1e9 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P {
              const int64_t every = (int64_t) p.at("every").value, early = (int64_t) p.at("early").value;
              return std::make_unique<placement>(s, in, every, p.at("decay").value, p.at("bonus").value, early);
          } },
        { "static", {}, [](const expert_space & s, const residency & in, const parameters &, const policy_source & from) -> P {
              return std::make_unique<static_set>(s, in, from.learned ? *from.learned : tables());
          } },
    };
}

} // namespace edgemoe
