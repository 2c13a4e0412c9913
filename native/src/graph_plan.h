// Reads one split of llama.cpp's graph and says how to compute it: steps of our own for what the kernels do faster, whole blocks of experts where these may lie
// on a device, ggml's nodes for the rest.
#pragma once

#include "expert_block.h"
#include "products.h"
#include "weights.h"

#include "ggml.h"

#include <memory>
#include <vector>

namespace edgemoe {

struct graph_plan {
    // A node of the graph, a step of ours, or a block, which is not one piece of work for ggml's threads but has several of its own.
    struct item { ggml_tensor * node; step * ours; const expert_block * block; };
    std::vector<item> items;
    bool              has_steps = false;   // or blocks
    bool              leaves_experts = false;   // some products are ggml's nodes
    uint64_t          n_fused   = 0;       // whole experts

    // The ids of expert products must have been checked, and their data and the inputs of the split must be there: routings are sorted here.
    // in_blocks: experts are left in blocks, where these are found; all_in_blocks: a product that belongs to none is one by itself; all_weighed: and what the graph does
    // with a block's rows belongs to it, as it does to a fused one.
    enum class experts { fused, in_blocks, all_in_blocks, all_weighed };
    graph_plan(const std::vector<ggml_tensor *> & nodes, weight_lookup weights_of, experts how, workspace & memory, int n_threads);

    // Some routed pairs of a block that have_kernels, from the inputs given with them. `rows`: [n_tokens, n_used, n_out], where theirs go to; NULL: where the block has them.
    struct block_pair { int32_t token, k; const float * x; };
    graph_plan(const expert_block & b, const std::vector<block_pair> & pairs, float * rows, workspace & memory, int n_threads);
    // Once all rows of a block with router_weights are there: what the graph makes of them.
    graph_plan(const expert_block & b, const float * rows, workspace & memory, int n_threads);

private:
    friend struct planner;
    std::vector<std::unique_ptr<step>>           steps;
    std::vector<std::unique_ptr<quantized_rows>> rows;
    std::vector<std::unique_ptr<routing>>        routings;
    std::vector<std::unique_ptr<expert_block>>   blocks;
};

// True when these nodes make `t`, so that it is not there before they are computed.
bool is_made_by(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * t);

// True when our kernels compute all products of the block.
bool have_kernels(const expert_block & b);

} // namespace edgemoe
