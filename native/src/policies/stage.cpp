// SAEM: the experts that the stages of a reasoning use, chosen at the boundaries between them.
#include "chosen_set.h"

#include <algorithm>

namespace edgemoe {

struct stage_options {
    double  decay, bonus;
    int64_t most;      // experts that a boundary brings in, of all layers; 0: no limit
    int64_t longest;   // tokens after which a stage ends in any case; 0: never
    bool    fills;     // between boundaries LRU
};

// At each boundary the set is chosen by how many tokens of the finished stage used an expert, all sequences of the batch together. A prompt is a stage of its own. What comes in
// is ordered by what it gains over the one whose place it takes, over all layers, so that under a limit, and on a slow way, the most valuable come first.
struct stage : chosen_set {
    stage(const expert_space & space, const residency & in, const stage_options & o) : chosen_set(space, in, o.decay, o.bonus), o(o), target(space.n_all()) {}

    void begin_sequence(const future * known) override {
        chosen_set::begin_sequence(known);
        std::fill(recent.begin(), recent.end(), 0.0);   // what the last sequence ended with is no part of this one's first stage
        current    = -1;
        n_tokens   = 0;
        has_prompt = false;
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        chosen_set::begin_pass(s, wishes);
        const bool too_long = o.longest > 0 && n_tokens >= o.longest;
        if ((s.stage != current && current >= 0) || (!s.prompt && (has_prompt || too_long))) {
            choose_most_valuable(wishes);
            n_tokens   = 0;
            has_prompt = false;
        }
        current     = s.stage;
        has_prompt |= s.prompt;
        n_tokens   += s.prompt ? 0 : s.n_tokens;
    }

    void choose_most_valuable(std::vector<wish> & wishes) {
        struct move { double gain; int32_t expert; };
        std::vector<move> moves;
        std::vector<int32_t> best, residents;
        space.for_each_pool([&](size_t layer, int32_t first, int32_t end) {
            rank(first, end);
            best.clear();
            residents.clear();
            for (int32_t key = first; key < end; key++) {
                best.push_back(key);
                if (in.present(key)) {
                    residents.push_back(key);
                }
            }
            const auto last = best.begin() + std::min<std::ptrdiff_t>(in.n_slots(layer), end - first);
            std::partial_sort(best.begin(), last, best.end(), [&](int32_t a, int32_t b) { return by.lower(b, a); });
            std::sort(residents.begin(), residents.end(), [&](int32_t a, int32_t b) { return by.lower(a, b); });
            // The best of those that are absent takes an empty slot, or the place of the lowest, the next one that of the next lowest.
            size_t n_empty = (size_t) (in.n_slots(layer) - in.n_present(layer)), n_victims = 0;
            for (auto at = best.begin(); at != last; at++) {
                const double score = by.score[(size_t) *at];
                if (in.present(*at)) {
                    continue;
                }
                if (n_empty > 0 && !in.full(layer)) {
                    n_empty--;
                    if (score > 0) {
                        moves.push_back({ score, *at });
                    }
                } else if (n_victims < residents.size() && score > by.score[(size_t) residents[n_victims]]) {
                    moves.push_back({ score - by.score[(size_t) residents[n_victims++]], *at });
                }
            }
        });
        std::stable_sort(moves.begin(), moves.end(), [](const move & a, const move & b) { return a.gain > b.gain; });
        if (o.most > 0 && moves.size() > (size_t) o.most) {
            moves.resize((size_t) o.most);
        }
        target = by;
        for (const move & m : moves) {
            wishes.push_back({ wish::how::bring, space.layer_of(m.expert), { m.expert }, &target });
        }
        if (o.fills) {
            std::fill(by.score.begin(), by.score.end(), 0.0);   // from here on by the last use
            n_events++;   // being chosen is a use: later than all before
        }
    }

    // What was chosen has not been used yet, and must not be the first to go.
    void inserted(int32_t expert) override {
        if (o.fills) {
            by.last_use[(size_t) expert] = n_events;
        }
    }

    bool admits_misses() const override { return o.fills; }

    stage_options o;
    scores        target;   // when the set was chosen
    int32_t       current = -1;
    int64_t       n_tokens = 0;   // of this stage
    bool          has_prompt = false;
};

static std::unique_ptr<policy> make_stage(const expert_space & s, const residency & in, const parameters & p, bool fills) {
    return std::make_unique<stage>(s, in, stage_options { p.at("decay").value, p.at("bonus").value, (int64_t) p.at("most").value, (int64_t) p.at("longest").value, fills });
}

std::vector<policy_kind> stage_policies() {
    using P = std::unique_ptr<policy>;
    const parameters known = { { "decay", { 0, 0, 1 } }, { "bonus", { 0, 0, 1e9 } }, { "most", { 0, 0, 1e9 } }, { "longest", { 0, 0, 1e9 } } };
    return {
        { "stage", known, [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P { return make_stage(s, in, p, false); } },
        { "stage+lru", known, [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P { return make_stage(s, in, p, true); } },
    };
}

} // namespace edgemoe
