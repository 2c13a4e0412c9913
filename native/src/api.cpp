// The C border. Exceptions from below become a return code and one line of text here, and nowhere else.

#include "edgemoe.h"

#include "backend.h"
#include "heads.h"
#include "kernels/kernels.h"
#include "recorder.h"
#include "router_feed.h"
#include "simulation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

using namespace edgemoe;

struct edgemoe_source {
    std::unique_ptr<source> owned;   // empty once a model has it
    const source *          s;
};

struct edgemoe_model {
    std::unique_ptr<model> m;
    std::string            dense;   // pattern
    std::string            fault, failure;
    router_tap             tap;     // of the context that was made with it
    std::vector<std::unique_ptr<router_feed>> feeds;

    std::vector<tier *> tiers() const {
        std::vector<tier *> all;
        if (m->cache) {
            all.push_back(&m->cache->experts);
        }
        if (m->ram) {
            all.push_back(&m->ram->experts);
        }
        return all;
    }
};

struct edgemoe_recorder {
    recorder r;
};

struct edgemoe_heads {
    std::shared_ptr<const heads> h;
};

struct edgemoe_replay {
    tier                     experts;
    std::vector<tier::visit> held;
};

struct edgemoe_choice {
    miss_choice   misses;
    stream_choice prompts;
};

static thread_local std::string last_error;

template <typename F> static auto guarded(F && body, decltype(body()) failed) -> decltype(body()) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
    } catch (const std::exception & e) {
        last_error = e.what();
    }
    return failed;
}

static const expert_layer & layer_at(const edgemoe_source * source, uint32_t index) {
    if (index >= source->s->layers.size()) {
        throw std::out_of_range("layer index " + std::to_string(index) + ", wanted less than " + std::to_string(source->s->layers.size()));
    }
    return source->s->layers[index];
}

static const projection & projection_at(const expert_layer & layer, uint32_t index) {
    if (index >= layer.projections.size()) {
        throw std::out_of_range("projection index " + std::to_string(index) + ", wanted less than " + std::to_string(layer.projections.size()));
    }
    return layer.projections[index];
}

static ggml_type type_named(const char * name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * its_name = ggml_type_name((ggml_type) t);
        if (its_name && !strcmp(its_name, name)) {
            return (ggml_type) t;
        }
    }
    throw std::invalid_argument(std::string("type ") + name + ", wanted one of ggml's");
}

static isa isa_named(const char * name) {
    for (const isa level : { isa::none, isa::avx2, isa::avxvnni, isa::avx512 }) {
        if (!strcmp(isa_name(level), name)) {
            return level;
        }
    }
    throw std::invalid_argument(std::string("instruction set ") + name + ", wanted avx2, avxvnni or avx512");
}

// True when there was such a kernel.
static bool multiply(ggml_type type, isa level, bool tiled, const void * w, size_t row_bytes, int64_t n, int64_t n_rows, const float * x, int64_t n_tokens, float * y) {
    const kernel * k = isa_supported(level) ? find_kernel(type, level) : nullptr;
    if (!k || (tiled && !k->multiply)) {
        return false;
    }
    const size_t q_bytes = activation_bytes(k->activation, n);
    workspace memory;
    char * q    = (char *) memory.take(q_bytes * n_tokens);
    void * tile = memory.take(tiled ? k->tile_bytes(n) : 0);
    std::vector<const void *> qs;
    for (int64_t t = 0; t < n_tokens; t++) {
        qs.push_back(q + t * q_bytes);
        quantize(k->activation, x + t * n, q + t * q_bytes, n);
        if (!tiled) {
            k->dot(w, row_bytes, qs.back(), n, n_rows, y + t * n_rows);
        }
    }
    for (int64_t r = 0; tiled && r < n_rows; r += tile_rows) {
        const int n_tile_rows = (int) std::min<int64_t>(tile_rows, n_rows - r);
        std::vector<float *> ys;
        for (int64_t t = 0; t < n_tokens; t++) {
            ys.push_back(y + t * n_rows + r);
        }
        k->unpack((const char *) w + r * row_bytes, row_bytes, n, n_tile_rows, tile);
        k->multiply(tile, n, n_tile_rows, qs.data(), n_tokens, ys.data());
    }
    return true;
}

