// Compares every kernel with a sum in double precision of ggml's own dequantised weights times the quantised activations.
//   kernels_check                 exit code 1 and a line for each difference
//   kernels_check --bench [TYPE]  GB/s of weights read, for our kernels and ggml's vec_dot; n = 2048 per row
// Rows end where a page without access begins, so that a read behind a row is a crash and not luck.
#include "kernels.h"

#include "ggml-cpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace edgemoe;

// Where the scales of a block lie; f16 except for MXFP4's one byte.
struct type_info {
    ggml_type type;
    int       n_scales;
    size_t    scale_at[2];
};

static const type_info types[] = {
    { GGML_TYPE_Q4_K,   2, { 0, 2 } },
    { GGML_TYPE_Q6_K,   1, { 208 } },
    { GGML_TYPE_Q8_0,   1, { 0 } },
    { GGML_TYPE_Q4_0,   1, { 0 } },
    { GGML_TYPE_Q4_1,   2, { 0, 2 } },
    { GGML_TYPE_Q5_K,   2, { 0, 2 } },
    { GGML_TYPE_MXFP4,  1, { 0 } },
    { GGML_TYPE_IQ4_NL, 1, { 0 } },
    { GGML_TYPE_IQ4_XS, 1, { 0 } },
    { GGML_TYPE_Q5_0,   1, { 0 } },
    { GGML_TYPE_Q5_1,   2, { 0, 2 } },
    { GGML_TYPE_Q3_K,   1, { 108 } },
    { GGML_TYPE_F16,    0, { } },
    { GGML_TYPE_BF16,   0, { } },
    { GGML_TYPE_F32,    0, { } },
};

static const struct { isa level; const char * name; } levels[] = { { isa::avx2, "avx2" }, { isa::avx512, "avx512" } };

enum class scales { usual, zero, largest, denormal, infinite, nan };
static const char * scale_names[] = { "usual", "zero", "largest", "denormal", "infinite", "nan" };

static std::mt19937 rng(1);

static float uniform(float from, float to) {
    return std::uniform_real_distribution<float>(from, to)(rng);
}

static uint16_t half_scale(scales kind) {
    switch (kind) {
        case scales::usual:    return ggml_fp32_to_fp16(uniform(-0.02f, 0.02f));
        case scales::zero:     return 0;
        case scales::largest:  return rng() % 2 ? 0x7BFF : 0xFBFF;
        case scales::denormal: return (uint16_t) (rng() % 0x400);
        case scales::infinite: return 0x7C00;
        case scales::nan:      return 0x7E01;
    }
    return 0;
}

static uint8_t e8m0_scale(scales kind) {
    switch (kind) {
        case scales::usual:    return (uint8_t) (118 + rng() % 6);
        case scales::largest:  return 240;   // 255 would be NaN, which ggml does not know either
        default:               return (uint8_t) (rng() % 3);
    }
}

static void fill_row(const type_info & t, scales kind, char * row, int64_t n) {
    const size_t bytes = ggml_row_size(t.type, n);
    if (t.n_scales == 0) {   // float weights: the values are their own scales
        for (int64_t i = 0; i < n; i++) {
            const float special[] = { uniform(-1, 1), 0.0f, 65504.0f, 1e-40f, INFINITY, NAN };
            const float f = special[(int) kind];
            const ggml_bf16_t b = ggml_fp32_to_bf16(f);
            const ggml_fp16_t h = ggml_fp32_to_fp16(f);
            const void * from = t.type == GGML_TYPE_F32 ? (const void *) &f : t.type == GGML_TYPE_F16 ? (const void *) &h : (const void *) &b;
            memcpy(row + i * ggml_type_size(t.type), from, ggml_type_size(t.type));
        }
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        row[i] = (char) (kind == scales::zero ? 0 : rng());
    }
    for (size_t at = 0; at < bytes; at += ggml_type_size(t.type)) {
        for (int s = 0; s < t.n_scales; s++) {
            const uint16_t h = half_scale(kind);
            const uint8_t  e = e8m0_scale(kind);
            const bool is_byte = t.type == GGML_TYPE_MXFP4;
            memcpy(row + at + t.scale_at[s], is_byte ? (const void *) &e : (const void *) &h, is_byte ? 1 : 2);
        }
    }
}

