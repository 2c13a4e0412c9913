#include "ram_cache.h"

#include <algorithm>
#include <stdexcept>

namespace edgemoe {

// Reads that are on their way at once: enough to keep a fast disk busy, and not more, since the first one is there the sooner the fewer share the way. Small ones cost a
// disk its time per read and not per byte, hence many.
static constexpr lanes READS = { 8, 2, 2u << 20 };
// Slots through which a prompt's experts pass: what is computed, and what is read meanwhile.
static constexpr int32_t MOST_STAGING = 16, LEAST_STAGING = 2;
// From this size on an expert comes in two reads, so that its first products are computed while its down rows come. A smaller one gains less than a read costs.
static constexpr size_t LEAST_IN_PARTS = 1u << 20;

static std::vector<tier_layer> layers_of(const source & s) {
    std::vector<tier_layer> layers;
    for (const expert_layer & l : s.layers) {
        layers.push_back({ (int32_t) l.n_expert, l.bytes_per_expert(), 0 });
    }
    return layers;
}

ram_cache::ram_cache(const source & s, store & from, expert_memory & memory, const ram_options & o)
    : from(from), memory(memory), fail_every(o.fail_every), most_read(o.most_read), routers(s, from, o.level), experts(layers_of(s), tier_options_of(s, o), this) {
    for (const expert_layer & l : s.layers) {
        layouts.push_back({ l.projections.size(), l.projections.size() });
        for (size_t p = 0; p < l.projections.size() && l.bytes_per_expert() >= LEAST_IN_PARTS; p++) {
            layouts.back().down = l.projections[p].name.find("ffn_down_exps") != std::string::npos ? p : layouts.back().down;
        }
    }
}

tier_options ram_cache::tier_options_of(const source & s, const ram_options & o) {
    tier_options options = o.slots;
    int64_t all = 0;
    options.shared    = true;
    options.must_load = true;
    options.misses    = "load";
    options.ways      = READS;
    for (size_t l = 0; l < s.layers.size(); l++) {
        options.cost.push_back((int64_t) memory.bytes(l));
        largest = std::max(largest, options.cost.back());
        all    += options.cost.back() * s.layers[l].n_expert;
    }
    // A sixteenth of the slots at most: decoding, which has the others, is what the budget is for.
    n_stage = (int32_t) std::max<int64_t>(LEAST_STAGING, std::min<int64_t>(MOST_STAGING, (int64_t) o.bytes / 16 / largest));
    slots_budget = (int64_t) o.bytes >= all ? all : (int64_t) o.bytes - n_stage * largest;   // where all fit, nobody passes through
    if (slots_budget < largest) {
        throw std::invalid_argument("a budget of " + std::to_string(o.bytes) + " bytes for experts in RAM, wanted at least " + std::to_string((n_stage + 1) * largest));
    }
    options.budget    = slots_budget;
    options.n_staging = n_stage;
    return options;
}

bool ram_cache::carry(const transfer & t) {
    if (memory.settle(t.slot, t.layer, t.expert)) {
        return true;   // it was on its way out, and its bytes are still there
    }
    char * dst[MOST_PROJECTIONS];
    for (size_t p = 0; p < layouts[t.layer].n_projections; p++) {
        dst[p] = memory.place(t.layer, p, t.expert);
    }
    try {
        read(t.layer, t.expert, dst, [&] { experts.half_there(t); });
    } catch (const std::exception & e) {
        std::lock_guard<std::mutex> lock(mutex);
        last_error = e.what();
        return false;
    }
    memory.confirm(t.layer, t.expert);
    return true;
}

void ram_cache::read(size_t layer, int32_t expert, char * const * dst, const std::function<void()> & half_done) {
    struct timed {
        ram_cache & c;
        explicit timed(ram_cache & c) : c(c) {
            std::lock_guard<std::mutex> lock(c.mutex);
            if (c.n_active++ == 0) {
                c.active_since = std::chrono::steady_clock::now();
            }
        }
        ~timed() {
            std::lock_guard<std::mutex> lock(c.mutex);
            if (--c.n_active == 0) {
                c.done.busy_us += (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - c.active_since).count();
            }
        }
    } busy(*this);
    if (fail_every && ++n_tried % fail_every == 0) {
        throw std::runtime_error("layer " + std::to_string(layer) + ", expert " + std::to_string(expert) + ": cannot be read: a failure for tests");
    }
    const layout & l = layouts[layer];
    if (l.down == l.n_projections) {
        from.read(layer, expert, 0, l.n_projections, dst, most_read);
    } else {
        from.read(layer, expert, 0, l.down, dst, most_read);
        from.read(layer, expert, l.down + 1, l.n_projections, dst, most_read);
        half_done();
        from.read(layer, expert, l.down, l.down + 1, dst, most_read);
    }
    std::lock_guard<std::mutex> lock(mutex);
    done.n_reads++;
    done.bytes_read += experts.bytes_per_expert(layer);
}

void ram_cache::look_ahead(size_t layer, const float * x, size_t stride, int64_t n_in, int64_t n_tokens, int64_t n_used) {
    if (n_tokens <= tier::MOST_DECODED && experts.looks_ahead()) {
        const std::vector<int32_t> guessed = routers.guess(layer, x, stride, n_in, n_tokens, n_used);
        if (!guessed.empty()) {
            experts.expect(layer + 1, guessed);
        }
    }
}

bool ram_cache::adopt(const transfer & t) { return memory.adopt(t.slot, t.layer, t.expert); }

void ram_cache::left(size_t layer, int32_t expert) { memory.drop(layer, expert); }

ram_cache::counts ram_cache::reads() const {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
}

std::string ram_cache::error() const {
    std::lock_guard<std::mutex> lock(mutex);
    return last_error;
}

} // namespace edgemoe
