// Policies: what an expert's place in the cache is worth, learned from the events of one layer. They know no slots, only which experts are present.
#pragma once

#include "residency.h"

#include <memory>
#include <string>

namespace edgemoe {

struct policy {
    explicit policy(int32_t n_expert) : by(n_expert) {}
    virtual ~policy() = default;

    // Counts an event; after it the scores are up to date.
    virtual void observe(const event & e);
    // A prompt says what is popular, not what is recent: by default it is not counted.
    virtual void observe_prompt(const event &) {}
    // Whether a miss is a reason to bring the expert in.
    virtual bool admits_misses() const { return true; }
    // After observe: true when the residents should be chosen anew (residency::refine).
    virtual bool wants_refine(const residency &) { return false; }
    // Starts over, as when the model was opened.
    virtual void reset();

    scores by;

protected:
    uint64_t n_events = 0;
};

// `text`: a name, or name:key=value,key=value. Throws std::invalid_argument that says what was wanted.
//   lru                                  the expert that was not used for longest goes
//   placement:every=32,decay=0.5,bonus=2 chosen anew every so many tokens, by how many of these used an expert, plus decay times the score so far, plus a bonus for
//                                        residents (every/16 when not given); nothing moves in between
std::unique_ptr<policy> make_policy(const std::string & text, int32_t n_expert);

} // namespace edgemoe