// Memory whose end borders on a page without access.
struct guarded {
    char * base;
    size_t bytes;
    explicit guarded(size_t room) {
        const size_t page = (size_t) sysconf(_SC_PAGESIZE);
        bytes = (room + page - 1) / page * page;
        base  = (char *) mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(base + bytes, page, PROT_NONE) != 0) {
            perror("mmap");
            exit(2);
        }
    }
    ~guarded() { munmap(base, bytes + (size_t) sysconf(_SC_PAGESIZE)); }
    char * ending(size_t size) const { return base + bytes - size; }
    guarded(const guarded &) = delete;
};

static int n_failed = 0;

static void fail(const std::string & text) {
    if (n_failed++ < 40) {
        printf("FAILED %s\n", text.c_str());
    }
}

// ---- activations: one written down here from ggml's definition of Q8_K, one made by the CPU backend's own Q8_0 ----

struct activation {
    std::vector<float> x, rounded;   // rounded: what the weights are multiplied with
    std::vector<float> s;            // per 32: d * sum, as Q8_1 rounds it
};

static void round_q8_k(const float * x, float * rounded, int8_t * qs, float & d) {
    float max = 0;
    for (int i = 0; i < 256; i++) {
        if (std::fabs(x[i]) > std::fabs(max)) {
            max = x[i];
        }
    }
    const float scale = max != 0 ? -127.0f / max : 0.0f;
    d = max != 0 ? 1 / scale : 0.0f;
    for (int i = 0; i < 256; i++) {
        qs[i] = (int8_t) std::min(127, (int) std::nearbyint(scale * x[i]));
        rounded[i] = d * qs[i];
    }
}

// Also checks the kernel's own quantisation, byte for byte.
static activation make_activation(const std::string & name, const kernel & k, std::vector<float> x, const void * q) {
    const int64_t n = (int64_t) x.size();
    activation a = { x, x, {} };
    if (k.quantize == quantize_256) {
        for (int64_t i = 0; i < n / 256; i++) {
            const act_256 & y = ((const act_256 *) q)[i];
            int8_t qs[256];
            float d;
            round_q8_k(x.data() + 256*i, a.rounded.data() + 256*i, qs, d);
            int sums[16] = { 0 };
            for (int j = 0; j < 256; j++) {
                sums[j/16] += qs[j];
            }
            bool same = memcmp(qs, y.qs, 256) == 0 && memcmp(&d, &y.d, 4) == 0;
            for (int j = 0; j < 16; j++) {
                same = same && sums[j] == y.sums16[j] && sums[j/2*2] + sums[j/2*2 + 1] == y.sums32[j/2];
            }
            if (!same) {
                fail(name + ": activations differ from Q8_K");
            }
        }
    } else if (k.quantize != copy_float) {
        const ggml_type_traits_cpu * q8_1 = ggml_get_type_traits_cpu(GGML_TYPE_Q8_1);
        std::vector<block_q8_0> reference((size_t) (n / 32)), slow((size_t) (n / 32));
        struct { uint16_t d, s; int8_t qs[32]; } with_sum;
        ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float(x.data(), reference.data(), n);
        ggml_get_type_traits(GGML_TYPE_Q8_0)->to_float(reference.data(), a.rounded.data(), n);
        ggml_quantize_chunk(GGML_TYPE_Q8_0, x.data(), slow.data(), 0, 1, n, nullptr);
        for (int64_t i = 0; i < n / 32; i++) {
            const act_2x32 & y = ((const act_2x32 *) q)[i/2];
            q8_1->from_float(x.data() + 32*i, &with_sum, 32);
            a.s.push_back(ggml_fp16_to_fp32(with_sum.s));
            if (memcmp(reference[i].qs, y.qs + 32*(i%2), 32) != 0 || ggml_fp16_to_fp32(reference[i].d) != y.d[i%2] || a.s.back() != y.s[i%2]) {
                fail(name + ": activations differ from Q8_0 or Q8_1 of ggml's CPU backend");
            }
            // ggml's slow reference multiplies by 1/d and rounds ties away from zero.
            for (int j = 0; j < 32; j++) {
                if (std::abs(slow[i].qs[j] - y.qs[32*(i%2) + j]) > 1 || slow[i].d != reference[i].d) {
                    fail(name + ": activations are far from ggml_quantize_chunk");
                }
            }
        }
    }
    return a;
}

