// Computes routed pairs on a device, from the slots of its experts, while the caller does something else.
//
// A runner belongs to one executor and is used by its thread; slots may be shared with other runners.
#pragma once

#include "device_slots.h"
#include "expert_block.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <map>
#include <memory>
#include <vector>

namespace edgemoe {

// A pair of the block with the slot of its expert (-1: none) and its input, n_in floats.
struct placed_pair { int32_t token, k, expert, slot; const float * x; };

struct device_runner {
    explicit device_runner(device_slots & slots);   // throws when the device cannot be used
    ~device_runner();

    void set_n_threads(int n);   // for a device that computes with the CPU's threads

    // Begins to compute the pairs; their inputs may change once it returns. One launch at a time. False when the device cannot compute this block.
    bool launch(const expert_block & b, const std::vector<placed_pair> & pairs, bool one_input);
    // Waits for the launch and writes the rows of its pairs. False when the device failed.
    bool collect(const expert_block & b);

    device_slots & slots;

private:
    struct part { std::vector<placed_pair> pairs; block_graph g; };   // of one block of slots

    std::vector<ggml_tensor *> biases_on_device(const expert_block & b);
    bool computes(const ggml_cgraph * graph) const;
    char * staged(size_t bytes);   // host memory that the device reads and writes fast
    bool   allocate();             // memory for the tensors of the scratch context

    struct context_deleter { void operator()(ggml_context * c) const { ggml_free(c); } };
    using context = std::unique_ptr<ggml_context, context_deleter>;

    struct buffer_deleter { void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); } };
    // The last one is in use. Smaller ones before it stay until the end: ggml-vulkan remembers what its shaders were bound to by the handles of buffers, and a freed
    // handle may come back as another buffer (ggml 0.25.3 on llvmpipe then writes into freed memory). Each is twice as large as the one before.
    using growing_buffer = std::vector<std::unique_ptr<ggml_backend_buffer, buffer_deleter>>;
    ggml_backend_buffer_t grown(growing_buffer & all, ggml_backend_buffer_type_t type, size_t bytes);   // NULL when there is no room

    ggml_backend_t        backend = nullptr;
    context               scratch;
    size_t                scratch_tensors = 0;
    growing_buffer        workspace, staging;
    std::vector<part>     parts;
    ggml_status           status = GGML_STATUS_SUCCESS;

    struct bias_set { context c; std::unique_ptr<ggml_backend_buffer, buffer_deleter> memory; std::vector<ggml_tensor *> tensors; };
    std::map<size_t, bias_set> biases;   // by layer
    std::map<size_t, bool>     computable;
};

} // namespace edgemoe