static tables tables_of(const edgemoe_cache_options & o) {
    tables all;
    for (uint32_t i = 0; i < o.n_tables; i++) {
        const edgemoe_table & t = o.tables[i];
        size_t n = 1;
        for (uint32_t d = 0; d < t.n_dims; d++) {
            n *= t.shape[d];
        }
        for (size_t i = 0; i < n; i++) {
            if (!std::isfinite(t.data[i])) {
                throw std::invalid_argument(std::string("table ") + t.name + ": value " + std::to_string(i) + " is not a finite number");
            }
        }
        all[t.name] = { { t.shape, t.shape + t.n_dims }, { t.data, t.data + n } };
    }
    return all;
}

static read_ahead read_ahead_named(const std::string & name) {
    if (name != "off" && name != "on" && name != "auto") {
        throw std::invalid_argument("read ahead: " + name + ", wanted off, on or auto");
    }
    return name == "on" ? read_ahead::on : name == "auto" ? read_ahead::automatic : read_ahead::off;
}

// `learned` has to live until the tier has made its own copy.
static tier_options tier_options_of(const edgemoe_cache_options & o, const tables & learned) {
    tier_options options;
    options.n_slots           = (int32_t) std::min<uint32_t>(o.n_slots, INT32_MAX);
    options.shared            = o.shared;
    options.policy            = o.policy;
    options.from              = { &learned, o.heads, o.score, o.user };
    options.misses            = o.misses;
    options.rule.by           = o.strict ? admission::rule::used_more : admission::rule::anyone;
    options.rule.most_inserts = o.most_inserts ? (int32_t) o.most_inserts : INT32_MAX;
    options.seed              = o.seed;
    options.n_staging         = (int32_t) o.n_staging;
    options.inline_loads      = o.inline_loads;
    options.ahead             = read_ahead_named(o.read_ahead ? o.read_ahead : "off");
    return options;
}

static edgemoe_access_counts border(const access_counts & c) {
    return { c.n_events, c.n_accesses, c.n_hits, c.n_demand, c.n_computed, c.n_proactive, c.n_evicted, c.n_unused, c.n_failed, c.bytes_loaded, c.stall_us };
}

template <typename T> static int copy(const std::vector<T> & from, T * to) {
    std::copy(from.begin(), from.end(), to);
    return (int) from.size();
}

static const tier & tier_of(const edgemoe_model * model, int which, uint32_t layer) {
    if (which == EDGEMOE_IN_RAM ? !model->m->ram : !model->m->cache) {
        throw std::logic_error(std::string("the model has no expert slots ") + (which == EDGEMOE_IN_RAM ? "in RAM" : "on a device"));
    }
    const tier & t = which == EDGEMOE_IN_RAM ? model->m->ram->experts : model->m->cache->experts;
    if (layer >= t.n_layers()) {
        throw std::out_of_range("layer index " + std::to_string(layer) + ", wanted less than " + std::to_string(t.n_layers()));
    }
    return t;
}

static std::vector<int> block_numbers(const edgemoe_model & model) {
    std::vector<int> layers;
    for (const expert_layer & layer : model.m->src->layers) {
        layers.push_back((int) layer.index);
    }
    return layers;
}

// Heads must be of this model, as far as can be seen.
static void check_heads(const heads & h, const source & s) {
    const auto wrong = [](size_t layer, const std::string & what, uint64_t found, uint64_t wanted) {
        throw std::invalid_argument("heads: layer index " + std::to_string(layer) + ": " + std::to_string(found) + " " + what + ", wanted " + std::to_string(wanted));
    };
    if (h.n_layers() != s.layers.size()) {
        throw std::invalid_argument("heads: " + std::to_string(h.n_layers()) + " layers, wanted " + std::to_string(s.layers.size()));
    }
    for (size_t l = 0; l < s.layers.size(); l++) {
        if (h.n_expert[l] != s.layers[l].n_expert) {
            wrong(l, "experts", h.n_expert[l], s.layers[l].n_expert);
        }
        const router & r = s.layers[l].chosen_by;
        if (r.weight.bytes && r.n_in != h.n_embd) {
            wrong(l, "values", (uint64_t) h.n_embd, (uint64_t) r.n_in);
        }
    }
}

