#include "device_slots.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace edgemoe {

bool computes_experts(ggml_backend_dev_t device, ggml_type type, int64_t n_in, int64_t n_out, int64_t n) {
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> c(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }), ggml_free);
    ggml_tensor * w   = ggml_new_tensor_3d(c.get(), type, n_in, n_out, n);
    ggml_tensor * x   = ggml_new_tensor_3d(c.get(), GGML_TYPE_F32, n_in, 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(c.get(), GGML_TYPE_I32, 1, 1);
    return ggml_backend_dev_supports_op(device, ggml_mul_mat_id(c.get(), w, x, ids));
}

// The most slots that one tensor of any projection of the layer may hold.
static int32_t slots_per_block(const expert_layer & layer, ggml_backend_dev_t device, int32_t n_slots, size_t most_bytes) {
    int32_t n = n_slots;
    for (const projection & p : layer.projections) {
        n = (int32_t) std::min<size_t>((size_t) n, std::max<size_t>(most_bytes / p.bytes, 1));
        while (!computes_experts(device, p.type, p.n_in, p.n_out, n)) {
            if (n == 1) {
                throw std::runtime_error(std::string(ggml_backend_dev_name(device)) + " cannot compute experts of type " + ggml_type_name(p.type) + " [" +
                    std::to_string(p.n_in) + " x " + std::to_string(p.n_out) + "], as " + p.name + " has them");
            }
            n = (n + 1) / 2;
        }
    }
    return n;
}

static std::vector<ggml_tensor *> new_slots(ggml_context * c, const expert_layer & layer, int32_t n) {
    std::vector<ggml_tensor *> projections;
    for (const projection & p : layer.projections) {
        projections.push_back(ggml_new_tensor_3d(c, p.type, p.n_in, p.n_out, n));
    }
    return projections;
}

static bool same_shape(const expert_layer & a, const expert_layer & b) {
    return std::equal(a.projections.begin(), a.projections.end(), b.projections.begin(), b.projections.end(),
        [](const projection & p, const projection & q) { return p.type == q.type && p.n_in == q.n_in && p.n_out == q.n_out; });
}

device_slots::device_slots(const source & s, ggml_backend_dev_t device, int32_t n_slots, int32_t n_staging, size_t most_block_bytes, size_t most_bytes)
    : device(device), s(s), n_stage(n_staging) {
    const ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
    const size_t most = std::min(most_block_bytes ? most_block_bytes : SIZE_MAX, ggml_backend_buft_get_max_size(buft));
    size_t n_tensors = 0, largest = 0;
    for (const expert_layer & layer : s.layers) {
        n_tensors += layer.projections.size() * (layer.n_expert + 1);   // at most
        for (const projection & p : layer.projections) {
            largest = std::max(largest, p.bytes);
        }
    }
    context.reset(ggml_init({ n_tensors * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    for (size_t l = 0; l < s.layers.size(); l++) {
        const expert_layer & layer = s.layers[l];
        const int32_t n = std::min(n_slots, (int32_t) layer.n_expert), per_block = slots_per_block(layer, device, std::max(n, n_staging), most);
        layers.emplace_back();
        for (int32_t first = 0; first < n; first += per_block) {
            const int32_t n_here = std::min(per_block, n - first);
            layers.back().push_back({ first, n_here, new_slots(context.get(), layer, n_here) });
        }
        if (n_staging > 0) {
            size_t twin = 0;
            while (!same_shape(s.layers[twin], layer)) {
                twin++;
            }
            const int32_t n_here = std::min(n_staging, per_block);
            layers.back().push_back({ n, n_here, twin < l ? layers[twin].back().projections : new_slots(context.get(), layer, n_here) });
            n_stage = std::min(n_stage, n_here);
        }
    }
    if (!most_bytes || ggml_backend_alloc_ctx_tensors_from_buft_size(context.get(), buft) <= most_bytes) {
        memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), buft));
    }
    if (!memory) {
        throw no_room(std::string(ggml_backend_dev_name(device)) + " has no room for " + std::to_string(n_slots) + " expert slots per layer");
    }
    // Device kernels read past the end of a row, up to the next slot, and multiply what they find by zero: it must not be NaN.
    fill(0);
    if (const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device)) {
        staging.reset(ggml_backend_buft_alloc_buffer(pinned, largest));
        if (staging && ggml_backend_buffer_get_type(staging.get()) != pinned) {
            staging.reset();   // ordinary memory in disguise: one copy more, and nothing won
        }
    }
}

device_slots::~device_slots() = default;

const device_slots::block & device_slots::block_of(size_t layer, int32_t slot) const {
    const std::vector<block> & all = layers[layer];
    return slot >= all.back().first ? all.back() : all[(size_t) (slot / all[0].n)];
}

bool device_slots::write(size_t layer, int32_t slot, const char * const * projections) {
    const block & b = block_of(layer, slot);
    const expert_layer & info = s.layers[layer];
    for (size_t p = 0; p < info.projections.size(); p++) {
        const char * bytes = projections[p];
        if (staging) {
            memcpy(ggml_backend_buffer_get_base(staging.get()), bytes, info.projections[p].bytes);
            bytes = (const char *) ggml_backend_buffer_get_base(staging.get());
        }
        ggml_backend_tensor_set(b.projections[p], bytes, (size_t) (slot - b.first) * info.projections[p].bytes, info.projections[p].bytes);
    }
    return true;
}

void device_slots::fill(uint8_t value) { ggml_backend_buffer_clear(memory.get(), value); }

size_t device_slots::bytes() const { return ggml_backend_buffer_get_size(memory.get()); }

} // namespace edgemoe
