// The tables that make edgemoe a ggml device of type ACCEL: llama.cpp adds such a device to every context, places the routed experts in its
// buffer type when told to (tensor_buft_overrides), and sends it the nodes that it claims.

#include "backend.h"

#include "ggml_abi.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include <sys/mman.h>

extern "C" {
GGML_API ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, struct ggml_backend_buffer_i, void *, size_t);
}

namespace edgemoe {

// --- buffer type and buffer ---
// A buffer holds libllama's tensors for weights of ours: the stacked experts and the dense matrices. They are stand-ins: address space without bytes,
// since the bytes are in the store. Other tensors that land here (an adapter's) are ordinary host memory.

static const char * const NAME = "EdgeMoE";

static ggml_backend_device device;

static model & model_of(ggml_backend_buffer_type_t buft) { return *(model *) buft->context; }

struct buffer_memory {
    explicit buffer_memory(size_t size) : bytes(size ? size : 1) {
        // NORESERVE: never touched for stand-ins, so it costs nothing.
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    ~buffer_memory() {
        if (base != MAP_FAILED) {
            munmap(base, bytes);
        }
    }
    void * base;
    size_t bytes;
};

static const owned_tensor * weight_of(const ggml_tensor * t) {
    return (const owned_tensor *) t->extra;
}

static void buffer_free(ggml_backend_buffer_t buffer) { delete (buffer_memory *) buffer->context; }

static void * buffer_base(ggml_backend_buffer_t buffer) { return ((buffer_memory *) buffer->context)->base; }

static ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t) {
    model & m = model_of(buffer->buft);
    const owned_tensor * weight = m.held.find(t->name);
    if (!weight) {
        return GGML_STATUS_SUCCESS;
    }
    if (weight->tensor->type != t->type || !ggml_are_same_shape(weight->tensor, t)) {
        m.held.set_fault(std::string(t->name) + ": llama.cpp asks for another shape than the file has");
        return GGML_STATUS_FAILED;
    }
    t->extra = (void *) weight;
    return GGML_STATUS_SUCCESS;
}

static void buffer_memset(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    if (!weight_of(t)) {
        memset((char *) t->data + offset, value, size);
    }
}

static void buffer_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    // For a weight of ours there is nothing to do: the store has it. With a package `data` points into a hole that must not be read.
    if (!weight_of(t)) {
        memcpy((char *) t->data + offset, data, size);
    }
}

static void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const owned_tensor * weight = weight_of(t);
    if (!weight) {
        memcpy(data, (const char *) t->data + offset, size);
        return;
    }
    // Back from strided to stacked, one expert at a time.
    const ggml_tensor * w = weight->tensor;
    model & m = model_of(buffer->buft);
    std::vector<char> from_disk(m.ram && weight->layer != owned_tensor::DENSE ? w->nb[2] : 0);
    const size_t per_expert = ggml_row_size(w->type, w->ne[0]) * (size_t) w->ne[1];
    for (size_t done = 0; done < size;) {
        const size_t e = (offset + done) / per_expert, within = (offset + done) % per_expert;
        const size_t n = std::min(per_expert - within, size - done);
        const char * expert = (const char *) w->data + e * w->nb[2];
        if (!from_disk.empty()) {
            const expert_layer & layer = m.src->layers[weight->layer];
            m.src->read(layer, layer.projections[weight->projection], (uint32_t) e, from_disk.data());
            expert = from_disk.data();
        }
        memcpy((char *) data + done, expert + within, n);
        done += n;
    }
}

static void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

