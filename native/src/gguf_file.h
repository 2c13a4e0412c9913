// A GGUF header, read through ggml's own parser. Bad headers are exceptions that carry the parser's reason.
#pragma once

#include "file.h"

#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace edgemoe {

struct gguf_tensor {
    std::string name;
    ggml_type   type;
    int64_t     ne[GGML_MAX_DIMS];
    uint64_t    offset;   // from the start of the file
    uint64_t    bytes;
};

struct gguf_header {
    // Checks as well that every tensor lies inside the file.
    explicit gguf_header(const file & f);
    // A header without a file behind it.
    gguf_header(const std::string & bytes, const std::string & path);

    bool        has(const char * key) const;
    // Integer keys of any width; `fallback` when the key is absent.
    int64_t     integer(const char * key, int64_t fallback) const;
    // A missing key or one of another type is an error.
    std::string text(const char * key) const;
    template <typename T> std::vector<T> array(const char * key, gguf_type type) const {
        const T * data = (const T *) array_data(key, type);
        return std::vector<T>(data, data + array_size(key));
    }

    const gguf_tensor * find(const std::string & name) const;

    std::string              path;
    std::vector<gguf_tensor> tensors;
    uint64_t                 data_offset;

private:
    void collect();
    const void * array_data(const char * key, gguf_type type) const;
    size_t       array_size(const char * key) const;

    struct deleter { void operator()(gguf_context * c) const { gguf_free(c); } };
    std::unique_ptr<gguf_context, deleter> context;
};

} // namespace edgemoe
