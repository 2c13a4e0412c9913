// The expert source: where the bytes of projection p of expert e in layer l lie, for a stacked GGUF (one file or shards) and for a package alike.
// Opening checks everything that can be checked without reading weights or visiting every blob; visit_blobs checks those.
#pragma once

#include "gguf_file.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace edgemoe {

enum class source_kind { dense, stacked, package };

struct projection {
    std::string name;         // of the stacked tensor
    ggml_type   type;
    int64_t     n_in, n_out;  // row length and rows of one expert
    size_t      bytes;        // of one expert
    uint64_t    offset;       // stacked: of expert 0 in its file; package: in every blob of the layer
    uint32_t    shard = 0;    // stacked: index into files
};

// What chooses the experts of a layer: z = W x + bias, by the size of z, or of sigmoid(z) + selection_bias. Tensors that are not there have no bytes.
struct router {
    struct tensor { ggml_type type; uint64_t offset, bytes = 0; uint32_t shard; };
    int64_t n_in = 0;
    tensor  weight, bias, selection_bias;
};

// gate, up and down; or a fused one, and down.
constexpr size_t MOST_PROJECTIONS = 4;

struct expert_layer {
    uint32_t                index;       // blk.<index>
    uint32_t                n_expert;
    std::vector<projection> projections;
    router                  chosen_by;
    uint64_t                blob_bytes = 0;   // package only, as is the header
    std::string             blob_header;      // that of expert 0; the others have the same, but for the number of the expert

    size_t bytes_per_expert() const;
};

// A weight matrix outside of the experts that llama.cpp's graphs use for nothing but products.
struct dense_weight {
    std::string name;
    ggml_type   type;
    int64_t     n_in, n_out;
    uint64_t    offset, bytes;
    uint32_t    shard;
};

struct source {
    static std::unique_ptr<source> open(const std::string & path);

    // Opens every blob of a package, checks its size and header, and hands it over. Several threads share the layers (by their index in `layers`);
    // the experts of one layer come in order, from one thread.
    using blob_visitor = std::function<void(size_t layer, uint32_t expert, const file & blob)>;
    void visit_blobs(const blob_visitor & visit) const;

    std::string blob_path(const expert_layer & layer, uint32_t expert) const;
    // Reads one projection of one expert into `dst`.
    void read(const expert_layer & layer, const projection & p, uint32_t expert, void * dst) const;

    source_kind               kind = source_kind::dense;
    std::string               path;
    std::string               architecture;
    std::string               fingerprint;    // package: of its source
    std::vector<file>         files;          // what libllama maps: the shards, or model.gguf
    std::string               ghost_header;   // package
    uint64_t                  ghost_bytes = 0;
    std::vector<expert_layer> layers;
    std::vector<dense_weight> dense;
    uint64_t                  dense_bytes = 0;
};

// The names of routed expert weights, as a regular expression for llama.cpp's buffer type overrides.
const char * expert_pattern();
// The same for their biases.
const char * expert_bias_pattern();
// The same for s.dense.
std::string dense_pattern(const source & s);

} // namespace edgemoe
