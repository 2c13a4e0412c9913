#include "device_cache.h"

#include <stdexcept>

namespace edgemoe {

static ggml_backend_dev_t device_named(const std::string & name) {
    const ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        return device;
    }
    std::string wanted;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const ggml_backend_dev_t d = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(d) != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            wanted += (wanted.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(d));
        }
    }
    throw std::invalid_argument("device " + name + ", wanted one of " + wanted);
}

static std::vector<tier_layer> layers_of(const source & s) {
    std::vector<tier_layer> layers;
    for (const expert_layer & l : s.layers) {
        // Rates compare within a mix of types: the first and the last projection tell them apart.
        layers.push_back({ (int32_t) l.n_expert, l.bytes_per_expert(), (int) l.projections.front().type * GGML_TYPE_COUNT + (int) l.projections.back().type });
    }
    return layers;
}

static tier_options with_staging(tier_options options, int32_t n_staging) {
    options.n_staging = n_staging;
    return options;
}

device_cache::device_cache(const source & s, const store & from, ram_cache * ram, const cache_options & options)
    : slots(s, device_named(options.device), options.slots.n_slots, options.slots.n_staging, options.most_block_bytes, options.most_bytes), s(s), from(from), ram(ram),
      fail_every(options.fail_every), experts(layers_of(s), with_staging(options.slots, slots.n_staging()), this) {
    if (options.poison) {
        slots.fill(0xff);
    }
}

bool device_cache::carry(const transfer & t) {
    if (fail_every && ++n_uploads % fail_every == 0) {
        return false;
    }
    try {
        if (ram && !ram->borrow(t.layer, t.expert)) {
            return carry_from_disk(t);
        }
        const char * bytes[MOST_PROJECTIONS];
        for (size_t p = 0; p < s.layers[t.layer].projections.size(); p++) {
            const expert_view view = from.view(t.layer, p);
            bytes[p] = view.base + (size_t) t.expert * view.stride;
        }
        struct borrowed {
            ram_cache * from;
            const transfer & t;
            ~borrowed() {
                if (from) {
                    from->give_back(t.layer, t.expert);
                }
            }
        } until_written = { ram, t };
        return slots.write(t.layer, t.slot, bytes);
    } catch (...) {
        return false;   // a device's driver may throw what it likes; the expert is computed on the CPU then
    }
}

bool device_cache::carry_from_disk(const transfer & t) {
    const std::vector<projection> & all = s.layers[t.layer].projections;
    const size_t page = page_size();
    size_t n = page;
    for (const projection & p : all) {
        n += round_up(p.bytes, page) + 2 * page;
    }
    passing.resize(std::max(n, passing.size()));
    char * dst[MOST_PROJECTIONS], * at = (char *) round_up((uintptr_t) passing.data(), page);
    for (size_t p = 0; p < all.size(); p++) {
        dst[p] = at + from.offset_in_page(t.layer, p, t.expert);
        at += round_up(all[p].bytes, page) + page;
    }
    ram->read(t.layer, t.expert, dst);
    return slots.write(t.layer, t.slot, dst);
}

} // namespace edgemoe
