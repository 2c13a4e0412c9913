// A sink that tells a tier what the routers said, for policies that go by it.
#pragma once

#include "router_tap.h"
#include "tier.h"

#include <vector>

namespace edgemoe {

struct router_feed : router_sink {
    // `layers`: block numbers of the tier's layers.
    router_feed(router_tap & tap, tier & to, std::vector<int> layers);
    ~router_feed() override;

    bool wants_probs()  const override { return to.needs_probs(); }
    bool wants_hidden() const override { return to.needs_hidden(); }
    void routed(const routing_view & view) noexcept override;

private:
    router_tap &     tap;
    tier &           to;
    std::vector<int> layers;
};

} // namespace edgemoe
