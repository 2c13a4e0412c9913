#include "gguf_file.h"

#include <mutex>
#include <stdexcept>
#include <thread>

namespace edgemoe {

// ggml's parser explains itself only through the log. The log callback is global: one header is read at a time, and what other threads
// log meanwhile goes where it would have gone.
struct log_capture {
    log_capture() : lock(mutex()), owner(std::this_thread::get_id()) {
        ggml_log_get(&previous, &previous_data);
        ggml_log_set([](ggml_log_level level, const char * text, void * data) {
            log_capture & self = *(log_capture *) data;
            if (std::this_thread::get_id() != self.owner) {
                self.previous(level, text, self.previous_data);
            } else if (level == GGML_LOG_LEVEL_ERROR) {
                self.text += text;
            }
        }, this);
    }
    ~log_capture() { ggml_log_set(previous, previous_data); }

    // First line, without the parser's function name.
    std::string reason() const {
        std::string line = text.substr(0, text.find('\n'));
        const size_t colon = line.find(": ");
        return line.empty() ? "not a readable GGUF" : colon == std::string::npos ? line : line.substr(colon + 2);
    }

private:
    static std::mutex & mutex() { static std::mutex m; return m; }

    std::lock_guard<std::mutex> lock;
    std::thread::id             owner;
    std::string                 text;
    ggml_log_callback           previous = nullptr;
    void *                      previous_data = nullptr;
};

gguf_header::gguf_header(const file & f) : path(f.path) {
    {
        const log_capture log;
        context.reset(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));
        if (!context) {
            throw std::runtime_error(path + ": not a readable GGUF (" + std::to_string(f.bytes) + " bytes): " + log.reason());
        }
    }
    collect();
    for (const gguf_tensor & t : tensors) {
        if (t.offset + t.bytes > f.bytes || t.offset + t.bytes < t.offset) {
            throw std::runtime_error(path + ": tensor " + t.name + " ends at " + std::to_string(t.offset + t.bytes) + ", file has " +
                std::to_string(f.bytes) + " bytes");
        }
    }
}

gguf_header::gguf_header(const std::string & bytes, const std::string & path) : path(path) {
    {
        const log_capture log;
        context.reset(gguf_init_from_buffer(bytes.data(), bytes.size(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));
        if (!context) {
            throw std::runtime_error(path + ": not a readable GGUF header: " + log.reason());
        }
    }
    collect();
}

void gguf_header::collect() {
    data_offset = gguf_get_data_offset(context.get());
    const int64_t n = gguf_get_n_tensors(context.get());
    tensors.reserve((size_t) n);
    for (int64_t i = 0; i < n; i++) {
        gguf_tensor t;
        t.name   = gguf_get_tensor_name(context.get(), i);
        t.type   = gguf_get_tensor_type(context.get(), i);
        t.offset = data_offset + gguf_get_tensor_offset(context.get(), i);
        t.bytes  = gguf_get_tensor_size(context.get(), i);
        const int64_t * ne = gguf_get_tensor_ne(context.get(), i);
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            t.ne[d] = ne[d];
        }
        tensors.push_back(std::move(t));
    }
}

bool gguf_header::has(const char * key) const {
    return gguf_find_key(context.get(), key) >= 0;
}

int64_t gguf_header::integer(const char * key, int64_t fallback) const {
    const int64_t id = gguf_find_key(context.get(), key);
    if (id < 0) {
        return fallback;
    }
    switch (gguf_get_kv_type(context.get(), id)) {
        case GGUF_TYPE_UINT8:  return gguf_get_val_u8 (context.get(), id);
        case GGUF_TYPE_UINT16: return gguf_get_val_u16(context.get(), id);
        case GGUF_TYPE_UINT32: return gguf_get_val_u32(context.get(), id);
        case GGUF_TYPE_UINT64: return (int64_t) gguf_get_val_u64(context.get(), id);
        case GGUF_TYPE_INT32:  return gguf_get_val_i32(context.get(), id);
        case GGUF_TYPE_INT64:  return gguf_get_val_i64(context.get(), id);
        default: throw std::runtime_error(path + ": key " + key + " has type " + gguf_type_name(gguf_get_kv_type(context.get(), id)) + ", wanted an integer");
    }
}

std::string gguf_header::text(const char * key) const {
    const int64_t id = gguf_find_key(context.get(), key);
    if (id < 0 || gguf_get_kv_type(context.get(), id) != GGUF_TYPE_STRING) {
        throw std::runtime_error(path + ": key " + key + (id < 0 ? " is missing" : " is not a string"));
    }
    return gguf_get_val_str(context.get(), id);
}

const void * gguf_header::array_data(const char * key, gguf_type type) const {
    const int64_t id = gguf_find_key(context.get(), key);
    if (id < 0 || gguf_get_kv_type(context.get(), id) != GGUF_TYPE_ARRAY || gguf_get_arr_type(context.get(), id) != type) {
        throw std::runtime_error(path + ": key " + key + (id < 0 ? " is missing" : std::string(" is not an array of ") + gguf_type_name(type)));
    }
    return gguf_get_arr_data(context.get(), id);
}

size_t gguf_header::array_size(const char * key) const {
    return gguf_get_arr_n(context.get(), gguf_find_key(context.get(), key));
}

const gguf_tensor * gguf_header::find(const std::string & name) const {
    const int64_t id = gguf_find_tensor(context.get(), name.c_str());
    return id < 0 ? nullptr : &tensors[(size_t) id];
}

} // namespace edgemoe