struct expected {
    double value;
    double magnitude;   // the sum that float rounding is relative to
};

static expected reference(const type_info & t, const char * row, const activation & a) {
    const int64_t n = (int64_t) a.x.size();
    std::vector<char>  aligned(row, row + ggml_row_size(t.type, n));
    std::vector<float> w((size_t) n);
    if (t.type == GGML_TYPE_F32) {
        memcpy(w.data(), aligned.data(), aligned.size());
    } else {
        ggml_get_type_traits(t.type)->to_float(aligned.data(), w.data(), n);
    }
    expected e = { 0, 0 };
    const bool has_min = t.type == GGML_TYPE_Q4_1 || t.type == GGML_TYPE_Q5_1;
    for (int64_t i = 0; i < n; i += 32) {
        double largest = 0, sum = 0, sum_abs = 0;
        for (int64_t j = i; j < std::min(i + 32, n); j++) {
            e.value += (double) w[j] * a.rounded[j];
            largest  = std::max(largest, (double) std::fabs(w[j]));
            sum     += a.rounded[j];
            sum_abs += std::fabs(a.rounded[j]);
        }
        if (has_min) {
            uint16_t m;
            memcpy(&m, aligned.data() + (size_t) (i / 32) * ggml_type_size(t.type) + 2, 2);
            e.value += (double) ggml_fp16_to_fp32(m) * (a.s[i/32] - sum);   // Q8_1 rounds its sum
        }
        e.magnitude += largest * sum_abs;
    }
    return e;
}

static void check(const type_info & t, isa level, const char * level_name, scales kind, int64_t n, int64_t n_rows, size_t gap, int input) {
    const kernel * k = find_kernel(t.type, level);
    const std::string name = std::string(ggml_type_name(t.type)) + " " + level_name + ", scales " + scale_names[(int) kind] + ", n " +
        std::to_string(n) + ", " + std::to_string(n_rows) + " rows, gap " + std::to_string(gap);
    std::vector<float> x((size_t) n);
    for (float & f : x) {
        f = input == 0 ? uniform(-3, 3) : input == 1 ? 0.0f : uniform(0, 1e-3f);
    }
    const size_t bytes = ggml_row_size(t.type, n);
    const size_t row_bytes = bytes + gap;
    const guarded memory((size_t) n_rows * row_bytes), q_memory(k->activation_bytes(n));
    // Ends at the page: its start is aligned to 2 bytes (or 1, for MXFP4), as a row in a GGUF tensor may be.
    char * w = memory.ending((size_t) n_rows * row_bytes - gap);
    for (int64_t r = 0; r < n_rows; r++) {
        fill_row(t, kind, w + (size_t) r * row_bytes, n);
    }
    void * q = q_memory.ending(k->activation_bytes(n));
    k->quantize(x.data(), q, n);
    const activation a = make_activation(name, *k, x, q);
    std::vector<float> y((size_t) n_rows + 1, -7.0f);
    k->dot(w, row_bytes, q, n, n_rows, y.data());
    if (y[(size_t) n_rows] != -7.0f) {
        fail(name + ": wrote behind the last row");
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const expected e = reference(t, w + (size_t) r * row_bytes, a);
        const float got = y[(size_t) r];
        const bool special = (kind == scales::infinite || kind == scales::nan) && t.type != GGML_TYPE_MXFP4;
        const double error = std::fabs(got - e.value);
        if (special ? std::isfinite(got) : !(error <= 2e-6 * e.magnitude + 1e-37)) {
            fail(name + ", row " + std::to_string(r) + ": " + std::to_string(got) + ", wanted " + std::to_string(e.value) + " of " + std::to_string(e.magnitude));
        }
    }
}

