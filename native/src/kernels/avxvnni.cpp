// Kernels for AVX2, FMA, F16C and AVX-VNNI. Compilers that do not know AVX-VNNI leave the table empty.
#if defined(__AVXVNNI__)

#include "avx2_kernels.h"

namespace edgemoe {

kernel_table kernels_avxvnni() {
    return all_kernels();
}

} // namespace edgemoe

#elif defined(__x86_64__)

#include "blocks.h"

namespace edgemoe {

kernel_table kernels_avxvnni() {
    return { nullptr, 0 };
}

} // namespace edgemoe

#endif
