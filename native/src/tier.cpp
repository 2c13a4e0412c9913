#include "tier.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <numeric>
#include <stdexcept>

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
    n_unused += o.n_unused;
    bytes_loaded += o.bytes_loaded;
    stall_us += o.stall_us;
    return *this;
}

static std::vector<int32_t> n_experts(const std::vector<tier_layer> & infos) {
    std::vector<int32_t> n;
    for (const tier_layer & info : infos) {
        n.push_back(info.n_expert);
    }
    return n;
}

static policy_source with(const tables & learned, policy_source from) {
    from.learned = &learned;
    return from;
}

tier::tier(std::vector<tier_layer> infos, const tier_options & options, carrier * who)
    : options(options), carries(who), learned(options.from.learned ? *options.from.learned : tables()), space(n_experts(infos), options.shared),
      in(new_residency()), by(make_policy(options.policy, space, in, with(learned, options.from))), half((size_t) space.n_all(), false),
      unused((size_t) space.n_all(), 0), choice(options.misses),
      prompt_choice(options.misses == "auto" ? "auto" : "cpu", { miss_mode::cpu, miss_mode::off }, { 3, 0, 0 }),
      ahead_choice(options.ahead == read_ahead::automatic ? "auto" : options.ahead == read_ahead::on ? "load" : "cpu", { miss_mode::cpu, miss_mode::load }, { 16, 4, 48 }),
      stage((size_t) options.n_staging) {
    if (this->options.rule.by == admission::rule::anyone) {
        this->options.rule.by = by->admits();
    }
    for (const tier_layer & info : infos) {
        layers.push_back({ info, {}, {}, {}, {}, {} });
    }
    if (carries && by->needs_future()) {
        throw std::invalid_argument("policy " + options.policy + " knows the future, which only a simulation does");
    }
    if (carries && !options.inline_loads) {
        moving = std::make_unique<loader>(options.ways, [this](const transfer & t) { return timed_carry(t); }, [this](const transfer & t, bool loaded) { finished(t, loaded); });
    }
}

residency tier::new_residency() const {
    return options.budget ? residency(space, options.cost, options.budget) : residency(space, options.n_slots);
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

// --- what the loader's lanes do ---

bool tier::timed_carry(const transfer & t) {
    const auto start = clock::now();
    const bool ok = carries->carry(t);
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
        half[(size_t) key_of(t.layer, t.expert)] = false;
        if (is_staging(t.layer, t.slot)) {
            staging_slot & at = stage[(size_t) (t.slot - in.n_slots(t.layer))];
            assert(at.expert == key_of(t.layer, t.expert));   // nobody takes a staging slot while something is on its way
            at.state = loaded ? staging::loaded : staging::failed;
        } else {
            in.finish(t.layer, t.slot, loaded);
        }
        layers[t.layer].counts[(size_t) phase::decode].n_failed += !loaded;
    }
    arrived.notify_all();
}

void tier::half_there(const transfer & t) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        half[(size_t) key_of(t.layer, t.expert)] = true;
    }
    arrived.notify_all();
}

// --- events; the mutex is held by those that are not public ---

// Those who went for somebody else's sake, without leaving him their slot.
void tier::account_for_gone(access_counts & c) {
    for (const int32_t key : in.gone) {
        c.n_evicted++;
        c.n_unused += unused[(size_t) key];
        unused[(size_t) key] = 0;
        if (carries) {
            const size_t layer = space.layer_of(key);
            carries->left(layer, expert_of(layer, key));
        }
    }
    in.gone.clear();
}

// `counted`: not when an expert moves from a staging slot to one of its layer, which is no new load of it.
void tier::request(size_t layer, const residency::insertion & i, phase when, bool demand, bool counted) {
    access_counts & c = layers[layer].counts[(size_t) when];
    account_for_gone(c);
    (demand ? c.n_demand : c.n_proactive) += counted;
    c.bytes_loaded += counted ? layers[layer].info.bytes_per_expert : 0;
    c.n_evicted    += i.evicted >= 0;
    if (i.evicted >= 0) {
        c.n_unused += unused[(size_t) i.evicted];
        unused[(size_t) i.evicted] = 0;
    }
    unused[(size_t) i.expert] = !demand && counted;
    const bool staging = is_staging(layer, i.slot);
    if (!staging) {
        by->inserted(i.expert);
    }
    const transfer t = { layer, expert_of(layer, i.expert), i.slot };
    if (carries && !counted && carries->adopt(t)) {
        in.finish(layer, i.slot, true);
        return;
    }
    if (moving) {
        moving->request(t, layers[layer].info.bytes_per_expert, demand);
        return;
    }
    bool loaded = true;
    if (carries) {
        const auto start = clock::now();
        loaded = carries->carry(t);
        if (loaded) {
            choice.loaded(layers[layer].info.kind, (double) layers[layer].info.bytes_per_expert, seconds_since(start));
        }
        c.n_failed += !loaded;
    }
    if (staging) {
        stage[(size_t) (i.slot - in.n_slots(layer))].state = loaded ? staging::loaded : staging::failed;
    } else {
        in.finish(layer, i.slot, loaded);
    }
}

