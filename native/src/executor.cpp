#include "executor.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace edgemoe {

executor::executor() : cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)) {
    if (!cpu) {
        throw std::runtime_error("ggml has no CPU backend");
    }
}

executor::~executor() {
    ggml_backend_free(cpu);
}

// The CPU backend may be a library that ggml loaded itself, so its functions are found by name.
template <typename F> static F cpu_function(ggml_backend_t cpu, const char * name) {
    return (F) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), name);
}

void executor::set_n_threads(int n) {
    n_threads = n;
    if (auto set = cpu_function<ggml_backend_set_n_threads_t>(cpu, "ggml_backend_set_n_threads")) {
        set(cpu, n);
    }
}

void executor::set_abort_callback(ggml_abort_callback callback, void * data) {
    if (auto set = cpu_function<ggml_backend_set_abort_callback_t>(cpu, "ggml_backend_set_abort_callback")) {
        set(cpu, callback, data);
    }
}

// A layer's products follow one another, though not always in one graph (per-expert scales come between); each is computed once per step.
bool executor::begins_event(const owned & w) {
    if (event_first && event_first != w.weight && event_first->layer == w.weight->layer) {
        return false;
    }
    event_first = w.weight;
    return true;
}

// False when an id names no expert (ggml's release builds would read and write outside of their arrays).
bool executor::check_ids(const ggml_tensor * ids, const owned & w, bool counts_as_event) {
    const int64_t n_expert = w.weight->tensor->ne[2];
    seen.assign((size_t) n_expert, 0);
    uint64_t n_distinct = 0;
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            const int32_t id = *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + k * ids->nb[0]);
            if (id < 0 || id >= n_expert) {
                w.model->set_fault(std::string(w.weight->tensor->name) + ": token " + std::to_string(token) + " is routed to expert " + std::to_string(id) +
                    ", wanted 0 to " + std::to_string(n_expert - 1));
                return false;
            }
            n_distinct += !seen[(size_t) id];
            seen[(size_t) id] = 1;
        }
    }
    if (!counts_as_event) {
        return true;
    }
    counters & c = w.model->count;
    c.n_events          += 1;
    c.n_pairs           += (uint64_t) (ids->ne[0] * ids->ne[1]);
    c.n_accesses        += n_distinct;
    c.n_computed_on_cpu += n_distinct;
    c.bytes_accessed    += n_distinct * w.weight->bytes_per_expert;
    return true;
}

// Our steps are ggml's custom operations. ggml is C: nothing may be thrown through it, and without memory there is no way to go on.
static void run_step(ggml_tensor *, int thread, int n_threads, void * data) noexcept {
    ((step *) data)->run(thread, n_threads);
}

ggml_status executor::compute_plan(const graph_plan & plan) {
    const size_t n = plan.items.size();
    if (!context || n > context_items) {
        context_items = std::max<size_t>(2 * n, 64);
        context.reset(ggml_init({ /*.mem_size =*/ context_items * ggml_tensor_overhead() + ggml_graph_overhead_custom(context_items, false), nullptr, /*.no_alloc =*/ true }));
    }
    ggml_reset(context.get());
    ggml_cgraph * graph = ggml_new_graph_custom(context.get(), context_items, false);
    for (const graph_plan::item & item : plan.items) {
        ggml_tensor * node = item.node;
        if (item.ours) {
            node = ggml_custom_4d(context.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run_step, GGML_N_TASKS_MAX, item.ours);
            node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        ggml_graph_add_node(graph, node);
    }
    return ggml_backend_graph_compute(cpu, graph);
}

ggml_status executor::compute(ggml_cgraph * graph, weight_lookup weights_of) {
    const auto start = std::chrono::steady_clock::now();

    // llama.cpp's weights stand in for ours: they have the shape, ours have the bytes. They are put back before llama.cpp sees its graph again.
    struct swap { ggml_tensor * node, * original, * ours; };
    std::vector<swap> swapped;
    std::vector<ggml_tensor *> nodes;
    weights * model = nullptr;
    const ggml_tensor * checked_ids = nullptr;
    bool has_experts = false, has_kernels = false;
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && status == GGML_STATUS_SUCCESS; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        nodes.push_back(node);
        const owned w = node->src[0] ? weights_of(node->src[0]) : owned {};
        if (!w.weight || node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW) {
            continue;
        }
        model = w.model;
        swapped.push_back({ node, node->src[0], w.weight->tensor });
        has_kernels = has_kernels || w.weight->k;
        if (!model->usable()) {
            status = GGML_STATUS_FAILED;
        } else if (node->op == GGML_OP_MUL_MAT_ID) {
            has_experts = true;
            const bool begins = begins_event(w);
            if ((begins || node->src[2] != checked_ids) && !check_ids(node->src[2], w, begins)) {
                status = GGML_STATUS_FAILED;
            }
            checked_ids = node->src[2];
        }
    }
    if (status == GGML_STATUS_SUCCESS) {
        memory.clear();
        std::unique_ptr<graph_plan> plan(has_kernels ? new graph_plan(nodes, weights_of, memory, n_threads) : nullptr);
        for (const swap & s : swapped) {
            s.node->src[0] = s.ours;
        }
        if (plan) {
            model->count.n_fused += plan->n_fused;
        }
        status = plan && plan->has_steps ? compute_plan(*plan) : ggml_backend_graph_compute(cpu, graph);
        for (const swap & s : swapped) {
            s.node->src[0] = s.original;
        }
    }
    if (model) {
        if (has_experts) {
            const auto spent = std::chrono::steady_clock::now() - start;
            model->count.compute_us += (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(spent).count();
        }
        if (status == GGML_STATUS_SUCCESS && !model->usable()) {
            status = GGML_STATUS_FAILED;
        }
    }
    return status;
}

} // namespace edgemoe
