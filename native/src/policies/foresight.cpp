// Sets that are chosen by what will be used: how much could be won. Bounds, not policies.
#include "chosen_set.h"

#include <algorithm>
#include <stdexcept>

namespace edgemoe {

// With perfect knowledge of what the coming stage (every = 0) or the coming tokens will use.
struct foresight : chosen_set {
    foresight(const expert_space & space, const residency & in, int64_t every) : chosen_set(space, in, 0, 0), every(every) {}

    void begin_sequence(const future * all) override {
        chosen_set::begin_sequence(all);
        known = all;
        now   = -1;
        until = 0;
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        chosen_set::begin_pass(s, wishes);
        if (!known) {
            throw std::invalid_argument("policies oracle and foresight know the future, which only a simulation does");
        }
        if (++now < until) {
            return;
        }
        until = now + 1;
        while ((size_t) until < known->n_passes && (every > 0 ? until < now + every : known->stage[(size_t) until] == known->stage[(size_t) now])) {
            until++;
        }
        for (size_t key = 0; key < known->passes_of.size(); key++) {
            const std::vector<int32_t> & uses = known->passes_of[key];
            recent[key] = (double) (std::lower_bound(uses.begin(), uses.end(), (int32_t) until) - std::lower_bound(uses.begin(), uses.end(), (int32_t) now));
        }
        choose_all(wishes);
    }

    void observe(const event & e) override { policy::observe(e); }
    bool needs_future() const override { return true; }

    int64_t every, now = -1, until = 0;
    const future * known = nullptr;
};

// The same for stages whose counts were written down when the text was computed before: that is how an engine can be given the future. Learns `coming` [stages, layers,
// experts], by the number of the stage; of later stages nothing is known, and nothing moves.
struct replayed_oracle : chosen_set {
    replayed_oracle(const expert_space & space, const residency & in, const table & coming) : chosen_set(space, in, 0, 0), coming(coming) {
        need_equal_layers(space, "oracle");
        if (coming.shape.size() != 3 || coming.shape[1] != space.n_layers() || coming.shape[2] != (uint64_t) space.n_expert(0)) {
            throw std::invalid_argument("policy oracle: table coming [stages, layers, experts] was made for another model");
        }
    }

    void begin_sequence(const future * known) override {
        chosen_set::begin_sequence(known);
        current = -1;
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        chosen_set::begin_pass(s, wishes);
        if (s.stage == current || s.stage < 0 || (uint64_t) s.stage >= coming.shape[0] || s.prompt) {
            return;
        }
        current = s.stage;
        const size_t n = (size_t) space.n_all();
        std::copy_n(coming.data.begin() + (std::ptrdiff_t) (n * (size_t) current), n, recent.begin());
        choose_all(wishes);
    }

    void observe(const event & e) override { policy::observe(e); }
    void observe_prompt(const event & e) override { policy::observe(e); }

    const table coming;
    int32_t     current = -1;
};

std::vector<policy_kind> foresight_policies() {
    using P = std::unique_ptr<policy>;
    return {
        { "oracle", {},
          [](const expert_space & s, const residency & in, const parameters &, const policy_source & from) -> P {
              if (from.learned && from.learned->count("coming")) {
                  return std::make_unique<replayed_oracle>(s, in, from.learned->at("coming"));
              }
              return std::make_unique<foresight>(s, in, 0);
          } },
        { "foresight", { { "every", { 64, 1, 1e9 } } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source &) -> P {
              return std::make_unique<foresight>(s, in, (int64_t) p.at("every").value);
          } },
    };
}

} // namespace edgemoe
