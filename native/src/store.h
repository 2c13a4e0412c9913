// The bytes of a model. In place: mapped where they lie, nothing is copied, the page cache is shared with every other process that reads the files. Or from the disk: only
// the dense weights are mapped, and experts are read to wherever they are wanted, past the page cache.
//
// Threads: a package is checked (and mapped) in the background, while libllama loads the dense part; whoever made the store meets that work in wait(). After that read()
// may be called from any thread.
#pragma once

#include "expert_memory.h"
#include "source.h"

#include <future>
#include <memory>
#include <vector>

namespace edgemoe {

struct store {
    // `places`: where experts are, if they are not mapped. `s` and `places` must outlive the store.
    explicit store(const source & s, const expert_memory * places = nullptr);

    // Returns when all bytes are mapped; throws what was wrong with a blob. Views may be made before, but not read.
    void wait();

    expert_view view(size_t layer, size_t projection) const { return views[layer][projection]; }
    // Of source::dense[i]; the stride is its size.
    expert_view dense_view(size_t i) const { return dense_views[i]; }
    // Of a tensor of a router.
    const char * at(const router::tensor & t) const { return mapped.base() + file_at[t.shard] + t.offset; }
    // True once a mapped file has lost bytes; what was computed since is worthless.
    bool lost() const { return mapped.lost(); }

    // Experts that are not mapped: reads projections [first, end) of one, each to `dst[projection]`, which lies in its page as the bytes do in one of the file. `most`
    // bytes per call of the system; 0: no limit. Throws, also when the file is not the one that was opened.
    void read(size_t layer, int32_t expert, size_t first, size_t end, char * const * dst, size_t most);
    // Where in a page that is.
    size_t offset_in_page(size_t layer, size_t projection, int32_t expert) const;
    // Whether reads go past the page cache.
    bool direct() const { return reads_are_direct; }

private:
    size_t map_files(const source & s);
    void   map_blobs(const source & s, size_t at);
    void   view_stacked(const source & s);
    void   open_for_reads(const source & s);

    const source & s;
    region mapped;
    std::vector<size_t>                   file_at;   // in the region, per file of the source
    std::vector<std::vector<expert_view>> views;
    std::vector<expert_view>              dense_views;
    std::vector<direct_file>              shards;    // of a GGUF whose experts are read
    std::vector<std::vector<file_identity>> identities;   // of the shards, one each in the first row; of a package's blobs, a row per layer
    bool                                  reads_are_direct = false;
    std::future<void> mapping;   // last: its destructor waits, while the region is still there
};

} // namespace edgemoe
