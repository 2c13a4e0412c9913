#include "parameters.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace edgemoe {

static std::string shown(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%g", x);
    return text;
}

parameters read_parameters(const std::string & text, parameters known) {
    size_t at = std::min(text.find(':'), text.size());
    while (at < text.size()) {
        const size_t end    = std::min(text.find(',', at + 1), text.size());
        const std::string p = text.substr(at + 1, end - at - 1);
        const size_t equals = p.find('=');
        const auto   it     = known.find(p.substr(0, equals));
        if (equals == std::string::npos || it == known.end()) {
            std::string wanted;
            for (const auto & [key, value] : known) {
                wanted += (wanted.empty() ? "" : ", ") + key + "=";
            }
            throw std::invalid_argument("policy " + text + ": parameter " + p + ", wanted " + (wanted.empty() ? "none" : wanted));
        }
        parameter & found = it->second;
        try {
            size_t used;
            found.value = std::stod(p.substr(equals + 1), &used);
            if (used != p.size() - equals - 1 || !(found.value >= found.least && found.value <= found.most)) {
                throw std::invalid_argument("");
            }
        } catch (const std::exception &) {
            throw std::invalid_argument("policy " + text + ": " + p + ", wanted a number from " + shown(found.least) + " to " + shown(found.most));
        }
        at = end;
    }
    return known;
}

} // namespace edgemoe
