#include "graph_plan.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace edgemoe {

static bool is_noop(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

static bool is_output(const ggml_tensor * t) { return t->flags & GGML_TENSOR_FLAG_OUTPUT; }

static bool has_float_rows(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }

static const float * row_of(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3 = 0) {
    return (const float *) ((const char *) t->data + (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3]);
}

static matrix matrix_of(const owned_tensor & w) {
    const ggml_tensor * t = w.tensor;
    return { w.k, (const char *) t->data, t->nb[1], t->nb[2], t->ne[0], t->ne[1] };
}

bool is_made_by(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * t) {
    for (const ggml_tensor * node : nodes) {
        if (!is_noop(node) && (node == t || node == t->view_src)) {
            return true;
        }
    }
    return false;
}

bool have_kernels(const expert_block & b) {
    for (const expert_block::product & p : b.products) {
        if (!p.weight->k || p.weight->k->activation != b.products[0].weight->k->activation) {
            return false;
        }
    }
    return b.down->k;
}

// A block while it is found by going backwards from the input of its down product.
struct block_search {
    expert_block                  b;         // chain: products count from 0, its own values from FIRST_STEP until they are numbered
    std::set<const ggml_tensor *> members;
    static constexpr int FIRST_STEP = 1 << 16;
};

struct planner {
    graph_plan &                       plan;
    const std::vector<ggml_tensor *> & nodes;
    weight_lookup                      weights_of;
    graph_plan::experts                how;
    workspace &                        memory;
    int                                n_threads;

    const owned_tensor * expert_weight(const ggml_tensor * product) const {
        const owned w = weights_of(product->src[0]);
        return w.weight && w.weight->layer != owned_tensor::DENSE ? w.weight : nullptr;
    }

    const owned_tensor * kernel_weight(const ggml_tensor * product) const {
        const owned w = weights_of(product->src[0]);
        return w.weight && w.weight->k ? w.weight : nullptr;
    }

    bool is_made_here(const ggml_tensor * t) const { return is_made_by(nodes, t); }
    bool leaves_none() const { return how == graph_plan::experts::all_in_blocks || how == graph_plan::experts::all_weighed; }   // no product of experts outside of blocks

    void add_step(std::unique_ptr<step> s) {
        plan.items.push_back({ nullptr, s.get(), nullptr });
        plan.steps.push_back(std::move(s));
        plan.has_steps = true;
    }

    quantized_rows & quantized(rounding how, int64_t n, std::vector<const float *> rows) {
        plan.rows.push_back(std::make_unique<quantized_rows>(memory, how, n, std::move(rows)));
        return *plan.rows.back();
    }

    const quantized_rows & quantize_rows(rounding how, int64_t n, std::vector<const float *> rows) {
        quantized_rows & q = quantized(how, n, std::move(rows));
        add_step(std::make_unique<quantize_step>(q));
        return q;
    }

    void run();

    size_t take_dense(size_t i);
    size_t take_experts(size_t i);
    size_t take_pairs(size_t i);
    bool   find_product(size_t i, expert_block & b) const;
    void add_product(const owned_tensor & w, const routing & r, const quantized_rows & q, bool x_per_pair, const down_step::output & out);
    size_t next_node(size_t i) const;
    size_t find_block(size_t i, expert_block & b) const;
    int    resolve(block_search & found, const ggml_tensor * t, int64_t row, int depth) const;
    const routing & sorted(std::vector<routing::pair> pairs, const ggml_tensor * ids, int64_t n_expert);
    const routing & routing_of(const ggml_tensor * ids, int64_t n_expert);
    const quantized_rows & expert_input(const ggml_tensor * x, rounding how);
    void compute_block(const expert_block & b, const routing & r, const quantized_rows & q, bool x_per_pair, const down_step::output & out);
    void find_weighted_sum(size_t & i, expert_block & b) const;
    const float * weights_of_pairs(const expert_block & b, const routing & r);
};

graph_plan::graph_plan(const std::vector<ggml_tensor *> & nodes, weight_lookup weights_of, experts how, workspace & memory, int n_threads) {
    planner { *this, nodes, weights_of, how, memory, n_threads }.run();
}

void planner::run() {
    for (size_t i = 0; i < nodes.size();) {
        ggml_tensor * node = nodes[i];
        size_t n = 0;
        if (node->op == GGML_OP_MUL_MAT) {
            n = take_dense(i);
        } else if (node->op == GGML_OP_MUL_MAT_ID) {
            n = take_experts(i);
            n = n || leaves_none() ? n : take_pairs(i);
        }
        if (n == 0) {
            plan.leaves_experts = plan.leaves_experts || (node->op == GGML_OP_MUL_MAT_ID && expert_weight(node));
            plan.items.push_back({ node, nullptr, nullptr });
            n = 1;
        }
        i += n;
    }
}

// --- dense products: as many as follow one another with the same input ---

static bool is_plain_product(const ggml_tensor * t) {
    return has_float_rows(t->src[1]) && has_float_rows(t) && t->src[0]->ne[2] == 1 && t->src[0]->ne[3] == 1;
}

// With float weights a prompt is faster through ggml, but for experts, which ggml takes row by row (docs/results/cpu_speed.md).
static bool wins(const kernel & k, const ggml_tensor * x) {
    return k.activation != rounding::none || ggml_nrows(x) < TILE_MIN;
}

size_t planner::take_dense(size_t i) {
    std::vector<dense_step::product> products;
    const ggml_tensor * x = nodes[i]->src[1];
    rounding how = rounding::none;
    size_t end = i;
    for (size_t j = i; j < nodes.size(); j++) {
        const ggml_tensor * node = nodes[j];
        if (is_noop(node)) {
            continue;
        }
        const owned_tensor * w = node->op == GGML_OP_MUL_MAT ? kernel_weight(node) : nullptr;
        if (!w || node->src[1] != x || !is_plain_product(node) || !wins(*w->k, x) || (!products.empty() && w->k->activation != how)) {
            break;
        }
        how = w->k->activation;
        products.push_back({ matrix_of(*w), {} });
        for (int64_t i3 = 0; i3 < node->ne[3]; i3++) {
            for (int64_t i2 = 0; i2 < node->ne[2]; i2++) {
                for (int64_t i1 = 0; i1 < node->ne[1]; i1++) {
                    products.back().y.push_back(const_cast<float *>(row_of(node, i1, i2, i3)));
                }
            }
        }
        end = j + 1;
    }
    if (products.empty()) {
        return 0;
    }
    std::vector<const float *> rows;
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                rows.push_back(row_of(x, i1, i2, i3));
            }
        }
    }
    const quantized_rows & q = quantize_rows(how, x->ne[0], std::move(rows));
    add_step(std::make_unique<dense_step>(q, std::move(products), n_threads));
    return end - i;
}

