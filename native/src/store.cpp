#include "store.h"

namespace edgemoe {

// A package maps its blobs one behind the other, a layer at a time; the distance between two is a whole number of pages. Each projection is then a
// strided view, whatever the size of an expert.
static size_t blob_stride(const expert_layer & layer) {
    return round_up(layer.blob_bytes, page_size());
}

static size_t address_space(const source & s) {
    size_t sum = 0;
    for (const file & f : s.files) {
        sum += round_up(f.bytes, page_size());
    }
    for (const expert_layer & layer : s.layers) {
        sum += s.kind == source_kind::package ? layer.n_expert * blob_stride(layer) : 0;
    }
    return sum;
}

store::store(const source & s) : mapped(address_space(s)), views(s.layers.size()) {
    const size_t at = map_files(s);
    if (s.kind == source_kind::package) {
        map_blobs(s, at);
    } else {
        view_stacked(s);
    }
}

// Returns where the files end.
size_t store::map_files(const source & s) {
    size_t at = 0;
    for (const file & f : s.files) {
        mapped.map(at, f, f.bytes);
        file_at.push_back(at);
        at += round_up(f.bytes, page_size());
    }
    for (const dense_weight & d : s.dense) {
        dense_views.push_back({ mapped.base() + file_at[d.shard] + d.offset, d.bytes });
    }
    return at;
}

void store::map_blobs(const source & s, size_t at) {
    std::vector<size_t> layer_at;
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

void store::view_stacked(const source & s) {
    for (size_t l = 0; l < s.layers.size(); l++) {
        for (const projection & p : s.layers[l].projections) {
            views[l].push_back({ mapped.base() + file_at[p.shard] + p.offset, p.bytes });
        }
    }
}

} // namespace edgemoe
