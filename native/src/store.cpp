#include "store.h"

namespace edgemoe {

// A package maps its blobs one behind the other, a layer at a time; the distance between two is a whole number of pages. Each projection is then a
// strided view, whatever the size of an expert.
static size_t blob_stride(const expert_layer & layer) {
    return round_up(layer.blob_bytes, page_size());
}

static size_t address_space(const source & s) {
    size_t sum = 0;
    if (s.kind == source_kind::package) {
        for (const expert_layer & layer : s.layers) {
            sum += layer.n_expert * blob_stride(layer);
        }
    } else {
        for (const file & f : s.files) {
            sum += round_up(f.bytes, page_size());
        }
    }
    return sum;
}

store::store(const source & s) : mapped(address_space(s)), views(s.layers.size()) {
    if (s.kind == source_kind::package) {
        map_package(s);
    } else {
        map_stacked(s);
    }
}

void store::map_package(const source & s) {
    std::vector<size_t> layer_at;
    size_t at = 0;
    for (size_t l = 0; l < s.layers.size(); l++) {
        const size_t stride = blob_stride(s.layers[l]);
        for (const projection & p : s.layers[l].projections) {
            views[l].push_back({ mapped.base() + at + p.offset, stride });
        }
        layer_at.push_back(at);
        at += s.layers[l].n_expert * stride;
    }
    mapping = std::async(std::launch::async, [this, &s, layer_at] {
        s.visit_blobs([&](size_t l, uint32_t expert, const file & blob) {
            mapped.map(layer_at[l] + expert * blob_stride(s.layers[l]), blob, s.layers[l].blob_bytes);
        });
    });
}

void store::wait() {
    if (mapping.valid()) {
        mapping.get();
    }
}

void store::map_stacked(const source & s) {
    std::vector<size_t> file_at;
    size_t at = 0;
    for (const file & f : s.files) {
        mapped.map(at, f, f.bytes);
        file_at.push_back(at);
        at += round_up(f.bytes, page_size());
    }
    for (size_t l = 0; l < s.layers.size(); l++) {
        for (const projection & p : s.layers[l].projections) {
            views[l].push_back({ mapped.base() + file_at[p.shard] + p.offset, p.bytes });
        }
    }
}

} // namespace edgemoe
