#include "products.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace edgemoe {

// Rows of the longest piece of work.
static constexpr int64_t MOST_ROWS = 256;
static void * aligned(size_t bytes) {
    void * p = std::aligned_alloc(64, (std::max<size_t>(bytes, 64) + 63) / 64 * 64);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

workspace::~workspace() {
    free_chunks();
}

void workspace::free_chunks() {
    for (chunk & c : chunks) {
        std::free(c.at);
    }
    chunks.clear();
}

void * workspace::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    for (chunk & c : chunks) {
        if (c.bytes - c.used >= bytes) {
            c.used += bytes;
            return c.at + c.used - bytes;
        }
    }
    const size_t room = std::max<size_t>(bytes, 1 << 20);
    chunks.push_back({ (char *) aligned(room), room, bytes });
    return chunks.back().at;
}

void workspace::clear() {
    if (chunks.size() > 1) {
        // One that has room for all: chunks of a prompt just shorter than the next one would be of no use, and stay.
        size_t sum = 0;
        for (const chunk & c : chunks) {
            sum += c.used;
        }
        free_chunks();
        chunks.push_back({ (char *) aligned(sum), sum, 0 });
    }
    for (chunk & c : chunks) {
        c.used = 0;
    }
}

// A thread's own memory, kept from step to step.
struct thread_buffer {
    ~thread_buffer() { std::free(at); }
    void * get(size_t wanted) {
        if (wanted > bytes) {
            std::free(at);
            at    = nullptr;
            at    = aligned(wanted);
            bytes = wanted;
        }
        return at;
    }
    void * at    = nullptr;
    size_t bytes = 0;
};

static thread_local thread_buffer tile_buffer, value_buffer;

// Rows that will be read after the present ones. A row kernel prefetches for itself, but for the start of a run; unpacking a tile does not.
static void prefetch(const char * rows, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(rows + i, 0, 2);
    }
}

static constexpr size_t START_OF_RUN = 2048;

// y[t][0 .. n_rows) = rows [row, row + n_rows) of expert e times q[t]
static void multiply_rows(const matrix & w, int64_t expert, int64_t row, int64_t n_rows, const void * const * q, int64_t n_tokens, float * const * y) {
    thread_local std::vector<float *> at;
    const bool tiled = n_tokens >= TILE_MIN && w.k->multiply;
    for (int64_t r = 0; r < n_rows; r += tile_rows) {
        const int n = (int) std::min<int64_t>(tile_rows, n_rows - r);
        const char * rows = w.row(expert, row + r);
        if (tiled) {
            void * tile = tile_buffer.get(w.k->tile_bytes(w.n_in));
            at.assign(y, y + n_tokens);
            for (float *& p : at) {
                p += r;
            }
            w.k->unpack(rows, w.row_bytes, w.n_in, n, tile);
            if (r + tile_rows < n_rows) {
                prefetch(rows + tile_rows * w.row_bytes, std::min<int64_t>(tile_rows, n_rows - r - tile_rows) * w.row_bytes);
            }
            w.k->multiply(tile, w.n_in, n, q, n_tokens, at.data());
        } else {
            for (int64_t t = 0; t < n_tokens; t++) {
                w.k->dot(rows, w.row_bytes, q[t], w.n_in, n, y[t] + r);
            }
        }
    }
}

// Rows of a piece of work, a multiple of tile_rows: as many as leave every thread several pieces, since long runs are what memory reads fastest.
static int64_t rows_for_piece(int64_t n_rows, int64_t n_pieces_beside, int n_threads, int64_t most) {
    static constexpr int64_t PIECES_PER_THREAD = 6;
    const int64_t n_pieces = std::max<int64_t>(1, (PIECES_PER_THREAD * n_threads + n_pieces_beside - 1) / n_pieces_beside);
    const int64_t rows     = (n_rows + n_pieces - 1) / n_pieces;
    return std::min(std::max<int64_t>(1, rows / tile_rows), most / tile_rows) * tile_rows;
}

quantized_rows::quantized_rows(workspace & memory, rounding how, int64_t n, std::vector<const float *> rows) : how(how), n(n), from(std::move(rows)) {
    row_bytes = (activation_bytes(how, n) + 63) / 64 * 64;
    to = (char *) memory.take(row_bytes * from.size());
}

void quantize_step::run(int, int) {
    for (int64_t i = next++; i < (int64_t) rows.from.size(); i = next++) {
        if (!rows.from[(size_t) i]) {
            continue;   // nobody asks for this one
        }
        quantize(rows.how, rows.from[(size_t) i], rows.to + (size_t) i * rows.row_bytes, rows.n);
    }
}