// --- experts ---

// Pairs by expert.
const routing & planner::sorted(std::vector<routing::pair> pairs, const ggml_tensor * ids, int64_t n_expert) {
    plan.routings.push_back(std::make_unique<routing>());
    routing & r = *plan.routings.back();
    r.n_used   = ids->ne[0];
    r.n_tokens = ids->ne[1];
    const auto id_of = [&](const routing::pair & p) { return id_at(ids, p.token, p.k); };
    std::vector<int32_t> count((size_t) n_expert, 0), place((size_t) n_expert, 0);
    for (const routing::pair & p : pairs) {
        count[(size_t) id_of(p)]++;
    }
    int32_t at = 0;
    for (int64_t e = 0; e < n_expert; e++) {
        if (count[(size_t) e]) {
            r.groups.push_back({ (int32_t) e, at, count[(size_t) e] });
            place[(size_t) e] = at;
            at += count[(size_t) e];
        }
    }
    r.pairs.resize((size_t) at);
    for (const routing::pair & p : pairs) {
        r.pairs[(size_t) place[(size_t) id_of(p)]++] = p;
    }
    return r;
}

const routing & planner::routing_of(const ggml_tensor * ids, int64_t n_expert) {
    std::vector<routing::pair> pairs;
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            pairs.push_back({ (int32_t) t, (int32_t) k });
        }
    }
    return sorted(std::move(pairs), ids, n_expert);
}

