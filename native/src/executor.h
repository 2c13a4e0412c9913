// Computes one split of llama.cpp's graph on the CPU: checks and counts its expert products, puts our weights in place of libllama's stand-ins, and runs
// ggml's nodes and our own steps in one go on ggml's thread pool.
//
// An `executor` belongs to one llama context and is used by one thread at a time; executors of the same model meet in its counters.
#pragma once

#include "graph_plan.h"
#include "weights.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <memory>
#include <vector>

namespace edgemoe {

struct executor {
    executor();
    ~executor();
    executor(const executor &) = delete;
    executor & operator=(const executor &) = delete;

    void set_n_threads(int n);
    void set_abort_callback(ggml_abort_callback callback, void * data);

    ggml_status compute(ggml_cgraph * graph, weight_lookup weights_of);

private:
    bool begins_event(const owned & w);
    bool check_ids(const ggml_tensor * ids, const owned & w, bool counts_as_event);
    ggml_status compute_plan(const graph_plan & plan);

    struct deleter { void operator()(ggml_context * c) const { ggml_free(c); } };

    ggml_backend_t       cpu;
    int                  n_threads = GGML_DEFAULT_N_THREADS;
    const owned_tensor * event_first = nullptr;   // the product that began the current event
    std::vector<uint8_t> seen;                    // per expert, within one event
    workspace            memory;
    std::unique_ptr<ggml_context, deleter> context;   // of the graph in which our steps stand between ggml's nodes
    size_t               context_items = 0;           // how many it has room for
};

} // namespace edgemoe
