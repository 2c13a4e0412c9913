// Policies that go by what was used, when and how often, and the one that knows what will be.
#include "kinds.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace edgemoe {

// Nothing but the rule for equal scores.
struct lru : policy {
    using policy::policy;
};

// Events that used the expert since the sequence began, counted also while it was absent.
struct lfu : policy {
    using policy::policy;

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        std::fill(by.score.begin(), by.score.end(), 0.0);
    }

    void observe(const event & e) override {
        policy::observe(e);
        for (const int32_t expert : e.experts) {
            by.score[(size_t) expert] += 1;
        }
    }
};

// Combined recency and frequency: on use C = 1 + C 2^(-lambda dt), at any time worth C 2^(-lambda dt). Of two experts that order never changes without a use, so the
// score is log2(C) + lambda t of the last use. Unsure in the paper: what time counts (tokens, here), and what several tokens of one event count (one use).
struct lrfu : policy {
    lrfu(const expert_space & space, const residency & in, double lambda) : policy(space, in), lambda(lambda), n_tokens(space.n_layers(), 0) { forget(); }

    void observe(const event & e) override {
        policy::observe(e);
        const double now = (double) (n_tokens[e.layer] += e.n_tokens);
        for (const int32_t expert : e.experts) {
            double & score = by.score[(size_t) expert];
            score = std::log2(1 + std::exp2(score - lambda * now)) + lambda * now;
        }
    }

    void reset() override {
        policy::reset();
        forget();
    }

    void forget() {
        std::fill(n_tokens.begin(), n_tokens.end(), 0);
        std::fill(by.score.begin(), by.score.end(), -HUGE_VAL);   // the logarithm of no use at all
    }

    double lambda;
    std::vector<int64_t> n_tokens;   // per layer
};

// Counts that are halved every so many accesses, over sequences. Strict: a miss comes in only if its count exceeds that of the one it would replace.
struct frequency : policy {
    frequency(const expert_space & space, const residency & in, int64_t halve, bool strict) : policy(space, in), halve(halve), strict(strict) {}

    void observe(const event & e) override {
        policy::observe(e);
        for (const int32_t expert : e.experts) {
            by.score[(size_t) expert] += 1;
        }
        n_accesses += (int64_t) e.experts.size();
        if (n_accesses >= halve) {
            n_accesses = 0;
            for (double & score : by.score) {
                score = std::floor(score / 2);
            }
        }
    }

    admission::rule admits() const override { return strict ? admission::rule::scored_higher : admission::rule::anyone; }

    void reset() override {
        policy::reset();
        n_accesses = 0;
    }

    int64_t halve, n_accesses = 0;
    bool    strict;
};

// SpecMD. A resident is stale when it was neither used nor inserted in the current pass over the layers; the older pass goes first. Unsure: the order within a pass
// (here least recently used), and whether the prefetcher goes on from the last layer to the first of the next token (here it does).
struct least_stale : policy {
    least_stale(const expert_space & space, const residency & in, size_t ahead) : policy(space, in), ahead(std::min(ahead, space.n_layers() - 1)), previous(space.n_layers()) {}

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        std::fill(previous.begin(), previous.end(), std::vector<int32_t>());
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        policy::begin_pass(s, wishes);
        budget = in.n_slots(0) * (space.shared ? 1 : (int32_t) space.n_layers());
    }

    void observe(const event & e) override {
        policy::observe(e);
        for (const int32_t expert : e.experts) {
            by.score[(size_t) expert] = (double) n_passes;
        }
        previous[e.layer] = e.experts;
    }

    void inserted(int32_t expert) override { by.score[(size_t) expert] = (double) n_passes; }

    // What each of the next layers used for the previous token.
    void foresee(const event & e, std::vector<wish> & wishes) override {
        for (size_t d = 1; d <= ahead && budget > 0; d++) {
            const size_t layer = (e.layer + d) % space.n_layers();
            wish w = { wish::how::bring, layer, {}, &by };
            for (const int32_t expert : previous[layer]) {
                if (in.present(expert) || budget > 0) {   // those that are there must not make place
                    w.experts.push_back(expert);
                    budget -= !in.present(expert);
                }
            }
            wishes.push_back(std::move(w));
        }
    }

    size_t  ahead;
    int32_t budget = 0;   // insertions left in this step
    std::vector<std::vector<int32_t>> previous;   // per layer
};