// Rows in the order (token, k), or one per token when all experts of a token get the same.
const quantized_rows & planner::expert_input(const ggml_tensor * x, rounding how) {
    std::vector<const float *> rows;
    for (int64_t t = 0; t < x->ne[2]; t++) {
        for (int64_t k = 0; k < x->ne[1]; k++) {
            rows.push_back(row_of(x, k, t));
        }
    }
    return quantize_rows(how, x->ne[0], std::move(rows));
}

static bool has_pair_rows(const ggml_tensor * t, const ggml_tensor * ids) {
    return has_float_rows(t) && t->ne[1] == ids->ne[0] && t->ne[2] == ids->ne[1] && t->ne[3] == 1;
}

// A value of the chain for rows [row, ...) of `t`; -1 when `t` is made in a way that hidden_step does not know.
int planner::resolve(block_search & found, const ggml_tensor * t, int64_t row, int depth) const {
    expert_block & block = found.b;
    const ggml_tensor * ids = block.ids;
    if (depth > 16 || !has_pair_rows(t, ids) || is_output(t)) {
        return -1;
    }
    const auto source = [&](int s, int64_t at) { return resolve(found, t->src[s], at, depth + 1); };
    elementwise e = {};
    e.a = e.b = 0;
    switch (t->op) {
        case GGML_OP_MUL_MAT_ID: {
            const owned_tensor * w = expert_weight(t);
            if (!w || t->src[1] != block.x || t->src[2] != ids) {
                return -1;
            }
            found.members.insert(t);
            for (size_t p = 0; p < block.products.size(); p++) {
                if (block.products[p].weight == w && block.products[p].offset == row) {
                    return (int) p;
                }
            }
            block.products.push_back({ w, row });
            return (int) block.products.size() - 1;
        }
        case GGML_OP_VIEW: {
            // The same rows of fewer columns: half of a fused gate_up product.
            const ggml_tensor * of = t->src[0];
            const size_t offset = (size_t) ((const char *) t->data - (const char *) of->data);
            if (t->nb[1] != of->nb[1] || t->nb[2] != of->nb[2] || offset % sizeof(float) != 0 || (int64_t) (offset / sizeof(float)) + t->ne[0] > of->ne[0]) {
                return -1;
            }
            return source(0, row + (int64_t) (offset / sizeof(float)));
        }
        case GGML_OP_ADD_ID:
            if (t->src[2] != ids || !has_float_rows(t->src[1])) {
                return -1;
            }
            e.what = elementwise::kind::add_bias;
            e.bias = t->src[1];
            e.bias_row = row;
            e.a = source(0, row);
            break;
        case GGML_OP_GLU: {
            e.what = elementwise::kind::glu;
            e.op   = ggml_get_glu_op(t);
            if (!glu_supported((ggml_glu_op) e.op)) {
                return -1;
            }
            const int64_t half = t->src[1] ? 0 : t->src[0]->ne[0] / 2;
            const bool swapped = half && t->op_params[1];
            memcpy(e.params, t->op_params + 2, sizeof(e.params));
            e.a = source(0, row + (swapped ? half : 0));
            e.b = source(t->src[1] ? 1 : 0, row + (swapped ? 0 : half));
            break;
        }
        case GGML_OP_UNARY:
            e.what = elementwise::kind::unary;
            e.op   = ggml_get_unary_op(t);
            e.a    = unary_supported((ggml_unary_op) e.op) ? source(0, row) : -1;
            break;
        case GGML_OP_SQR:
            e.what = elementwise::kind::sqr;
            e.a    = source(0, row);
            break;
        case GGML_OP_CLAMP: case GGML_OP_SCALE:
            e.what = t->op == GGML_OP_CLAMP ? elementwise::kind::clamp : elementwise::kind::scale;
            memcpy(e.params, t->op_params, sizeof(e.params));
            e.a = source(0, row);
            break;
        case GGML_OP_MUL:
            e.what = elementwise::kind::mul;
            e.a = source(0, row);
            e.b = source(1, row);
            break;
        default:
            return -1;
    }
    if (e.a < 0 || e.b < 0) {
        return -1;
    }
    found.members.insert(t);
    block.chain.push_back(e);
    return block_search::FIRST_STEP + (int) block.chain.size() - 1;
}

