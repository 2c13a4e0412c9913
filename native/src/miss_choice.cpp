#include "miss_choice.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace edgemoe {

const char * miss_mode_name(miss_mode m) {
    static const char * const names[] = { "cpu", "load", "split", "off" };
    return names[(size_t) m];
}

miss_choice::miss_choice(const std::string & how, std::vector<miss_mode> candidates, pace steps)
    : order(std::move(candidates)), steps(steps), automatic(how == "auto"), chosen(how == "load" ? miss_mode::load : order[0]), pause(steps.n_before) {
    if (how != "cpu" && how != "load" && !automatic) {
        throw std::invalid_argument("misses: " + how + ", wanted cpu, load or auto");
    }
}

// An eighth of the way to each new value: steady over a few steps, and old conditions are forgotten.
static void average(std::map<int, double> & rates, int kind, double amount, double seconds) {
    if (seconds <= 0 || amount <= 0) {
        return;
    }
    const auto [it, is_new] = rates.emplace(kind, amount / seconds);
    if (!is_new) {
        it->second += (amount / seconds - it->second) / 8;
    }
}

static double rate(const std::map<int, double> & rates, int kind) {
    const auto it = rates.find(kind);
    return it == rates.end() ? 0 : it->second;
}

void miss_choice::computed(int kind, double bytes, double seconds) { average(cpu_rates, kind, bytes, seconds); }
void miss_choice::loaded(int kind, double bytes, double seconds) { average(load_rates, kind, bytes, seconds); }
double miss_choice::cpu_rate(int kind) const { return rate(cpu_rates, kind); }
double miss_choice::load_rate(int kind) const { return rate(load_rates, kind); }

int32_t miss_choice::n_to_load(int32_t n_misses, int kind) const {
    switch (mode()) {
        case miss_mode::cpu: case miss_mode::off: return 0;
        case miss_mode::load:                     return n_misses;
        case miss_mode::split:                    break;
    }
    const double p = load_rate(kind), c = cpu_rate(kind);
    return p + c > 0 ? (int32_t) std::lround(n_misses * p / (p + c)) : n_misses / 2;
}

double miss_choice::ratio() const {
    double sum = 0;
    int n = 0;
    for (const auto & [kind, c] : cpu_rates) {
        const double p = load_rate(kind);
        if (p > 0) {
            sum += std::log(p / c);
            n++;
        }
    }
    return n ? std::exp(sum / n) : 0;
}

void miss_choice::begin_trials() {
    result.clear();
    samples.clear();
    // The mode in use first: the others are judged against it, and given up early when they are hopeless.
    std::stable_partition(order.begin(), order.end(), [&](miss_mode m) { return m == chosen; });
    trial = 0;
}

void miss_choice::end_trial() {
    std::nth_element(samples.begin(), samples.begin() + (ptrdiff_t) samples.size() / 2, samples.end());
    result.push_back(samples[samples.size() / 2]);
    samples.clear();
    if (++trial == (int) order.size()) {
        decide();
    }
}

void miss_choice::decide() {
    const size_t best = (size_t) (std::min_element(result.begin(), result.end()) - result.begin());
    const bool   same = best == 0 || result[best] > DEAD_BAND * result[0];
    chosen     = same ? order[0] : order[best];
    pause      = same ? std::min(std::max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE) : FIRST_PAUSE;
    trial      = -1;
    n_steps    = 0;
    ratio_then = ratio();
}

void miss_choice::step(double seconds, int64_t n_pairs) {
    if (!automatic || n_pairs <= 0) {
        return;
    }
    n_steps++;
    if (trial < 0) {
        const double now = ratio();
        const bool drifted = ratio_then > 0 && now > 0 && (now > DRIFT * ratio_then || now * DRIFT < ratio_then);
        if (n_steps >= pause || (drifted && n_steps >= FIRST_PAUSE)) {
            begin_trials();
            n_steps = 0;
        }
        return;
    }
    if ((size_t) n_steps <= steps.n_settle) {
        return;
    }
    samples.push_back(seconds / (double) n_pairs);
    const bool hopeless = trial > 0 && samples.back() > HOPELESS * result[0];
    if (samples.size() == steps.n_trial || hopeless) {
        n_steps = 0;
        end_trial();
    }
}

// --- prompts ---

void stream_choice::computed(int kind, double n_pairs, double seconds) { average(pair_rates, kind, n_pairs, seconds); }
void stream_choice::on_device(int kind, double n_experts, double seconds) { average(device_rates, kind, n_experts, seconds); }

int32_t stream_choice::n_to_stream(const std::vector<int32_t> & n_tokens_of, int32_t most, int kind, double load_seconds) {
    const int32_t n = std::min((int32_t) n_tokens_of.size(), most);
    const double pairs = rate(pair_rates, kind), device = rate(device_rates, kind);
    if (pairs == 0) {
        return 0;   // the first prompt shows what the CPU does
    }
    if (device == 0 || load_seconds == 0) {
        return std::min(n, N_PROBE);
    }
    double on_cpu = 0;
    for (const int32_t tokens : n_tokens_of) {
        on_cpu += tokens / pairs;
    }
    // The CPU computes while experts are loaded; what was loaded is computed when both have ended.
    double least = on_cpu;
    int32_t best = 0;
    for (int32_t i = 1; i <= n; i++) {
        on_cpu -= n_tokens_of[(size_t) i - 1] / pairs;
        const double seconds = std::max(on_cpu, i * load_seconds) + i / device;
        if (seconds < least) {
            least = seconds;
            best  = i;
        }
    }
    int64_t & without = n_without[kind];
    without = best ? 0 : without + 1;
    return best ? best : without % PROBE_EVERY == 0 ? std::min(n, 1) : 0;
}

} // namespace edgemoe