static const char * buft_name(ggml_backend_buffer_type_t buft) {
    // libllama asks for the name when it places a tensor: after it has checked the sizes of its files, before it maps them. The last moment to
    // drop the hole of the ghost (see ghost_file).
    model & m = model_of(buft);
    if (m.ghost) {
        m.ghost->drop_hole();
    }
    return NAME;
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    auto memory = std::make_unique<buffer_memory>(size);
    if (memory->base == MAP_FAILED) {
        return nullptr;
    }
    ggml_backend_buffer_i table = {};
    table.free_buffer   = buffer_free;
    table.get_base      = buffer_base;
    table.init_tensor   = buffer_init_tensor;
    table.memset_tensor = buffer_memset;
    table.set_tensor    = buffer_set;
    table.get_tensor    = buffer_get;
    table.clear         = buffer_clear;
    return ggml_backend_buffer_init(buft, table, memory.release(), size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t) { return 64; }

// Not host memory: otherwise llama.cpp would let other backends read the tensors directly.
static bool buft_is_host(ggml_backend_buffer_type_t) { return false; }

static bool is_ours(ggml_backend_buffer_type_t buft) { return buft && buft->iface.get_name == buft_name; }

// --- model ---

struct model::ggml_side {
    ggml_backend_buffer_type buft;
};

model::model(std::unique_ptr<source> s, isa level, const ram_options * in_ram)
    : src(std::move(s)), places(in_ram && !src->layers.empty() ? std::make_unique<expert_memory>(*src) : nullptr), bytes(*src, places.get()),
      ram(places ? std::make_unique<ram_cache>(*src, bytes, *places, *in_ram) : nullptr), held(*src, bytes, level), ggml(std::make_unique<ggml_side>()) {
    if (src->kind == source_kind::package) {
        ghost = std::make_unique<ghost_file>(src->ghost_header, src->ghost_bytes);
    }
    ggml->buft = { { buft_name, buft_alloc, buft_alignment, nullptr, nullptr, buft_is_host }, &device, this };
}

model::~model() = default;

void * model::buffer_type() { return &ggml->buft; }

void model::loaded() {
    bytes.wait();
    for (const file & f : src->files) {
        dense.add(f.path);
    }
    if (ram && src->kind == source_kind::stacked) {
        forget_experts();
    }
}

// libllama has mapped a GGUF with all its experts, and asked for all of its pages. Only what lies between the experts is to take memory.
void model::forget_experts() {
    struct range { uint64_t first, end; };
    std::vector<std::vector<range>> experts(src->files.size());
    for (const expert_layer & layer : src->layers) {
        for (const projection & p : layer.projections) {
            experts[p.shard].push_back({ p.offset, p.offset + layer.n_expert * p.bytes });
        }
    }
    for (size_t i = 0; i < experts.size(); i++) {
        const file & f = src->files[i];
        std::sort(experts[i].begin(), experts[i].end(), [](const range & a, const range & b) { return a.first < b.first; });
        for (const range & r : experts[i]) {
            dense.forget(f, r.first, r.end - r.first);
        }
        uint64_t at = 0;
        for (const range & r : experts[i]) {
            f.want(at, r.first - at);
            at = r.end;
        }
        f.want(at, f.bytes - at);
    }
    dense.expect_no_neighbours();
}

void model::open_cache(const cache_options & options) {
    if (cache) {
        throw std::logic_error("the model has its expert slots already");
    }
    if (src->layers.empty()) {
        throw std::invalid_argument("a dense model has no experts to put into slots");
    }
    cache = std::make_unique<device_cache>(*src, bytes, ram.get(), options);
}

std::string model::fault() {
    if (dense.lost()) {
        held.set_fault("a file of the model was cut while the model was running; restore it and open the model again");
    }
    held.usable();
    return held.fault();
}

// --- backend ---

static bool is_in_our_buffer(const ggml_tensor * t) { return t->buffer && is_ours(t->buffer->buft); }

static owned lookup_weight(const ggml_tensor * t) {
    if (is_in_our_buffer(t) && weight_of(t)) {
        model & m = model_of(t->buffer->buft);
        return { weight_of(t), &m.held, m.cache.get(), m.ram.get(), m.learned.get() };
    }
    return {};
}

static executor & executor_of(ggml_backend_t backend) { return *(executor *) backend->context; }

static const char * backend_name(ggml_backend_t) { return NAME; }

static void backend_free(ggml_backend_t backend) {
    delete (executor *) backend->context;
    delete backend;
}

static ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try {
        return executor_of(backend).compute(graph, lookup_weight);
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;   // ggml is C: nothing may be thrown through it
    }
}

static void backend_set_n_threads(ggml_backend_t backend, int n) { executor_of(backend).set_n_threads(n); }

static void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    executor_of(backend).set_abort_callback(callback, data);
}

// --- device ---

static const char * device_name(ggml_backend_dev_t) { return NAME; }

static const char * device_description(ggml_backend_dev_t) { return "routed experts, computed where they lie"; }

static void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

static void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props = {};
    props->name        = device_name(dev);
    props->description = device_description(dev);
    props->type        = device_type(dev);
}

static ggml_backend_t device_init(ggml_backend_dev_t dev, const char *) {
    static uint8_t guid[16] = { 0xed, 0x6e, 0x30, 0xe0, 0x5a, 0x17, 0x4c, 0x02, 0x9b, 0x3e, 0x71, 0x88, 0x20, 0x26, 0x11, 0x30 };
    ggml_backend_i table = {};
    table.get_name      = backend_name;
    table.free          = backend_free;
    table.graph_compute = backend_compute;
    try {
        auto e = std::make_unique<executor>();
        return new ggml_backend { &guid, table, dev, e.release() };
    } catch (const std::exception &) {
        return nullptr;
    }
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }

