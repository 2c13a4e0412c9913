#include "residency.h"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace edgemoe {

expert_space::expert_space(const std::vector<int32_t> & n_expert, bool shared) : first(1, 0), shared(shared) {
    for (const int32_t n : n_expert) {
        first.push_back(first.back() + n);
    }
}

size_t expert_space::layer_of(int32_t expert) const {
    return (size_t) (std::upper_bound(first.begin(), first.end(), expert) - first.begin()) - 1;
}

bool admission::admits(int32_t expert, int32_t victim, const scores & s) const {
    switch (by) {
        case rule::used_more:     return s.n_uses[(size_t) expert] > s.n_uses[(size_t) victim];
        case rule::scored_higher: return s.score[(size_t) expert] > s.score[(size_t) victim];
        default:                  return true;
    }
}

residency::residency(const expert_space & space, int32_t n_slots_per_layer)
    : space(space), cost(space.n_layers(), 1), slot_of_expert((size_t) space.n_all(), -1), protection((size_t) space.n_all(), 0), excluded((size_t) space.n_all(), false) {
    for (size_t layer = 0; layer < space.n_layers(); layer++) {
        const int32_t n = std::min(space.n_expert(layer), n_slots_per_layer);
        if (layer == 0 || !space.shared) {
            pools.push_back({ slots.size(), 0, 0, 0, 0 });
        }
        pools.back().n      += n;
        pools.back().budget += n;
        slots.resize(slots.size() + (size_t) n);
        first_slot.insert(first_slot.end(), (size_t) space.n_expert(layer), pools.back().first);
    }
}

residency::residency(const expert_space & space, const std::vector<int64_t> & cost, int64_t budget)
    : space(space), cost(cost), slot_of_expert((size_t) space.n_all(), -1), first_slot((size_t) space.n_all(), 0), protection((size_t) space.n_all(), 0), excluded((size_t) space.n_all(), false) {
    assert(space.shared);
    const int64_t n = budget / *std::min_element(cost.begin(), cost.end());
    pools.push_back({ 0, (int32_t) std::min<int64_t>(n, space.n_all()), 0, budget, 0 });
    slots.resize((size_t) pools[0].n);
}

int64_t residency::cost_of(int32_t expert) const { return cost[space.layer_of(expert)]; }

int32_t residency::slot_of(int32_t expert) const {
    const int32_t at = slot_of_expert[(size_t) expert];
    return at >= 0 && !slots[first_slot[(size_t) expert] + (size_t) at].loading ? at : -1;
}

void residency::pin(int32_t expert) {
    assert(present(expert));
    slots[first_slot[(size_t) expert] + (size_t) slot_of_expert[(size_t) expert]].n_pins++;
}

void residency::unpin(int32_t expert) {
    assert(present(expert));
    slot & at = slots[first_slot[(size_t) expert] + (size_t) slot_of_expert[(size_t) expert]];
    assert(at.n_pins > 0);
    at.n_pins--;
}

void residency::protect(const std::vector<int32_t> & experts) {
    now++;
    for (const int32_t expert : experts) {
        protection[(size_t) expert] = now;
    }
}

size_t residency::lowest(const pool & p, const scores & by) const {
    size_t found = NO_SLOT;
    for (size_t s = p.first; s < p.first + (size_t) p.n; s++) {
        const slot & at = slots[s];
        if (at.expert < 0 || at.loading || at.n_pins > 0 || protection[(size_t) at.expert] == now) {
            continue;
        }
        if (found == NO_SLOT || by.lower(at.expert, slots[found].expert)) {
            found = s;
        }
    }
    return found;
}

size_t residency::empty(const pool & p) const {
    size_t s = p.first;
    while (slots[s].expert >= 0) {
        s++;
    }
    return s;
}

void residency::leave(pool & p, slot & at) {
    slot_of_expert[(size_t) at.expert] = -1;
    p.spent -= cost_of(at.expert);
    p.n_filled--;
    at = {};
}

bool residency::insert(size_t layer, int32_t expert, const scores & by, insertion & done, const admission & rule) {
    assert(!present(expert));
    if (excluded[(size_t) expert]) {
        return false;
    }
    pool & p = pools[space.pool_of(layer)];
    size_t s;
    int32_t evicted = -1;
    if (full(layer)) {
        s = lowest(p, by);
        if (s == NO_SLOT || !rule.admits(expert, slots[s].expert, by)) {
            return false;
        }
        evicted = slots[s].expert;
        leave(p, slots[s]);
        while (p.spent + cost[layer] > p.budget) {
            const size_t more = lowest(p, by);
            if (more == NO_SLOT) {
                gone.push_back(evicted);   // all others are in use: in vain
                return false;
            }
            gone.push_back(slots[more].expert);
            leave(p, slots[more]);
        }
    } else {
        s = empty(p);
    }
    done = { expert, (int32_t) (s - p.first), evicted };
    slots[s].expert  = expert;
    slots[s].loading = true;
    slot_of_expert[(size_t) expert] = done.slot;
    p.spent += cost[layer];
    p.n_filled++;
    return true;
}

void residency::update(const event & e, const std::vector<int32_t> & candidates, const scores & by, const admission & rule, bool keep_members, std::vector<insertion> & done) {
    if (keep_members) {
        protect(e.experts);
    }
    int32_t n_inserted = 0;
    for (size_t i = 0; i < candidates.size() && n_inserted < rule.most_inserts; i++) {
        insertion in;
        if (!present(candidates[i]) && insert(e.layer, candidates[i], by, in, rule)) {
            done.push_back(in);
            n_inserted++;
        }
    }
    protect({});
}

void residency::refine(size_t layer, int32_t first, int32_t end, const scores & by, int32_t budget, std::vector<insertion> & done) {
    std::vector<int32_t> best((size_t) (end - first));
    std::iota(best.begin(), best.end(), first);
    const auto last = best.begin() + std::min(budget, end - first);
    std::partial_sort(best.begin(), last, best.end(), [&](int32_t a, int32_t b) { return by.lower(b, a); });
    for (auto at = best.begin(); at != last; at++) {
        // An empty slot is filled as well, but not with what was never wanted.
        if (present(*at) || (!full(layer) && by.score[(size_t) *at] <= 0)) {
            continue;
        }
        insertion in;
        if (insert(layer, *at, by, in, { admission::rule::scored_higher })) {
            done.push_back(in);
        }
    }
}

void residency::bring(size_t layer, const std::vector<int32_t> & wanted, const scores & by, std::vector<insertion> & done) {
    protect(wanted);
    for (const int32_t expert : wanted) {
        insertion in;
        if (!present(expert) && insert(layer, expert, by, in)) {
            done.push_back(in);
        }
    }
    protect({});
}

void residency::finish(size_t layer, int32_t s, bool loaded) {
    pool & p  = pools[space.pool_of(layer)];
    slot & at = slots[p.first + (size_t) s];
    assert(at.loading);
    at.loading = false;
    if (!loaded) {
        leave(p, at);
    }
}

} // namespace edgemoe