// --- dense ---

dense_step::dense_step(const quantized_rows & x, std::vector<product> p, int n_threads) : x(x), products(std::move(p)), first_piece{0} {
    for (const product & each : products) {
        rows_per_piece.push_back(rows_for_piece(each.w.n_out, 1, n_threads, MOST_ROWS));
        first_piece.push_back(first_piece.back() + (each.w.n_out + rows_per_piece.back() - 1) / rows_per_piece.back());
    }
    for (size_t i = 0; i < x.from.size(); i++) {
        qs.push_back(x.row((int64_t) i));
    }
}

void dense_step::run(int, int) {
    thread_local std::vector<float *> y;
    size_t p = 0;
    for (int64_t piece = next++; piece < first_piece.back(); piece = next++) {
        while (piece >= first_piece[p + 1]) {
            p++;   // pieces come in ascending order
        }
        const product & each = products[p];
        const int64_t row = (piece - first_piece[p]) * rows_per_piece[p];
        y.assign(each.y.begin(), each.y.end());
        for (float *& to : y) {
            to += row;
        }
        multiply_rows(each.w, 0, row, std::min(rows_per_piece[p], each.w.n_out - row), qs.data(), (int64_t) qs.size(), y.data());
    }
}

// --- experts ---

hidden_step::hidden_step(const routing & r, const quantized_rows & x, bool x_per_pair, std::vector<stream> s, std::vector<elementwise> c, int result,
        int64_t n_hidden, quantized_rows & hidden, float * hidden_floats, int n_threads)
    : route(r), x(x), x_per_pair(x_per_pair), streams(std::move(s)), chain(std::move(c)), result(result), n_hidden(n_hidden), hidden(hidden),
      hidden_floats(hidden_floats), pieces_left(new std::atomic<int64_t>[r.groups.size()]) {
    rows_per_piece   = rows_for_piece(n_hidden, std::max<int64_t>(1, (int64_t) r.groups.size()), n_threads, MOST_ROWS);
    pieces_per_group = (n_hidden + rows_per_piece - 1) / rows_per_piece;
    for (size_t g = 0; g < r.groups.size(); g++) {
        pieces_left[g] = pieces_per_group;
    }
    for (const routing::pair & p : r.pairs) {
        qs.push_back(x.row(x_per_pair ? p.token * r.n_used + p.k : p.token));
    }
}

void hidden_step::run(int, int) {
    for (int64_t piece = next++; piece < pieces_per_group * (int64_t) route.groups.size(); piece = next++) {
        const size_t index = (size_t) (piece / pieces_per_group);
        const routing::group & g = route.groups[index];
        const int64_t row = piece % pieces_per_group * rows_per_piece;
        compute_piece(g, row, (int) std::min(rows_per_piece, n_hidden - row));
        if (--pieces_left[index] == 0) {
            for (int64_t i = g.first; i < g.first + g.n; i++) {
                quantize(hidden.how, hidden_floats + i * n_hidden, hidden.to + (size_t) i * hidden.row_bytes, n_hidden);
            }
        }
    }
}

void hidden_step::compute_piece(const routing::group & g, int64_t row, int n_rows) {
    thread_local std::vector<float *> y, value;
    // The products of all pairs first, [stream][pair][row]; then, pair by pair, the chain while they are in the cache.
    const size_t n_values = streams.size() + chain.size();
    const size_t plane    = (size_t) g.n * (size_t) rows_per_piece;
    float * buffer = (float *) value_buffer.get((streams.size() * plane + chain.size() * (size_t) rows_per_piece) * sizeof(float));
    y.resize((size_t) g.n);
    for (size_t s = 0; s < streams.size(); s++) {
        for (int32_t i = 0; i < g.n; i++) {
            y[(size_t) i] = buffer + s * plane + (size_t) (i * rows_per_piece);
        }
        if (s + 1 < streams.size()) {
            prefetch(streams[s + 1].w.row(g.expert, streams[s + 1].offset + row), START_OF_RUN);
        }
        multiply_rows(streams[s].w, g.expert, streams[s].offset + row, n_rows, &qs[(size_t) g.first], g.n, y.data());
    }
    value.resize(n_values);
    for (int32_t i = 0; i < g.n; i++) {
        for (size_t v = 0; v < n_values; v++) {
            value[v] = v < streams.size() ? buffer + v * plane + (size_t) (i * rows_per_piece) : buffer + streams.size() * plane + (v - streams.size()) * (size_t) rows_per_piece;
        }
        float * to = hidden_floats + (g.first + i) * n_hidden + row;
        value[(size_t) result] = chain.empty() ? value[(size_t) result] : to;
        for (size_t c = 0; c < chain.size(); c++) {
            const elementwise & e = chain[c];
            const float * bias = e.bias ? (const float *) ((const char *) e.bias->data + (size_t) g.expert * e.bias->nb[1]) + e.bias_row + row : nullptr;
            apply(e, value[(size_t) e.a], value[(size_t) e.b], bias, value[streams.size() + c], n_rows);
        }
        if (chain.empty()) {
            memcpy(to, value[(size_t) result], (size_t) n_rows * sizeof(float));
        }
    }
}

