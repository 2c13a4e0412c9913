#include "expert_memory.h"

#include <algorithm>

namespace edgemoe {

// A package's blobs keep their layout, without what lies before the first projection: one extent. Slices of stacked tensors lie at any offset of a page, and the next
// one at another: the stride takes care that places do the same, and that no two share a page.
size_t expert_memory::lay_out(const source & s, std::vector<layer_places> & layers) {
    const size_t page = page_size();
    size_t end = 0, n_keys = 0;
    for (const expert_layer & layer : s.layers) {
        layers.push_back({ {}, {}, n_keys });
        layer_places & l = layers.back();
        n_keys += layer.n_expert;
        if (s.kind == source_kind::package) {
            uint64_t first = UINT64_MAX, last = 0;
            for (const projection & p : layer.projections) {
                first = std::min(first, p.offset);
                last  = std::max(last, p.offset + p.bytes);
            }
            first = first / page * page;
            const size_t bytes = round_up((size_t) (last - first), page);
            l.extents.push_back({ end, bytes, bytes });
            for (const projection & p : layer.projections) {
                l.views.push_back({ (const char *) (end + (size_t) (p.offset - first)), bytes });
            }
            end += layer.n_expert * bytes;
            continue;
        }
        for (const projection & p : layer.projections) {
            const bool   aligned = p.offset % page == 0 && p.bytes % page == 0;
            const size_t stride  = aligned ? p.bytes : p.bytes + 2 * page, at = end + (size_t) (p.offset % page);
            l.extents.push_back({ at, stride, aligned ? p.bytes : round_up(p.bytes, page) + page });
            l.views.push_back({ (const char *) at, stride });
            end = round_up(at + layer.n_expert * stride + page, page);
        }
    }
    return end;
}

expert_memory::expert_memory(const source & s) : memory(lay_out(s, layers)) {
    for (layer_places & l : layers) {
        for (expert_view & v : l.views) {
            v.base = memory.base() + (size_t) v.base;
        }
    }
    states.resize(layers.empty() ? 0 : layers.back().first_key + s.layers.back().n_expert);
}

char * expert_memory::place(size_t layer, size_t projection, int32_t expert) const {
    const expert_view & v = layers[layer].views[projection];
    return const_cast<char *>(v.base) + (size_t) expert * v.stride;
}

size_t expert_memory::bytes(size_t layer) const {
    size_t sum = 0;
    for (const extent & e : layers[layer].extents) {
        sum += e.bytes;
    }
    return sum;
}

size_t expert_memory::begin_of(const extent & e, int32_t expert) const { return (e.at + (size_t) expert * e.stride) / page_size() * page_size(); }

void expert_memory::move(const owner & from, const owner & to) {
    const std::vector<extent> & a = layers[from.layer].extents, & b = layers[to.layer].extents;
    for (size_t i = 0; i < a.size(); i++) {
        if (i < b.size() && a[i].bytes == b[i].bytes) {
            memory.move(begin_of(a[i], from.expert), begin_of(b[i], to.expert), a[i].bytes);
        } else {
            memory.drop(begin_of(a[i], from.expert), a[i].bytes);   // experts of another shape: their pages come with the read
        }
    }
}

bool expert_memory::settle(int32_t slot, size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    if ((size_t) slot >= at.size()) {
        at.resize((size_t) slot + 1, { 0, -1 });
    }
    const owner to = { layer, expert }, from = at[(size_t) slot];
    place_state & there = state(to);
    if (there.slot == slot) {
        return there.valid;
    }
    if (there.slot >= 0) {
        // Whoever was given that slot after him has not come for the pages yet: they change places.
        at[(size_t) there.slot] = from;
        if (from.expert >= 0) {
            state(from).slot = there.slot;
        }
    } else if (from.expert >= 0) {
        move(from, to);
        state(from) = {};
    }
    there.slot = slot;
    at[(size_t) slot] = to;
    return there.valid;
}

void expert_memory::confirm(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    state({ layer, expert }).valid = true;
}

bool expert_memory::adopt(int32_t slot, size_t layer, int32_t expert) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!state({ layer, expert }).valid) {
            return false;
        }
    }
    return settle(slot, layer, expert);
}

void expert_memory::drop(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    place_state & there = state({ layer, expert });
    for (const extent & e : layers[layer].extents) {
        memory.drop(begin_of(e, expert), e.bytes);
    }
    if (there.slot >= 0) {
        at[(size_t) there.slot] = { 0, -1 };
    }
    there = {};
}

} // namespace edgemoe
