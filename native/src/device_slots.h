// Expert slots on a ggml device: for every layer one tensor per projection, as ggml stacks experts, with slots in the place of experts. Where a device
// limits the size of a tensor, the slots of a layer are several such tensors.
#pragma once

#include "source.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <memory>
#include <stdexcept>
#include <vector>

namespace edgemoe {

// The device has not the memory; fewer slots may fit.
struct no_room : std::runtime_error { using std::runtime_error::runtime_error; };

struct device_slots {
    // Some consecutive slots of one layer. The last one of every layer are the staging slots, whose tensors layers of one shape share.
    struct block {
        int32_t                    first, n;
        std::vector<ggml_tensor *> projections;   // in the order of expert_layer::projections
    };

    // At most `most_block_bytes` per tensor and `most_bytes` in all; 0: as much as the device takes. Throws no_room, or when the device cannot compute with a type.
    device_slots(const source & s, ggml_backend_dev_t device, int32_t n_slots, int32_t n_staging, size_t most_block_bytes,
        size_t most_bytes);
    ~device_slots();

    const std::vector<block> & blocks(size_t layer) const { return layers[layer]; }
    const block & block_of(size_t layer, int32_t slot) const;
    int32_t n_staging() const { return n_stage; }   // fewer than asked for where a device limits the size of a tensor
    // Copies an expert, given by its projections, into a slot. Called by one thread at a time. False when the device refuses.
    bool   write(size_t layer, int32_t slot, const char * const * projections);
    // All bytes of all slots.
    void   fill(uint8_t value);
    size_t bytes() const;
    bool   has_pinned() const { return staging != nullptr; }

    const ggml_backend_dev_t device;

private:
    struct context_deleter { void operator()(ggml_context * c) const { ggml_free(c); } };
    struct buffer_deleter  { void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); } };
    using buffer = std::unique_ptr<ggml_backend_buffer, buffer_deleter>;

    const source & s;
    int32_t        n_stage;
    std::unique_ptr<ggml_context, context_deleter> context;
    std::vector<std::vector<block>>                layers;
    buffer                                         memory;
    buffer                                         staging;   // pinned, as large as the largest projection; NULL: the device offers none
};

// Whether `device` computes the products of routed pairs with `n` experts of this type and shape.
bool computes_experts(ggml_backend_dev_t device, ggml_type type, int64_t n_in, int64_t n_out, int64_t n);

} // namespace edgemoe
