#include "policy.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

namespace edgemoe {

void policy::observe(const event & e) {
    n_events++;
    for (size_t i = 0; i < e.experts.size(); i++) {
        by.last_use[(size_t) e.experts[i]] = n_events;
        by.n_uses[(size_t) e.experts[i]]  += (uint64_t) e.n_tokens_of[i];
    }
}

void policy::reset() {
    by = scores((int32_t) by.score.size());
    n_events = 0;
}

struct lru : policy {
    using policy::policy;

    void observe(const event & e) override {
        policy::observe(e);
        for (const int32_t expert : e.experts) {
            by.score[(size_t) expert] = (double) n_events;
        }
    }
};

// Where misses are computed in place, moving rarely keeps about the hit rate of LRU at a small part of its traffic.
struct placement : policy {
    placement(int32_t n_expert, int64_t every, double decay, double bonus)
        : policy(n_expert), every(every), decay(decay), bonus(bonus), recent((size_t) n_expert, 0), old((size_t) n_expert, 0) {}

    void observe(const event & e) override {
        policy::observe(e);
        for (size_t i = 0; i < e.experts.size(); i++) {
            recent[(size_t) e.experts[i]] += e.n_tokens_of[i];
        }
        n_tokens += e.n_tokens;
    }

    void observe_prompt(const event & e) override { observe(e); }

    bool admits_misses() const override { return false; }

    bool wants_refine(const residency & r) override {
        if (n_tokens < every) {
            return false;
        }
        for (size_t i = 0; i < old.size(); i++) {
            old[i] = (double) recent[i] + decay * old[i];
            recent[i] = 0;
            by.score[i] = old[i] + (r.present((int32_t) i) ? bonus : 0.0);
        }
        n_tokens = 0;
        return true;
    }

    void reset() override {
        policy::reset();
        recent.assign(recent.size(), 0);
        old.assign(old.size(), 0.0);
        n_tokens = 0;
    }

    int64_t every;
    double  decay, bonus;
    int64_t n_tokens = 0;
    std::vector<int64_t> recent;
    std::vector<double>  old;
};

// --- by name ---

using parameters = std::map<std::string, double>;

static parameters parse(const std::string & text, const std::string & name, parameters known) {
    size_t at = name.size();
    while (at < text.size()) {
        const size_t end    = std::min(text.find(',', at + 1), text.size());
        const std::string p = text.substr(at + 1, end - at - 1);
        const size_t equals = p.find('=');
        const auto   it     = known.find(p.substr(0, equals));
        if (equals == std::string::npos || it == known.end()) {
            std::string wanted;
            for (const auto & [key, value] : known) {
                wanted += (wanted.empty() ? "" : ", ") + key + "=";
            }
            throw std::invalid_argument("policy " + text + ": parameter " + p + ", wanted " + (wanted.empty() ? "none" : wanted));
        }
        try {
            size_t used;
            it->second = std::stod(p.substr(equals + 1), &used);
            if (used != p.size() - equals - 1 || !std::isfinite(it->second)) {
                throw std::invalid_argument("");
            }
        } catch (const std::exception &) {
            throw std::invalid_argument("policy " + text + ": " + p + ", wanted a number");
        }
        at = end;
    }
    return known;
}

std::unique_ptr<policy> make_policy(const std::string & text, int32_t n_expert) {
    const std::string name = text.substr(0, text.find(':'));
    if (name == "lru") {
        parse(text, name, {});
        return std::make_unique<lru>(n_expert);
    }
    if (name == "placement") {
        const parameters p = parse(text, name, { { "every", 32 }, { "decay", 0.5 }, { "bonus", -1 } });
        const double every = p.at("every"), decay = p.at("decay"), bonus = p.at("bonus");
        if (every < 1 || every > 1e9 || decay < 0 || decay >= 1) {
            throw std::invalid_argument("policy " + text + ": wanted every of 1 or more (up to 1e9), decay from 0 to below 1");
        }
        return std::make_unique<placement>(n_expert, (int64_t) every, decay, bonus < 0 ? every / 16 : bonus);
    }
    throw std::invalid_argument("policy " + text + ", wanted lru or placement");
}

} // namespace edgemoe
