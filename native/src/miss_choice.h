// What to do with the misses of a step: compute them on the CPU where they lie, load them to the device first, or some of each; or leave the device alone.
//
// Rates measured at another time mislead (a peer loses 8 to 40 times on the wrong host), so everything here is measured on the steps that run: once the slots are
// filled each mode is tried for a few steps, the fastest stays, and the question is asked again when the rates have moved, or after a while. Pure arithmetic; whoever
// owns it guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace edgemoe {

// off: hits are computed on the CPU as well, for devices that are slower than it.
enum class miss_mode { cpu, load, split, off };

const char * miss_mode_name(miss_mode m);

struct miss_choice {
    // `how`: cpu, load, or auto, which tries `candidates`, the first of which is used until then. Throws std::invalid_argument.
    // Steps: of a trial, at its start not counted, before the first question.
    struct pace { size_t n_trial, n_settle; int64_t n_before; };
    explicit miss_choice(const std::string & how, std::vector<miss_mode> candidates = { miss_mode::cpu, miss_mode::load, miss_mode::split, miss_mode::off },
        pace steps = { 8, 2, 64 });

    miss_mode mode() const { return trial >= 0 ? order[(size_t) trial] : chosen; }
    // How many of n misses are to be loaded: all, none, or the share that lets both sides end together.
    int32_t   n_to_load(int32_t n_misses, int kind) const;

    // What was measured: bytes per second of experts computed on the CPU, and of experts loaded, per kind of weights.
    void computed(int kind, double bytes, double seconds);
    void loaded(int kind, double bytes, double seconds);
    // One step of all layers has taken so long in its experts, for so many routed pairs.
    void step(double seconds, int64_t n_pairs);

    double cpu_rate(int kind) const;    // 0 when not measured yet
    double load_rate(int kind) const;

private:
    void   begin_trials();
    void   end_trial();
    void   decide();
    double ratio() const;   // of the load rate to the CPU's, over all kinds; 0 when unknown

    static constexpr double DEAD_BAND = 0.95, DRIFT = 1.5, HOPELESS = 2.0;
    static constexpr int64_t FIRST_PAUSE = 256, LONGEST_PAUSE = 8192;

    std::vector<miss_mode>   order;
    pace                     steps;
    bool                     automatic;
    miss_mode                chosen;
    int                      trial = -1;    // index into order, or -1 while the choice stands
    std::vector<double>      result;        // seconds per pair, in the order of `order`
    std::vector<double>      samples;
    int64_t                  n_steps = 0, pause;
    double                   ratio_then = 0;
    std::map<int, double>    cpu_rates, load_rates;
};

// How many experts of a prompt's event to stream through staging slots while the CPU computes the others. An expert that many tokens share is worth the way
// to the device; one that few share is not. Where the line is comes from the running prompts: seconds per routed pair on the CPU, per load, and per expert on the device.
struct stream_choice {
    // `n_tokens_of` of the missing experts, descending; `load_seconds` of one, 0 when not measured yet.
    int32_t n_to_stream(const std::vector<int32_t> & n_tokens_of, int32_t most, int kind, double load_seconds);
    void    computed(int kind, double n_pairs, double seconds);
    void    on_device(int kind, double n_experts, double seconds);

private:
    static constexpr int64_t PROBE_EVERY = 64;   // events without streaming until one expert is streamed to see whether that still holds
    static constexpr int32_t N_PROBE = 2;

    std::map<int, double>  pair_rates, device_rates;   // per second
    std::map<int, int64_t> n_without;
};

} // namespace edgemoe
