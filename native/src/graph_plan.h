// Reads one split of llama.cpp's graph and says how to compute it: steps of our own for what the kernels do faster, ggml's nodes for the rest.
#pragma once

#include "products.h"
#include "weights.h"

#include "ggml.h"

#include <memory>
#include <vector>

namespace edgemoe {

struct graph_plan {
    // Either a node of the graph or a step of ours.
    struct item { ggml_tensor * node; step * ours; };
    std::vector<item> items;
    bool              has_steps = false;
    uint64_t          n_fused   = 0;       // whole experts

    // The ids of expert products must have been checked, and their data and the inputs of the split must be there: routings are sorted here.
    graph_plan(const std::vector<ggml_tensor *> & nodes, weight_lookup weights_of, workspace & memory, int n_threads);

private:
    friend struct planner;
    std::vector<std::unique_ptr<step>>           steps;
    std::vector<std::unique_ptr<quantized_rows>> rows;
    std::vector<std::unique_ptr<routing>>        routings;
};

} // namespace edgemoe
