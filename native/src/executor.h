// Computes one split of llama.cpp's graph: checks and counts its expert products, puts our weights in place of libllama's stand-ins, and runs ggml's nodes and
// our own steps in one go on ggml's thread pool. Where experts may lie on a device, those that do are computed there, and meanwhile the others on the CPU; where they may
// be on the disk, those that are in RAM are computed while the others come.
//
// An `executor` belongs to one llama context and is used by one thread at a time; executors of the same model meet in its counters and its cache.
#pragma once

#include "device_cache.h"
#include "device_runner.h"
#include "graph_plan.h"
#include "ram_cache.h"
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
    ggml_status compute_plan(const graph_plan & plan, const owned & of);
    void        run_alone(step & s);
    ggml_status compute_items(const graph_plan & plan, size_t first, size_t end);
    ggml_status compute_block(const expert_block & b, const owned & of);
    ggml_status compute_with_device(const expert_block & b, const owned & of, const std::vector<placed_pair> & pairs);
    ggml_status compute_here(const expert_block & b, const owned & of, const std::vector<placed_pair> & pairs, bool one_input);
    ggml_status compute_on_cpu(const expert_block & b, const std::vector<placed_pair> & pairs, bool one_input, float * rows);
    void        look_ahead(ram_cache & ram, const std::vector<ggml_tensor *> & nodes, const ggml_tensor & product);
    std::unique_ptr<graph_plan> plan_pairs(const expert_block & b, const std::vector<placed_pair> & pairs, float * rows, workspace & memory) const;
    void        prepare_runner(device_cache & cache);

    struct ram_visit;
    struct deleter { void operator()(ggml_context * c) const { ggml_free(c); } };

    ggml_backend_t       cpu;
    int                  n_threads = GGML_DEFAULT_N_THREADS;
    const owned_tensor * event_first = nullptr;   // the product that began the current event
    std::vector<uint8_t> seen;                    // per expert, within one event
    workspace            memory;
    std::unique_ptr<ggml_context, deleter> context;   // of the graph in which our steps stand between ggml's nodes
    size_t               context_items = 0;           // how many it has room for
    std::unique_ptr<device_runner> runner;            // of the cache in use
    workspace            inputs, block_rows, half_rows;   // of a block, and what our kernels make of them
    std::unique_ptr<ram_visit> visit;                 // of the expert products that come next
    ggml_gallocr_t       block_memory = nullptr;      // of blocks that ggml computes
};

} // namespace edgemoe