int32_t tier::staged_at(int32_t expert) const {
    for (size_t s = 0; s < stage.size(); s++) {
        if (stage[s].expert == expert) {
            return (int32_t) s;
        }
    }
    return -1;
}

// A staging slot into which nothing is on its way: a load that was asked for earlier must not come after one that was asked for later.
int32_t tier::free_stage(size_t from) const {
    for (size_t s = from; s < stage.size(); s++) {
        if (stage[s].state != staging::loading && !stage[s].in_use) {
            return (int32_t) s;
        }
    }
    return -1;
}

void tier::empty(staging_slot & s) {
    if (s.state == staging::loading) {
        return;
    }
    if (s.expert >= 0 && unused[(size_t) s.expert]) {
        layers[space.layer_of(s.expert)].counts[(size_t) phase::decode].n_unused++;
        unused[(size_t) s.expert] = 0;
    }
    if (s.in_use) {
        in.exclude(s.expert, false);
    }
    s = {};
}

// By the event that has taken the stage. In RAM no other event brings the expert into a slot meanwhile: slots there are pages that move to the place of an expert, there is
// one place, and it has one slot.
void tier::use(staging_slot & s) {
    s.in_use = true;
    in.exclude(s.expert, options.must_load);
}

void tier::release_stage(visit & v) {
    if (v.uses_stage) {
        v.uses_stage = stage_taken = false;
        for (staging_slot & s : stage) {
            empty(s);
        }
        arrived.notify_all();   // somebody may wait for the stage
    }
}

// The i-th expert of the event comes into a staging slot, from number `at` on, and will be gone after it. False when there is none left.
bool tier::through_stage(visit & v, size_t i, size_t & at) {
    const int32_t s = free_stage(at);
    if (s < 0) {
        return false;
    }
    at = (size_t) s + 1;
    empty(stage[(size_t) s]);
    stage[(size_t) s] = { v.e.experts[i], staging::loading };
    use(stage[(size_t) s]);
    stage_taken = v.uses_stage = v.any_awaited = true;
    v.awaited[i] = arrival::staged;
    request(v.layer, { v.e.experts[i], in.n_slots(v.layer) + s, -1 }, v.when, true);
    return true;
}

// Places in the event in the order in which misses come in: the most used first, since of these most is to be expected; where scores decide who comes in, the best.
const std::vector<size_t> & tier::by_worth(const visit & v) {
    order.resize(v.e.experts.size());
    std::iota(order.begin(), order.end(), (size_t) 0);
    if (v.when == phase::decode && options.rule.by == admission::rule::scored_higher) {
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return by->by.lower(v.e.experts[b], v.e.experts[a]); });
    } else if (v.e.n_tokens > 1) {   // one token uses each expert once
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return v.e.n_tokens_of[a] != v.e.n_tokens_of[b] ? v.e.n_tokens_of[a] > v.e.n_tokens_of[b] : a < b; });
    }
    return order;
}