size_t planner::next_node(size_t i) const {
    do {
        i++;
    } while (i < nodes.size() && is_noop(nodes[i]));
    return i;
}

// The block that begins with the product at i: what lies between the products, the down product, its bias. Returns the index of its last node; 0 when there is none.
size_t planner::find_block(size_t i, expert_block & b) const {
    const ggml_tensor * x = nodes[i]->src[1], * ids = nodes[i]->src[2];
    size_t at_down = i + 1;
    while (at_down < nodes.size() && !(nodes[at_down]->op == GGML_OP_MUL_MAT_ID && nodes[at_down]->src[1] != x)) {
        at_down++;
    }
    if (at_down == nodes.size() || is_made_here(ids)) {
        return 0;
    }
    const ggml_tensor * down = nodes[at_down], * hidden = down->src[1];
    const bool per_pair = x->ne[1] == ids->ne[0] && x->ne[1] != 1;
    if (!expert_weight(down) || down->src[2] != ids || !has_float_rows(x) || x->ne[2] != ids->ne[1] || (x->ne[1] != 1 && !per_pair)) {
        return 0;
    }
    block_search found = { { x, ids, {}, {}, 0, hidden->ne[0], expert_weight(down), nullptr, down }, {} };
    const int result = resolve(found, hidden, 0, 0);
    if (result < 0) {
        return 0;
    }
    for (size_t j = i; j < at_down; j++) {
        if (!is_noop(nodes[j]) && !found.members.count(nodes[j])) {
            return 0;
        }
    }
    b = std::move(found.b);
    const auto number = [&](int v) { return v < block_search::FIRST_STEP ? v : v - block_search::FIRST_STEP + (int) b.products.size(); };
    for (elementwise & e : b.chain) {
        e.a = number(e.a);
        e.b = number(e.b);
    }
    b.result = number(result);
    const size_t after = next_node(at_down);
    if (after < nodes.size() && !is_output(down) && nodes[after]->op == GGML_OP_ADD_ID && nodes[after]->src[0] == down && nodes[after]->src[2] == ids &&
            has_float_rows(nodes[after]->src[1])) {
        b.down_bias = nodes[after]->src[1];
        b.output    = nodes[after];
        return after;
    }
    return at_down;
}

// A product by itself: nothing lies between its input and the hidden values.
bool planner::find_product(size_t i, expert_block & b) const {
    ggml_tensor * node = nodes[i];
    const ggml_tensor * x = node->src[1], * ids = node->src[2];
    if (!expert_weight(node) || !has_float_rows(x) || !has_pair_rows(node, ids) || x->ne[2] != ids->ne[1] || (x->ne[1] != 1 && x->ne[1] != ids->ne[0]) || is_made_here(ids)) {
        return false;
    }
    b = { x, ids, {}, {}, 0, x->ne[0], expert_weight(node), nullptr, node };
    return true;
}

