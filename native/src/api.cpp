// The C border. Exceptions from below become a return code and one line of text here, and nowhere else.

#include "edgemoe.h"

#include "backend.h"
#include "kernels/kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

using namespace edgemoe;

struct edgemoe_source {
    std::unique_ptr<source> owned;   // empty for the source of a model
    const source *          s;
};

struct edgemoe_model {
    std::unique_ptr<model> m;
    edgemoe_source         view;    // of the model's own source
    std::string            dense;   // pattern
    std::string            fault;
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

edgemoe_source * edgemoe_source_open(const char * path) {
    return guarded([&] {
        auto s = source::open(path);
        s->visit_blobs([](size_t, uint32_t, const file &) {});
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

edgemoe_model * edgemoe_model_open(const char * path, const char * level) {
    return guarded([&] {
        const isa used = level ? isa_named(level) : best_isa();
        if (!isa_supported(used)) {
            throw std::invalid_argument(std::string("this CPU has no ") + level);
        }
        register_device();
        auto opened = std::make_unique<edgemoe_model>();
        opened->m      = std::make_unique<model>(source::open(path), used);
        opened->view.s = opened->m->src.get();
        opened->dense  = used == isa::none ? "" : dense_pattern(*opened->m->src);
        return opened.release();
    }, nullptr);
}

void edgemoe_model_close(edgemoe_model * model) { delete model; }

edgemoe_source * edgemoe_model_source(edgemoe_model * model) { return &model->view; }

void * edgemoe_model_buffer_type(edgemoe_model * model) { return model->m->buffer_type(); }

const char * edgemoe_model_ghost(edgemoe_model * model) {
    static thread_local std::string path;
    path = model->m->ghost_path();
    return path.empty() ? nullptr : path.c_str();
}

const char * edgemoe_expert_pattern(void) { return expert_pattern(); }

const char * edgemoe_dense_pattern(edgemoe_model * model) { return model->dense.c_str(); }

int edgemoe_model_loaded(edgemoe_model * model) {
    return guarded([&] { model->m->loaded(); return 0; }, -1);
}

const char * edgemoe_model_fault(edgemoe_model * model) {
    model->fault = model->m->fault();
    return model->fault.empty() ? nullptr : model->fault.c_str();
}

void edgemoe_model_get_stats(const edgemoe_model * model, edgemoe_stats * stats) {
    const counters & c = model->m->held.count;
    *stats = { c.n_events, c.n_pairs, c.n_accesses, c.n_computed_on_cpu, c.n_fused, c.bytes_accessed, c.compute_us };
}

void edgemoe_watch_interrupts(bool on) { watch_interrupts(on); }

bool edgemoe_interrupted(void *) { return interrupted(); }

} // extern "C"
