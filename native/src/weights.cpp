#include "weights.h"

namespace edgemoe {

weights::weights(const source & s, const store & st, isa level) : bytes(st), owner_process(process_id()) {
    size_t n = s.dense.size();
    for (const expert_layer & layer : s.layers) {
        n += layer.projections.size();
    }
    context.reset(ggml_init({ /*.mem_size =*/ (n + 1) * ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
    for (size_t l = 0; l < s.layers.size(); l++) {
        const expert_layer & layer = s.layers[l];
        for (size_t p = 0; p < layer.projections.size(); p++) {
            const projection & info = layer.projections[p];
            add(info.name, info.type, info.n_in, info.n_out, layer.n_expert, st.view(l, p), l, p, layer.bytes_per_expert(), level);
        }
    }
    for (size_t i = 0; level != isa::none && i < s.dense.size(); i++) {
        const dense_weight & info = s.dense[i];
        add(info.name, info.type, info.n_in, info.n_out, 1, st.dense_view(i), owned_tensor::DENSE, 0, 0, level);
    }
}

void weights::add(const std::string & name, ggml_type type, int64_t n_in, int64_t n_out, int64_t n_expert, const expert_view & view, size_t layer, size_t projection,
        size_t bytes_per_expert, isa level) {
    ggml_tensor * t = ggml_new_tensor_3d(context.get(), type, n_in, n_out, n_expert);
    ggml_set_name(t, name.c_str());
    // Only read through this pointer: the pages are mapped read-only.
    t->data  = const_cast<char *>(view.base);
    t->nb[2] = view.stride;
    t->nb[3] = view.stride * (size_t) n_expert;
    tensors[name] = { t, layer, projection, bytes_per_expert, find_kernel(type, level) };
}

const owned_tensor * weights::find(const char * name) const {
    const auto it = tensors.find(name);
    return it == tensors.end() ? nullptr : &it->second;
}

void weights::set_fault(const std::string & text) {
    std::lock_guard<std::mutex> lock(fault_mutex);
    if (fault_text.empty()) {
        fault_text = text;
        has_fault.store(true);
    }
}

std::string weights::fault() const {
    std::lock_guard<std::mutex> lock(fault_mutex);
    return fault_text;
}

void weights::set_failure(const std::string & text) {
    std::lock_guard<std::mutex> lock(fault_mutex);
    failure_text = text;
}

std::string weights::take_failure() {
    std::lock_guard<std::mutex> lock(fault_mutex);
    std::string text;
    text.swap(failure_text);
    return text;
}

bool weights::usable() {
    if (process_id() != owner_process) {
        set_fault("this process was forked from the one that opened the model; open the model after the fork");
    } else if (bytes.lost()) {
        set_fault("a file of the model was cut while the model was running; restore it and open the model again");
    }
    return !has_fault.load();
}

} // namespace edgemoe
