// The bytes of a model, mapped where they lie: nothing is copied, the page cache is shared with every other process that reads the files.
//
// Threads: a package is checked and mapped in the background, while libllama loads the dense part; whoever made the store meets that work in wait().
#pragma once

#include "source.h"

#include <future>
#include <vector>

namespace edgemoe {

// Expert e of a projection starts at base + e * stride.
struct expert_view {
    const char * base;
    size_t       stride;
};

struct store {
    // `s` must outlive the store.
    explicit store(const source & s);

    // Returns when all bytes are mapped; throws what was wrong with a blob. Views may be made before, but not read.
    void wait();

    expert_view view(size_t layer, size_t projection) const { return views[layer][projection]; }
    // Of source::dense[i]; the stride is its size.
    expert_view dense_view(size_t i) const { return dense_views[i]; }
    // True once a mapped file has lost bytes; what was computed since is worthless.
    bool lost() const { return mapped.lost(); }

private:
    size_t map_files(const source & s);
    void   map_blobs(const source & s, size_t at);
    void   view_stacked(const source & s);

    region mapped;
    std::vector<size_t>                   file_at;   // in the region, per file of the source
    std::vector<std::vector<expert_view>> views;
    std::vector<expert_view>              dense_views;
    std::future<void> mapping;   // last: its destructor waits, while the region is still there
};

} // namespace edgemoe
