// Policies: what an expert's place in the cache is worth, and which experts to bring in before they are asked for. The residency of the tier does the rest.
//
// A policy sees, in this order: a sequence begins; a step begins; for each layer the event (what the router chose), and after it the moment to say what is wanted next.
// It may look at the residency, but never changes it. Where its public description leaves something open, the reading taken is said where it is made.
#pragma once

#include "residency.h"

#include <map>
#include <string>

namespace edgemoe {

// What was learned from training traces, by name. Row-major.
struct table {
    std::vector<uint64_t> shape;
    std::vector<float>    data;
};
using tables = std::map<std::string, table>;

// Tokens that go through all layers together.
struct pass {
    const int32_t * token_ids = nullptr;   // NULL: not known
    int64_t         n_tokens = 0;
    int32_t         stage = -1;            // of a reasoning text; -1: not known
    bool            prompt = false;        // not what is decoded
};

// A sequence of which all is known, for policies that cheat. Steps are numbered from 0 in the order of begin_pass.
struct future {
    size_t               n_passes = 0;
    std::vector<std::vector<int32_t>> passes_of;   // per key: the steps that use it, ascending; without prompts
    std::vector<int32_t> stage;                   // per step
};

// Experts of a layer that are wanted in their slots.
struct wish {
    enum class how {
        bring,    // these, in the places of the lowest
        refine,   // the `budget` best of the keys from first to end, where they are better than what is there
        stage,    // beside the slots, for the layer's next event only
    };
    how                  kind;
    size_t               layer;
    std::vector<int32_t> experts;         // bring, stage: most urgent first
    const scores *       by = nullptr;    // bring, refine: whose place they take
    int32_t              first = 0, end = 0, budget = 0;
};

struct policy {
    policy(const expert_space & space, const residency & in) : by(space.n_all()), space(space), in(in) {}
    virtual ~policy() = default;

    // `known`: NULL outside of a simulation.
    virtual void begin_sequence(const future * known);
    virtual void begin_pass(const pass &, std::vector<wish> &) { n_passes++; }
    // What the router chose; after it the scores are up to date.
    virtual void observe(const event & e);
    // A prompt says what is popular, not what is recent: by default it is not counted.
    virtual void observe_prompt(const event &) {}
    // The event is over: what to bring in now, for whichever layer. After a prompt: nothing by default.
    virtual void foresee(const event &, std::vector<wish> &) {}
    virtual void foresee_prompt(const event &, std::vector<wish> &) {}
    virtual void inserted(int32_t) {}
    // Whether a miss is a reason to bring the expert in, and whether it may take another's place.
    virtual bool admits_misses() const { return true; }
    virtual admission::rule admits() const { return admission::rule::anyone; }
    // Whether what an event used stays through it. If not, what stays is chosen from residents and event alike.
    virtual bool keeps_members() const { return true; }
    virtual bool needs_probs() const { return false; }
    virtual bool needs_hidden() const { return false; }
    // What learned heads say of the layer's next event, and of the layer that comes next.
    virtual bool needs_next() const { return false; }
    virtual bool needs_successor() const { return false; }
    virtual bool needs_tokens() const { return false; }
    virtual bool needs_future() const { return false; }
    // Starts over, as when the model was opened.
    virtual void reset();

    scores by;

protected:
    const expert_space & space;
    const residency &    in;
    uint64_t             n_events = 0, n_passes = 0;
};

// A score function from outside. Fills score[n_expert] of the layer after each of its events; the lowest goes.
using score_function = void (*)(void * user, uint32_t layer, uint32_t n_expert, uint64_t n_events, const uint64_t * last_use, const uint64_t * n_uses, const float * probs,
                                double * score);

struct policy_source {
    const tables * learned = nullptr;
    bool           heads = false;        // events come with what learned heads say
    score_function score = nullptr;      // of the policy "custom"
    void *         user = nullptr;
};

} // namespace edgemoe
