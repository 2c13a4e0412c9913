// The weights that belong to us, as ggml tensors over the mapped bytes, with what is counted and what went wrong while they were in use.
//
// `weights` belongs to a model and is read-only once built, but for the counters, which are atomic, and the fault.
#pragma once

#include "kernels/kernels.h"
#include "store.h"

#include "ggml.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace edgemoe {

struct counters {
    std::atomic<uint64_t> n_events{0}, n_pairs{0}, n_accesses{0}, n_on_device{0}, n_refused{0}, n_fused{0}, bytes_accessed{0}, compute_us{0};
};

// One tensor as ggml sees it: our own over the mapped bytes, a stacked one with the stride of the store.
struct owned_tensor {
    ggml_tensor *  tensor;
    size_t         layer;               // index into source::layers; DENSE for other weights
    size_t         projection;          // index into expert_layer::projections
    size_t         bytes_per_expert;    // of the whole expert, all projections
    const kernel * k;                   // NULL: computed by ggml

    static constexpr size_t DENSE = SIZE_MAX;
};

struct weights {
    // `level` of the kernels; isa::none leaves every product to ggml, and the dense weights to llama.cpp.
    weights(const source & s, const store & st, isa level);

    // NULL when `name` is not one of ours.
    const owned_tensor * find(const char * name) const;

    counters count;

    void set_fault(const std::string & text);
    // The first fault since the model was opened, or empty.
    std::string fault() const;
    bool usable();   // notices lost bytes and a fork; false once there was a fault

    // What made a computation fail that another one may get past: the disk did not give an expert. Kept until it is asked for.
    void set_failure(const std::string & text);
    std::string take_failure();

private:
    struct deleter { void operator()(ggml_context * c) const { ggml_free(c); } };

    void add(const std::string & name, ggml_type type, int64_t n_in, int64_t n_out, int64_t n_expert, const expert_view & view, size_t layer, size_t projection,
        size_t bytes_per_expert, isa level);

    const store & bytes;
    int64_t       owner_process;
    std::unique_ptr<ggml_context, deleter>        context;
    std::unordered_map<std::string, owned_tensor> tensors;

    mutable std::mutex fault_mutex;
    std::string        fault_text, failure_text;
    std::atomic<bool>  has_fault{false};
};

struct device_cache;
struct ram_cache;
struct head_feed;

// For a weight of libllama's graph, our tensor and the model it belongs to, with its expert slots on a device and in RAM and who tells them what learned heads say, if it has some; NULL for any other tensor.
struct owned         { const owned_tensor * weight; weights * model; device_cache * cache; ram_cache * ram; head_feed * learned; };
using weight_lookup = owned (*)(const ggml_tensor * weight);

} // namespace edgemoe
