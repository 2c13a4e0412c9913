// The experts of one model that are in RAM, where not all of them fit: slots of pages within a budget, the tier that decides what is in them, and the reads that bring them
// from the disk. Shared by all contexts of the model.
#pragma once

#include "expert_memory.h"
#include "router_ahead.h"
#include "store.h"
#include "tier.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>

namespace edgemoe {

struct ram_options {
    tier_options slots;             // without the costs
    uint64_t     bytes = 0;         // of all slots
    uint32_t     fail_every = 0;    // for tests: every so manieth read fails
    size_t       most_read = 0;     // for tests: bytes per call of the system
    isa          level = isa::none; // of the kernels that guess ahead
};

struct ram_cache : carrier {
    // Throws when the budget is too small for what one layer needs at a time.
    ram_cache(const source & s, store & from, expert_memory & memory, const ram_options & options);

    struct counts { uint64_t bytes_read, n_reads, busy_us; };   // busy: some read was on its way
    counts      reads() const;
    // What went wrong with the last read that failed.
    std::string error() const;
    int64_t     budget() const { return slots_budget; }
    int64_t     staging() const { return n_stage * largest; }   // bytes, like the budget

    // A layer's event begins, with this input [n_in, n_tokens]: what the next layer is likely to need is read, if that pays.
    void look_ahead(size_t layer, const float * x, size_t stride, int64_t n_in, int64_t n_tokens, int64_t n_used);

    // The bytes of an expert in RAM, kept there until give_back; false when it is not there.
    bool borrow(size_t layer, int32_t expert) { return experts.hold(layer, expert); }
    void give_back(size_t layer, int32_t expert) { experts.let_go(layer, expert); }
    // Reads an expert to somewhere else. Throws.
    void read(size_t layer, int32_t expert, char * const * dst) { read(layer, expert, dst, [] {}); }

private:
    bool carry(const transfer & t) override;
    bool adopt(const transfer & t) override;
    void left(size_t layer, int32_t expert) override;
    void read(size_t layer, int32_t expert, char * const * dst, const std::function<void()> & half_done);
    tier_options tier_options_of(const source & s, const ram_options & o);

    store &         from;
    expert_memory & memory;
    const uint32_t  fail_every;
    const size_t    most_read;
    int64_t         slots_budget = 0;
    int64_t         largest = 0;        // slot
    int32_t         n_stage = 0;
    struct layout { size_t n_projections, down; };
    std::vector<layout> layouts;
    const router_ahead  routers;
    std::atomic<uint32_t> n_tried{0};

    mutable std::mutex mutex;   // of what follows
    std::string        last_error;
    counts             done = {};
    size_t             n_active = 0;
    std::chrono::steady_clock::time_point active_since;

public:
    tier experts;   // last: its lanes use the rest
};

} // namespace edgemoe
