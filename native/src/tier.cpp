#include "tier.h"

#include <algorithm>
#include <cassert>
#include <chrono>

namespace edgemoe {

using clock = std::chrono::steady_clock;

static double seconds_since(clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); }

access_counts & access_counts::operator+=(const access_counts & o) {
    n_events += o.n_events;
    n_accesses += o.n_accesses;
    n_hits += o.n_hits;
    n_demand += o.n_demand;
    n_computed += o.n_computed;
    n_proactive += o.n_proactive;
    n_evicted += o.n_evicted;
    n_failed += o.n_failed;
    bytes_loaded += o.bytes_loaded;
    stall_us += o.stall_us;
    return *this;
}

tier::tier(std::vector<tier_layer> infos, const tier_options & options, std::function<bool(const transfer &)> how)
    : options(options), upload(std::move(how)), choice(options.misses),
      prompt_choice(options.misses == "auto" ? "auto" : "cpu", { miss_mode::cpu, miss_mode::off }, { 3, 0, 0 }), stage((size_t) options.n_staging, staging::failed) {
    for (const tier_layer & info : infos) {
        layers.push_back({ info, residency(info.n_expert, options.n_slots), make_policy(options.policy, info.n_expert), {} });
    }
    if (upload) {
        moving = std::make_unique<loader>([this](const transfer & t) { return timed_upload(t); }, [this](const transfer & t, bool loaded) { finished(t, loaded); });
    }
}

void tier::wait_idle() {
    if (moving) {
        moving->wait_idle();
    }
}

void tier::stop() {
    if (moving) {
        moving->stop();
    }
}

// --- what the loader's thread does ---

bool tier::timed_upload(const transfer & t) {
    const auto start = clock::now();
    const bool ok = upload(t);
    const double seconds = seconds_since(start);
    std::lock_guard<std::mutex> lock(mutex);
    const tier_layer & info = layers[t.layer].info;
    if (ok) {
        choice.loaded(info.kind, (double) info.bytes_per_expert, seconds);
    }
    return ok;
}

void tier::finished(const transfer & t, bool loaded) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (staged(t.slot, t.layer)) {
            stage[(size_t) (t.slot - layers[t.layer].in.n_slots())] = loaded ? staging::loaded : staging::failed;
        } else {
            layers[t.layer].in.finish(t.slot, loaded);
        }
        layers[t.layer].counts[(size_t) phase::decode].n_failed += !loaded;
    }
    arrived.notify_all();
}

// --- events; the mutex is held by those that are not public ---

void tier::request(size_t layer, const residency::insertion & i, phase when, bool demand) {
    access_counts & c = layers[layer].counts[(size_t) when];
    (demand ? c.n_demand : c.n_proactive)++;
    c.n_evicted    += i.evicted >= 0;
    c.bytes_loaded += layers[layer].info.bytes_per_expert;
    if (moving) {
        moving->request({ layer, i.expert, i.slot }, demand);
    } else if (!staged(i.slot, layer)) {
        layers[layer].in.finish(i.slot, true);
    } else {
        stage[(size_t) (i.slot - layers[layer].in.n_slots())] = staging::loaded;
    }
}

// Turns misses into demand loads, as far as the mode wants and the slots allow.
void tier::demand(visit & v) {
    layer_state & l = layers[v.layer];
    const int32_t n_experts = (int32_t) v.e.experts.size();
    // With fewer slots than the event needs, each load would push out what the next event wants first: such a cache only takes what the policy brings in.
    if (v.when == phase::prompt || n_experts > l.in.n_slots()) {
        return;
    }
    const int32_t n_misses = (int32_t) std::count(v.slot.begin(), v.slot.end(), -1);
    int32_t n_to_load = choice.n_to_load(n_misses, l.info.kind);
    std::vector<uint8_t> keep((size_t) l.info.n_expert, 0);
    for (const int32_t expert : v.e.experts) {
        keep[(size_t) expert] = 1;
    }
    for (int32_t i = 0; i < n_experts && n_to_load > 0; i++) {
        if (v.slot[(size_t) i] >= 0) {
            continue;
        }
        const int32_t expert = v.e.experts[(size_t) i];
        if (l.in.present(expert)) {
            moving->promote(v.layer, expert);   // only a loader leaves something on its way
            v.awaited[(size_t) i] = arrival::late;
        } else {
            residency::insertion at;
            if (!l.in.insert(expert, l.by->by, keep, at)) {
                break;
            }
            request(v.layer, at, v.when, true);
            v.awaited[(size_t) i] = arrival::demanded;
        }
        l.in.pin(expert);
        v.any_awaited = true;
        n_to_load--;
    }
}

