// A set of experts that is chosen by counts. Between two choices nothing moves.
#pragma once

#include "kinds.h"

namespace edgemoe {

struct chosen_set : policy {
    chosen_set(const expert_space & space, const residency & in, double decay, double bonus)
        : policy(space, in), decay(decay), bonus(bonus), recent((size_t) space.n_all(), 0.0), old((size_t) space.n_all(), 0.0) {}

    void observe(const event & e) override {
        policy::observe(e);
        count(e, 1.0);
    }

    void observe_prompt(const event & e) override { observe(e); }

    void count(const event & e, double weight) {
        for (size_t i = 0; i < e.experts.size(); i++) {
            recent[(size_t) e.experts[i]] += e.n_tokens_of[i] * weight;
        }
    }
    bool admits_misses() const override { return false; }

    void reset() override {
        policy::reset();
        std::fill(recent.begin(), recent.end(), 0.0);
        std::fill(old.begin(), old.end(), 0.0);
    }

    // Scores by what was counted since the last choice.
    void rank(int32_t first, int32_t end) {
        for (size_t i = (size_t) first; i < (size_t) end; i++) {
            old[i]    = recent[i] + decay * old[i];
            recent[i] = 0;
            by.score[i] = old[i] + (in.present((int32_t) i) ? bonus : 0.0);
        }
    }

    // Of these keys the best come in.
    void choose(size_t layer, int32_t first, int32_t end, std::vector<wish> & wishes) {
        rank(first, end);
        wishes.push_back({ wish::how::refine, layer, {}, &by, first, end, in.n_slots(layer) });
    }

    void choose_all(std::vector<wish> & wishes) {
        space.for_each_pool([&](size_t layer, int32_t first, int32_t end) { choose(layer, first, end, wishes); });
    }

    double decay, bonus;
    std::vector<double> recent, old;   // per key: counts since the last choice, and the score then
};

} // namespace edgemoe
