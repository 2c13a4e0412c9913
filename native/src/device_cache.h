// The expert cache of one model on one device: slots there, and the tier that decides what is in them. Shared by all contexts of the model.
#pragma once

#include "device_slots.h"
#include "ram_cache.h"
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

struct device_cache : carrier {
    // `ram`: where experts are that are not mapped; or NULL. Throws when there is no such device, it has no room, or it cannot compute these experts.
    device_cache(const source & s, const store & from, ram_cache * ram, const cache_options & options);

    device_slots slots;

private:
    bool carry(const transfer & t) override;
    bool carry_from_disk(const transfer & t);

    const source &        s;
    const store &         from;
    ram_cache * const     ram;
    std::vector<char>     passing;   // an expert on its way from the disk to the device, which takes no slot in RAM
    uint32_t              fail_every;
    std::atomic<uint32_t> n_uploads{0};

public:
    tier experts;   // last: its lane uses the rest
};

} // namespace edgemoe
