// Policies that go by the router's probabilities, and by what is predicted from them.
//
// Predictions come from learned heads where there are any (event::next, event::successor), or else from tables that were fitted to training traces:
//   temporal  [layers, experts, 2 experts + 1]      this layer's next event from its probabilities, their moving average, and 1
//   spatial   [ahead, layers, experts, experts + 1]  the event 1, 2, 3 layers on (from the last layer on: of the next token) from this layer's probabilities and 1
//   mlp1, mlp2 [ahead, layers, width, n_embd + 1], [ahead, layers, experts, width + 1]  the same from the router's input, with one hidden layer
// All are scaled like probabilities: they add up to about 1 over the experts of a layer.
#include "kinds.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace edgemoe {

static const double AVERAGE_DECAY = 0.9;   // of the moving average that `temporal` was fitted with

// y = W (x, 1) for one matrix among the last two dimensions of a table.
static void affine(const table & t, size_t matrix, const float * x, std::vector<float> & y) {
    const size_t n_out = t.shape[t.shape.size() - 2], n_in = t.shape.back() - 1;
    y.resize(n_out);
    const float * w = t.data.data() + matrix * n_out * (n_in + 1);
    for (size_t i = 0; i < n_out; i++, w += n_in + 1) {
        float sum = w[n_in];
        for (size_t j = 0; j < n_in; j++) {
            sum += w[j] * x[j];
        }
        y[i] = sum;
    }
}

// What a table must be like: 0 stands for any size but none.
static const table * fitting(const tables & learned, const std::string & name, const std::vector<uint64_t> & shape) {
    const auto found = learned.find(name);
    if (found == learned.end()) {
        return nullptr;
    }
    bool fits = found->second.shape.size() == shape.size();
    for (size_t i = 0; i < shape.size() && fits; i++) {
        fits = shape[i] == 0 ? found->second.shape[i] > 0 : found->second.shape[i] == shape[i];
    }
    if (!fits) {
        throw std::invalid_argument("table " + name + " was fitted to another model");
    }
    return &found->second;
}

static const tables & learned_of(const policy_source & from) {
    static const tables none;
    return from.learned ? *from.learned : none;
}

// The k best experts of a layer as keys, best first; of equal ones the lower.
static std::vector<int32_t> best_of(const std::vector<float> & score, int32_t first, size_t k) {
    std::vector<int32_t> order(score.size());
    std::iota(order.begin(), order.end(), 0);
    k = std::min(k, order.size());
    std::partial_sort(order.begin(), order.begin() + (std::ptrdiff_t) k, order.end(),
        [&](int32_t a, int32_t b) { return score[(size_t) a] != score[(size_t) b] ? score[(size_t) a] > score[(size_t) b] : a < b; });
    order.resize(k);
    for (int32_t & expert : order) {
        expert += first;
    }
    return order;
}

struct predicting : policy {
    predicting(const expert_space & space, const residency & in, const policy_source & from, bool by_heads = false) : policy(space, in), by_heads(by_heads) {
        const uint64_t layers = space.n_layers(), experts = (uint64_t) space.n_expert(0);
        need_equal_layers(space, "with predictions");
        temporal = fitting(learned_of(from), "temporal", { layers, experts, 2 * experts + 1 });
        spatial  = fitting(learned_of(from), "spatial", { 0, layers, experts, experts + 1 });
        mlp1     = fitting(learned_of(from), "mlp1", { 0, layers, 0, 0 });
        mlp2     = mlp1 ? fitting(learned_of(from), "mlp2", { mlp1->shape[0], layers, experts, mlp1->shape[2] + 1 }) : nullptr;
    }

