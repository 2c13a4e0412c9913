// RAM for some of the experts. Every expert has its place among the addresses of its layer, where ggml's stacked tensors and our kernels look for it; whether there are
// pages behind them is another matter. A slot is the pages for one expert, and moves with them to the place of whoever it is given to: no bytes are copied.
//
// Threads: settle, confirm and drop may be called from any thread. Whoever reads a place must know that nobody moves it meanwhile.
#pragma once

#include "source.h"

#include <mutex>
#include <vector>

namespace edgemoe {

// Expert e of a projection starts at base + e * stride.
struct expert_view {
    const char * base;
    size_t       stride;
};

struct expert_memory {
    explicit expert_memory(const source & s);

    // A place lies in its first page where its bytes lie in a page of their file, so that whole pages can be read into it.
    expert_view view(size_t layer, size_t projection) const { return layers[layer].views[projection]; }
    char * place(size_t layer, size_t projection, int32_t expert) const;
    // What a slot with an expert of this layer takes, in whole pages.
    size_t bytes(size_t layer) const;

    // The pages of a slot come to the place of an expert. True when its bytes are there, because another slot had brought them before.
    bool settle(int32_t slot, size_t layer, int32_t expert);
    // The bytes of an expert have been read.
    void confirm(size_t layer, int32_t expert);
    // True when they have, and the pages are now those of this slot.
    bool adopt(int32_t slot, size_t layer, int32_t expert);
    // The pages at the place of an expert are given back.
    void drop(size_t layer, int32_t expert);

private:
    // Whole pages of the place of expert e: at + e * stride, a multiple of the page size or not.
    struct extent { size_t at, stride, bytes; };
    struct layer_places { std::vector<extent> extents; std::vector<expert_view> views; size_t first_key; };
    struct owner { size_t layer; int32_t expert; };
    struct place_state { int32_t slot = -1; bool valid = false; };

    static size_t lay_out(const source & s, std::vector<layer_places> & layers);
    place_state & state(const owner & o) { return states[layers[o.layer].first_key + (size_t) o.expert]; }
    void move(const owner & from, const owner & to);
    size_t begin_of(const extent & e, int32_t expert) const;

    std::vector<layer_places> layers;   // extents and views relative to the memory until that is there
    arena                     memory;
    std::mutex                mutex;
    std::vector<place_state>  states;   // per expert
    std::vector<owner>        at;       // per slot; expert -1: it has no pages
};

} // namespace edgemoe
