#include "policies.h"

#include "kinds.h"

#include <cstdio>
#include <stdexcept>

namespace edgemoe {

static const std::vector<policy_kind> & all_policies() {
    static const std::vector<policy_kind> all = [] {
        std::vector<policy_kind> kinds;
        for (const auto & some : { use_policies(), placement_policies(), stage_policies(), foresight_policies(), prediction_policies(), similarity_policies() }) {
            kinds.insert(kinds.end(), some.begin(), some.end());
        }
        return kinds;
    }();
    return all;
}

std::unique_ptr<policy> make_policy(const std::string & text, const expert_space & space, const residency & in, const policy_source & from) {
    const std::string name = text.substr(0, text.find(':'));
    std::string names;
    for (const policy_kind & kind : all_policies()) {
        if (name == kind.name) {
            std::unique_ptr<policy> made = kind.make(space, in, read_parameters(text, kind.known), from);
            made->begin_sequence(nullptr);
            return made;
        }
        names += std::string(names.empty() ? "" : ", ") + kind.name;
    }
    throw std::invalid_argument("policy " + text + ", wanted one of " + names);
}

std::string describe_policies() {
    std::string all;
    for (const policy_kind & kind : all_policies()) {
        std::string line = kind.name;
        for (const auto & [key, p] : kind.known) {
            char value[32];
            snprintf(value, sizeof(value), "%g", p.value);
            line += (line == kind.name ? ":" : ",") + key + "=" + value;
        }
        all += line + "\n";
    }
    return all;
}

} // namespace edgemoe
