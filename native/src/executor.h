// Computes the expert products of one split of llama.cpp's graph.
//
// `expert_weights` belongs to a model and is read-only once built. An `executor` belongs to one llama context and is used by one thread at a
// time; executors of the same model meet in its counters, which are atomic.
#pragma once

#include "store.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace edgemoe {

struct counters {
    std::atomic<uint64_t> n_events{0}, n_pairs{0}, n_accesses{0}, n_computed_on_cpu{0}, bytes_accessed{0}, compute_us{0};
};

// One stacked expert tensor as ggml sees it: our own tensor over the mapped bytes, with the stride of the store.
struct expert_tensor {
    ggml_tensor * tensor;
    size_t        layer;               // index into source::layers
    size_t        bytes_per_expert;    // of the whole expert, all projections
};

struct expert_weights {
    expert_weights(const source & s, const store & st);

    // NULL when `name` is not a routed expert weight.
    const expert_tensor * find(const char * name) const;

    counters count;

    void set_fault(const std::string & text);
    // The first fault since the model was opened, or empty.
    std::string fault() const;
    bool usable();   // notices lost bytes and a fork; false once there was a fault

private:
    struct deleter { void operator()(ggml_context * c) const { ggml_free(c); } };

    const store & bytes;
    int64_t       owner_process;
    std::unique_ptr<ggml_context, deleter>         context;
    std::unordered_map<std::string, expert_tensor> tensors;

    mutable std::mutex fault_mutex;
    std::string        fault_text;
    std::atomic<bool>  has_fault{false};
};

struct executor {
    executor();
    ~executor();
    executor(const executor &) = delete;
    executor & operator=(const executor &) = delete;

    void set_n_threads(int n);
    void set_abort_callback(ggml_abort_callback callback, void * data);

    // `weights_of` gives, for a weight of libllama's graph, our tensor and the model it belongs to; NULL for any other tensor.
    struct owned { const expert_tensor * weight; expert_weights * model; };
    using lookup = owned (*)(const ggml_tensor * weight);
    ggml_status compute(ggml_cgraph * graph, lookup weights_of);

private:
    bool begins_event(const owned & w);
    bool count_event(const ggml_tensor * ids, const owned & w);

    ggml_backend_t        cpu;
    const expert_tensor * event_first = nullptr;   // the product that began the current event
    std::vector<uint8_t>  seen;                    // per expert, within one event
};

} // namespace edgemoe
