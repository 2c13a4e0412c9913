// A tier of expert slots: for every layer which experts are in, by which policy, with one loader for all. What a slot is made of is the business of whoever
// gives the `upload` function; here slots are numbers.
//
// Threads: any number may run events (one llama context each); the loader's thread reports back. All meet in `mutex`, which is never held during an upload or a
// computation. Between begin and end the experts that an event uses are pinned.
#pragma once

#include "loader.h"
#include "miss_choice.h"
#include "policy.h"
#include "residency.h"

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace edgemoe {

// Of events with few tokens (decoding) and of prompts, apart: hit rates are those of decoding.
struct access_counts {
    uint64_t n_events = 0, n_accesses = 0;           // A: distinct experts, summed over the events
    uint64_t n_hits = 0, n_demand = 0, n_computed = 0;   // in a slot; D: loaded, and waited for; C: computed on the CPU. Their sum is A.
    uint64_t n_proactive = 0, n_evicted = 0, n_failed = 0;   // P; residents that had to go; uploads that failed
    uint64_t bytes_loaded = 0, stall_us = 0;         // by D and P; waiting for D

    access_counts & operator+=(const access_counts & o);
};

struct tier_options {
    int32_t     n_slots = 0;           // per layer
    std::string policy  = "placement";
    std::string misses  = "auto";      // cpu, load, auto
    admission   rule;
    bool        seed    = true;        // a prompt's experts are a reason to come in
    int32_t     n_staging = 0;         // slots beside those of the layers, for all of them, through which prompts stream experts
};

struct tier_layer {
    int32_t n_expert;
    size_t  bytes_per_expert;
    int     kind;              // layers of one kind have the same type of weights, so that their rates compare
};

struct tier {
    enum class phase { decode, prompt };
    // More tokens than this are a prompt. Up to here: one token, a few sequences at once, a draft.
    static constexpr int64_t MOST_DECODED = 16;

    // Without `upload` nothing moves: an expert is in its slot as soon as it is asked for. That is how a cache is simulated.
    tier(std::vector<tier_layer> layers, const tier_options & options, std::function<bool(const transfer &)> upload);

    enum class arrival : uint8_t { none, demanded, late, staged };   // late: a prefetch that was still on its way, which counts as a hit
    // Where the experts of one event are computed.
    struct visit {
        size_t               layer;
        event                e;
        phase                when;
        std::vector<int32_t> slot;      // per expert of the event; -1: on the CPU
        std::vector<arrival> awaited;   // per expert: being loaded, wait before the slot is used
        bool                 any_awaited = false;
        bool                 left_alone = false;   // the device, though experts are there
        int32_t              n_there = 0;          // experts that are
        std::vector<int32_t> staged;    // experts in staging slots, in the order of these: slots n_slots(layer) ...
    };
    visit begin(size_t layer, event e);
    // Until all awaited experts are in their slots; the slot of one that failed becomes -1.
    void  wait(visit & v);
    // What it took: seconds, bytes and routed pairs of the experts computed on the CPU; seconds on the device of those that were awaited; seconds and pairs of it all.
    struct cost { double cpu_seconds, cpu_bytes; int64_t n_cpu_pairs; double late_seconds, seconds; int64_t n_pairs; };
    void  end(visit & v, const cost & c);

    // Until nothing is on its way.
    void  wait_idle();
    // Nothing moves any more: before the contexts that use the device are freed. Only for a tier that is about to go.
    void  stop();
    // Evicts everything, forgets scores; counters stay. No event may be running.
    void  clear();
    access_counts counts(phase when, size_t layer) const;
    size_t        n_layers() const { return layers.size(); }
    int32_t       n_expert(size_t layer) const { return layers[layer].info.n_expert; }
    int32_t       n_slots(size_t layer) const { return layers[layer].in.n_slots(); }
    std::vector<int32_t> residents(size_t layer) const;
    // The mode of misses now, and the rates of layers like this one, in bytes per second.
    miss_mode     mode() const;
    double        cpu_rate(size_t layer) const;
    double        load_rate(size_t layer) const;

private:
    struct layer_state {
        tier_layer              info;
        residency               in;
        std::unique_ptr<policy> by;
        std::array<access_counts, 2> counts;
    };

    void demand(visit & v);
    void stream(visit & v);
    bool staged(int32_t slot, size_t layer) const { return slot >= layers[layer].in.n_slots(); }
    void bring_in(const visit & v);
    void request(size_t layer, const residency::insertion & i, phase when, bool demand);
    void finished(const transfer & t, bool loaded);
    bool timed_upload(const transfer & t);

    tier_options             options;
    std::function<bool(const transfer &)> upload;
    mutable std::mutex       mutex;
    std::condition_variable  arrived;
    std::vector<layer_state> layers;
    miss_choice              choice;
    miss_choice              prompt_choice;      // between hits on the device and all on the CPU; its steps are events
    stream_choice            prompts;
    enum class staging : uint8_t { loading, loaded, failed };
    std::vector<staging>     stage;              // of the staging slots
    bool                     stage_taken = false;   // by the one event that may use them
    size_t                   last_layer = 0;     // of the step that is running
    double                   step_seconds = 0;
    int64_t                  step_pairs = 0;
    std::unique_ptr<loader>  moving;             // last: its thread reports to the rest
};

} // namespace edgemoe