// The two halves of a block for the pairs of r; q has their inputs.
void planner::compute_block(const expert_block & b, const routing & r, const quantized_rows & q, bool x_per_pair, const down_step::output & out) {
    const int64_t n_pairs = (int64_t) r.pairs.size();
    std::vector<hidden_step::stream> streams;
    for (const expert_block::product & p : b.products) {
        streams.push_back({ matrix_of(*p.weight), p.offset });
    }
    float * floats = (float *) memory.take((size_t) (b.n_hidden * n_pairs) * sizeof(float));
    quantized_rows & h = quantized(b.down->k->activation, b.n_hidden, std::vector<const float *>((size_t) n_pairs));
    add_step(std::make_unique<hidden_step>(r, q, x_per_pair, std::move(streams), b.chain, b.result, b.n_hidden, h, floats, n_threads));
    std::vector<const void *> inputs;
    for (int64_t p = 0; p < n_pairs; p++) {
        inputs.push_back(h.row(p));
    }
    add_step(std::make_unique<down_step>(r, matrix_of(*b.down), std::move(inputs), out, n_threads));
}

static void set_output(down_step::output & out, const ggml_tensor * t, bool summed) {
    out.data         = (char *) t->data;
    out.pair_stride  = t->nb[1];
    out.token_stride = summed ? t->nb[1] : t->nb[2];
    out.summed       = summed;
}

const float * planner::weights_of_pairs(const expert_block & b, const routing & r) {
    float * weights = (float *) memory.take(r.pairs.size() * sizeof(float));
    for (size_t p = 0; p < r.pairs.size(); p++) {
        weights[p] = *row_of(b.router_weights, r.pairs[p].k, r.pairs[p].token);
    }
    return weights;
}

// A whole expert, with the weighted sum where the graph has that. 0 when it is none.
size_t planner::take_experts(size_t i) {
    auto found = std::make_unique<expert_block>();
    size_t end = find_block(i, *found);
    if (!end) {
        if (!leaves_none() || !find_product(i, *found)) {
            return 0;
        }
        end = i;
    }
    const expert_block & b = *found;
    if ((how == graph_plan::experts::fused || how == graph_plan::experts::all_weighed) && have_kernels(b) && !is_output(b.output)) {
        find_weighted_sum(end, *found);
    }
    if (how != graph_plan::experts::fused) {
        plan.items.push_back({ nullptr, nullptr, found.get() });
        plan.blocks.push_back(std::move(found));
        plan.has_steps = true;
        return end + 1 - i;
    }
    if (!have_kernels(b) || is_output(b.output)) {
        return 0;
    }
    const routing & r = routing_of(b.ids, b.down->tensor->ne[2]);
    const quantized_rows & q = expert_input(b.x, b.products[0].weight->k->activation);
    down_step::output out = {};
    out.bias = b.down_bias;
    set_output(out, b.sum ? b.sum : b.weighted ? b.weighted : b.output, b.sum);
    out.weights = b.router_weights ? weights_of_pairs(b, r) : nullptr;
    compute_block(b, r, q, b.x_per_pair(), out);
    plan.n_fused++;
    return end + 1 - i;
}

graph_plan::graph_plan(const expert_block & b, const std::vector<block_pair> & pairs, float * rows, workspace & memory, int n_threads) {
    const std::vector<ggml_tensor *> no_nodes;
    planner p { *this, no_nodes, nullptr, experts::in_blocks, memory, n_threads };
    std::vector<routing::pair> all;
    std::vector<const float *> inputs((size_t) (b.n_tokens() * b.n_used()), nullptr);
    const int64_t per_token = b.x_per_pair() ? b.n_used() : 1;
    for (const block_pair & each : pairs) {
        all.push_back({ each.token, each.k });
        inputs[(size_t) (each.token * per_token + (b.x_per_pair() ? each.k : 0))] = each.x;
    }
    const routing & r = p.sorted(std::move(all), b.ids, b.down->tensor->ne[2]);
    const quantized_rows & q = p.quantize_rows((b.products.empty() ? b.down : b.products[0].weight)->k->activation, b.n_in(), std::move(inputs));
    down_step::output out = {};
    out.bias = b.down_bias;
    set_output(out, b.output, false);
    if (rows) {
        out.data         = (char *) rows;
        out.pair_stride  = (size_t) b.n_out() * sizeof(float);
        out.token_stride = out.pair_stride * (size_t) b.n_used();
    }
    if (b.products.empty()) {
        p.add_product(*b.down, r, q, b.x_per_pair(), out);
    } else {
        p.compute_block(b, r, q, b.x_per_pair(), out);
    }
}

