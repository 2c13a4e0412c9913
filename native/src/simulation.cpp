#include "simulation.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace edgemoe {

namespace {

// Rows [first, end) of one step.
struct rows_of_step { size_t first, end; };

struct sequence {
    tier &                    t;
    const trace_rows &        rows;
    std::vector<rows_of_step> steps;
    std::vector<int32_t>      count;         // tokens per expert of the layer at hand
    std::vector<size_t>       there;         // the step's rows that reach it: of a prompt not all reach the last one
    std::vector<float>        probs, hidden, next, successor;   // means over a step

    sequence(tier & t, const trace_rows & rows) : t(t), rows(rows) {
        for (size_t r = 0; r < rows.n_rows; r++) {
            if (r == 0 || !rows.step || rows.step[r] != rows.step[r - 1]) {
                steps.push_back({ r, r });
            }
            steps.back().end = r + 1;
        }
        // A step in which nobody computes anything is none: policies do not hear of it.
        const size_t width = t.n_layers() * rows.n_used;
        const auto   empty = [&](const rows_of_step & s) {
            return std::all_of(rows.ids + s.first * width, rows.ids + s.end * width, [](uint16_t id) { return id == NO_EXPERT; });
        };
        steps.erase(std::remove_if(steps.begin(), steps.end(), empty), steps.end());
        int32_t most = 0;
        for (size_t layer = 0; layer < t.n_layers(); layer++) {
            most = std::max(most, t.n_expert(layer));
            if ((rows.probs || rows.next || rows.successor) && t.n_expert(layer) != t.n_expert(0)) {
                throw std::invalid_argument("rows: probabilities of " + std::to_string(t.n_expert(0)) + " experts per layer; layer " + std::to_string(layer) + " has " +
                    std::to_string(t.n_expert(layer)));
            }
        }
        count.assign((size_t) most, 0);
    }

    const uint16_t * ids_of(size_t row, size_t layer) const { return rows.ids + (row * t.n_layers() + layer) * rows.n_used; }

    event event_of(const rows_of_step & s, size_t layer) {
        event e = { layer, {}, {}, 0 };
        there.clear();
        e.experts.reserve(rows.n_used);
        e.n_tokens_of.reserve(rows.n_used);
        for (size_t r = s.first; r < s.end; r++) {
            const uint16_t * ids = ids_of(r, layer);
            if (ids[0] != NO_EXPERT) {
                there.push_back(r);
            }
            for (size_t k = 0; k < rows.n_used; k++) {
                if (ids[k] == NO_EXPERT) {
                    continue;
                }
                if (ids[k] >= t.n_expert(layer)) {
                    throw std::invalid_argument("row " + std::to_string(r) + ", layer " + std::to_string(layer) + ": expert " + std::to_string(ids[k]) + ", wanted less than " +
                        std::to_string(t.n_expert(layer)));
                }
                if (count[ids[k]]++ == 0) {
                    e.experts.push_back(ids[k]);
                }
            }
        }
        e.n_tokens = (int64_t) there.size();
        std::sort(e.experts.begin(), e.experts.end());
        for (const int32_t expert : e.experts) {
            e.n_tokens_of.push_back(count[(size_t) expert]);
            count[(size_t) expert] = 0;
        }
        return e;
    }

    // The mean over the rows that are there; of one row the row itself.
    const float * mean(const float * all, size_t width, size_t layer, std::vector<float> & sum) const {
        const auto row = [&](size_t r) { return all + (r * t.n_layers() + layer) * width; };
        if (!all || there.size() == 1) {
            return all ? row(there[0]) : nullptr;
        }
        sum.assign(width, 0.0f);
        for (const size_t r : there) {
            for (size_t i = 0; i < width; i++) {
                sum[i] += row(r)[i] / (float) there.size();
            }
        }
        return sum.data();
    }

    // Of the chosen experts only: the others have none.
    const float * scattered(size_t layer) {
        probs.assign((size_t) t.n_expert(layer), 0.0f);
        for (const size_t r : there) {
            const uint16_t * ids = ids_of(r, layer);
            for (size_t k = 0; k < rows.n_used; k++) {
                if (ids[k] != NO_EXPERT) {
                    probs[ids[k]] += rows.chosen_probs[(r * t.n_layers() + layer) * rows.n_used + k] / (float) there.size();
                }
            }
        }
        return probs.data();
    }

    future known() {
        future all;
        all.n_passes = steps.size();
        const size_t last = t.n_layers() - 1;
        all.passes_of.resize((size_t) t.key_of(last, t.n_expert(last)));
        for (size_t s = 0; s < steps.size(); s++) {
            all.stage.push_back(rows.stage ? rows.stage[steps[s].first] : -1);
            for (size_t layer = 0; layer < t.n_layers(); layer++) {
                const event e = event_of(steps[s], layer);
                if (e.n_tokens > tier::MOST_DECODED) {
                    continue;   // a prompt's hits are not what a cache is judged by
                }
                for (const int32_t expert : e.experts) {
                    all.passes_of[(size_t) t.key_of(layer, expert)].push_back((int32_t) s);
                }
            }
        }
        return all;
    }

    void run() {
        future all;
        if (t.needs_future()) {
            all = known();
        }
        t.begin_sequence(t.needs_future() ? &all : nullptr);
        const bool with_probs = t.needs_probs();
        const size_t n_expert = (size_t) t.n_expert(0);
        for (const rows_of_step & s : steps) {
            t.announce({ rows.token_ids ? rows.token_ids + s.first : nullptr, (int64_t) (s.end - s.first), rows.stage ? rows.stage[s.first] : -1 });
            for (size_t layer = 0; layer < t.n_layers(); layer++) {
                event e = event_of(s, layer);
                if (e.experts.empty()) {
                    continue;
                }
                if (with_probs) {
                    e.probs = rows.probs ? mean(rows.probs, n_expert, layer, probs) : rows.chosen_probs ? scattered(layer) : nullptr;
                    e.hidden    = mean(rows.hidden, rows.n_embd, layer, hidden);
                    e.n_embd    = rows.n_embd;
                    e.next      = mean(rows.next, n_expert, layer, next);
                    e.successor = mean(rows.successor, n_expert, layer, successor);
                }
                tier::visit v = t.begin(std::move(e));
                t.wait(v);
                t.end(v, {});
            }
        }
    }
};

} // namespace

void simulate(tier & t, const trace_rows & rows) {
    // What a policy knows of the future ends with the sequence, however that ends.
    try {
        sequence(t, rows).run();
    } catch (...) {
        t.begin_sequence(nullptr);
        throw;
    }
    t.begin_sequence(nullptr);
}

} // namespace edgemoe
