// The expert cache of one model on one device: slots there, and the tier that decides what is in them. Shared by all contexts of the model.
#pragma once

#include "device_slots.h"
#include "tier.h"

#include <atomic>
#include <string>

namespace edgemoe {

struct cache_options {
    std::string  device;                // as ggml names it
    tier_options slots;
    size_t       most_block_bytes = 0;  // per tensor; 0: as the device allows
    size_t       most_bytes = 0;        // of all; 0: as the device has
    uint32_t     fail_every = 0;        // for tests: every so manieth upload fails
    bool         poison = false;        // for tests: NaN in slots before an expert comes
};

struct device_cache {
    // Throws when there is no such device, it has no room, or it cannot compute these experts.
    device_cache(const source & s, const store & from, const cache_options & options);

    device_slots slots;
    tier         experts;

private:
    bool upload(const transfer & t);

    uint32_t              fail_every;
    std::atomic<uint32_t> n_uploads{0};
};

} // namespace edgemoe