// A prompt's misses that are worth the way to the device and back out of the cache.
void tier::stream(visit & v) {
    layer_state & l = layers[v.layer];
    if (v.when != phase::prompt || stage.empty() || stage_taken || options.misses == "cpu") {
        return;
    }
    std::vector<size_t> missing;
    for (size_t i = 0; i < v.slot.size(); i++) {
        if (v.slot[i] < 0) {
            missing.push_back(i);
        }
    }
    std::stable_sort(missing.begin(), missing.end(), [&](size_t a, size_t b) { return v.e.n_tokens_of[a] > v.e.n_tokens_of[b]; });
    std::vector<int32_t> n_tokens_of;
    for (const size_t i : missing) {
        n_tokens_of.push_back(v.e.n_tokens_of[i]);
    }
    const int32_t most = std::min((int32_t) missing.size(), (int32_t) stage.size());
    const double  rate = choice.load_rate(l.info.kind);
    const int32_t n    = options.misses == "load" ? most : prompts.n_to_stream(n_tokens_of, most, l.info.kind, rate > 0 ? (double) l.info.bytes_per_expert / rate : 0);
    for (int32_t i = 0; i < n; i++) {
        const int32_t expert = v.e.experts[missing[(size_t) i]];
        stage[(size_t) i] = staging::loading;
        stage_taken = true;
        v.staged.push_back(expert);
        v.awaited[missing[(size_t) i]] = arrival::staged;
        v.any_awaited = true;
        request(v.layer, { expert, l.in.n_slots() + i, -1 }, v.when, true);
    }
}

tier::visit tier::begin(size_t layer, event e) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_state & l = layers[layer];
    visit v = { layer, std::move(e), phase::decode, {}, {}, false, false, 0, {} };
    v.when = v.e.n_tokens > MOST_DECODED ? phase::prompt : phase::decode;
    v.slot.assign(v.e.experts.size(), -1);
    v.awaited.assign(v.e.experts.size(), arrival::none);
    v.left_alone = (v.when == phase::prompt ? prompt_choice : choice).mode() == miss_mode::off;
    for (size_t i = 0; i < v.slot.size(); i++) {
        const int32_t at = l.in.slot_of(v.e.experts[i]);
        v.n_there += at >= 0;
        if (at >= 0 && !v.left_alone) {
            v.slot[i] = at;
            l.in.pin(v.e.experts[i]);
        }
    }
    if (!v.left_alone) {
        demand(v);
        stream(v);
    }
    return v;
}

void tier::wait(visit & v) {
    if (!v.any_awaited) {
        return;
    }
    const auto start = clock::now();
    std::unique_lock<std::mutex> lock(mutex);
    layer_state & l = layers[v.layer];
    for (size_t i = 0; i < v.slot.size(); i++) {
        if (v.awaited[i] == arrival::none) {
            continue;
        }
        const int32_t expert = v.e.experts[i];
        if (v.awaited[i] == arrival::staged) {
            const size_t at = (size_t) (std::find(v.staged.begin(), v.staged.end(), expert) - v.staged.begin());
            arrived.wait(lock, [&] { return stage[at] != staging::loading; });
            v.slot[i] = stage[at] == staging::loaded ? l.in.n_slots() + (int32_t) at : -1;
        } else {
            arrived.wait(lock, [&] { return !l.in.present(expert) || l.in.slot_of(expert) >= 0; });
            v.slot[i] = l.in.slot_of(expert);
        }
    }
    l.counts[(size_t) v.when].stall_us += (uint64_t) (1e6 * seconds_since(start));
}

