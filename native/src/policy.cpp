#include "policy.h"

namespace edgemoe {

void policy::begin_sequence(const future *) {}

void policy::observe(const event & e) {
    n_events++;
    for (size_t i = 0; i < e.experts.size(); i++) {
        by.last_use[(size_t) e.experts[i]] = n_events;
        by.n_uses[(size_t) e.experts[i]]  += (uint64_t) e.n_tokens_of[i];
    }
}

void policy::reset() {
    by = scores((int32_t) by.score.size());
    n_events = n_passes = 0;
    begin_sequence(nullptr);
}

} // namespace edgemoe
