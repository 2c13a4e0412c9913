// Kernels for AVX2, FMA, F16C and AVX-VNNI.
#if defined(__x86_64__)

#include "avx2_kernels.h"

namespace edgemoe {

kernel_table kernels_avxvnni() {
    return all_kernels();
}

} // namespace edgemoe

#endif