// Loads that no computation waits for.
void tier::bring_in(const visit & v) {
    layer_state & l = layers[v.layer];
    if (v.when == phase::prompt) {
        if (!options.seed) {
            return;
        }
        l.by->observe_prompt(v.e);
    } else {
        l.by->observe(v.e);
    }
    if (v.left_alone) {
        return;   // what is there stays, for the next time that it is tried
    }
    // The most used first: of these most is to be expected.
    std::vector<int32_t> candidates = v.e.experts;
    std::vector<int32_t> uses((size_t) l.info.n_expert, 0);
    for (size_t i = 0; i < v.e.experts.size(); i++) {
        uses[(size_t) v.e.experts[i]] = v.e.n_tokens_of[i];
    }
    std::stable_sort(candidates.begin(), candidates.end(), [&](int32_t a, int32_t b) { return uses[(size_t) a] > uses[(size_t) b]; });
    std::vector<residency::insertion> changes;
    if (l.by->wants_refine(l.in)) {
        changes = l.in.refine(l.by->by, l.in.n_slots());   // for the events to come: members of this one may go
    } else if (v.when == phase::decode && l.by->admits_misses()) {
        changes = l.in.update(v.e, candidates, l.by->by, options.rule);
    }
    // Empty slots cost nobody a place.
    for (size_t i = 0; i < candidates.size() && l.in.n_present() < l.in.n_slots(); i++) {
        residency::insertion at;
        if (!l.in.present(candidates[i]) && l.in.insert(candidates[i], l.by->by, {}, at)) {
            changes.push_back(at);
        }
    }
    for (const residency::insertion & i : changes) {
        request(v.layer, i, v.when, false);
    }
}

void tier::end(visit & v, const cost & c) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_state & l = layers[v.layer];
    access_counts & n = l.counts[(size_t) v.when];
    n.n_events++;
    n.n_accesses += v.e.experts.size();
    for (size_t i = 0; i < v.slot.size(); i++) {
        const bool loaded = v.awaited[i] == arrival::demanded || v.awaited[i] == arrival::staged;
        if (v.slot[i] >= 0) {
            if (v.awaited[i] != arrival::staged) {
                l.in.unpin(v.e.experts[i]);
            }
            n.n_hits += !loaded;
            continue;
        }
        n.n_computed++;
        if (loaded) {   // it failed, and lost its pin with its slot; it was counted as a load when it was asked for
            n.n_demand--;
            n.bytes_loaded -= l.info.bytes_per_expert;
        }
    }
    if (!v.staged.empty()) {
        stage_taken = false;
        prompts.on_device(l.info.kind, (double) v.staged.size(), c.late_seconds);
    }
    if (v.when == phase::prompt) {
        prompts.computed(l.info.kind, (double) c.n_cpu_pairs, c.cpu_seconds);
        if (v.n_there > 0) {   // else there was nothing to choose
            prompt_choice.step(c.seconds, c.n_pairs);
        }
    } else {
        choice.computed(l.info.kind, c.cpu_bytes, c.cpu_seconds);
        // A step ends when a layer comes up that is not behind the last one.
        if (v.layer <= last_layer && step_pairs > 0) {
            choice.step(step_seconds, step_pairs);
            step_seconds = 0;
            step_pairs   = 0;
        }
        last_layer    = v.layer;
        step_seconds += c.seconds;
        step_pairs   += c.n_pairs;
    }
    bring_in(v);
}

void tier::clear() {
    wait_idle();
    std::lock_guard<std::mutex> lock(mutex);
    for (layer_state & l : layers) {
        l.in = residency(l.info.n_expert, options.n_slots);
        l.by->reset();
    }
}

access_counts tier::counts(phase when, size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return layers[layer].counts[(size_t) when];
}

std::vector<int32_t> tier::residents(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> experts;
    for (int32_t e = 0; e < layers[layer].info.n_expert; e++) {
        if (layers[layer].in.slot_of(e) >= 0) {
            experts.push_back(e);
        }
    }
    return experts;
}

miss_mode tier::mode() const {
    std::lock_guard<std::mutex> lock(mutex);
    return choice.mode();
}

double tier::cpu_rate(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return choice.cpu_rate(layers[layer].info.kind);
}

double tier::load_rate(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return choice.load_rate(layers[layer].info.kind);
}

} // namespace edgemoe