    bool needs_probs() const override { return true; }
    bool needs_hidden() const override { return mlp1 && mlp2; }

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        average.assign((size_t) space.n_all(), 0.0f);
    }

    void observe(const event & e) override {
        policy::observe(e);
        float * a = average.data() + space.first[e.layer];
        for (int32_t i = 0; i < space.n_expert(e.layer); i++) {
            a[i] = (float) (AVERAGE_DECAY * a[i] + (1 - AVERAGE_DECAY) * e.probs[i]);
        }
    }

    void need(bool there, const char * name, const char * what) const {
        if (!there) {
            throw std::invalid_argument(std::string("policy ") + name + ": wanted " + what + ", which fitting on a trace makes");
        }
    }

    // Of this layer's next event. To be called after observe.
    void predict_next(const event & e, std::vector<float> & y) {
        if (by_heads && e.next) {
            y.assign(e.next, e.next + space.n_expert(e.layer));
            return;
        }
        const size_t n = (size_t) space.n_expert(e.layer);
        if (!temporal) {
            y.assign(n, 0.0f);   // a head that says nothing
            return;
        }
        input.assign(e.probs, e.probs + n);
        input.insert(input.end(), average.begin() + space.first[e.layer], average.begin() + space.first[e.layer + 1]);
        affine(*temporal, e.layer, input.data(), y);
    }

    // Of the event `ahead` layers on.
    void predict_ahead(const event & e, size_t ahead, std::vector<float> & y) {
        const size_t matrix = (ahead - 1) * space.n_layers() + e.layer;
        if (by_heads && ahead == 1 && e.successor) {
            y.assign(e.successor, e.successor + space.n_expert((e.layer + 1) % space.n_layers()));
        } else if (mlp1 && mlp2 && e.hidden && e.n_embd + 1 == mlp1->shape[3]) {
            affine(*mlp1, matrix, e.hidden, inner);
            for (float & x : inner) {
                x = std::max(x, 0.0f);
            }
            affine(*mlp2, matrix, inner.data(), y);
        } else if (spatial && ahead <= spatial->shape[0]) {
            affine(*spatial, matrix, e.probs, y);
        } else {
            y.assign((size_t) space.n_expert((e.layer + ahead) % space.n_layers()), 0.0f);   // nothing is known
        }
    }

    size_t n_ahead(const event & e) const { return mlp1 && mlp2 && e.hidden ? mlp1->shape[0] : spatial ? spatial->shape[0] : 1; }

    const bool by_heads;   // of what learned heads say this one makes use; other predictors stay what they were published as
    const table * temporal, * spatial, * mlp1, * mlp2;
    std::vector<float> average, input, inner, predicted;
};

// Cache-Aware Router paper. Retention by p^R + p^T of the token just computed (temporal); before a layer, refine with budget R by p^R + p^T of the previous token plus
// p^S of the layer before (spatio-temporal), or by p^R + p^S with p^R alone for retention (spatio).
struct router_scores : predicting {
    router_scores(const expert_space & space, const residency & in, const policy_source & from, bool with_temporal, bool with_spatial, int32_t budget)
        : predicting(space, in, from, true), heads(from.heads), with_temporal(with_temporal), with_spatial(with_spatial), budget(budget), before(space.n_all()) {
        need(!with_temporal || temporal || from.heads, "temporal", "a head, or a table temporal");
        need(!with_spatial || spatial || (mlp1 && mlp2) || from.heads, "spatio-temporal", "a head, or a table spatial");
    }

    bool needs_next() const override { return with_temporal && heads; }
    bool needs_successor() const override { return with_spatial && heads; }

    void observe(const event & e) override {
        predicting::observe(e);
        const size_t first = (size_t) space.first[e.layer], n = (size_t) space.n_expert(e.layer);
        if (with_temporal) {
            predict_next(e, predicted);
        }
        for (size_t i = 0; i < n; i++) {
            by.score[first + i] = (double) e.probs[i] + (with_temporal ? (double) predicted[i] : 0.0);
        }
        recall(e.layer);
    }

    void begin_sequence(const future * known) override {
        predicting::begin_sequence(known);
        before   = by;
        foretold = SIZE_MAX;
    }

    // What a layer's experts are worth without any foresight.
    void recall(size_t layer) {
        for (size_t i = (size_t) space.first[layer]; with_spatial && i < (size_t) space.first[layer + 1]; i++) {
            before.score[i]    = by.score[i];
            before.last_use[i] = by.last_use[i];
        }
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        if (!with_spatial) {
            return;
        }
        const size_t layer = (e.layer + 1) % space.n_layers(), first = (size_t) space.first[layer];
        predict_ahead(e, 1, predicted);
        // Where layers share their slots victims may be of any of them: all others are worth what they are worth now.
        if (foretold != SIZE_MAX) {
            recall(foretold);
        }
        foretold = layer;
        for (size_t i = 0; i < predicted.size(); i++) {
            before.score[first + i] = by.score[first + i] + (double) predicted[i];
        }
        const int32_t most = budget > 0 ? budget : 2 * (int32_t) e.experts.size();
        wishes.push_back({ wish::how::refine, layer, {}, &before, space.first[layer], space.first[layer + 1], most });
    }

