#include "source.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>

#include <sys/stat.h>

namespace edgemoe {

static const char * const PROJECTIONS[] = { "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps" };

// Literal text only: libllama compiles the expression anew for every tensor of the model, and bracket expressions cost it tens of milliseconds.
const char * expert_pattern() {
    return "ffn_gate_exps.weight|ffn_up_exps.weight|ffn_gate_up_exps.weight|ffn_down_exps.weight";
}

const char * expert_bias_pattern() {
    return "ffn_gate_exps.bias|ffn_up_exps.bias|ffn_gate_up_exps.bias|ffn_down_exps.bias";
}

// Matrices that llama.cpp's graphs only ever multiply with. The embedding is one of them when it serves as the output as well: its rows are read by
// ggml, from our tensor.
static const char * const DENSE[] = {
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_gate", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b",
    "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_chexp", "ffn_up_chexp", "ffn_down_chexp",
    "ssm_in", "ssm_out", "ssm_ba",
};

// "blk.7.attn_q.weight" → "attn_q.weight"; empty for what is not in the list.
static std::string dense_kind(const std::string & name, bool tied) {
    if (name == "output.weight" || (tied && name == "token_embd.weight")) {
        return name;
    }
    unsigned layer;
    int used = 0;
    if (sscanf(name.c_str(), "blk.%u.%n", &layer, &used) != 1 || used == 0) {
        return "";
    }
    for (const char * d : DENSE) {
        if (name.compare((size_t) used, std::string::npos, std::string(d) + ".weight") == 0) {
            return name.substr((size_t) used);
        }
    }
    return "";
}

static void collect_dense(source & s, const std::vector<gguf_header> & headers) {
    bool tied = true;
    for (const gguf_header & h : headers) {
        tied = tied && !h.find("output.weight");
    }
    for (uint32_t shard = 0; shard < headers.size(); shard++) {
        for (const gguf_tensor & t : headers[shard].tensors) {
            if (t.ne[1] > 1 && t.ne[2] == 1 && t.ne[3] == 1 && !dense_kind(t.name, tied).empty()) {
                s.dense.push_back({ t.name, t.type, t.ne[0], t.ne[1], t.offset, t.bytes, shard });
            }
        }
    }
}

static void collect_routers(source & s, const std::vector<gguf_header> & headers) {
    for (expert_layer & layer : s.layers) {
        const std::string prefix = "blk." + std::to_string(layer.index) + ".";
        for (uint32_t shard = 0; shard < headers.size(); shard++) {
            const auto find = [&](const char * name, int64_t n_out_dimension, router::tensor & found) -> const gguf_tensor * {
                const gguf_tensor * t = headers[shard].find(prefix + name);
                if (t && t->ne[n_out_dimension] == layer.n_expert) {
                    found = { t->type, t->offset, t->bytes, shard };
                    return t;
                }
                return nullptr;
            };
            if (const gguf_tensor * t = find("ffn_gate_inp.weight", 1, layer.chosen_by.weight)) {
                layer.chosen_by.n_in = t->ne[0];
            }
            find("ffn_gate_inp.bias", 0, layer.chosen_by.bias);
            find("exp_probs_b.bias", 0, layer.chosen_by.selection_bias);
        }
    }
}

std::string dense_pattern(const source & s) {
    std::set<std::string> kinds;
    for (const dense_weight & d : s.dense) {
        kinds.insert(dense_kind(d.name, true));
    }
    std::string pattern;
    for (const std::string & kind : kinds) {
        pattern += (pattern.empty() ? "" : "|") + kind;
    }
    return pattern;
}

// "blk.7.ffn_up_exps.weight" → layer 7, true. Anything else is a dense tensor.
static bool is_expert_weight(const std::string & name, uint32_t & layer) {
    int used = 0;
    if (sscanf(name.c_str(), "blk.%u.%n", &layer, &used) != 1 || used == 0) {
        return false;
    }
    for (const char * p : PROJECTIONS) {
        if (name.compare((size_t) used, std::string::npos, std::string(p) + ".weight") == 0) {
            return true;
        }
    }
    return false;
}

static std::string padded(uint32_t n, int width) {
    std::string s = std::to_string(n);
    return s.size() < (size_t) width ? std::string((size_t) width - s.size(), '0') + s : s;
}

size_t expert_layer::bytes_per_expert() const {
    size_t sum = 0;
    for (const projection & p : projections) {
        sum += p.bytes;
    }
    return sum;
}

// llama.cpp crashes, or aborts the process, on weights it has no product for (an F64 router, say). Better said here.
static void check_type(const std::string & path, const gguf_tensor & t) {
    const bool is_matrix = t.ne[1] > 1;
    const bool is_plain_number = t.type == GGML_TYPE_F64 || t.type == GGML_TYPE_I8 || t.type == GGML_TYPE_I16 || t.type == GGML_TYPE_I32 || t.type == GGML_TYPE_I64;
    const bool is_weight = t.name.size() > 7 && t.name.compare(t.name.size() - 7, 7, ".weight") == 0;
    if (is_matrix && is_plain_number && is_weight) {
        throw std::runtime_error(path + ": tensor " + t.name + " has type " + ggml_type_name(t.type) + "; llama.cpp has no matrix product for it");
    }
}

// Adds a stacked tensor to the layers, checking that it fits the tensors of its layer that came before.
static void add_stacked(std::map<uint32_t, expert_layer> & layers, uint32_t index, const gguf_tensor & t, uint32_t shard, const std::string & path) {
    if (t.ne[2] < 1 || t.ne[3] != 1) {
        throw std::runtime_error(path + ": tensor " + t.name + " has 4 dimensions, wanted [n_in, n_out, n_expert]");
    }
    expert_layer & layer = layers[index];
    if (layer.projections.empty()) {
        layer.index    = index;
        layer.n_expert = (uint32_t) t.ne[2];
    }
    if ((int64_t) layer.n_expert != t.ne[2]) {
        throw std::runtime_error(path + ": layer " + std::to_string(index) + ": " + t.name + " has " + std::to_string(t.ne[2]) + " experts, " +
            layer.projections[0].name + " has " + std::to_string(layer.n_expert));
    }
    layer.projections.push_back({ t.name, t.type, t.ne[0], t.ne[1], (size_t) (t.bytes / (uint64_t) t.ne[2]), t.offset, shard });
}

static std::vector<expert_layer> ordered(std::map<uint32_t, expert_layer> && layers) {
    std::vector<expert_layer> out;
    for (auto & entry : layers) {
        out.push_back(std::move(entry.second));
    }
    return out;
}

// --- stacked GGUF ---

// "NAME-00002-of-00003.gguf", part 2 of 3 → NAME; empty when the name does not say so.
static std::string shard_prefix(const std::string & path, int64_t no, int64_t count) {
    const std::string suffix = "-" + padded((uint32_t) no + 1, 5) + "-of-" + padded((uint32_t) count, 5) + ".gguf";
    if (path.size() <= suffix.size() || path.compare(path.size() - suffix.size(), suffix.size(), suffix) != 0) {
        return "";
    }
    return path.substr(0, path.size() - suffix.size());
}

static void check_shard(const gguf_header & h, int64_t no, int64_t count) {
    const int64_t found_no = h.integer("split.no", 0), found_count = h.integer("split.count", 1);
    if (found_no != no || found_count != count) {
        throw std::runtime_error(h.path + ": is part " + std::to_string(found_no + 1) + " of " + std::to_string(found_count) +
            ", wanted part " + std::to_string(no + 1) + " of " + std::to_string(count));
    }
}

// All parts of the model that `path` is a part of, in order. The metadata decides; the names only tell where the other parts are.
static std::vector<file> open_shards(const std::string & path, std::vector<gguf_header> & headers) {
    std::vector<file> files;
    file given(path);
    gguf_header header(given);
    const int64_t count = header.integer("split.count", 1), no = header.integer("split.no", 0);
    if (count <= 1) {
        files.push_back(std::move(given));
        headers.push_back(std::move(header));
        return files;
    }
    const std::string prefix = shard_prefix(path, no, count);
    if (prefix.empty()) {
        throw std::runtime_error(path + ": is part " + std::to_string(no + 1) + " of " + std::to_string(count) +
            ", but is not named NAME-" + padded((uint32_t) no + 1, 5) + "-of-" + padded((uint32_t) count, 5) + ".gguf, so the other parts cannot be found");
    }
    int64_t n_tensors = 0;
    for (int64_t i = 0; i < count; i++) {
        files.emplace_back(prefix + "-" + padded((uint32_t) i + 1, 5) + "-of-" + padded((uint32_t) count, 5) + ".gguf");
        headers.emplace_back(files.back());
        check_shard(headers.back(), i, count);
        n_tensors += (int64_t) headers.back().tensors.size();
    }
    const int64_t wanted = headers[0].integer("split.tensors.count", n_tensors);
    if (n_tensors != wanted) {
        throw std::runtime_error(path + ": the " + std::to_string(count) + " parts hold " + std::to_string(n_tensors) + " tensors, wanted " + std::to_string(wanted));
    }
    return files;
}

static void open_stacked(source & s) {
    std::vector<gguf_header> headers;
    s.files        = open_shards(s.path, headers);
    s.architecture = headers[0].text("general.architecture");

    std::map<uint32_t, expert_layer> layers;
    uint64_t expert_bytes = 0, all_bytes = 0;
    for (uint32_t shard = 0; shard < headers.size(); shard++) {
        for (const gguf_tensor & t : headers[shard].tensors) {
            check_type(headers[shard].path, t);
            uint32_t index;
            if (is_expert_weight(t.name, index)) {
                add_stacked(layers, index, t, shard, headers[shard].path);
                expert_bytes += t.bytes;
            }
        }
        all_bytes += s.files[shard].bytes;
    }
    s.layers      = ordered(std::move(layers));
    s.kind        = s.layers.empty() ? source_kind::dense : source_kind::stacked;
    s.dense_bytes = all_bytes - expert_bytes;
    collect_dense(s, headers);
    collect_routers(s, headers);
}

// --- package ---

std::string source::blob_path(const expert_layer & layer, uint32_t expert) const {
    return path + "/experts/L" + padded(layer.index, 4) + "/E" + padded(expert, 4) + ".gguf";
}

static std::string blob_name(const expert_layer & layer, uint32_t expert) {
    return "layer " + std::to_string(layer.index) + ", expert " + std::to_string(expert);
}

static void check_blob_size(const expert_layer & layer, uint32_t expert, const file & f) {
    if (f.bytes != layer.blob_bytes) {
        throw std::runtime_error(blob_name(layer, expert) + ": " + f.path + " has " + std::to_string(f.bytes) + " bytes, wanted " + std::to_string(layer.blob_bytes));
    }
}

// Reads where the projections lie from the blob of expert 0, and checks them against the stacked shapes of the ghost header.
static void read_layout(const source & s, expert_layer & layer) {
    const file f(s.blob_path(layer, 0));
    check_blob_size(layer, 0, f);
    const gguf_header h(f);
    const std::string where = blob_name(layer, 0) + ": " + f.path;
    if (h.text("edgemoe.fingerprint") != s.fingerprint) {
        throw std::runtime_error(where + " has fingerprint " + h.text("edgemoe.fingerprint") + ", wanted " + s.fingerprint);
    }
    if (h.integer("edgemoe.layer", -1) != layer.index || h.integer("edgemoe.expert", -1) != 0) {
        throw std::runtime_error(where + " holds layer " + std::to_string(h.integer("edgemoe.layer", -1)) + ", expert " + std::to_string(h.integer("edgemoe.expert", -1)));
    }
    for (projection & p : layer.projections) {
        const gguf_tensor * t = h.find(p.name);
        if (!t) {
            throw std::runtime_error(where + " lacks tensor " + p.name);
        }
        if (t->type != p.type || t->ne[0] != p.n_in || t->ne[1] != p.n_out || t->ne[2] != 1 || t->bytes != p.bytes) {
            throw std::runtime_error(where + ": tensor " + p.name + " is " + ggml_type_name(t->type) + " [" + std::to_string(t->ne[0]) + ", " + std::to_string(t->ne[1]) +
                "], wanted " + ggml_type_name(p.type) + " [" + std::to_string(p.n_in) + ", " + std::to_string(p.n_out) + "]");
        }
        p.offset = t->offset;
    }
    layer.blob_header.resize(h.data_offset);
    f.read(&layer.blob_header[0], layer.blob_header.size(), 0);
}

// Where the value of "edgemoe.expert" lies in a blob's header: behind the key's text and the type (u32).
static size_t expert_number_at(const std::string & header, const std::string & path) {
    static const std::string key = "edgemoe.expert";
    const size_t at = header.find(key);
    if (at == std::string::npos || at + key.size() + 8 > header.size()) {
        throw std::runtime_error(path + ": key edgemoe.expert is missing");
    }
    return at + key.size() + 4;
}

static void visit_layer(const source & s, size_t index, const source::blob_visitor & visit) {
    const expert_layer & layer = s.layers[index];
    std::string wanted = layer.blob_header, found(wanted.size(), '\0');
    const size_t number_at = expert_number_at(wanted, s.blob_path(layer, 0));
    for (uint32_t e = 0; e < layer.n_expert; e++) {
        const file f(s.blob_path(layer, e));
        check_blob_size(layer, e, f);
        f.read(&found[0], found.size(), 0);
        for (int byte = 0; byte < 4; byte++) {
            wanted[number_at + (size_t) byte] = (char) (e >> (8 * byte));
        }
        if (found != wanted) {
            const gguf_header h(f);   // says what is wrong, if it is not even GGUF
            throw std::runtime_error(blob_name(layer, e) + ": " + f.path + " holds layer " + std::to_string(h.integer("edgemoe.layer", -1)) + ", expert " +
                std::to_string(h.integer("edgemoe.expert", -1)) + " of " + h.text("edgemoe.fingerprint") + ", wanted this expert of " + s.fingerprint);
        }
        visit(index, e, f);
    }
}

// Thousands of files: the system calls of one thread alone would be a fifth of a small model's load time.
void source::visit_blobs(const blob_visitor & visit) const {
    if (kind != source_kind::package) {
        return;
    }
    std::vector<std::exception_ptr> errors(layers.size());
    std::atomic<size_t> next{0};
    const auto work = [&] {
        for (size_t l = next++; l < layers.size(); l = next++) {
            try {
                visit_layer(*this, l, visit);
            } catch (...) {
                errors[l] = std::current_exception();
            }
        }
    };
    std::vector<std::thread> helpers;
    for (unsigned i = 1; i < std::min(4u, std::thread::hardware_concurrency()); i++) {
        helpers.emplace_back(work);
    }
    work();
    for (std::thread & helper : helpers) {
        helper.join();
    }
    for (const std::exception_ptr & error : errors) {
        if (error) {
            std::rethrow_exception(error);   // that of the first layer, whichever came first
        }
    }
}

static void open_package(source & s) {
    const file sidecar_file(s.path + "/router.gguf");
    const gguf_header sidecar(sidecar_file);
    const int64_t version = sidecar.integer("edgemoe.format_version", -1);
    if (version != 1) {
        throw std::runtime_error(sidecar.path + ": format version " + std::to_string(version) + ", wanted 1");
    }
    s.kind         = source_kind::package;
    s.architecture = sidecar.text("edgemoe.source.architecture");
    s.fingerprint  = sidecar.text("edgemoe.fingerprint");
    s.files.emplace_back(s.path + "/model.gguf");
    const uint64_t wanted_bytes = (uint64_t) sidecar.integer("edgemoe.dense_bytes", 0);
    if (s.files[0].bytes != wanted_bytes) {
        throw std::runtime_error(s.files[0].path + " has " + std::to_string(s.files[0].bytes) + " bytes, wanted " + std::to_string(wanted_bytes));
    }
    s.dense_bytes = wanted_bytes;
    std::vector<gguf_header> headers;
    headers.emplace_back(s.files[0]);
    collect_dense(s, headers);

    const gguf_tensor * ghost = sidecar.find("edgemoe.ghost");
    if (!ghost) {
        throw std::runtime_error(sidecar.path + ": tensor edgemoe.ghost is missing");
    }
    s.ghost_header.resize(ghost->bytes);
    sidecar_file.read(&s.ghost_header[0], ghost->bytes, ghost->offset);
    const gguf_header stacked(s.ghost_header, sidecar.path + " (ghost)");

    std::map<uint32_t, expert_layer> layers;
    s.ghost_bytes = stacked.data_offset;
    for (const gguf_tensor & t : stacked.tensors) {
        uint32_t index;
        if (!is_expert_weight(t.name, index)) {
            throw std::runtime_error(stacked.path + ": tensor " + t.name + " is not a routed expert");
        }
        add_stacked(layers, index, t, 0, stacked.path);
        s.ghost_bytes = std::max(s.ghost_bytes, t.offset + t.bytes);
    }
    s.layers = ordered(std::move(layers));

    const auto indices    = sidecar.array<uint32_t>("edgemoe.layers", GGUF_TYPE_UINT32);
    const auto blob_bytes = sidecar.array<uint64_t>("edgemoe.blob_bytes", GGUF_TYPE_UINT64);
    if (indices.size() != s.layers.size() || blob_bytes.size() != s.layers.size()) {
        throw std::runtime_error(sidecar.path + ": lists " + std::to_string(indices.size()) + " layers and " + std::to_string(blob_bytes.size()) +
            " blob sizes, its ghost has " + std::to_string(s.layers.size()) + " layers");
    }
    for (size_t i = 0; i < s.layers.size(); i++) {
        if (indices[i] != s.layers[i].index) {
            throw std::runtime_error(sidecar.path + ": lists layer " + std::to_string(indices[i]) + ", its ghost has layer " + std::to_string(s.layers[i].index));
        }
        s.layers[i].blob_bytes = blob_bytes[i];
        read_layout(s, s.layers[i]);
    }
    collect_routers(s, headers);
}

std::unique_ptr<source> source::open(const std::string & path) {
    auto s = std::make_unique<source>();
    s->path = path;
    while (s->path.size() > 1 && s->path.back() == '/') {
        s->path.pop_back();
    }
    struct stat st;
    if (stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) {
        static const std::string partial = ".partial";
        if (s->path.size() > partial.size() && s->path.compare(s->path.size() - partial.size(), partial.size(), partial) == 0) {
            throw std::runtime_error(path + ": an unfinished conversion; run edgemoe-convert again and it goes on from there");
        }
        if (stat((s->path + "/router.gguf").c_str(), &st) != 0) {
            throw std::runtime_error(path + ": not an edgemoe package: it has no router.gguf (an interrupted conversion? run edgemoe-convert again)");
        }
        open_package(*s);
    } else {
        open_stacked(*s);
    }
    return s;
}

void source::read(const expert_layer & layer, const projection & p, uint32_t expert, void * dst) const {
    if (kind == source_kind::package) {
        const file f(blob_path(layer, expert));
        f.read(dst, p.bytes, p.offset);
    } else {
        files[p.shard].read(dst, p.bytes, p.offset + (uint64_t) expert * p.bytes);
    }
}

} // namespace edgemoe
