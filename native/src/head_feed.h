// What learned heads say of an event, told to the tiers before it begins.
//
// The router's input is read where it costs nothing: mostly it is the input of the expert products as well, which the executor has in its hands. Whether it is can be seen in
// the graph: the tap names the tensor that a layer's router reads, the executor the one that the experts read. Until both have been seen to be one, and where they are not
// (the experts' input is weighed, or a copy from another device), the graph is stopped behind the router and the input is read there.
//
// Threads: what a tap has named or heard is good for the events of the thread that decodes with it; others find nothing.
#pragma once

#include "heads.h"
#include "tier.h"

#include "ggml.h"

#include <functional>
#include <mutex>
#include <thread>

namespace edgemoe {

struct head_feed {
    head_feed(std::shared_ptr<const heads> of, size_t n_layers);

    // Who wants to hear; it must outlive this.
    void add(tier & t) { tiers.push_back(&t); }

    // By the tap. `x`: what the router of a layer is about to read. True: the graph is to stop behind it, and heard() to be called.
    bool router_reads(size_t layer, const ggml_tensor * x);
    // The rows [n_rows][n_embd] that it has read.
    void heard(size_t layer, const float * rows, int64_t n_rows);

    // By the executor, before the event of a layer with this product of experts begins. run: has a step run by all threads.
    void tell(size_t layer, const ggml_tensor * product, const std::function<void(step &)> & run);

    const std::shared_ptr<const heads> of;

private:
    struct layer_state {
        bool                is_experts_input = false;   // what the router reads is what the experts read
        const ggml_tensor * router_input = nullptr;     // of the graph that is running
        std::vector<float>  rows;                       // heard
        std::thread::id     by;
    };
    bool wants_next() const;
    bool wants_successor() const;

    std::mutex               mutex;   // of `layers`
    std::vector<layer_state> layers;
    std::vector<tier *>      tiers;
};

} // namespace edgemoe
