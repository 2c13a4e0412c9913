#include "heads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace edgemoe {

// Rows of a matrix that a thread takes at a time.
static constexpr int64_t ROWS_PER_PIECE = 16;

float as_half(float x) { return ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)); }

std::vector<float> mean_of_rows(const std::vector<float> & rows, size_t width) {
    const size_t n = width ? rows.size() / width : 0;
    if (n == 1) {
        return rows;
    }
    std::vector<float> sum(rows.empty() ? 0 : width, 0.0f);
    for (size_t r = 0; r < n; r++) {
        for (size_t i = 0; i < width; i++) {
            sum[i] += rows[r * width + i] / (float) n;
        }
    }
    return sum;
}

heads::heads(std::vector<uint32_t> n_expert_, int64_t n_embd, const std::vector<weights> & next, const std::vector<weights> & successor)
    : n_expert(std::move(n_expert_)), n_embd(n_embd) {
    const size_t n = n_expert.size();
    if (n_embd < 1 || n == 0 || (next.empty() && successor.empty()) || (!next.empty() && next.size() != n) || (!successor.empty() && successor.size() != n)) {
        throw std::invalid_argument("heads: " + std::to_string(n) + " layers of " + std::to_string(n_embd) + " values, wanted a head for each, of one kind at least");
    }
    for (size_t l = 0; l < n && !next.empty(); l++) {
        nexts.push_back(copied(next[l], n_expert[l]));
    }
    for (size_t l = 0; l < n && !successor.empty(); l++) {
        successors.push_back(copied(successor[l], n_expert[(l + 1) % n]));
    }
}

heads::matrix heads::copied(const weights & from, int64_t n_out) {
    if ((from.type != GGML_TYPE_F16 && from.type != GGML_TYPE_Q8_0) || n_embd % ggml_blck_size(from.type) != 0) {
        throw std::invalid_argument(std::string("heads: ") + std::to_string(n_embd) + " values as " + ggml_type_name(from.type) + ", wanted F16, or Q8_0 in blocks of 32");
    }
    const size_t row_bytes = ggml_row_size(from.type, n_embd);
    void * data = memory.take(row_bytes * (size_t) n_out);
    memcpy(data, from.data, row_bytes * (size_t) n_out);
    return { from.type, find_kernel(from.type, best_isa()), (const char *) data, row_bytes, n_out,
             from.bias ? std::vector<float>(from.bias, from.bias + n_out) : std::vector<float>() };
}

head_step::head_step(const heads & of, size_t layer, bool next, bool successor, const float * hidden, size_t stride, int64_t n_rows)
    : n_embd(of.n_embd), n_rows(n_rows), x((size_t) (of.n_embd * n_rows)) {
    for (int64_t r = 0; r < n_rows; r++) {
        const float * row = (const float *) ((const char *) hidden + (size_t) r * stride);
        std::transform(row, row + n_embd, x.begin() + r * n_embd, as_half);
    }
    const heads::matrix * wanted[2] = { next ? &of.nexts.at(layer) : nullptr, successor ? &of.successors.at(layer) : nullptr };
    for (size_t i = 0; i < 2; i++) {
        if (!wanted[i]) {
            continue;
        }
        products[i] = { wanted[i], std::vector<float>((size_t) (n_rows * wanted[i]->n_out)) };
        n_pieces   += (wanted[i]->n_out + ROWS_PER_PIECE - 1) / ROWS_PER_PIECE;
        const kernel * k = wanted[i]->k;
        if (!k || k->activation == rounding::none) {
            continue;
        }
        const size_t bytes = activation_bytes(k->activation, n_embd);
        q[i].resize(bytes * (size_t) n_rows);
        for (int64_t r = 0; r < n_rows; r++) {
            quantize(k->activation, x.data() + r * n_embd, q[i].data() + (size_t) r * bytes, n_embd);
        }
    }
}

void head_step::run(int, int) {
    std::vector<float> row;
    for (int64_t piece = next_piece++; piece < n_pieces; piece = next_piece++) {
        const int64_t in_first = products[0].w ? (products[0].w->n_out + ROWS_PER_PIECE - 1) / ROWS_PER_PIECE : 0;
        const size_t  i        = piece >= in_first;
        product &     p        = products[i];
        const int64_t first = (piece - (i ? in_first : 0)) * ROWS_PER_PIECE, n = std::min(ROWS_PER_PIECE, p.w->n_out - first);
        const char *  rows  = p.w->data + (size_t) first * p.w->row_bytes;
        for (int64_t t = 0; t < n_rows && p.w->k; t++) {
            const void * from = q[i].empty() ? (const void *) (x.data() + t * n_embd) : q[i].data() + q[i].size() / (size_t) n_rows * (size_t) t;
            p.w->k->dot(rows, p.w->row_bytes, from, n_embd, n, p.z.data() + t * p.w->n_out + first);
        }
        for (int64_t r = 0; r < n && !p.w->k; r++) {
            row.resize((size_t) n_embd);
            ggml_get_type_traits(p.w->type)->to_float(rows + (size_t) r * p.w->row_bytes, row.data(), n_embd);
            for (int64_t t = 0; t < n_rows; t++) {
                float sum = 0;
                for (int64_t j = 0; j < n_embd; j++) {
                    sum += row[(size_t) j] * x[(size_t) (t * n_embd + j)];
                }
                p.z[(size_t) (t * p.w->n_out + first + r)] = sum;
            }
        }
    }
}

std::vector<float> head_step::probs_of(size_t i) const {
    std::vector<float> probs = products[i].z;
    const size_t n = products[i].w ? (size_t) products[i].w->n_out : 0;
    for (size_t at = 0; at < probs.size(); at += n) {
        float * p = probs.data() + at;
        const std::vector<float> & bias = products[i].w->bias;
        for (size_t e = 0; e < bias.size(); e++) {
            p[e] += bias[e];
        }
        const float largest = *std::max_element(p, p + n);
        float sum = 0;
        for (size_t e = 0; e < n; e++) {
            p[e] = std::exp(p[e] - largest);
            sum += p[e];
        }
        for (size_t e = 0; e < n; e++) {
            p[e] = std::isfinite(sum) ? as_half(p[e] / sum) : 0.0f;   // a score that is no number would leave nothing in order
        }
    }
    return probs;
}

} // namespace edgemoe
