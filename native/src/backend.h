// The ggml device: its registration, and one buffer type per model.
#pragma once

#include "executor.h"
#include "head_feed.h"

#include <memory>
#include <string>

namespace edgemoe {

// Empty, or one line that says why a ggml with this API and version cannot be used.
std::string check_ggml(int api_version, const std::string & version);

// Registers the device with the ggml in this process; throws when that ggml is another one than we were built for. Idempotent.
void register_device();

// One opened model. libllama holds buffers of its buffer type, so it must outlive the llama_model.
struct model {
    // `level` of the kernels; isa::none computes everything with ggml's own, bit-identical to llama.cpp. `in_ram`: experts are in slots within a budget, and on the
    // disk; NULL: all are mapped.
    model(std::unique_ptr<source> s, isa level, const ram_options * in_ram);
    ~model();

    // libllama has loaded: waits until all experts are mapped, and guards libllama's own mappings too. Throws what is wrong with the package.
    void loaded();
    // Puts expert slots on a device. Throws; once per model.
    void open_cache(const cache_options & options);
    // Empty, or why the last results are worthless.
    std::string fault();
    void * buffer_type();   // a ggml_backend_buffer_type_t

    std::unique_ptr<source> src;

    std::string ghost_path() const { return ghost ? ghost->path() : ""; }

    std::unique_ptr<expert_memory> places;  // NULL: experts are mapped
    store                       bytes;
    std::unique_ptr<ram_cache>  ram;        // as places
    weights                     held;
    std::unique_ptr<device_cache> cache;    // NULL: every expert is computed on the CPU
    std::unique_ptr<ghost_file> ghost;      // package only
    std::unique_ptr<head_feed>  learned;    // NULL: no learned heads

private:
    void forget_experts();

    struct ggml_side;
    std::unique_ptr<ggml_side> ggml;
    foreign_mappings           dense;
};

} // namespace edgemoe
