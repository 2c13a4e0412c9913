#include "executor.h"

#include <chrono>
#include <stdexcept>

namespace edgemoe {

expert_weights::expert_weights(const source & s, const store & st) : bytes(st), owner_process(process_id()) {
    size_t n = 0;
    for (const expert_layer & layer : s.layers) {
        n += layer.projections.size();
    }
    context.reset(ggml_init({ /*.mem_size =*/ (n + 1) * ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
    for (size_t l = 0; l < s.layers.size(); l++) {
        const expert_layer & layer = s.layers[l];
        for (size_t p = 0; p < layer.projections.size(); p++) {
            const projection & info = layer.projections[p];
            const expert_view  view = st.view(l, p);
            ggml_tensor * t = ggml_new_tensor_3d(context.get(), info.type, info.n_in, info.n_out, layer.n_expert);
            ggml_set_name(t, info.name.c_str());
            // Only read through this pointer: the pages are mapped read-only.
            t->data  = const_cast<char *>(view.base);
            t->nb[2] = view.stride;
            t->nb[3] = view.stride * layer.n_expert;
            tensors[info.name] = { t, l, layer.bytes_per_expert() };
        }
    }
}

const expert_tensor * expert_weights::find(const char * name) const {
    const auto it = tensors.find(name);
    return it == tensors.end() ? nullptr : &it->second;
}

void expert_weights::set_fault(const std::string & text) {
    std::lock_guard<std::mutex> lock(fault_mutex);
    if (fault_text.empty()) {
        fault_text = text;
        has_fault.store(true);
    }
}

std::string expert_weights::fault() const {
    std::lock_guard<std::mutex> lock(fault_mutex);
    return fault_text;
}

bool expert_weights::usable() {
    if (process_id() != owner_process) {
        set_fault("this process was forked from the one that opened the model; open the model after the fork");
    } else if (bytes.lost()) {
        set_fault("a file of the model was cut while the model was running; restore it and open the model again");
    }
    return !has_fault.load();
}

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

// Counts the event; false when an id names no expert (ggml's release builds would read and write outside of their arrays).
bool executor::count_event(const ggml_tensor * ids, const owned & w) {
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
    counters & c = w.model->count;
    c.n_events          += 1;
    c.n_pairs           += (uint64_t) (ids->ne[0] * ids->ne[1]);
    c.n_accesses        += n_distinct;
    c.n_computed_on_cpu += n_distinct;
    c.bytes_accessed    += n_distinct * w.weight->bytes_per_expert;
    return true;
}

ggml_status executor::compute(ggml_cgraph * graph, lookup weights_of) {
    const auto start = std::chrono::steady_clock::now();

    // llama.cpp's weights stand in for ours: they have the shape, ours have the bytes. They are put back before llama.cpp sees its graph again.
    struct swap { ggml_tensor * node; ggml_tensor * original; };
    std::vector<swap> swapped;
    expert_weights * model = nullptr;
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && status == GGML_STATUS_SUCCESS; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        const owned w = weights_of(node->src[0]);
        if (!w.weight) {
            continue;
        }
        model = w.model;
        swapped.push_back({ node, node->src[0] });
        node->src[0] = w.weight->tensor;
        if (!model->usable() || (begins_event(w) && !count_event(node->src[2], w))) {
            status = GGML_STATUS_FAILED;
        }
    }
    if (status == GGML_STATUS_SUCCESS) {
        status = ggml_backend_graph_compute(cpu, graph);
    }
    for (const swap & s : swapped) {
        s.node->src[0] = s.original;
    }
    if (model) {
        const auto spent = std::chrono::steady_clock::now() - start;
        model->count.compute_us += (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(spent).count();
        if (status == GGML_STATUS_SUCCESS && !model->usable()) {
            status = GGML_STATUS_FAILED;
        }
    }
    return status;
}

} // namespace edgemoe