graph_plan::graph_plan(const expert_block & b, const float * rows, workspace & memory, int n_threads) {
    const std::vector<ggml_tensor *> no_nodes;
    planner p { *this, no_nodes, nullptr, experts::in_blocks, memory, n_threads };
    down_step::output out = {};
    set_output(out, b.sum ? b.sum : b.weighted, b.sum);
    // In the order in which a fused block adds up: by expert.
    const routing & r = p.routing_of(b.ids, b.down->tensor->ne[2]);
    p.add_step(std::make_unique<weigh_step>(r, rows, b.n_out(), p.weights_of_pairs(b, r), out, n_threads));
}

// After the block, of which nodes[i] is the last: router weights and sum. `i` moves to the last node that is taken.
void planner::find_weighted_sum(size_t & i, expert_block & b) const {
    const ggml_tensor * last = nodes[i];
    size_t j = next_node(i);
    if (j >= nodes.size() || nodes[j]->op != GGML_OP_MUL || nodes[j]->src[0] != last) {
        return;
    }
    const ggml_tensor * w = nodes[j]->src[1];
    if (w->type != GGML_TYPE_F32 || w->ne[0] != 1 || w->ne[1] != b.n_used() || w->ne[2] != b.n_tokens() || is_made_here(w)) {
        return;
    }
    b.router_weights = w;
    b.weighted = nodes[j];
    i = j;

    // The sum: views of one expert's column each, added up in order.
    const ggml_tensor * all = b.weighted, * sum = nullptr;
    const auto is_column = [&](const ggml_tensor * t, int64_t k) {
        return t->op == GGML_OP_VIEW && t->src[0] == all && t->ne[0] == all->ne[0] && t->ne[1] == b.n_tokens() && t->nb[1] == all->nb[2] &&
               (const char *) t->data == (const char *) all->data + (size_t) k * all->nb[1];
    };
    size_t end = i;
    for (int64_t k = 1; k < b.n_used(); k++) {
        j = next_node(end);
        if (is_output(all) || j >= nodes.size() || nodes[j]->op != GGML_OP_ADD || !has_float_rows(nodes[j]) || !is_column(nodes[j]->src[1], k) ||
                !(k == 1 ? is_column(nodes[j]->src[0], 0) : nodes[j]->src[0] == sum) || (sum && is_output(sum))) {
            return;
        }
        sum = nodes[j];
        end = j;
    }
    if (sum) {
        b.sum = sum;
        i = end;
    }
}

// One product by itself, for graphs that are put together in another way.
size_t planner::take_pairs(size_t i) {
    const ggml_tensor * node = nodes[i], * x = node->src[1], * ids = node->src[2];
    const owned_tensor * w = kernel_weight(node);
    const bool per_pair = x->ne[1] == ids->ne[0] && x->ne[1] != 1;
    if (!w || !has_float_rows(x) || !has_pair_rows(node, ids) || x->ne[2] != ids->ne[1] || (x->ne[1] != 1 && !per_pair) || is_made_here(ids)) {
        return 0;
    }
    const routing & r = routing_of(ids, w->tensor->ne[2]);
    const quantized_rows & q = expert_input(x, w->k->activation);
    down_step::output out = {};
    set_output(out, node, false);
    add_product(*w, r, q, per_pair, out);
    return 1;
}

void planner::add_product(const owned_tensor & w, const routing & r, const quantized_rows & q, bool x_per_pair, const down_step::output & out) {
    std::vector<const void *> inputs;
    for (const routing::pair & p : r.pairs) {
        inputs.push_back(q.row(x_per_pair ? p.token * r.n_used + p.k : p.token));
    }
    add_step(std::make_unique<down_step>(r, matrix_of(w), std::move(inputs), out, n_threads));
}

} // namespace edgemoe
