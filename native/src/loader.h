// The thread that moves experts into slots, so that computing goes on meanwhile. Knows nothing of where bytes come from or go to.
//
// Threads: request, promote and wait_idle may be called from any thread. `upload` and then `done` run on the loader's own thread, without the loader's
// mutex, so that they may take others. Requests are served one at a time: a demand load first, whenever there is one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace edgemoe {

struct transfer { size_t layer; int32_t expert, slot; };

struct loader {
    loader(std::function<bool(const transfer &)> upload, std::function<void(const transfer &, bool loaded)> done);
    ~loader();   // what has not begun is dropped

    void request(const transfer & t, bool demand);
    // A prefetch that is still waiting becomes a demand.
    void promote(size_t layer, int32_t expert);
    void wait_idle();
    void stop();   // ends what has begun, drops the rest, takes no more; nobody may wait for what is dropped

private:
    void run();

    std::function<bool(const transfer &)>       upload;
    std::function<void(const transfer &, bool)> done;

    std::mutex              mutex;
    std::condition_variable changed;
    std::deque<transfer>    demands, prefetches;
    bool                    busy = false, stopping = false;
    std::thread             thread;   // last: it uses all of the above
};

} // namespace edgemoe