    bool    heads;   // there are some
    bool    with_temporal, with_spatial;
    int32_t budget;
    scores  before;   // of refine: as `by`, but for the layer that was foretold last
    size_t  foretold = SIZE_MAX;
};

// ProMoE: from each layer the best of the next three, nearest first; predicted residents count as used. Speculative loads that are still under way when the true routing
// arrives are the loader's affair: a demand load overtakes them.
struct promoe : predicting {
    promoe(const expert_space & space, const residency & in, const policy_source & from, size_t k) : predicting(space, in, from), k(k) {
        need(spatial || (mlp1 && mlp2), "promoe", "a table spatial, or mlp1 and mlp2");
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        for (size_t d = 1; d <= std::min<size_t>(3, n_ahead(e)) && e.layer + d < space.n_layers(); d++) {
            predict_ahead(e, d, predicted);
            wish w = { wish::how::bring, e.layer + d, best_of(predicted, space.first[e.layer + d], k ? k : e.experts.size()), &by };
            for (const int32_t expert : w.experts) {
                by.last_use[(size_t) expert] = n_events;
            }
            wishes.push_back(std::move(w));
        }
    }

    size_t k;   // 0: as many as the event had
};

// Mixtral-Offloading: the best one or two of the next layer wait beside the cache, and enter it only when they are used.
struct mixtral_offloading : predicting {
    mixtral_offloading(const expert_space & space, const residency & in, const policy_source & from, size_t k) : predicting(space, in, from), k(k) {
        need(spatial || (mlp1 && mlp2), "mixtral-offloading", "a table spatial, or mlp1 and mlp2");
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        if (e.layer + 1 == space.n_layers()) {
            return;
        }
        predict_ahead(e, 1, predicted);
        wish w = { wish::how::stage, e.layer + 1, {} };
        for (const int32_t expert : best_of(predicted, space.first[e.layer + 1], k)) {
            if (!in.present(expert)) {
                w.experts.push_back(expert);
            }
        }
        wishes.push_back(std::move(w));
    }

    size_t k;
};

// Like ST-MoE: how often an expert followed each of this layer's, and whether the next layer used it for the previous token.
//   follow [layers, experts, experts]  of the tokens that used expert i of a layer, the share that used expert j of the next one
struct st_moe : policy {
    st_moe(const expert_space & space, const residency & in, const policy_source & from, double weight, size_t k) : policy(space, in), weight(weight), k(k) {
        const uint64_t experts = (uint64_t) space.n_expert(0);
        need_equal_layers(space, "st-moe");
        follow = fitting(learned_of(from), "follow", { space.n_layers(), experts, experts });
        if (!follow) {
            throw std::invalid_argument("policy st-moe: wanted a table follow, which fitting on a trace makes");
        }
    }

    void begin_sequence(const future * known) override {
        policy::begin_sequence(known);
        previous.assign((size_t) space.n_all(), 0);
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        const size_t n = (size_t) space.n_expert(e.layer), layer = (e.layer + 1) % space.n_layers();
        for (size_t i = 0; i < n; i++) {
            previous[(size_t) space.first[e.layer] + i] = 0;
        }
        score.assign((size_t) space.n_expert(layer), 0.0f);
        for (const int32_t expert : e.experts) {
            previous[(size_t) expert] = 1;
            const float * row = follow->data.data() + ((size_t) e.layer * n + (size_t) (expert - space.first[e.layer])) * n;
            for (size_t j = 0; j < score.size(); j++) {
                score[j] += row[j] / (float) e.experts.size();
            }
        }
        for (size_t j = 0; j < score.size(); j++) {
            score[j] += (float) weight * (float) previous[(size_t) space.first[layer] + j];
        }
        wishes.push_back({ wish::how::bring, layer, best_of(score, space.first[layer], k ? k : e.experts.size()), &by });
    }

