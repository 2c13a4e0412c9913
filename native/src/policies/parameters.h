// A policy's parameters, read from text such as "lrfu:lambda=0.5".
#pragma once

#include <map>
#include <string>

namespace edgemoe {

struct parameter { double value, least, most; };
using parameters = std::map<std::string, parameter>;

// `known`: every parameter with its default and its bounds. Throws std::invalid_argument that says what was wanted.
parameters read_parameters(const std::string & text, parameters known);

} // namespace edgemoe