down_step::down_step(const routing & r, const matrix & w, std::vector<const void *> inputs, const output & out, int n_threads) : route(r), w(w), out(out), qs(std::move(inputs)) {
    rows_per_piece = rows_for_piece(w.n_out, 1, n_threads, MOST_ROWS);
}

void down_step::run(int, int) {
    for (int64_t row = rows_per_piece * next++; row < w.n_out; row = rows_per_piece * next++) {
        compute_piece(row, (int) std::min(rows_per_piece, w.n_out - row));
    }
}

// One function, so that the same bits come out wherever the rows come from.
__attribute__((noinline)) static void weigh(const float * from, const float * bias, float weight, bool summed, float * to, int n) {
    for (int r = 0; r < n; r++) {
        const float value = (from[r] + (bias ? bias[r] : 0.0f)) * weight;
        to[r] = summed ? to[r] + value : value;
    }
}

void down_step::compute_piece(int64_t row, int n_rows) {
    thread_local std::vector<float *> y;
    if (out.summed) {
        for (int64_t t = 0; t < route.n_tokens; t++) {
            memset(out.data + (size_t) t * out.token_stride + (size_t) row * sizeof(float), 0, (size_t) n_rows * sizeof(float));
        }
    }
    for (size_t i_group = 0; i_group < route.groups.size(); i_group++) {
        const routing::group & g = route.groups[i_group];
        if (i_group + 1 < route.groups.size()) {
            prefetch(w.row(route.groups[i_group + 1].expert, row), START_OF_RUN);
        }
        float * buffer = (float *) value_buffer.get((size_t) g.n * (size_t) rows_per_piece * sizeof(float));
        y.resize((size_t) g.n);
        for (int32_t i = 0; i < g.n; i++) {
            y[(size_t) i] = buffer + i * rows_per_piece;
        }
        multiply_rows(w, g.expert, row, n_rows, &qs[(size_t) g.first], g.n, y.data());
        const float * bias = out.bias ? (const float *) ((const char *) out.bias->data + (size_t) g.expert * out.bias->nb[1]) + row : nullptr;
        for (int32_t i = 0; i < g.n; i++) {
            const routing::pair & p = route.pairs[(size_t) (g.first + i)];
            float * to = (float *) (out.data + (size_t) p.token * out.token_stride + (out.summed ? 0 : (size_t) p.k * out.pair_stride)) + row;
            const float weight = out.weights ? out.weights[g.first + i] : 1.0f;
            weigh(y[(size_t) i], bias, weight, out.summed, to, n_rows);
        }
    }
}

weigh_step::weigh_step(const routing & r, const float * rows, int64_t n_out, const float * weights, const down_step::output & out, int n_threads)
    : route(r), rows(rows), n_out(n_out), rows_per_piece(rows_for_piece(n_out, 1, n_threads, MOST_ROWS)), weights(weights), out(out) {}

void weigh_step::run(int, int) {
    for (int64_t row = rows_per_piece * next++; row < n_out; row = rows_per_piece * next++) {
        const int n_rows = (int) std::min(rows_per_piece, n_out - row);
        for (int64_t t = 0; out.summed && t < route.n_tokens; t++) {
            memset(out.data + (size_t) t * out.token_stride + (size_t) row * sizeof(float), 0, (size_t) n_rows * sizeof(float));
        }
        for (size_t i = 0; i < route.pairs.size(); i++) {
            const routing::pair & p = route.pairs[i];
            float * to = (float *) (out.data + (size_t) p.token * out.token_stride + (out.summed ? 0 : (size_t) p.k * out.pair_stride)) + row;
            weigh(rows + (p.token * route.n_used + p.k) * n_out + row, nullptr, weights[i], out.summed, to, n_rows);
        }
    }
}

} // namespace edgemoe
