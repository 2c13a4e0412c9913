#include "device_runner.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace edgemoe {

device_runner::device_runner(device_slots & slots) : slots(slots) {
    backend = ggml_backend_dev_init(slots.device, nullptr);
    if (!backend) {
        throw std::runtime_error(std::string(ggml_backend_dev_name(slots.device)) + ": the device cannot be used");
    }
}

device_runner::~device_runner() {
    biases.clear();
    workspace.clear();
    staging.clear();
    ggml_backend_free(backend);
}

void device_runner::set_n_threads(int n) {
    const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(slots.device);
    if (auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads")) {
        set(backend, n);
    }
}

ggml_backend_buffer_t device_runner::grown(growing_buffer & all, ggml_backend_buffer_type_t type, size_t bytes) {
    const size_t has = all.empty() ? 0 : ggml_backend_buffer_get_size(all.back().get());
    if (has < bytes) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, std::max(bytes, 2 * has));
        if (!buffer) {
            return nullptr;
        }
        all.emplace_back(buffer);
    }
    return all.back().get();
}

char * device_runner::staged(size_t bytes) {
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(slots.device);
    ggml_backend_buffer_t buffer = pinned ? grown(staging, pinned, bytes) : nullptr;
    buffer = buffer ? buffer : grown(staging, ggml_backend_cpu_buffer_type(), bytes);
    if (!buffer) {
        throw std::bad_alloc();
    }
    return (char *) ggml_backend_buffer_get_base(buffer);
}

// Every tensor gets a place of its own: a block is few tensors, and sharing places would cost more time than it saves memory.
bool device_runner::allocate() {
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(slots.device);
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    size_t bytes = alignment;
    for (ggml_tensor * t = ggml_get_first_tensor(scratch.get()); t; t = ggml_get_next_tensor(scratch.get(), t)) {
        bytes += t->view_src ? 0 : (ggml_backend_buft_get_alloc_size(type, t) + alignment - 1) / alignment * alignment;
    }
    const ggml_backend_buffer_t buffer = grown(workspace, type, bytes);
    if (!buffer) {
        return false;
    }
    ggml_tallocr allocator = ggml_tallocr_new(buffer);
    for (ggml_tensor * t = ggml_get_first_tensor(scratch.get()); t; t = ggml_get_next_tensor(scratch.get(), t)) {
        if ((t->view_src ? ggml_backend_view_init(t) : ggml_tallocr_alloc(&allocator, t)) != GGML_STATUS_SUCCESS) {
            return false;
        }
    }
    return true;
}

