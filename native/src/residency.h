// Which experts of one layer lie in its slots, and who has to go when another comes. No I/O, no threads, no ggml: whoever owns a residency guards it.
//
// The two operators are those of the Temporal / Spatio-Temporal Router paper (algorithms 1 and 2): update brings in what an event has loaded, refine
// brings in what is expected to be needed. Both look at scores only; where these come from is the policy's affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgemoe {

// One layer in one step: the distinct experts that its tokens need, ascending, and how many tokens need each.
struct event {
    std::vector<int32_t> experts, n_tokens_of;
    int64_t              n_tokens;
};

// What victims are chosen by, per expert: the lowest score goes; of equal ones the least recently used, then the lower id.
struct scores {
    std::vector<double>   score;
    std::vector<uint64_t> last_use;   // number of the event
    std::vector<uint64_t> n_uses;     // tokens that used it

    explicit scores(int32_t n_expert) : score((size_t) n_expert, 0.0), last_use((size_t) n_expert, 0), n_uses((size_t) n_expert, 0) {}
    bool lower(int32_t a, int32_t b) const;
};

// What may come in after an event, in the place of something else. Demand loads and empty slots are free of it.
struct admission {
    bool    strict       = false;       // only an expert that was used more often than the one it replaces
    int32_t most_inserts = INT32_MAX;   // per event
};

struct residency {
    struct insertion { int32_t expert, slot, evicted; };   // evicted: -1 when the slot was empty

    residency(int32_t n_expert, int32_t n_slots);

    int32_t n_expert() const { return (int32_t) slot_of_expert.size(); }
    int32_t n_slots()  const { return (int32_t) slots.size(); }

    // The slot whose bytes may be used, or -1.
    int32_t slot_of(int32_t expert) const;
    // In a slot, or on its way there.
    bool    present(int32_t expert) const { return slot_of_expert[(size_t) expert] >= 0; }
    int32_t n_present() const { return n_filled; }

    // A pinned expert stays, and so does one that is on its way. Pins are counted; only what is present can be pinned.
    void pin(int32_t expert);
    void unpin(int32_t expert);

    // Takes the slot of the lowest expert that is neither pinned, on its way, nor marked in `keep` (per expert; may be empty) and begins the load of
    // `expert`, which is not present. False when nothing may be replaced.
    bool insert(int32_t expert, const scores & by, const std::vector<uint8_t> & keep, insertion & done);
    // The bytes of a slot are there, or will not come.
    void finish(int32_t slot, bool loaded);

    // After an event: brings in those of `candidates` that are absent, in their order. No member of the event is evicted.
    std::vector<insertion> update(const event & e, const std::vector<int32_t> & candidates, const scores & by, const admission & rule);
    // Before an event: of the `budget` best experts by score, an absent one replaces the lowest resident whose score is lower, or takes an empty slot.
    std::vector<insertion> refine(const scores & by, int32_t budget);

private:
    struct slot { int32_t expert = -1; int32_t n_pins = 0; bool loading = false; };

    int32_t victim(const scores & by, const std::vector<uint8_t> & keep) const;   // a slot, or -1

    std::vector<slot>    slots;
    std::vector<int32_t> slot_of_expert;
    int32_t              n_filled = 0;
};

} // namespace edgemoe
