#include "loader.h"

#include <algorithm>

namespace edgemoe {

loader::loader(std::function<bool(const transfer &)> upload, std::function<void(const transfer &, bool)> done)
    : upload(std::move(upload)), done(std::move(done)), thread([this] { run(); }) {}

loader::~loader() {
    stop();
}

void loader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void loader::request(const transfer & t, bool demand) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        (demand ? demands : prefetches).push_back(t);
    }
    changed.notify_all();
}

void loader::promote(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = std::find_if(prefetches.begin(), prefetches.end(), [&](const transfer & t) { return t.layer == layer && t.expert == expert; });
    if (it != prefetches.end()) {
        demands.push_back(*it);
        prefetches.erase(it);
    }
}

void loader::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return !busy && demands.empty() && prefetches.empty(); });
}

void loader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return stopping || !demands.empty() || !prefetches.empty(); });
        if (stopping) {
            return;
        }
        // A demand load overtakes prefetches: computation is waiting for it.
        std::deque<transfer> & queue = demands.empty() ? prefetches : demands;
        const transfer next = queue.front();
        queue.pop_front();
        busy = true;
        lock.unlock();
        done(next, upload(next));
        lock.lock();
        busy = false;
        changed.notify_all();
    }
}

} // namespace edgemoe
