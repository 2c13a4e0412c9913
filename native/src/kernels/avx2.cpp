// Kernels for AVX2, FMA and F16C.
#if defined(__x86_64__)

#include "avx2_kernels.h"

namespace edgemoe {

kernel_table kernels_avx2() {
    return all_kernels();
}

} // namespace edgemoe

#endif
