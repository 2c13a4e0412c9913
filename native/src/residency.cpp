#include "residency.h"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace edgemoe {

bool scores::lower(int32_t a, int32_t b) const {
    const size_t i = (size_t) a, j = (size_t) b;
    if (score[i] != score[j]) {
        return score[i] < score[j];
    }
    return last_use[i] != last_use[j] ? last_use[i] < last_use[j] : a < b;
}

residency::residency(int32_t n_expert, int32_t n_slots) : slots((size_t) std::min(n_expert, n_slots)), slot_of_expert((size_t) n_expert, -1) {}

int32_t residency::slot_of(int32_t expert) const {
    const int32_t at = slot_of_expert[(size_t) expert];
    return at >= 0 && !slots[(size_t) at].loading ? at : -1;
}

void residency::pin(int32_t expert) {
    assert(present(expert));
    slots[(size_t) slot_of_expert[(size_t) expert]].n_pins++;
}

void residency::unpin(int32_t expert) {
    assert(present(expert) && slots[(size_t) slot_of_expert[(size_t) expert]].n_pins > 0);
    slots[(size_t) slot_of_expert[(size_t) expert]].n_pins--;
}

int32_t residency::victim(const scores & by, const std::vector<uint8_t> & keep) const {
    int32_t lowest = -1;
    for (int32_t s = 0; s < n_slots(); s++) {
        const slot & at = slots[(size_t) s];
        if (at.expert < 0) {
            return s;
        }
        if (at.loading || at.n_pins > 0 || (!keep.empty() && keep[(size_t) at.expert])) {
            continue;
        }
        if (lowest < 0 || by.lower(at.expert, slots[(size_t) lowest].expert)) {
            lowest = s;
        }
    }
    return lowest;
}

bool residency::insert(int32_t expert, const scores & by, const std::vector<uint8_t> & keep, insertion & done) {
    assert(!present(expert));
    const int32_t s = victim(by, keep);
    if (s < 0) {
        return false;
    }
    slot & at = slots[(size_t) s];
    done = { expert, s, at.expert };
    if (at.expert >= 0) {
        slot_of_expert[(size_t) at.expert] = -1;
    } else {
        n_filled++;
    }
    at.expert  = expert;
    at.loading = true;
    slot_of_expert[(size_t) expert] = s;
    return true;
}

void residency::finish(int32_t s, bool loaded) {
    slot & at = slots[(size_t) s];
    assert(at.loading);
    at.loading = false;
    if (!loaded) {
        slot_of_expert[(size_t) at.expert] = -1;
        at = {};
        n_filled--;
    }
}

std::vector<residency::insertion> residency::update(const event & e, const std::vector<int32_t> & candidates, const scores & by, const admission & rule) {
    std::vector<insertion> done;
    std::vector<uint8_t> keep((size_t) n_expert(), 0);
    for (const int32_t expert : e.experts) {
        keep[(size_t) expert] = 1;
    }
    for (const int32_t expert : candidates) {
        if ((int32_t) done.size() >= rule.most_inserts) {
            break;
        }
        if (present(expert)) {
            continue;
        }
        const int32_t s = victim(by, keep);
        const int32_t replaced = s < 0 ? -1 : slots[(size_t) s].expert;
        if (s < 0 || (rule.strict && replaced >= 0 && by.n_uses[(size_t) expert] <= by.n_uses[(size_t) replaced])) {
            continue;
        }
        insertion i;
        insert(expert, by, keep, i);
        done.push_back(i);
    }
    return done;
}

std::vector<residency::insertion> residency::refine(const scores & by, int32_t budget) {
    std::vector<insertion> done;
    std::vector<int32_t> best((size_t) n_expert());
    std::iota(best.begin(), best.end(), 0);
    const auto end = best.begin() + std::min(budget, n_expert());
    std::partial_sort(best.begin(), end, best.end(), [&](int32_t a, int32_t b) { return by.lower(b, a); });
    for (auto at = best.begin(); at != end; at++) {
        if (present(*at)) {
            continue;
        }
        const int32_t s = victim(by, {});
        const int32_t replaced = s < 0 ? -1 : slots[(size_t) s].expert;
        // An empty slot is filled as well, but not with what was never wanted.
        if (s < 0 || by.score[(size_t) *at] <= (replaced >= 0 ? by.score[(size_t) replaced] : 0.0)) {
            continue;
        }
        insertion i;
        insert(*at, by, {}, i);
        done.push_back(i);
    }
    return done;
}

} // namespace edgemoe