// Policies that go by what routers say hear it, and what learned heads make of it.
static void feed(edgemoe_model & model, tier & t, const edgemoe_heads * learned) {
    if (learned && !model.m->learned) {
        check_heads(*learned->h, *model.m->src);
        model.m->learned = std::make_unique<head_feed>(learned->h, model.m->src->layers.size());
    }
    head_feed * by_heads = t.needs_next() || t.needs_successor() ? model.m->learned.get() : nullptr;
    if ((t.needs_next() && !(by_heads && by_heads->of->has_next())) || (t.needs_successor() && !(by_heads && by_heads->of->has_successor()))) {
        throw std::invalid_argument("heads: the policy wants heads of another kind, too");
    }
    if (by_heads) {
        by_heads->add(t);
    }
    if (t.needs_probs()) {
        model.feeds.push_back(std::make_unique<router_feed>(model.tap, t, block_numbers(model), by_heads));
    }
}

static tier::visit begin(edgemoe_replay * replay, uint32_t layer, const int32_t * experts, const int32_t * n_tokens_of, uint32_t n, int64_t n_tokens) {
    if (layer >= replay->experts.n_layers()) {
        throw std::out_of_range("event: layer " + std::to_string(layer) + ", wanted less than " + std::to_string(replay->experts.n_layers()));
    }
    const int32_t n_expert = replay->experts.n_expert(layer);
    for (uint32_t i = 0; i < n; i++) {
        if (experts[i] < (i ? experts[i - 1] + 1 : 0) || experts[i] >= n_expert) {
            throw std::out_of_range("event: expert " + std::to_string(experts[i]) + " at place " + std::to_string(i) + ", wanted distinct ones below " +
                std::to_string(n_expert) + " in ascending order");
        }
        if (n_tokens_of[i] < 1 || n_tokens_of[i] > n_tokens) {
            throw std::out_of_range("event: expert " + std::to_string(experts[i]) + " is used by " + std::to_string(n_tokens_of[i]) + " tokens, wanted 1 to " + std::to_string(n_tokens));
        }
    }
    return replay->experts.begin({ layer, { experts, experts + n }, { n_tokens_of, n_tokens_of + n }, n_tokens });
}