// Belady: the one needed furthest in the future goes. Without force, misses need not be kept, and hits need not stay: of residents and event those that are needed soonest
// are kept, and no lossless policy without prefetch hits more.
struct belady : policy {
    belady(const expert_space & space, const residency & in, bool force) : policy(space, in), force(force) {}

    void begin_sequence(const future * all) override {
        policy::begin_sequence(all);
        known = all;
        now   = -1;
        next.assign((size_t) space.n_all(), 0);
        std::fill(by.score.begin(), by.score.end(), -HUGE_VAL);
        // What is there from the last sequence may be needed in this one.
        for (size_t layer = 0; known && layer < space.n_layers(); layer++) {
            for (int32_t key = space.first[layer]; key < space.first[layer + 1]; key++) {
                look_ahead(key, layer);
            }
        }
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        policy::begin_pass(s, wishes);
        now++;
    }

    void observe(const event & e) override {
        policy::observe(e);
        see(e);
    }

    void observe_prompt(const event & e) override { see(e); }

    void see(const event & e) {
        if (!known) {
            throw std::invalid_argument("policy belady knows the future, which only a simulation does");
        }
        for (const int32_t expert : e.experts) {
            look_ahead(expert, e.layer);
        }
    }

    // The sooner the next use after this step, the higher.
    void look_ahead(int32_t expert, size_t layer) {
        const std::vector<int32_t> & uses = known->passes_of[(size_t) expert];
        size_t & at = next[(size_t) expert];
        while (at < uses.size() && uses[at] <= now) {
            at++;
        }
        // Layers come one after the other within a step, which matters where all share one capacity.
        by.score[(size_t) expert] = at < uses.size() ? -((double) uses[at] * (double) space.n_layers() + (double) layer) : -HUGE_VAL;
    }

    admission::rule admits() const override { return force ? admission::rule::anyone : admission::rule::scored_higher; }
    bool keeps_members() const override { return force; }
    bool needs_future() const override { return true; }

    bool                force;
    const future *   known = nullptr;
    int32_t             now = -1;
    std::vector<size_t> next;   // per key: index into its steps
};

// A score function from outside.
struct custom : policy {
    custom(const expert_space & space, const residency & in, const policy_source & from) : policy(space, in), from(from) {}

    void observe(const event & e) override {
        policy::observe(e);
        const size_t at = (size_t) space.first[e.layer];
        from.score(from.user, (uint32_t) e.layer, (uint32_t) space.n_expert(e.layer), n_events, by.last_use.data() + at, by.n_uses.data() + at, e.probs, by.score.data() + at);
    }

    bool needs_probs() const override { return true; }

    policy_source from;
};

std::vector<policy_kind> use_policies() {
    using P = std::unique_ptr<policy>;
    return {
        { "lru", {}, [](const expert_space & s, const residency & in, const parameters &, const policy_source &) -> P { return std::make_unique<lru>(s, in); } },
        { "lfu", {}, [](const expert_space & s, const residency & in, const parameters &, const policy_source &) -> P { return std::make_unique<lfu>(s, in); } },
        { "lrfu", { { "lambda", { 0.5, 0, 1e6 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P { return std::make_unique<lrfu>(s, in, p.at("lambda").value); } },
        { "frequency", { { "halve", { 32768, 1, 1e15 } }, { "strict", { 0, 0, 1 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P {
              return std::make_unique<frequency>(s, in, (int64_t) p.at("halve").value, p.at("strict").value != 0);
          } },
        { "least-stale", { { "ahead", { 3, 0, 1000 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P {
              return std::make_unique<least_stale>(s, in, (size_t) p.at("ahead").value);
          } },
        { "belady", { { "force", { 1, 0, 1 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P { return std::make_unique<belady>(s, in, p.at("force").value != 0); } },
        { "custom", {},
          [](const expert_space & s, const residency & in, const parameters &, const policy_source & from) -> P {
              if (!from.score) {
                  throw std::invalid_argument("policy custom: wanted a score function");
              }
              return std::make_unique<custom>(s, in, from);
          } },
    };
}

} // namespace edgemoe
