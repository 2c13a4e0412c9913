#include "loader.h"

#include <algorithm>

namespace edgemoe {

loader::loader(const lanes & ways, std::function<bool(const transfer &)> upload, std::function<void(const transfer &, bool)> done)
    : ways(ways), upload(std::move(upload)), done(std::move(done)) {
    for (size_t i = 0; i < ways.n; i++) {
        threads.emplace_back([this] { run(); });
    }
}

loader::~loader() {
    stop();
}

void loader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    work.notify_all();
    for (std::thread & t : threads) {
        if (t.joinable()) {
            t.join();
        }
    }
}

void loader::request(const transfer & t, size_t bytes, bool demand) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        (demand ? demands : prefetches).push_back({ t, bytes });
    }
    work.notify_one();
}

void loader::promote(size_t layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = std::find_if(prefetches.begin(), prefetches.end(), [&](const order & o) { return o.t.layer == layer && o.t.expert == expert; });
    if (it != prefetches.end()) {
        demands.push_back(*it);
        prefetches.erase(it);
        work.notify_one();
    }
}

size_t loader::n_prefetches_waiting() {
    std::lock_guard<std::mutex> lock(mutex);
    return prefetches.size();
}

std::vector<transfer> loader::drop_prefetches(size_t layer, const std::vector<int32_t> & but) {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<transfer> dropped;
    for (auto it = prefetches.begin(); it != prefetches.end();) {
        if (it->t.layer == layer && std::find(but.begin(), but.end(), it->t.expert) == but.end()) {
            dropped.push_back(it->t);
            it = prefetches.erase(it);
        } else {
            ++it;
        }
    }
    if (n_busy == 0 && demands.empty() && prefetches.empty()) {
        idle.notify_all();
    }
    return dropped;
}

void loader::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    idle.wait(lock, [&] { return n_busy == 0 && demands.empty() && prefetches.empty(); });
}

// A demand load overtakes prefetches: computation is waiting for it.
bool loader::next(order & found, bool & demand) {
    demand = !demands.empty();
    std::deque<order> & queue = demand ? demands : prefetches;
    if (queue.empty() || (!demand && n_prefetching >= ways.n_prefetches) || (n_busy > 0 && bytes_busy + queue.front().bytes > ways.most_bytes)) {
        return false;
    }
    found = queue.front();
    queue.pop_front();
    return true;
}

void loader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        order o;
        bool demand = false;
        work.wait(lock, [&] { return stopping || next(o, demand); });
        if (stopping) {
            return;
        }
        n_busy++;
        bytes_busy    += o.bytes;
        n_prefetching += !demand;
        lock.unlock();
        done(o.t, upload(o.t));
        lock.lock();
        n_busy--;
        bytes_busy    -= o.bytes;
        n_prefetching -= !demand;
        if (!demands.empty() || !prefetches.empty()) {
            work.notify_one();   // there may be room for more than what this lane takes next
        } else if (n_busy == 0) {
            idle.notify_all();
        }
    }
}

} // namespace edgemoe