// The product with one of our weights whose result `t` is, possibly after a bias, a scale or an activation; NULL when there is none.
static const ggml_tensor * product_behind(const ggml_tensor * t) {
    for (int depth = 0; t && depth < 16; depth++) {
        switch (t->op) {
            case GGML_OP_MUL_MAT: case GGML_OP_MUL_MAT_ID:
                return is_in_our_buffer(t->src[0]) ? t : nullptr;
            case GGML_OP_ADD_ID: case GGML_OP_GLU: case GGML_OP_UNARY: case GGML_OP_SQR: case GGML_OP_MUL: case GGML_OP_CLAMP: case GGML_OP_SCALE:
            case GGML_OP_VIEW: case GGML_OP_RESHAPE:
                t = t->src[0];
                break;
            default:
                return nullptr;
        }
    }
    return nullptr;
}

static bool is_down(const ggml_tensor * product) { return strstr(product->src[0]->name, "ffn_down_exps"); }

// Part of the sum over the experts of a token: their columns, and what is added up of them so far.
static bool is_sum_of_experts(const ggml_tensor * t) {
    for (int depth = 0; depth < 256 && t->op == GGML_OP_ADD; depth++) {
        t = t->src[0];
    }
    if (t->op != GGML_OP_VIEW || t->src[0]->op != GGML_OP_MUL) {
        return false;
    }
    const ggml_tensor * product = product_behind(t);
    return product && product->op == GGML_OP_MUL_MAT_ID && is_down(product);
}

// Products with our weights and what lies between those of one expert, up to the weighted sum over a token's experts, so that a layer is one piece
// of the graph. What is done with a dense product is left where the rest of the model runs, but for a gate between two of them.
static bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE: case GGML_OP_RESHAPE: case GGML_OP_VIEW: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return true;
        case GGML_OP_MUL_MAT: case GGML_OP_MUL_MAT_ID: case GGML_OP_GET_ROWS:
            return is_in_our_buffer(op->src[0]);
        case GGML_OP_ADD_ID:
            return product_behind(op->src[0]) != nullptr;
        case GGML_OP_GLU: {
            const ggml_tensor * product = product_behind(op->src[0]);
            return product && !is_down(product);
        }
        case GGML_OP_UNARY: case GGML_OP_SQR: case GGML_OP_MUL: case GGML_OP_CLAMP: case GGML_OP_SCALE: {
            const ggml_tensor * product = product_behind(op->src[0]);
            return product && product->op == GGML_OP_MUL_MAT_ID && (op->op == GGML_OP_MUL || !is_down(product));
        }
        case GGML_OP_ADD:
            return is_sum_of_experts(op->src[0]) && is_sum_of_experts(op->src[1]);
        default:
            return false;
    }
}

static bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return is_ours(buft) || ggml_backend_buft_is_host(buft);
}

// --- registration ---

static const char * reg_name(ggml_backend_reg_t) { return NAME; }

static size_t reg_device_count(ggml_backend_reg_t) { return 1; }

static ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t) { return &device; }

static void * reg_function(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "ggml_backend_set_n_threads")) {
        return (void *) backend_set_n_threads;
    }
    if (!strcmp(name, "ggml_backend_set_abort_callback")) {
        return (void *) backend_set_abort_callback;
    }
    return nullptr;
}

std::string check_ggml(int api_version, const std::string & version) {
    if (api_version == EDGEMOE_GGML_API_VERSION && version == EDGEMOE_GGML_VERSION) {
        return "";
    }
    return "edgemoe needs ggml " EDGEMOE_GGML_VERSION " (backend API " + std::to_string(EDGEMOE_GGML_API_VERSION) + "), found ggml " + version + " (backend API " +
        std::to_string(api_version) + "): pip install llama-cpp-python==0.3.36";
}

void register_device() {
    static ggml_backend_reg reg = { EDGEMOE_GGML_API_VERSION, { reg_name, reg_device_count, reg_device, reg_function }, nullptr };
    if (device.reg) {
        return;
    }
    const ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
    if (!cpu) {
        throw std::runtime_error("this llama-cpp-python has no CPU backend");
    }
    const std::string problem = check_ggml(cpu->api_version, ggml_version());
    if (!problem.empty()) {
        throw std::runtime_error(problem);
    }
    device.iface = { device_name, device_description, device_memory, device_type, device_props, device_init, device_buffer_type, nullptr, nullptr,
                     device_supports_op, device_supports_buft, nullptr, nullptr, nullptr, nullptr };
    device.reg   = &reg;
    ggml_backend_register(&reg);
}

} // namespace edgemoe