// Biases are small and stay on the device for all experts, so that they never have to move with one.
std::vector<ggml_tensor *> device_runner::biases_on_device(const expert_block & b) {
    const std::vector<expert_block::bias> wanted = b.biases();
    if (wanted.empty()) {
        return {};
    }
    bias_set & set = biases[b.layer()];
    if (set.tensors.empty()) {
        set.c.reset(ggml_init({ (wanted.size() + 1) * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
        for (const expert_block::bias & w : wanted) {
            set.tensors.push_back(ggml_new_tensor_2d(set.c.get(), GGML_TYPE_F32, w.n_rows, w.of->ne[1]));
        }
        set.memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(set.c.get(), ggml_backend_dev_buffer_type(slots.device)));
        if (!set.memory) {
            biases.erase(b.layer());
            throw std::bad_alloc();
        }
        for (size_t i = 0; i < wanted.size(); i++) {
            const size_t bytes = (size_t) wanted[i].n_rows * sizeof(float);
            for (int64_t e = 0; e < wanted[i].of->ne[1]; e++) {
                ggml_backend_tensor_set(set.tensors[i], (const char *) wanted[i].of->data + (size_t) e * wanted[i].of->nb[1] + (size_t) wanted[i].row * sizeof(float), (size_t) e * bytes, bytes);
            }
        }
    }
    return set.tensors;
}

bool device_runner::computes(const ggml_cgraph * graph) const {
    for (int i = 0; i < ggml_graph_n_nodes(const_cast<ggml_cgraph *>(graph)); i++) {
        if (!ggml_backend_dev_supports_op(slots.device, ggml_graph_node(const_cast<ggml_cgraph *>(graph), i))) {
            return false;
        }
    }
    return true;
}

bool device_runner::launch(const expert_block & b, const std::vector<placed_pair> & pairs, bool one_input) {
    const size_t layer = b.layer();
    if (!parts.empty()) {
        ggml_backend_synchronize(backend);   // one that nobody collected
    }
    const std::vector<device_slots::block> & blocks = slots.blocks(layer);
    parts.clear();
    for (const device_slots::block & at : blocks) {
        part p;
        for (const placed_pair & pair : pairs) {
            if (pair.slot >= at.first && pair.slot < at.first + at.n) {
                p.pairs.push_back(pair);
            }
        }
        if (!p.pairs.empty()) {
            parts.push_back(std::move(p));
        }
    }
    const size_t n_tensors = parts.size() * (8 + 3 * (b.products.size() + b.chain.size()));
    if (!scratch || n_tensors > scratch_tensors) {
        scratch_tensors = n_tensors;
        scratch.reset(ggml_init({ n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, /*.no_alloc =*/ true }));
    }
    ggml_reset(scratch.get());
    ggml_cgraph * graph = ggml_new_graph_custom(scratch.get(), n_tensors, false);
    const std::vector<ggml_tensor *> on_device = biases_on_device(b);
    for (part & p : parts) {
        const device_slots::block & at = slots.block_of(layer, p.pairs[0].slot);
        std::vector<ggml_tensor *> weights;
        for (const expert_block::product & each : b.products) {
            weights.push_back(at.projections[each.weight->projection]);
        }
        weights.push_back(at.projections[b.down->projection]);
        p.g = build_graph(scratch.get(), b, weights, on_device, (int64_t) p.pairs.size(), one_input);
        ggml_build_forward_expand(graph, p.g.output);
    }
    const auto known = computable.find(layer);
    if (known == computable.end()) {
        computable[layer] = computes(graph);
    }
    if (!computable[layer] || !allocate()) {
        parts.clear();
        return false;
    }
    size_t bytes = 0;
    for (const part & p : parts) {
        bytes += std::max(ggml_nbytes(p.g.x) + 2 * ggml_nbytes(p.g.ids), ggml_nbytes(p.g.output));
    }
    char * to = staged(bytes);
    for (part & p : parts) {
        float *   x        = (float *) to;
        int32_t * ids      = (int32_t *) (to + ggml_nbytes(p.g.x));
        int32_t * bias_ids = ids + p.pairs.size();
        const int32_t first = slots.block_of(layer, p.pairs[0].slot).first;
        for (size_t i = 0; i < p.pairs.size(); i++) {
            ids[i]      = p.pairs[i].slot - first;
            bias_ids[i] = p.pairs[i].expert;
            if (i == 0 || !one_input) {
                memcpy(x + (int64_t) i * b.n_in(), p.pairs[i].x, (size_t) b.n_in() * sizeof(float));
            }
        }
        ggml_backend_tensor_set_async(backend, p.g.x, x, 0, ggml_nbytes(p.g.x));
        ggml_backend_tensor_set_async(backend, p.g.ids, ids, 0, ggml_nbytes(p.g.ids));
        if (p.g.bias_ids) {
            ggml_backend_tensor_set_async(backend, p.g.bias_ids, bias_ids, 0, ggml_nbytes(p.g.bias_ids));
        }
        to += std::max(ggml_nbytes(p.g.x) + 2 * ggml_nbytes(p.g.ids), ggml_nbytes(p.g.output));
    }
    status = ggml_backend_graph_compute_async(backend, graph);
    return true;
}

bool device_runner::collect(const expert_block & b) {
    char * from = parts.empty() ? nullptr : (char *) ggml_backend_buffer_get_base(staging.back().get());
    std::vector<const char *> rows;
    // The inputs have been read before the outputs are written over them: both are in the order of the device's stream.
    for (const part & p : parts) {
        if (status == GGML_STATUS_SUCCESS) {
            ggml_backend_tensor_get_async(backend, p.g.output, from, 0, ggml_nbytes(p.g.output));
        }
        rows.push_back(from);
        from += std::max(ggml_nbytes(p.g.x) + 2 * ggml_nbytes(p.g.ids), ggml_nbytes(p.g.output));
    }
    ggml_backend_synchronize(backend);
    for (size_t i = 0; i < parts.size() && status == GGML_STATUS_SUCCESS; i++) {
        for (size_t j = 0; j < parts[i].pairs.size(); j++) {
            const placed_pair & pair = parts[i].pairs[j];
            memcpy(b.output_row(pair.token, pair.k), rows[i] + j * (size_t) b.n_out() * sizeof(float), (size_t) b.n_out() * sizeof(float));
        }
    }
    parts.clear();
    return status == GGML_STATUS_SUCCESS;
}

} // namespace edgemoe
