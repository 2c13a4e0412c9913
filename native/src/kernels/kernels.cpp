#include "blocks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace edgemoe {

const char * isa_name(isa level) {
    switch (level) {
        case isa::avx2:    return "avx2";
        case isa::avxvnni: return "avxvnni";
        case isa::avx512:  return "avx512";
        case isa::none:    break;
    }
    return "none";
}

#if defined(__x86_64__)

bool isa_supported(isa level) {
    // The compiler's test also asks whether the operating system saves the wide registers; F16C and AVX-VNNI are not in every compiler's list.
    unsigned a, b, c, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    switch (level) {
        case isa::none:    return true;
        case isa::avx2:    return avx2;
        case isa::avxvnni: return avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) && kernels_avxvnni().n > 0;
        case isa::avx512:  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    }
    return false;
}

isa best_isa() {
    static const isa best = isa_supported(isa::avx512) ? isa::avx512 : isa_supported(isa::avxvnni) ? isa::avxvnni :
                            isa_supported(isa::avx2) ? isa::avx2 : isa::none;
    return best;
}

static kernel_table table_of(isa level) {
    switch (level) {
        case isa::avx512:  return kernels_avx512();
        case isa::avxvnni: return kernels_avxvnni();
        case isa::avx2:    return kernels_avx2();
        case isa::none:    break;
    }
    return { nullptr, 0 };
}

const kernel * find_kernel(ggml_type weight, isa level) {
    const kernel_table table = table_of(level);
    for (size_t i = 0; i < table.n; i++) {
        if (table.first[i].weight == weight) {
            return &table.first[i];
        }
    }
    return nullptr;
}

#else

bool isa_supported(isa level) { return level == isa::none; }

isa best_isa() { return isa::none; }

const kernel * find_kernel(ggml_type, isa) { return nullptr; }

size_t activation_bytes(rounding, int64_t) { return 0; }

void quantize(rounding, const float *, void *, int64_t) {}

#endif

} // namespace edgemoe