extern "C" {

const char * edgemoe_last_error(void) { return last_error.c_str(); }

const char * edgemoe_check_ggml(int api_version, const char * version) {
    static thread_local std::string problem;
    problem = check_ggml(api_version, version);
    return problem.empty() ? nullptr : problem.c_str();
}

int edgemoe_init(void) {
    return guarded([] { register_device(); return 0; }, -1);
}

uint32_t edgemoe_device_count(void) { return (uint32_t) ggml_backend_dev_count(); }

int edgemoe_get_device(uint32_t index, edgemoe_device_info * info) {
    return guarded([&] {
        if (index >= ggml_backend_dev_count()) {
            throw std::out_of_range("device " + std::to_string(index) + ", wanted less than " + std::to_string(ggml_backend_dev_count()));
        }
        const ggml_backend_dev_t device = ggml_backend_dev_get(index);
        size_t free, total;
        ggml_backend_dev_memory(device, &free, &total);
        *info = { ggml_backend_dev_name(device), ggml_backend_dev_description(device), (int) ggml_backend_dev_type(device), free, total };
        return 0;
    }, -1);
}

int edgemoe_kernel_multiply(const char * type, const char * isa, bool tiled, const void * w, size_t row_bytes, int64_t n, int64_t n_rows, const float * x,
                            int64_t n_tokens, float * y) {
    return guarded([&] {
        const ggml_type t = type_named(type);
        if (n <= 0 || n % ggml_blck_size(t) != 0) {
            throw std::invalid_argument(std::to_string(n) + " elements per row, wanted a multiple of " + std::to_string(ggml_blck_size(t)));
        }
        return multiply(t, isa ? isa_named(isa) : best_isa(), tiled, w, row_bytes, n, n_rows, x, n_tokens, y) ? 0 : 1;
    }, -1);
}

const char * edgemoe_best_isa(void) { return isa_name(best_isa()); }

edgemoe_source * edgemoe_source_open(const char * path, bool check_blobs) {
    return guarded([&] {
        auto s = source::open(path);
        if (check_blobs) {
            s->visit_blobs([](size_t, uint32_t, const file &) {});
        }
        const source * view = s.get();
        return new edgemoe_source { std::move(s), view };
    }, nullptr);
}

void edgemoe_source_close(edgemoe_source * source) { delete source; }

void edgemoe_source_get_info(const edgemoe_source * source, edgemoe_source_info * info) {
    const auto & s = *source->s;
    *info = {};
    info->kind     = s.kind == source_kind::dense ? EDGEMOE_DENSE : s.kind == source_kind::stacked ? EDGEMOE_STACKED : EDGEMOE_PACKAGE;
    info->n_files  = (uint32_t) s.files.size();
    info->n_layers = (uint32_t) s.layers.size();
    for (const expert_layer & layer : s.layers) {
        info->expert_bytes += (uint64_t) layer.n_expert * layer.bytes_per_expert();
    }
    info->dense_bytes  = s.dense_bytes;
    info->architecture = s.architecture.c_str();
    info->fingerprint  = s.fingerprint.c_str();
}

const char * edgemoe_source_file(const edgemoe_source * source, uint32_t index) {
    return index < source->s->files.size() ? source->s->files[index].path.c_str() : nullptr;
}

int edgemoe_source_get_layer(const edgemoe_source * source, uint32_t index, edgemoe_layer_info * info) {
    return guarded([&] {
        const expert_layer & layer = layer_at(source, index);
        *info = { layer.index, layer.n_expert, (uint32_t) layer.projections.size(), layer.bytes_per_expert() };
        return 0;
    }, -1);
}

int edgemoe_source_get_projection(const edgemoe_source * source, uint32_t index, uint32_t projection, edgemoe_projection_info * info) {
    return guarded([&] {
        const auto & p = projection_at(layer_at(source, index), projection);
        *info = { p.name.c_str(), ggml_type_name(p.type), p.n_in, p.n_out, p.bytes };
        return 0;
    }, -1);
}

int64_t edgemoe_source_integer(const edgemoe_source * source, const char * key, int64_t fallback) {
    return guarded([&] { return gguf_header(file(source->s->files[0].path)).integer(key, fallback); }, fallback);
}

int edgemoe_source_read(const edgemoe_source * source, uint32_t index, uint32_t projection, uint32_t expert, void * dst) {
    return guarded([&] {
        const expert_layer & layer = layer_at(source, index);
        if (expert >= layer.n_expert) {
            throw std::out_of_range("expert " + std::to_string(expert) + ", wanted less than " + std::to_string(layer.n_expert));
        }
        source->s->read(layer, projection_at(layer, projection), expert, dst);
        return 0;
    }, -1);
}

edgemoe_model * edgemoe_model_open(edgemoe_source * source, const char * level, const edgemoe_cache_options * ram) {
    return guarded([&] {
        const isa used = level ? isa_named(level) : best_isa();
        if (!isa_supported(used)) {
            throw std::invalid_argument(std::string("this CPU has no ") + level);
        }
        register_device();
        auto opened = std::make_unique<edgemoe_model>();
        if (ram) {
            const tables learned = tables_of(*ram);
            const ram_options options = { tier_options_of(*ram, learned), ram->most_bytes, ram->fail_every, (size_t) ram->most_read, best_isa() };
            opened->m = std::make_unique<model>(std::move(source->owned), used, &options);
        } else {
            opened->m = std::make_unique<model>(std::move(source->owned), used, nullptr);
        }
        if (opened->m->ram) {
            feed(*opened, opened->m->ram->experts, ram->learned_heads);
        }
        opened->dense  = used == isa::none ? "" : dense_pattern(*opened->m->src);
        return opened.release();
    }, nullptr);
}

void edgemoe_model_close(edgemoe_model * model) { delete model; }

void * edgemoe_model_buffer_type(edgemoe_model * model) { return model->m->buffer_type(); }

const char * edgemoe_model_ghost(edgemoe_model * model) {
    static thread_local std::string path;
    path = model->m->ghost_path();
    return path.empty() ? nullptr : path.c_str();
}

const char * edgemoe_expert_pattern(void) { return expert_pattern(); }

const char * edgemoe_expert_bias_pattern(void) { return expert_bias_pattern(); }

const char * edgemoe_dense_pattern(edgemoe_model * model) { return model->dense.c_str(); }

int edgemoe_model_loaded(edgemoe_model * model) {
    return guarded([&] { model->m->loaded(); return 0; }, -1);
}

const char * edgemoe_model_fault(edgemoe_model * model) {
    model->fault = model->m->fault();
    return model->fault.empty() ? nullptr : model->fault.c_str();
}

const char * edgemoe_model_take_failure(edgemoe_model * model) {
    model->failure = model->m->held.take_failure();
    return model->failure.empty() ? nullptr : model->failure.c_str();
}

void edgemoe_model_get_stats(const edgemoe_model * model, edgemoe_stats * stats) {
    const counters & c = model->m->held.count;
    *stats = { c.n_events, c.n_pairs, c.n_accesses, c.n_accesses - c.n_on_device, c.n_on_device, c.n_refused, c.n_fused, c.bytes_accessed, c.compute_us };
}

int edgemoe_model_open_cache(edgemoe_model * model, const edgemoe_cache_options * o) {
    return guarded([&] {
        try {
            const tables learned = tables_of(*o);
            model->m->open_cache({ o->device, tier_options_of(*o, learned), o->most_block_bytes, o->most_bytes, o->fail_every, o->poison });
            feed(*model, model->m->cache->experts, o->learned_heads);
            return 0;
        } catch (const no_room & e) {
            last_error = e.what();
            return 1;
        }
    }, -1);
}

void edgemoe_model_get_cache_info(const edgemoe_model * model, edgemoe_cache_info * info) {
    const device_cache & c = *model->m->cache;
    *info = { c.slots.bytes(), c.slots.has_pinned(), miss_mode_name(c.experts.mode()), c.experts.cpu_rate(0), c.experts.load_rate(0) };
}

void edgemoe_model_get_ram_info(const edgemoe_model * model, edgemoe_ram_info * info) {
    const ram_cache & c = *model->m->ram;
    const ram_cache::counts reads = c.reads();
    *info = { (uint64_t) c.budget(), (uint64_t) c.staging(), (uint64_t) c.experts.spent(0), (uint32_t) c.experts.n_present(0), model->m->bytes.direct(), reads.bytes_read,
              reads.n_reads, reads.busy_us };
}

uint64_t edgemoe_model_get_ram_cost(const edgemoe_model * model, uint32_t layer) { return model->m->places->bytes(layer); }

int edgemoe_model_get_access_counts(const edgemoe_model * model, int which, int phase, uint32_t layer, edgemoe_access_counts * counts) {
    return guarded([&] { *counts = border(tier_of(model, which, layer).counts((tier::phase) phase, layer)); return 0; }, -1);
}

int edgemoe_model_get_residents(const edgemoe_model * model, int which, uint32_t layer, int32_t * experts) {
    return guarded([&] { return copy(tier_of(model, which, layer).residents(layer), experts); }, -1);
}

int edgemoe_model_get_uses(const edgemoe_model * model, int which, uint32_t layer, uint64_t * uses) {
    return guarded([&] { return copy(tier_of(model, which, layer).uses(layer), uses); }, -1);
}

void edgemoe_model_wait_cache(edgemoe_model * model) {
    for (tier * t : model->tiers()) {
        t->wait_idle();
    }
}

void edgemoe_model_stop_cache(edgemoe_model * model) {
    for (tier * t : model->tiers()) {
        t->stop();
    }
}

void edgemoe_model_clear_cache(edgemoe_model * model) {
    for (tier * t : model->tiers()) {
        t->clear();
    }
}

static std::vector<heads::weights> weights_of(const edgemoe_head * all, uint32_t n) {
    std::vector<heads::weights> found;
    for (uint32_t l = 0; all && l < n; l++) {
        found.push_back({ type_named(all[l].type), all[l].weights, all[l].bias });
    }
    return found;
}

edgemoe_heads * edgemoe_heads_open(const uint32_t * n_expert, uint32_t n_layers, uint32_t n_embd, const edgemoe_head * next, const edgemoe_head * successor) {
    return guarded([&] {
        return new edgemoe_heads { std::make_shared<const heads>(std::vector<uint32_t>(n_expert, n_expert + n_layers), n_embd, weights_of(next, n_layers), weights_of(successor, n_layers)) };
    }, nullptr);
}

void edgemoe_heads_close(edgemoe_heads * heads) { delete heads; }

int edgemoe_heads_evaluate(const edgemoe_heads * from, bool successor, uint32_t layer, const float * hidden, uint32_t n_rows, float * probs) {
    return guarded([&] {
        const heads & h = *from->h;
        if (layer >= h.n_layers() || !(successor ? h.has_successor() : h.has_next())) {
            throw std::out_of_range("heads: layer index " + std::to_string(layer) + (successor ? " of the next layer's" : " of the layer's own") + ", found none");
        }
        head_step step(h, layer, !successor, successor, hidden, (size_t) h.n_embd * sizeof(float), n_rows);
        step.run(0, 1);
        const std::vector<float> found = successor ? step.successor() : step.next();
        std::copy(found.begin(), found.end(), probs);
        return 0;
    }, -1);
}

bool edgemoe_model_eval(void * node, bool ask, void * model) { return ((edgemoe_model *) model)->tap.eval((ggml_tensor *) node, ask); }

edgemoe_recorder * edgemoe_recorder_open(edgemoe_model * model, int32_t n_used, int32_t n_expert, int32_t n_embd, int64_t n_ubatch) {
    return guarded([&] {
        return new edgemoe_recorder { { model->tap, block_numbers(*model), n_used, n_expert, n_embd, n_ubatch } };
    }, nullptr);
}

void edgemoe_recorder_close(edgemoe_recorder * recorder) { delete recorder; }

void edgemoe_recorder_begin(edgemoe_recorder * recorder, const edgemoe_recording * to) {
    recorder->r.begin({ to->n_tokens, to->outputs, to->ids, to->chosen, to->probs, to->hidden });
}

int64_t edgemoe_recorder_end(edgemoe_recorder * recorder) {
    return guarded([&] { return recorder->r.end(); }, (int64_t) -1);
}

const char * edgemoe_recorder_gating(const edgemoe_recorder * recorder) { return gating_name(recorder->r.how); }

void edgemoe_model_begin_sequence(edgemoe_model * model) {
    for (tier * t : model->tiers()) {
        t->begin_sequence(nullptr);
    }
}

bool edgemoe_model_wants_tokens(const edgemoe_model * model) {
    const std::vector<tier *> all = model->tiers();
    return std::any_of(all.begin(), all.end(), [](const tier * t) { return t->needs_tokens(); });
}

void edgemoe_model_announce(edgemoe_model * model, const int32_t * token_ids, int64_t n_tokens, int32_t stage) {
    for (tier * t : model->tiers()) {
        t->announce({ token_ids, n_tokens, stage });
    }
}

const char * edgemoe_policies(void) {
    static const std::string all = describe_policies();
    return all.c_str();
}

edgemoe_replay * edgemoe_replay_open(const uint32_t * n_expert, uint32_t n_layers, const edgemoe_cache_options * o) {
    return guarded([&] {
        if (n_layers == 0) {
            throw std::invalid_argument("replay: no layers");
        }
        const tables learned = tables_of(*o);
        std::vector<tier_layer> layers;
        for (uint32_t i = 0; i < n_layers; i++) {
            layers.push_back({ (int32_t) n_expert[i], 1, 0 });
        }
        tier_options options = tier_options_of(*o, learned);
        if (o->costs) {
            options.cost.assign(o->costs, o->costs + n_layers);
            options.budget    = (int64_t) o->most_bytes;
            options.must_load = true;
        }
        return new edgemoe_replay { { layers, options, nullptr }, {} };
    }, nullptr);
}

void edgemoe_replay_close(edgemoe_replay * replay) { delete replay; }

int edgemoe_replay_event(edgemoe_replay * replay, uint32_t layer, const int32_t * experts, const int32_t * n_tokens_of, uint32_t n, int64_t n_tokens) {
    return guarded([&] {
        tier::visit v = begin(replay, layer, experts, n_tokens_of, n, n_tokens);
        replay->experts.wait(v);
        replay->experts.end(v, {});
        return 0;
    }, -1);
}

int edgemoe_replay_hold(edgemoe_replay * replay, uint32_t layer, const int32_t * experts, const int32_t * n_tokens_of, uint32_t n, int64_t n_tokens) {
    return guarded([&] {
        replay->held.push_back(begin(replay, layer, experts, n_tokens_of, n, n_tokens));
        replay->experts.wait(replay->held.back());
        return 0;
    }, -1);
}

void edgemoe_replay_release(edgemoe_replay * replay) {
    for (tier::visit & v : replay->held) {
        replay->experts.end(v, {});
    }
    replay->held.clear();
}

int edgemoe_replay_sequence(edgemoe_replay * replay, const edgemoe_rows * r) {
    return guarded([&] {
        simulate(replay->experts, { r->n_rows, r->n_used, r->ids, r->step, r->stage, r->token_ids, r->chosen_probs, r->probs, r->hidden, r->n_embd, r->next, r->successor });
        return 0;
    }, -1);
}

void edgemoe_replay_clear(edgemoe_replay * replay) { replay->experts.clear(); }

void edgemoe_replay_get_counts(const edgemoe_replay * replay, int phase, uint32_t layer, edgemoe_access_counts * counts) {
    *counts = border(replay->experts.counts((tier::phase) phase, layer));
}

int edgemoe_replay_get_residents(const edgemoe_replay * replay, uint32_t layer, int32_t * experts) { return copy(replay->experts.residents(layer), experts); }

edgemoe_choice * edgemoe_choice_open(const char * misses) {
    return guarded([&] { return new edgemoe_choice { miss_choice(misses), {} }; }, nullptr);
}

void edgemoe_choice_close(edgemoe_choice * choice) { delete choice; }

const char * edgemoe_choice_mode(const edgemoe_choice * choice) { return miss_mode_name(choice->misses.mode()); }

uint32_t edgemoe_choice_n_to_load(const edgemoe_choice * choice, uint32_t n_misses) { return (uint32_t) choice->misses.n_to_load((int32_t) n_misses, 0); }

void edgemoe_choice_rates(edgemoe_choice * choice, double cpu, double load) {
    choice->misses.computed(0, cpu, 1);
    choice->misses.loaded(0, load, 1);
}

void edgemoe_choice_step(edgemoe_choice * choice, double seconds, int64_t n_pairs) { choice->misses.step(seconds, n_pairs); }

uint32_t edgemoe_choice_n_to_stream(edgemoe_choice * choice, double pairs_per_second, double experts_per_second, const int32_t * n_tokens_of, uint32_t n, double load_seconds) {
    choice->prompts.computed(0, pairs_per_second, 1);
    choice->prompts.on_device(0, experts_per_second, 1);
    return (uint32_t) choice->prompts.n_to_stream({ n_tokens_of, n_tokens_of + n }, (int32_t) n, 0, load_seconds);
}

void edgemoe_watch_interrupts(bool on) { watch_interrupts(on); }

bool edgemoe_interrupted(void *) { return interrupted(); }

} // extern "C"
