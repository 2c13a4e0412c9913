// A tier of expert slots, on a device or in RAM: which experts are in, by which policy, with one loader for all layers. What a slot is made of is the business of the
// carrier; here slots are numbers.
//
// Threads: any number may run events (one llama context each); the loader's lanes report back. All meet in `mutex`, which is never held while bytes move or experts are
// computed. Between begin and end the experts that an event uses are pinned.
#pragma once

#include "loader.h"
#include "miss_choice.h"
#include "policies/policies.h"
#include "residency.h"

#include <array>
#include <chrono>
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
    uint64_t n_unused = 0;                           // of those that had to go: came in as P and were never used
    uint64_t bytes_loaded = 0, stall_us = 0;         // by D and P; waiting for D

    access_counts & operator+=(const access_counts & o);
};

// Who moves bytes into slots.
struct carrier {
    virtual ~carrier() = default;
    // Brings an expert into a slot, however long that takes. On a lane of the loader; must not throw. False: it failed.
    virtual bool carry(const transfer & t) = 0;
    // True when the slot has the expert's bytes at once, because they are in a staging slot whose contents need not be moved.
    virtual bool adopt(const transfer &) { return false; }
    // Evicted, and its slot stays empty.
    virtual void left(size_t layer, int32_t expert) { (void) layer, (void) expert; }
};

// Whether experts are brought in that the next layer is likely to need: never, always, or when steps are faster with it.
enum class read_ahead { off, on, automatic };

struct tier_options {
    int32_t       n_slots = 0;           // per layer
    bool          shared  = false;       // of all layers together; a device's slots belong to their layer
    std::vector<int64_t> cost;           // of an expert per layer, for slots that are shared within a budget
    int64_t       budget  = 0;           // 0: n_slots
    bool          must_load = false;     // nothing can be computed where it lies: every miss is loaded, of a prompt too
    lanes         ways;
    read_ahead    ahead = read_ahead::off;
    std::string   policy  = "placement";
    policy_source from;                  // what the policy has learned; the tier keeps a copy
    std::string   misses  = "auto";      // cpu, load, auto
    admission     rule;
    bool          seed    = true;        // a prompt's experts are a reason to come in
    int32_t       n_staging = 0;         // slots beside those of the layers, for all of them: prompts stream experts through them, and misses that are not to stay
    bool          inline_loads = false;  // a load is done when it is asked for, so that nothing depends on time
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

    // Without a carrier nothing moves: an expert is in its slot as soon as it is asked for. That is how a cache is simulated.
    tier(std::vector<tier_layer> layers, const tier_options & options, carrier * by);

    // late: a prefetch that was still on its way, which counts as a hit; pending: there is no slot for it yet (must_load only)
    enum class arrival : uint8_t { none, demanded, late, staged, pending };
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
        std::vector<float>   probs, hidden, next, successor;   // of the event, where it does not bring its own
        bool                 uses_stage = false;   // some of its experts are in staging slots: n_slots(layer) ...
        std::vector<bool>    named, half_named;    // by next()
    };
    // What the coming steps are made of; to be said before each step, or not at all.
    void  announce(const pass & s);
    // What the router of a layer said, for the event of it that comes next: probabilities of its experts, and the router's input (or nothing).
    void  tell(size_t layer, std::vector<float> probs, std::vector<float> hidden);
    // And what learned heads say of it (or nothing).
    void  tell_heads(size_t layer, std::vector<float> next, std::vector<float> successor);
    // A new text: policies forget what belongs to the last one.
    void  begin_sequence(const future * known);
    // `e` has the experts' numbers in their layer; the visit's event has their keys. A step begins with a layer that is not behind the last one.
    visit begin(event e);
    // Until all awaited experts are in their slots; the slot of one that failed becomes -1.
    void  wait(visit & v);
    // An expert of the event, by its place in it. Not whole: all of it but what is used last is there.
    struct arrived_expert { size_t i; bool whole; };
    // must_load: waits until further experts of the event are in their slots and names them; false once all are named as whole. What has no slot yet gets one as others are
    // released. `failed`: some that could not be loaded; the event cannot be computed.
    bool  next(visit & v, std::vector<arrived_expert> & found, bool & failed);
    // By the carrier, of a transfer that goes on: all is there but what is used last.
    void  half_there(const transfer & t);
    // Nothing of the event has to be waited for.
    static bool all_there(const visit & v);
    // The i-th expert of the event has been computed.
    void  release(visit & v, size_t i);
    // Whether guesses are welcome now.
    bool  looks_ahead() const;
    // The experts that the next event of a layer is likely to need, the likeliest first. It costs nothing that is known to be needed its place.
    void  expect(size_t layer, const std::vector<int32_t> & experts);
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
    int32_t       n_expert(size_t layer) const { return space.n_expert(layer); }
    int32_t       n_slots(size_t layer) const { return in.n_slots(layer); }
    // Of an expert's number in its layer its key, and back.
    int32_t       key_of(size_t layer, int32_t expert) const { return space.first[layer] + expert; }
    int32_t       expert_of(size_t layer, int32_t key) const { return key - space.first[layer]; }
    bool          needs_probs() const { return by->needs_probs(); }
    bool          needs_hidden() const { return by->needs_hidden(); }
    bool          needs_next() const { return by->needs_next(); }
    bool          needs_successor() const { return by->needs_successor(); }
    bool          needs_tokens() const { return by->needs_tokens(); }
    bool          needs_future() const { return by->needs_future(); }
    std::vector<int32_t> residents(size_t layer) const;
    // Per expert of a layer, the tokens that used it since the start or the last clear(); those of prompts where the policy hears them.
    std::vector<uint64_t> uses(size_t layer) const;
    // An expert that is in its slot stays there until it is let go; false when it is not.
    bool          hold(size_t layer, int32_t expert);
    void          let_go(size_t layer, int32_t expert);
    // Of the budget, by what is in the slots of this layer's pool, and how many that are.
    int64_t       spent(size_t layer) const;
    int32_t       n_present(size_t layer) const;
    size_t        bytes_per_expert(size_t layer) const { return layers[layer].info.bytes_per_expert; }
    // The mode of misses now, and the rates of layers like this one, in bytes per second.
    miss_mode     mode() const;
    double        cpu_rate(size_t layer) const;
    double        load_rate(size_t layer) const;