// Turns misses into demand loads, as far as the mode wants and the slots allow.
void tier::demand(visit & v) {
    const size_t n_experts = v.e.experts.size();
    // With fewer slots than the event needs, each load would push out what the next event wants first: such a cache only takes what the policy brings in.
    if (!options.must_load && (v.when == phase::prompt || (int32_t) n_experts > in.n_slots(v.layer))) {
        return;
    }
    const int32_t n_misses = (int32_t) std::count(v.slot.begin(), v.slot.end(), -1);
    int32_t n_to_load = options.must_load ? n_misses : choice.n_to_load(n_misses, layers[v.layer].info.kind);
    if (n_to_load == 0) {
        return;
    }
    const bool stage_is_free = !stage_taken;
    size_t next_stage = 0;
    in.protect(v.e.experts);
    for (const size_t i : by_worth(v)) {
        const int32_t expert = v.e.experts[i];
        if (n_to_load == 0 || v.slot[i] >= 0) {
            continue;
        }
        if (in.present(expert)) {
            moving->promote(v.layer, expert_of(v.layer, expert));   // only a loader leaves something on its way
            v.awaited[i] = arrival::late;
            in.pin(expert);
        } else {
            residency::insertion at;
            // Else that is decided after the event. Of a prompt nothing takes another's place.
            const bool may_stay = !in.full(v.layer) || (v.when == phase::decode && by->admits_misses() && by->keeps_members());
            if (may_stay && in.insert(v.layer, expert, by->by, at, options.rule)) {
                request(v.layer, at, v.when, true);
                v.awaited[i] = arrival::demanded;
                if (in.present(expert)) {   // else its load has failed at once
                    in.pin(expert);
                }
            } else if (!stage_is_free || !through_stage(v, i, next_stage)) {
                if (options.must_load) {
                    v.awaited[i] = arrival::pending;
                }
                continue;
            }
        }
        v.any_awaited = true;
        n_to_load--;
    }
    in.protect({});
    account_for_gone(layers[v.layer].counts[(size_t) v.when]);
}

// A prompt's misses that are worth the way to the device and back out of the cache.
void tier::stream(visit & v) {
    if (v.when != phase::prompt || stage.empty() || stage_taken || options.must_load || options.misses == "cpu") {
        return;
    }
    const tier_layer & info = layers[v.layer].info;
    std::vector<size_t> missing;
    std::vector<int32_t> n_tokens_of;
    for (const size_t i : by_worth(v)) {
        if (v.slot[i] < 0) {
            missing.push_back(i);
            n_tokens_of.push_back(v.e.n_tokens_of[i]);
        }
    }
    const int32_t most = std::min((int32_t) missing.size(), (int32_t) stage.size());
    const double  rate = choice.load_rate(info.kind);
    const int32_t n    = options.misses == "load" ? most : prompts.n_to_stream(n_tokens_of, most, info.kind, rate > 0 ? (double) info.bytes_per_expert / rate : 0);
    size_t next_stage = 0;
    for (int32_t i = 0; i < n && through_stage(v, missing[(size_t) i], next_stage); i++) {}
}

void tier::announce(const pass & s) {
    std::lock_guard<std::mutex> lock(mutex);
    announced_tokens.assign(s.token_ids, s.token_ids + (s.token_ids ? s.n_tokens : 0));
    announced = s;
    announced.token_ids = s.token_ids ? announced_tokens.data() : nullptr;
    last_begun = SIZE_MAX;   // whatever layer comes next
}

void tier::tell(size_t layer, std::vector<float> probs, std::vector<float> hidden) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].probs  = std::move(probs);
    layers[layer].hidden = std::move(hidden);
}

void tier::tell_heads(size_t layer, std::vector<float> next, std::vector<float> successor) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].next      = std::move(next);
    layers[layer].successor = std::move(successor);
}

void tier::begin_sequence(const future * known) {
    std::lock_guard<std::mutex> lock(mutex);
    by->begin_sequence(known);
    last_begun = SIZE_MAX;
}

// `v` has its layer, phase and event.
void tier::begin_pass(const visit & v) {
    const bool known = announced.n_tokens == v.e.n_tokens;   // else it was said of another batch
    by->begin_pass({ known ? announced.token_ids : nullptr, v.e.n_tokens, announced.stage, v.when == phase::prompt }, wishes);
    grant(v.when);
    const auto now = clock::now();
    if (options.ahead != read_ahead::off && pass_decodes) {
        ahead_choice.step(std::chrono::duration<double>(now - pass_began).count(), pass_accesses);
    }
    ahead_left    = pass_accesses / 2;
    pass_began    = now;
    pass_accesses = 0;
    pass_decodes  = v.when == phase::decode;
}

bool tier::looks_ahead() const {
    std::lock_guard<std::mutex> lock(mutex);
    return options.ahead != read_ahead::off && pass_decodes && ahead_choice.mode() == miss_mode::load;
}

