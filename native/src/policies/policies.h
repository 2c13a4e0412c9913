// All policies by name.
#pragma once

#include "../policy.h"

#include <memory>
#include <string>

namespace edgemoe {

// `text`: a name, or name:key=value,key=value. Throws std::invalid_argument that says what was wanted.
std::unique_ptr<policy> make_policy(const std::string & text, const expert_space & space, const residency & in, const policy_source & from = {});

// Each name with its parameters and their defaults, "name:key=value,...", one per line.
std::string describe_policies();

} // namespace edgemoe
