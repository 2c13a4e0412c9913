// The threads that move experts into slots, so that computing goes on meanwhile. Knows nothing of where bytes come from or go to.
//
// Threads: request, promote and wait_idle may be called from any thread. `upload` and then `done` run on the loader's own threads (lanes), without the loader's
// mutex, so that they may take others. A free lane takes a demand load first, whenever there is one; so do all that wait for a prefetch to end.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace edgemoe {

struct transfer { size_t layer; int32_t expert, slot; };

// How much may be on its way at once. One transfer always may.
struct lanes {
    size_t n = 1;
    size_t n_prefetches = 1;                 // of these; a demand load that comes has then a lane left
    size_t most_bytes = SIZE_MAX;   // the sooner the first is there, the fewer share the way
};

struct loader {
    loader(const lanes & ways, std::function<bool(const transfer &)> upload, std::function<void(const transfer &, bool loaded)> done);
    ~loader();   // what has not begun is dropped

    void request(const transfer & t, size_t bytes, bool demand);
    // A prefetch that is still waiting becomes a demand.
    void promote(size_t layer, int32_t expert);
    size_t n_prefetches_waiting();
    // Prefetches for a layer that have not begun and are not among these experts are dropped, and returned.
    std::vector<transfer> drop_prefetches(size_t layer, const std::vector<int32_t> & but);
    void wait_idle();
    void stop();   // ends what has begun, drops the rest, takes no more; nobody may wait for what is dropped

private:
    struct order { transfer t; size_t bytes; };
    void run();
    bool next(order & found, bool & demand);

    const lanes ways;
    std::function<bool(const transfer &)>       upload;
    std::function<void(const transfer &, bool)> done;

    std::mutex              mutex;
    std::condition_variable work, idle;
    std::deque<order>       demands, prefetches;
    size_t                  n_busy = 0, n_prefetching = 0, bytes_busy = 0;
    bool                    stopping = false;
    std::vector<std::thread> threads;   // last: they use all of the above
};

} // namespace edgemoe