// Few at a time: a guess that waits is overtaken by what it guessed at.
void tier::expect(size_t layer, const std::vector<int32_t> & experts) {
    static constexpr size_t MOST_WAITING = 3;
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> keys;
    for (const int32_t expert : experts) {
        keys.push_back(key_of(layer, expert));
    }
    size_t n_waiting = moving ? moving->n_prefetches_waiting() : MOST_WAITING;
    in.protect(keys);
    for (size_t i = 0; i < keys.size() && n_waiting < MOST_WAITING && ahead_left > 0; i++) {
        residency::insertion at;
        if (!in.present(keys[i]) && in.insert(layer, keys[i], by->by, at)) {
            request(layer, at, phase::decode, false);
            n_waiting++;
            ahead_left--;
        }
    }
    in.protect({});
    account_for_gone(layers[layer].counts[(size_t) phase::decode]);
}

// Guesses at this layer that have not begun and were wrong.
void tier::drop_guesses(const visit & v) {
    if (options.ahead == read_ahead::off || !moving) {
        return;
    }
    std::vector<int32_t> used;
    for (const int32_t key : v.e.experts) {
        used.push_back(expert_of(v.layer, key));
    }
    access_counts & c = layers[v.layer].counts[(size_t) phase::decode];
    for (const transfer & t : moving->drop_prefetches(v.layer, used)) {
        in.finish(t.layer, t.slot, false);
        unused[(size_t) key_of(t.layer, t.expert)] = 0;
        c.n_proactive--;
        c.bytes_loaded -= layers[t.layer].info.bytes_per_expert;
    }
}