    double  weight;
    size_t  k;
    const table * follow;
    std::vector<uint8_t> previous;   // per key: used by its layer's last event
    std::vector<float>   score;
};

// Like STEP: a moving average of the next layer's probabilities, and what this layer's state predicts for it, weighted per layer by how many of the used experts each had
// among its best lately.
struct step_like : predicting {
    step_like(const expert_space & space, const residency & in, const policy_source & from, size_t k) : predicting(space, in, from), k(k) {
        need(spatial || (mlp1 && mlp2), "step", "a table spatial, or mlp1 and mlp2");
    }

    void begin_sequence(const future * known) override {
        predicting::begin_sequence(known);
        for (auto * success : { &time_success, &space_success }) {
            success->assign(space.n_layers(), 0.5);
        }
        by_time.assign(space.n_layers(), {});
        by_space.assign(space.n_layers(), {});
    }

    void observe(const event & e) override {
        predicting::observe(e);
        judge(e, by_time[e.layer], time_success[e.layer]);
        judge(e, by_space[e.layer], space_success[e.layer]);
    }

    static void judge(const event & e, const std::vector<int32_t> & guess, double & success) {
        if (guess.empty() || e.experts.empty()) {
            return;
        }
        size_t n_right = 0;
        for (const int32_t expert : guess) {
            n_right += std::binary_search(e.experts.begin(), e.experts.end(), expert);
        }
        success = 0.95 * success + 0.05 * (double) n_right / (double) e.experts.size();
    }

    void foresee(const event & e, std::vector<wish> & wishes) override {
        const size_t layer = (e.layer + 1) % space.n_layers(), n = k ? k : e.experts.size();
        predict_ahead(e, 1, predicted);
        std::vector<float> past(average.begin() + space.first[layer], average.begin() + space.first[layer + 1]);
        by_time[layer]  = best_of(past, space.first[layer], n);
        by_space[layer] = best_of(predicted, space.first[layer], n);
        const float w = (float) (space_success[layer] / std::max(1e-9, space_success[layer] + time_success[layer]));
        for (size_t i = 0; i < past.size(); i++) {
            past[i] = w * predicted[i] + (1 - w) * past[i];
        }
        wishes.push_back({ wish::how::bring, layer, best_of(past, space.first[layer], n), &by });
    }

    size_t k;
    std::vector<double> time_success, space_success;          // per layer: moving average of the share of used experts that were predicted
    std::vector<std::vector<int32_t>> by_time, by_space;      // per layer: what was predicted for its coming event
};

std::vector<policy_kind> prediction_policies() {
    using P = std::unique_ptr<policy>;
    const parameter how_many = { 0, 0, 1e6 };   // 0: as many as the last event used
    return {
        { "temporal", {}, [](const expert_space & s, const residency & in, const parameters &, const policy_source & from) -> P {
              return std::make_unique<router_scores>(s, in, from, true, false, 0);
          } },
        { "spatio-temporal", { { "R", how_many } }, [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P {
              return std::make_unique<router_scores>(s, in, from, true, true, (int32_t) p.at("R").value);
          } },
        { "spatio", { { "R", how_many } }, [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P {
              return std::make_unique<router_scores>(s, in, from, false, true, (int32_t) p.at("R").value);
          } },
        { "promoe", { { "k", how_many } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P { return std::make_unique<promoe>(s, in, from, (size_t) p.at("k").value); } },
        { "mixtral-offloading", { { "k", { 2, 1, 1e6 } } }, [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P {
              return std::make_unique<mixtral_offloading>(s, in, from, (size_t) p.at("k").value);
          } },
        { "st-moe", { { "weight", { 0.5, 0, 1e6 } }, { "k", how_many } }, [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P {
              return std::make_unique<st_moe>(s, in, from, p.at("weight").value, (size_t) p.at("k").value);
          } },
        { "step", { { "k", how_many } },
          [](const expert_space & s, const residency & in, const parameters & p, const policy_source & from) -> P { return std::make_unique<step_like>(s, in, from, (size_t) p.at("k").value); } },
    };
}

} // namespace edgemoe