// A number that is none must not vanish in the rounding.
static void check_broken_input(const type_info & t, isa level, float broken) {
    const kernel * k = find_kernel(t.type, level);
    const int64_t n = 512;
    std::vector<float> x((size_t) n, 0.5f);
    x[300] = broken;
    std::vector<char> w(ggml_row_size(t.type, n));
    std::vector<float> q(k->activation_bytes(n) / sizeof(float));
    fill_row(t, scales::usual, w.data(), n);
    k->quantize(x.data(), q.data(), n);
    float y = 0;
    k->dot(w.data(), w.size(), q.data(), n, 1, &y);
    if (std::isfinite(y)) {
        fail(std::string(ggml_type_name(t.type)) + ": a NaN or infinite activation gave " + std::to_string(y));
    }
}

static void check_type(const type_info & t, isa level, const char * level_name) {
    const int64_t block = ggml_blck_size(t.type);
    for (int kind = 0; kind <= (int) scales::nan; kind++) {
        for (const int64_t n : { 256, 512, 768, 2048, 2816, 4096 }) {
            check(t, level, level_name, (scales) kind, n, 3, 0, 0);
        }
        for (const int64_t n : { 32, 64, 96, 160, 1056, 2880 }) {
            if (n % block == 0) {
                check(t, level, level_name, (scales) kind, n, 3, 0, 0);
            }
        }
    }
    for (const int64_t n_rows : { 0, 1, 2, 5, 8, 17 }) {
        for (const size_t gap : { 0, 2, 6, 34 }) {
            // float rows are aligned to their elements
            if (t.type != GGML_TYPE_F32 || gap % 4 == 0) {
                check(t, level, level_name, scales::usual, 768, n_rows, gap, 0);
            }
        }
    }
    for (const int64_t n : { 1, 7, 31, 33, 100 }) {
        if (n % block == 0) {
            check(t, level, level_name, scales::usual, n, 2, 0, 0);
        }
    }
    check(t, level, level_name, scales::usual, 1024, 2, 0, 1);
    check(t, level, level_name, scales::usual, 1024, 2, 0, 2);
    check_broken_input(t, level, NAN);
    check_broken_input(t, level, INFINITY);
}

// ---- speed ----

using product = void (*)(const kernel *, ggml_type, const char * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y);

static void ours(const kernel * k, ggml_type, const char * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y) {
    k->dot(w, row_bytes, q, n, n_rows, y);
}

static void ggmls(const kernel *, ggml_type type, const char * w, size_t row_bytes, const void * q, int64_t n, int64_t n_rows, float * y) {
    const auto dot = ggml_get_type_traits_cpu(type)->vec_dot;
    for (int64_t r = 0; r < n_rows; r++) {
        dot((int) n, y + r, 0, w + (size_t) r * row_bytes, 0, q, 0, 1);
    }
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best of several runs, in GB/s; `repeat` times over the same rows within a run.
static double speed(product p, const kernel * k, ggml_type type, const char * w, const void * q, int64_t n, int64_t n_rows, int n_threads, int repeat) {
    const size_t row_bytes = ggml_row_size(type, n);
    std::vector<float> y((size_t) n_rows);
    double best = 1e9;
    for (int run = 0; run < 3; run++) {
        const double start = seconds();
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; t++) {
            threads.emplace_back([&, t] {
                const int64_t from = n_rows * t / n_threads, to = n_rows * (t + 1) / n_threads;
                for (int i = 0; i < repeat; i++) {
                    p(k, type, w + (size_t) from * row_bytes, row_bytes, q, n, to - from, y.data() + from);
                }
            });
        }
        for (std::thread & t : threads) {
            t.join();
        }
        best = std::min(best, seconds() - start);
    }
    return (double) n_rows * (double) row_bytes * repeat / best / 1e9;
}