tier::visit tier::begin(event e) {
    std::lock_guard<std::mutex> lock(mutex);
    visit v = {};
    v.layer = e.layer;
    v.when  = e.n_tokens > MOST_DECODED ? phase::prompt : phase::decode;
    v.e     = std::move(e);
    for (int32_t & expert : v.e.experts) {
        expert = key_of(v.layer, expert);
    }
    if (last_begun == SIZE_MAX || v.layer <= last_begun) {
        begin_pass(v);
    }
    last_begun = v.layer;
    drop_guesses(v);
    const size_t n = v.e.experts.size();
    pass_accesses += (int64_t) n;
    if (by->needs_probs() && !v.e.probs) {
        v.probs  = std::move(layers[v.layer].probs);
        v.hidden = std::move(layers[v.layer].hidden);
        v.next      = std::move(layers[v.layer].next);
        v.successor = std::move(layers[v.layer].successor);
        layers[v.layer].probs.clear();
        layers[v.layer].hidden.clear();
        layers[v.layer].next.clear();
        layers[v.layer].successor.clear();
        if (v.probs.empty()) {
            // Not known: what was chosen counts, by how many tokens chose it.
            v.probs.assign((size_t) space.n_expert(v.layer), 0.0f);
            const float sum = (float) std::accumulate(v.e.n_tokens_of.begin(), v.e.n_tokens_of.end(), 0);
            for (size_t i = 0; i < n; i++) {
                v.probs[(size_t) expert_of(v.layer, v.e.experts[i])] = (float) v.e.n_tokens_of[i] / sum;
            }
        }
        v.e.probs  = v.probs.data();
        if (!v.hidden.empty()) {
            v.e.hidden = v.hidden.data();
            v.e.n_embd = v.hidden.size();
        }
        v.e.next      = v.next.empty() ? v.e.next : v.next.data();   // a recording may have what heads say and no probabilities
        v.e.successor = v.successor.empty() ? v.e.successor : v.successor.data();
    }
    v.slot.assign(n, -1);
    v.awaited.assign(n, arrival::none);
    v.named.assign(n, false);
    v.half_named.assign(n, false);
    v.left_alone = (v.when == phase::prompt ? prompt_choice : choice).mode() == miss_mode::off;
    for (size_t i = 0; i < n; i++) {
        const int32_t expert = v.e.experts[i], at = in.slot_of(expert);
        v.n_there += at >= 0;
        if (v.left_alone) {
            continue;
        }
        if (at >= 0) {
            v.slot[i] = at;
            in.pin(expert);
            unused[(size_t) expert] = 0;
        } else if (v.when == phase::decode && !in.present(expert) && !stage.empty()) {
            const int32_t s = staged_at(expert);
            if (s >= 0 && stage[(size_t) s].state == staging::loaded && (!stage_taken || v.uses_stage)) {
                v.slot[i] = in.n_slots(v.layer) + s;
                stage_taken = v.uses_stage = true;
                use(stage[(size_t) s]);
                unused[(size_t) expert] = 0;
            }
        }
    }
    // The router has spoken: what happens to the misses goes by what is known now.
    if (v.when == phase::decode) {
        by->observe(v.e);
    } else if (options.seed) {
        by->observe_prompt(v.e);
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
    const auto start = moving ? clock::now() : clock::time_point();   // without a loader nothing is on its way any more
    std::unique_lock<std::mutex> lock(mutex);
    for (size_t i = 0; i < v.slot.size(); i++) {
        const int32_t expert = v.e.experts[i];
        if (v.named[i] || v.awaited[i] == arrival::pending) {
            continue;
        }
        if (v.awaited[i] == arrival::staged) {
            const size_t at = (size_t) staged_at(expert);
            arrived.wait(lock, [&] { return stage[at].state != staging::loading; });
            v.slot[i] = stage[at].state == staging::loaded ? in.n_slots(v.layer) + (int32_t) at : -1;
        } else if (v.awaited[i] != arrival::none) {
            arrived.wait(lock, [&] { return !in.present(expert) || in.slot_of(expert) >= 0; });
            v.slot[i] = in.slot_of(expert);
            unused[(size_t) expert] = 0;
        }
    }
    layers[v.layer].counts[(size_t) v.when].stall_us += moving ? (uint64_t) (1e6 * seconds_since(start)) : 0;
}

bool tier::next(visit & v, std::vector<arrived_expert> & there, bool & failed) {
    there.clear();
    failed = false;
    const auto start = clock::now();
    std::unique_lock<std::mutex> lock(mutex);
    size_t n_left = 0;
    while (there.empty() && !failed) {
        n_left = 0;
        for (size_t i = 0; i < v.slot.size(); i++) {
            if (v.named[i]) {
                continue;
            }
            n_left++;
            size_t any = 0;
            const int32_t expert = v.e.experts[i];
            if (v.awaited[i] == arrival::pending && in.present(expert)) {
                v.awaited[i] = arrival::late;   // another event has brought it in
                in.pin(expert);
            } else if (v.awaited[i] == arrival::pending && (!stage_taken || v.uses_stage)) {
                through_stage(v, i, any);
            }
            bool lost = false;
            if (v.awaited[i] == arrival::staged) {
                const size_t at = (size_t) staged_at(expert);
                v.slot[i] = stage[at].state == staging::loaded ? in.n_slots(v.layer) + (int32_t) at : -1;
                lost      = stage[at].state == staging::failed;
            } else if (v.awaited[i] == arrival::demanded || v.awaited[i] == arrival::late) {
                v.slot[i] = in.slot_of(expert);
                lost      = !in.present(expert);
            }
            failed = failed || lost;
            if (v.slot[i] >= 0) {
                unused[(size_t) expert] = 0;
                v.named[i] = true;
                there.push_back({ i, true });
            } else if (half[(size_t) expert] && !v.half_named[i]) {
                v.half_named[i] = true;
                there.push_back({ i, false });
            }
        }
        if (n_left == 0) {
            break;
        }
        if (there.empty() && !failed) {
            arrived.wait(lock);
        }
    }
    layers[v.layer].counts[(size_t) v.when].stall_us += n_left ? (uint64_t) (1e6 * seconds_since(start)) : 0;
    return n_left > 0;
}

bool tier::all_there(const visit & v) {
    return !v.any_awaited && std::all_of(v.slot.begin(), v.slot.end(), [](int32_t slot) { return slot >= 0; });
}

void tier::release(visit & v, size_t i) {
    if (v.slot[i] < 0 || !is_staging(v.layer, v.slot[i])) {
        return;   // the others stay pinned until the event ends
    }
    std::lock_guard<std::mutex> lock(mutex);
    staging_slot & s = stage[(size_t) (v.slot[i] - in.n_slots(v.layer))];
    // Where nobody waits for a slot it keeps this one: the policy may want it to stay.
    if (std::any_of(v.awaited.begin(), v.awaited.end(), [](arrival a) { return a == arrival::pending; })) {
        empty(s);
    }
}

// What the policy has asked for.
void tier::grant(phase when) {
    for (const wish & w : wishes) {
        changes.clear();
        if (w.kind == wish::how::refine) {
            in.refine(w.layer, w.first, w.end, *w.by, w.budget, changes);
        } else if (w.kind == wish::how::bring) {
            in.bring(w.layer, w.experts, *w.by, changes);
        } else if (!stage_taken && !options.must_load) {   // there the stage is for those who wait
            for (staging_slot & s : stage) {
                empty(s);
            }
            size_t at = 0;
            for (int32_t s = free_stage(0); s >= 0 && at < w.experts.size(); s = free_stage((size_t) s + 1), at++) {
                stage[(size_t) s] = { w.experts[at], staging::loading };
                request(w.layer, { w.experts[at], in.n_slots(w.layer) + s, -1 }, when, false);
            }
        }
        for (const residency::insertion & i : changes) {
            request(space.layer_of(i.expert), i, when, false);   // which need not be the wish's where all share their slots
        }
    }
    wishes.clear();
}

// Loads that no computation waits for.
void tier::bring_in(visit & v) {
    if (v.left_alone || (v.when == phase::prompt && !options.seed)) {
        release_stage(v);
        return;   // what is there stays, for the next time that it is tried
    }
    std::vector<int32_t> missing;
    for (const size_t i : by_worth(v)) {
        if (!in.present(v.e.experts[i])) {
            missing.push_back(v.e.experts[i]);
        }
    }
    if (v.when == phase::decode && by->admits_misses() && !missing.empty()) {
        for (staging_slot & s : stage) {
            if (v.uses_stage && s.in_use) {
                in.exclude(s.expert, false);   // computed: it may stay now
            }
        }
        changes.clear();
        in.update(v.e, missing, by->by, options.rule, by->keeps_members(), changes);
        for (const residency::insertion & i : changes) {
            request(v.layer, i, v.when, false, staged_at(i.expert) < 0);
        }
    }
    release_stage(v);
    if (v.when == phase::prompt) {
        by->foresee_prompt(v.e, wishes);
    } else {
        by->foresee(v.e, wishes);
    }
    grant(v.when);
    // An empty slot costs nobody a place. Where all misses are loaded, one that had a place to stay has it.
    for (size_t i = 0; i < missing.size() && !in.full(v.layer) && !options.must_load; i++) {
        residency::insertion at;
        if (!in.present(missing[i]) && in.insert(v.layer, missing[i], by->by, at)) {
            request(v.layer, at, v.when, false);
        }
    }
}

void tier::end(visit & v, const cost & c) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_state & l = layers[v.layer];
    access_counts & n = l.counts[(size_t) v.when];
    n.n_events++;
    n.n_accesses += v.e.experts.size();
    size_t n_streamed = 0;
    for (size_t i = 0; i < v.slot.size(); i++) {
        const bool loaded = v.awaited[i] == arrival::demanded || v.awaited[i] == arrival::staged;
        n_streamed += v.awaited[i] == arrival::staged;
        if (v.slot[i] >= 0) {
            if (!is_staging(v.layer, v.slot[i])) {
                in.unpin(v.e.experts[i]);
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
    if (v.when == phase::prompt) {
        if (n_streamed > 0) {
            prompts.on_device(l.info.kind, (double) n_streamed, c.late_seconds);
        }
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
    account_for_gone(n);
}

void tier::clear() {
    wait_idle();
    std::lock_guard<std::mutex> lock(mutex);
    in = new_residency();
    by->reset();
    stage.assign(stage.size(), {});
    unused.assign(unused.size(), 0);
    last_begun = SIZE_MAX;
}

access_counts tier::counts(phase when, size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return layers[layer].counts[(size_t) when];
}

std::vector<int32_t> tier::residents(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> experts;
    for (int32_t e = 0; e < space.n_expert(layer); e++) {
        if (in.slot_of(key_of(layer, e)) >= 0) {
            experts.push_back(e);
        }
    }
    return experts;
}

std::vector<uint64_t> tier::uses(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    const auto begin = by->by.n_uses.begin();
    return { begin + space.first[layer], begin + space.first[layer + 1] };
}

bool tier::hold(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    const int32_t key = key_of(layer, expert);
    if (in.slot_of(key) < 0) {
        return false;
    }
    in.pin(key);
    return true;
}

void tier::let_go(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    in.unpin(key_of(layer, expert));
}

int64_t tier::spent(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return in.spent(layer);
}

int32_t tier::n_present(size_t layer) const {
    std::lock_guard<std::mutex> lock(mutex);
    return in.n_present(layer);
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
