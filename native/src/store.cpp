#include "store.h"

#include <stdexcept>

namespace edgemoe {

// A package maps its blobs one behind the other, a layer at a time; the distance between two is a whole number of pages. Each projection is then a
// strided view, whatever the size of an expert.
static size_t blob_stride(const expert_layer & layer) {
    return round_up(layer.blob_bytes, page_size());
}

static size_t address_space(const source & s, bool with_blobs) {
    size_t sum = 0;
    for (const file & f : s.files) {
        sum += round_up(f.bytes, page_size());
    }
    for (const expert_layer & layer : s.layers) {
        sum += with_blobs && s.kind == source_kind::package ? layer.n_expert * blob_stride(layer) : 0;
    }
    return sum;
}

store::store(const source & s, const expert_memory * places) : s(s), mapped(address_space(s, !places)), views(s.layers.size()) {
    const size_t at = map_files(s);
    if (places) {
        for (size_t l = 0; l < s.layers.size(); l++) {
            for (size_t p = 0; p < s.layers[l].projections.size(); p++) {
                views[l].push_back(places->view(l, p));
            }
        }
        open_for_reads(s);
    } else if (s.kind == source_kind::package) {
        map_blobs(s, at);
    } else {
        view_stacked(s);
    }
}

// The first read of each kind tells whether they can be direct.
static bool try_read(direct_file & f) {
    std::vector<char> pages(2 * page_size());
    char * const page = (char *) round_up((uintptr_t) pages.data(), page_size());
    f.read(page, 1, 0);
    return f.direct;
}

void store::open_for_reads(const source & s) {
    if (s.kind == source_kind::package) {
        direct_file first(s.blob_path(s.layers[0], 0));
        reads_are_direct = try_read(first);
        for (const expert_layer & layer : s.layers) {
            identities.emplace_back(layer.n_expert);
        }
        mapping = std::async(std::launch::async, [this, &s] {
            s.visit_blobs([&](size_t l, uint32_t expert, const file & blob) { identities[l][expert] = blob.identity(); });
        });
        return;
    }
    identities.emplace_back();
    reads_are_direct = true;
    for (const file & f : s.files) {
        shards.emplace_back(f.path);
        identities[0].push_back(f.identity());
        reads_are_direct = try_read(shards.back()) && reads_are_direct;
    }
}

static void check_identity(const direct_file & f, const file_identity & wanted) {
    if (!(f.identity() == wanted)) {
        throw std::runtime_error(f.path + ": was changed or replaced while the model was running");
    }
}

void store::read(size_t layer, int32_t expert, size_t first, size_t end, char * const * dst, size_t most) {
    const std::vector<projection> & all = s.layers[layer].projections;
    if (first == end) {
        return;
    }
    if (s.kind == source_kind::package) {
        direct_file blob(s.blob_path(s.layers[layer], (uint32_t) expert));
        check_identity(blob, identities[layer][(size_t) expert]);
        for (size_t p = first; p < end;) {
            // Neighbours whose places are neighbours, too, come in one read.
            size_t last = p;
            while (last + 1 < end && all[last + 1].offset > all[last].offset && dst[last + 1] - dst[last] == (ptrdiff_t) (all[last + 1].offset - all[last].offset)) {
                last++;
            }
            blob.read(dst[p], (size_t) (all[last].offset + all[last].bytes - all[p].offset), all[p].offset, most);
            p = last + 1;
        }
        return;
    }
    for (size_t p = first; p < end; p++) {
        direct_file & f = shards[all[p].shard];
        check_identity(f, identities[0][all[p].shard]);
        f.read(dst[p], all[p].bytes, all[p].offset + (uint64_t) expert * all[p].bytes, most);
    }
}

size_t store::offset_in_page(size_t layer, size_t projection, int32_t expert) const {
    const edgemoe::projection & p = s.layers[layer].projections[projection];
    return (size_t) ((p.offset + (s.kind == source_kind::package ? 0 : (uint64_t) expert * p.bytes)) % page_size());
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
