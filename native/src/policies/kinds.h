// The kinds of policies, family by family, in the files of this folder.
#pragma once

#include "../policy.h"
#include "parameters.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

namespace edgemoe {

struct policy_kind {
    const char * name;
    parameters   known;
    std::unique_ptr<policy> (*make)(const expert_space & space, const residency & in, const parameters & p, const policy_source & from);
};

// What is learned has the same number of experts for all layers.
inline void need_equal_layers(const expert_space & space, const std::string & name) {
    for (size_t layer = 1; layer < space.n_layers(); layer++) {
        if (space.n_expert(layer) != space.n_expert(0)) {
            throw std::invalid_argument("policy " + name + ": layer " + std::to_string(layer) + " has " + std::to_string(space.n_expert(layer)) + " experts, wanted " +
                std::to_string(space.n_expert(0)) + " as in the first");
        }
    }
}

// use.cpp: by what was used, when and how often
std::vector<policy_kind> use_policies();
// placement.cpp: a set that is chosen anew now and then, or once
std::vector<policy_kind> placement_policies();
// stage.cpp: a set that is chosen where a reasoning takes another line
std::vector<policy_kind> stage_policies();
// foresight.cpp: a set that is chosen by what will be
std::vector<policy_kind> foresight_policies();
// prediction.cpp: by what the router says, and what is predicted from it
std::vector<policy_kind> prediction_policies();
// similar.cpp: by what similar tokens or sequences used
std::vector<policy_kind> similarity_policies();

} // namespace edgemoe
