// A sink that tells a tier what the routers said, for policies that go by it.
#pragma once

#include "head_feed.h"
#include "router_tap.h"
#include "tier.h"

#include <vector>

namespace edgemoe {

struct router_feed : router_sink {
    // `layers`: block numbers of the tier's layers. `learned`: what wants to know what routers read; or NULL.
    router_feed(router_tap & tap, tier & to, std::vector<int> layers, head_feed * learned);
    ~router_feed() override;

    bool wants_probs()  const override { return to.needs_probs(); }
    bool wants_chosen() const override { return false; }
    bool wants_hidden(int layer, const ggml_tensor * x) override;
    void routed(const routing_view & view) noexcept override;

private:
    size_t index_of(int layer) const;

    router_tap &     tap;
    tier &           to;
    head_feed *      learned;
    std::vector<int> layers;
};

} // namespace edgemoe