static void bench(const char * only) {
    const int64_t n = 2048;
    const size_t room = (size_t) 1100 << 20;
    const size_t in_cache = 256 << 10;   // per thread; fits in the second-level cache
    std::vector<char> w(room);
    std::vector<float> x((size_t) n);
    for (float & f : x) {
        f = uniform(-3, 3);
    }
    printf("n = %d; memory: 1.1 GB, cache: 256 KB per thread; GB/s with 1 and 2 threads\n", (int) n);
    printf("%-8s %-8s %14s %14s %14s\n", "type", "kernel", "memory 1", "memory 2", "cache 1");
    for (const type_info & t : types) {
        if (only && std::string(only) != ggml_type_name(t.type)) {
            continue;
        }
        const size_t row_bytes = ggml_row_size(t.type, n);
        const int64_t n_rows = (int64_t) (room / row_bytes), n_different = 64;
        for (int64_t r = 0; r < n_rows; r++) {
            if (r < n_different) {
                fill_row(t, scales::usual, w.data() + (size_t) r * row_bytes, n);
            } else {
                memcpy(w.data() + (size_t) r * row_bytes, w.data() + (size_t) (r % n_different) * row_bytes, row_bytes);
            }
        }
        const auto line = [&](const char * name, product p, const kernel * k, const void * q) {
            printf("%-8s %-8s %14.1f %14.1f %14.1f\n", ggml_type_name(t.type), name, speed(p, k, t.type, w.data(), q, n, n_rows, 1, 1),
                speed(p, k, t.type, w.data(), q, n, n_rows, 2, 1), speed(p, k, t.type, w.data(), q, n, (int64_t) (in_cache / row_bytes), 1, 400));
            fflush(stdout);
        };
        const auto * traits = ggml_get_type_traits_cpu(t.type);
        std::vector<float> q(4096);
        if (traits->vec_dot_type == GGML_TYPE_F32) {
            std::copy(x.begin(), x.end(), q.begin());
        } else {
            ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x.data(), q.data(), n);
        }
        line("ggml", ggmls, nullptr, q.data());
        for (const auto & l : levels) {
            const kernel * k = l.level <= best_isa() ? find_kernel(t.type, l.level) : nullptr;
            if (k) {
                std::vector<float> room_for_q(k->activation_bytes(n) / sizeof(float) + 16);
                void * aligned = (void *) (((uintptr_t) room_for_q.data() + 63) & ~(uintptr_t) 63);
                k->quantize(x.data(), aligned, n);
                line(l.name, ours, k, aligned);
            }
        }
    }
}

int main(int argc, char ** argv) {
    ggml_cpu_init();
    if (argc > 1 && std::string(argv[1]) == "--bench") {
        bench(argc > 2 ? argv[2] : nullptr);
        return 0;
    }
    int n_kernels = 0;
    for (const type_info & t : types) {
        for (const auto & l : levels) {
            if (l.level <= best_isa() && find_kernel(t.type, l.level)) {
                const int before = n_failed;
                check_type(t, l.level, l.name);
                n_kernels++;
                printf("%-8s %-8s %s\n", ggml_type_name(t.type), l.name, n_failed == before ? "ok" : "FAILED");
            }
        }
    }
    printf("%d kernels, %d differences\n", n_kernels, n_failed);
    return n_failed != 0;
}
