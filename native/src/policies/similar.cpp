// Policies that look for tokens or sequences of the past that were routed alike.
#include "kinds.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace edgemoe {

static const table & stored(const policy_source & from, const char * policy, const char * name, size_t n_dims) {
    const auto found = from.learned ? from.learned->find(name) : tables::const_iterator();
    if (!from.learned || found == from.learned->end() || found->second.shape.size() != n_dims) {
        throw std::invalid_argument(std::string("policy ") + policy + ": wanted a table " + name + ", which fitting on a trace makes");
    }
    return found->second;
}

static void check_shape(const table & t, const expert_space & space, const char * policy, const char * name) {
    need_equal_layers(space, policy);
    if (t.shape[1] != space.n_layers() || t.shape[2] != (uint64_t) space.n_expert(0)) {
        throw std::invalid_argument(std::string("policy ") + policy + ": table " + name + " was fitted to another model");
    }
}

// FineMoE: maps of training tokens (layer x expert probabilities); the first layers go by the token, later ones by the map whose layers so far are nearest by cosine.
//   maps       [n, layers, experts]
//   map_tokens [n]                    the token of each; traces have no embeddings, so the nearest embedding is read as the same token, or else no map
// Unsure: the re-ranking of candidates (here none), and the store's replacement, which happens once, when it is fitted.
struct finemoe : policy {
    static constexpr size_t AHEAD = 3;

    finemoe(const expert_space & space, const residency & in, const policy_source & from) : policy(space, in), visits((size_t) space.n_all(), 0) {
        const table & maps = stored(from, "finemoe", "maps", 3);
        check_shape(maps, space, "finemoe", "maps");
        const table & tokens = stored(from, "finemoe", "map_tokens", 1);
        n = maps.shape[0];
        if (tokens.shape[0] != n) {
            throw std::invalid_argument("policy finemoe: table map_tokens has " + std::to_string(tokens.shape[0]) + " tokens, wanted one for each of " + std::to_string(n) + " maps");
        }
        n_expert = maps.shape[2];
        // Turned over, so that all maps are compared with one probability in one go.
        by_expert.resize(maps.data.size());
        for (size_t m = 0; m < n; m++) {
            for (size_t key = 0; key < space.n_layers() * n_expert; key++) {
                by_expert[key * n + m] = maps.data[m * space.n_layers() * n_expert + key];
            }
            if (tokens.data[m] >= 0) {   // else it was not known
                map_of_token[(int32_t) tokens.data[m]] = m;
            }
        }
        squares.resize(space.n_layers() * n, 0.0f);
        for (size_t key = 0; key < space.n_layers() * n_expert; key++) {
            for (size_t m = 0; m < n; m++) {
                squares[key / n_expert * n + m] += by_expert[key * n + m] * by_expert[key * n + m];
            }
        }
    }

    bool needs_probs() const override { return true; }
    bool needs_tokens() const override { return true; }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        policy::begin_pass(s, wishes);
        product.assign(n, 0.0f);
        norm.assign(n, 0.0f);
        left = in.n_slots(0);
        nearest = n;
        if (s.n_tokens == 1 && s.token_ids) {
            const auto found = map_of_token.find(s.token_ids[0]);
            nearest = found == map_of_token.end() ? n : found->second;
        }
        for (size_t layer = 0; layer < std::min(AHEAD, space.n_layers()) && nearest < n; layer++) {
            want(layer, k, wishes);
        }
    }

    void observe(const event & e) override {
        policy::observe(e);
        k = e.n_tokens == 1 ? e.experts.size() : k;
        for (const int32_t expert : e.experts) {
            visits[(size_t) expert] += in.present(expert);
        }
        for (size_t i = 0; i < n_expert; i++) {
            if (e.probs[i] != 0) {
                const float * row = by_expert.data() + ((size_t) e.layer * n_expert + i) * n;
                for (size_t m = 0; m < n; m++) {
                    product[m] += e.probs[i] * row[m];
                }
            }
        }
        nearest = n;
        float best = 0;
        for (size_t m = 0; m < n; m++) {
            norm[m] += squares[(size_t) e.layer * n + m];
            // Squares keep the order of cosines, which are not negative here.
            if (norm[m] > 0 && product[m] * product[m] > best * norm[m]) {
                best    = product[m] * product[m] / norm[m];
                nearest = m;
            }
        }
        if (nearest < n) {
            for (size_t key = (size_t) space.first[e.layer]; key < (size_t) space.first[e.layer + 1]; key++) {
                by.score[key] = (double) by_expert[key * n + nearest] * (double) visits[key];
            }
        }
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        if (nearest < n && e.layer + AHEAD < space.n_layers()) {
            want(e.layer + AHEAD, e.experts.size(), wishes);
        }
    }

    void inserted(int32_t expert) override {
        visits[(size_t) expert]   = 0;
        by.score[(size_t) expert] = 0;
    }

    void reset() override {
        policy::reset();
        std::fill(visits.begin(), visits.end(), 0);
        k = 1;
    }

    // The most probable of a row of the map: at least as many as a token uses, while their probabilities are above the mean of the row, and the step's budget lasts.
    void want(size_t layer, size_t least, std::vector<wish> & wishes) {
        std::vector<std::pair<float, int32_t>> row;
        float sum = 0;
        for (size_t i = 0; i < n_expert; i++) {
            row.push_back({ -by_expert[((size_t) layer * n_expert + i) * n + nearest], space.first[layer] + (int32_t) i });
            sum -= row.back().first;
        }
        std::sort(row.begin(), row.end());
        wish w = { wish::how::bring, layer, {}, &by };
        for (size_t i = 0; i < row.size() && (i < least || -row[i].first > sum / (float) n_expert) && left > 0 && row[i].first < 0; i++) {
            w.experts.push_back(row[i].second);
            left -= !in.present(row[i].second);
        }
        wishes.push_back(std::move(w));
    }

    size_t  n = 0, n_expert = 0, nearest = 0, k = 1;
    int32_t left = 0;   // loads of this step
    std::vector<float>    by_expert, squares;   // [layers, experts, n], [layers, n]
    std::map<int32_t, size_t> map_of_token;
    std::vector<float>    product, norm;         // per map, over the layers so far
    std::vector<uint32_t> visits;                // per key: uses since it came in
};