private:
    struct layer_state {
        tier_layer info;
        std::array<access_counts, 2> counts;
        std::vector<float> probs, hidden, next, successor;   // that the router and the heads have told
    };
    enum class staging : uint8_t { empty, loading, loaded, failed };
    struct staging_slot { int32_t expert = -1; staging state = staging::empty; bool in_use = false; };

    const std::vector<size_t> & by_worth(const visit & v);   // until it is called again
    void demand(visit & v);
    void stream(visit & v);
    bool through_stage(visit & v, size_t i, size_t & at);
    int32_t free_stage(size_t from) const;
    void release_stage(visit & v);
    void empty(staging_slot & s);
    void use(staging_slot & s);
    residency new_residency() const;
    void account_for_gone(access_counts & c);
    int32_t staged_at(int32_t expert) const;
    void bring_in(visit & v);
    void grant(phase when);
    void begin_pass(const visit & v);
    void drop_guesses(const visit & v);
    bool is_staging(size_t layer, int32_t slot) const { return slot >= in.n_slots(layer); }
    void request(size_t layer, const residency::insertion & i, phase when, bool demand, bool counts = true);
    void finished(const transfer & t, bool loaded);
    bool timed_carry(const transfer & t);

    tier_options             options;
    carrier *                carries;
    mutable std::mutex       mutex;
    std::condition_variable  arrived;
    const tables             learned;
    const expert_space       space;
    residency                in;
    std::unique_ptr<policy>  by;
    std::vector<layer_state> layers;
    std::vector<int32_t>     announced_tokens;
    pass                     announced;
    std::vector<wish>        wishes;             // workspaces
    std::vector<size_t>      order;
    std::vector<residency::insertion> changes;
    std::vector<bool>        half;               // per key: on its way, and there but for what is used last
    std::vector<uint8_t>     unused;             // per key: came in as P and was not used since
    miss_choice              choice;
    miss_choice              prompt_choice;      // between hits on the device and all on the CPU; its steps are events
    stream_choice            prompts;
    miss_choice              ahead_choice;       // load: look ahead; cpu: do not
    std::chrono::steady_clock::time_point pass_began;
    int64_t                  pass_accesses = 0, ahead_left = 0;   // of the step that is running; how many it may still bring in ahead
    bool                     pass_decodes = false;
    std::vector<staging_slot> stage;
    bool                     stage_taken = false;   // by the one event that may use them
    size_t                   last_begun = SIZE_MAX, last_layer = 0;   // of the step that is running
    double                   step_seconds = 0;
    int64_t                  step_pairs = 0;
    std::unique_ptr<loader>  moving;             // last: its thread reports to the rest
};

} // namespace edgemoe