// MoE-Infinity: how often each expert was used in the sequence so far, matched with those of past sequences; the nearest one says what the coming layers will use.
//   sequences [n, layers, experts]  counts
// Unsure: how many are prefetched after a layer; here as many as its event used, over all coming layers of the pass.
struct moe_infinity : policy {
    moe_infinity(const expert_space & space, const residency & in, const policy_source & from, size_t k) : policy(space, in), k(k), past(stored(from, "moe-infinity", "sequences", 3)) {
        check_shape(past, space, "moe-infinity", "sequences");
        n_expert = past.shape[2];
        norms.resize(past.shape[0] * space.n_layers());
        for (size_t i = 0; i < norms.size(); i++) {
            double squares = 0;
            for (size_t e = 0; e < n_expert; e++) {
                squares += (double) past.data[i * n_expert + e] * past.data[i * n_expert + e];
            }
            norms[i] = std::sqrt(squares);
        }
    }

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        std::fill(by.score.begin(), by.score.end(), 0.0);   // visits since the sequence began
        nearest = past.shape[0];
    }

    void begin_pass(const pass & s, std::vector<wish> & wishes) override {
        policy::begin_pass(s, wishes);
        match();
    }

    void observe(const event & e) override {
        policy::observe(e);
        for (size_t i = 0; i < e.experts.size(); i++) {
            by.score[(size_t) e.experts[i]] += e.n_tokens_of[i];
        }
    }

    // The mean over the layers that have counts of the cosine between this sequence's row and a stored one.
    void match() {
        std::vector<double> own(space.n_layers(), 0.0);
        for (size_t key = 0; key < by.score.size(); key++) {
            own[key / n_expert] += by.score[key] * by.score[key];
        }
        double best = 0;
        nearest = past.shape[0];
        for (size_t m = 0; m < past.shape[0]; m++) {
            double sum = 0;
            for (size_t layer = 0; layer < space.n_layers(); layer++) {
                const double length = std::sqrt(own[layer]) * norms[m * space.n_layers() + layer];
                const float * row = past.data.data() + (m * space.n_layers() + layer) * n_expert;
                double product = 0;
                for (size_t e = 0; e < n_expert; e++) {
                    product += row[e] * by.score[layer * n_expert + e];
                }
                sum += length > 0 ? product / length : 0;
            }
            if (sum > best) {
                best    = sum;
                nearest = m;
            }
        }
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        if (nearest == past.shape[0]) {
            return;
        }
        std::vector<std::pair<double, int32_t>> wanted;   // minus the priority
        for (size_t layer = e.layer + 1; layer < space.n_layers(); layer++) {
            const double nearness = 1 - (double) (layer - e.layer) / (double) (space.n_layers() + 1);
            for (size_t i = 0; i < n_expert; i++) {
                const double count = past.data[(nearest * space.n_layers() + layer) * n_expert + i];
                const int32_t key = space.first[layer] + (int32_t) i;
                if (count > 0 && !in.present(key)) {
                    wanted.push_back({ -count * nearness, key });
                }
            }
        }
        const size_t n_wanted = std::min(wanted.size(), k ? k : e.experts.size());
        std::partial_sort(wanted.begin(), wanted.begin() + (std::ptrdiff_t) n_wanted, wanted.end());
        // One wish per pool: what comes in by one would be the first to go by the next.
        std::map<size_t, wish> of_pool;
        for (size_t i = 0; i < n_wanted; i++) {
            const size_t layer = (size_t) wanted[i].second / n_expert;
            of_pool.insert({ space.pool_of(layer), { wish::how::bring, layer, {}, &by } }).first->second.experts.push_back(wanted[i].second);
        }
        for (auto & [pool, w] : of_pool) {
            wishes.push_back(std::move(w));
        }
    }

    size_t k, n_expert = 0, nearest = 0;
    table  past;
    std::vector<double> norms;   // of the rows
};

std::vector<policy_kind> similarity_policies() {
    using P = std::unique_ptr<policy>;
    return {
        { "finemoe", {}, [](const expert_space & s, const residency & in, const parameters &, const policy_source & from) -> P { return std::make_unique<finemoe>(s, in, from); } },
        { "moe-infinity", { { "k", { 0, 0, 1e6 } } }, [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P {
              return std::make_unique<moe_infinity>(s, in, from, (size_t) p.at("k").value);
          } },
    };
}

} // namespace edgemoe
