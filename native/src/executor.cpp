#include "executor.h"

#include "head_feed.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

namespace edgemoe {

executor::executor() : cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)) {
    if (!cpu) {
        throw std::runtime_error("ggml has no CPU backend");
    }
}

executor::~executor() {
    ggml_gallocr_free(block_memory);
    ggml_backend_free(cpu);
}

// The CPU backend may be a library that ggml loaded itself, so its functions are found by name.
template <typename F> static F cpu_function(ggml_backend_t cpu, const char * name) {
    return (F) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), name);
}

void executor::set_n_threads(int n) {
    n_threads = n;
    if (auto set = cpu_function<ggml_backend_set_n_threads_t>(cpu, "ggml_backend_set_n_threads")) {
        set(cpu, n);
    }
    if (runner) {
        runner->set_n_threads(n);
    }
}

void executor::set_abort_callback(ggml_abort_callback callback, void * data) {
    if (auto set = cpu_function<ggml_backend_set_abort_callback_t>(cpu, "ggml_backend_set_abort_callback")) {
        set(cpu, callback, data);
    }
}

// A layer's products follow one another, though not always in one graph (per-expert scales come between); each is computed once per step.
bool executor::begins_event(const owned & w) {
    if (event_first && event_first != w.weight && event_first->layer == w.weight->layer) {
        return false;
    }
    event_first = w.weight;
    return true;
}

// False when an id names no expert (ggml's release builds would read and write outside of their arrays).
bool executor::check_ids(const ggml_tensor * ids, const owned & w, bool counts_as_event) {
    const int64_t n_expert = w.weight->tensor->ne[2];
    seen.assign((size_t) n_expert, 0);
    uint64_t n_distinct = 0;
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            const int32_t id = id_at(ids, token, k);
            if (id < 0 || id >= n_expert) {
                w.model->set_fault(std::string(w.weight->tensor->name) + ": token " + std::to_string(token) + " is routed to expert " + std::to_string(id) +
                    ", wanted 0 to " + std::to_string(n_expert - 1));
                return false;
            }
            n_distinct += !seen[(size_t) id];
            seen[(size_t) id] = 1;
        }
    }
    if (!counts_as_event) {
        return true;
    }
    counters & c = w.model->count;
    c.n_events          += 1;
    c.n_pairs           += (uint64_t) (ids->ne[0] * ids->ne[1]);
    c.n_accesses        += n_distinct;
    c.bytes_accessed    += n_distinct * w.weight->bytes_per_expert;
    return true;
}

// Our steps are ggml's custom operations. ggml is C: nothing may be thrown through it, and without memory there is no way to go on.
static void run_step(ggml_tensor *, int thread, int n_threads, void * data) noexcept {
    ((step *) data)->run(thread, n_threads);
}

// A step by itself, on all threads.
void executor::run_alone(step & s) {
    alignas(64) uint8_t at[4096];
    assert(ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false) <= sizeof(at));
    ggml_context * c = ggml_init({ sizeof(at), at, /*.no_alloc =*/ true });
    ggml_cgraph * graph = ggml_new_graph_custom(c, 1, false);
    ggml_tensor * node = ggml_custom_4d(c, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run_step, GGML_N_TASKS_MAX, &s);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml_graph_add_node(graph, node);
    ggml_backend_graph_compute(cpu, graph);
    ggml_free(c);
}

// Items [first, end), none of them a block, in one graph.
ggml_status executor::compute_items(const graph_plan & plan, size_t first, size_t end) {
    const size_t n = end - first;
    if (n == 0) {
        return GGML_STATUS_SUCCESS;
    }
    if (!context || n > context_items) {
        context_items = std::max<size_t>(2 * n, 64);
        context.reset(ggml_init({ /*.mem_size =*/ context_items * ggml_tensor_overhead() + ggml_graph_overhead_custom(context_items, false), nullptr, /*.no_alloc =*/ true }));
    }
    ggml_reset(context.get());
    ggml_cgraph * graph = ggml_new_graph_custom(context.get(), context_items, false);
    for (size_t i = first; i < end; i++) {
        ggml_tensor * node = plan.items[i].node;
        if (plan.items[i].ours) {
            node = ggml_custom_4d(context.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run_step, GGML_N_TASKS_MAX, plan.items[i].ours);
            node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        ggml_graph_add_node(graph, node);
    }
    return ggml_backend_graph_compute(cpu, graph);
}

ggml_status executor::compute_plan(const graph_plan & plan, const owned & of) {
    ggml_status status = GGML_STATUS_SUCCESS;
    size_t first = 0;
    for (size_t i = 0; i <= plan.items.size() && status == GGML_STATUS_SUCCESS; i++) {
        if (i == plan.items.size() || plan.items[i].block) {
            status = compute_items(plan, first, i);
            first = i + 1;
            if (status == GGML_STATUS_SUCCESS && i < plan.items.size()) {
                status = compute_block(*plan.items[i].block, of);
            }
        }
    }
    return status;
}

// --- blocks: experts on a device and on the CPU at the same time, from RAM and from the disk ---

void executor::prepare_runner(device_cache & cache) {
    if (!runner || &runner->slots != &cache.slots) {
        runner = std::make_unique<device_runner>(cache.slots);
        runner->set_n_threads(n_threads);
    }
}

static event event_of(size_t layer, int64_t n_tokens, const std::vector<int32_t> & count) {
    event e = { layer, {}, {}, n_tokens };
    for (size_t i = 0; i < count.size(); i++) {
        if (count[i]) {
            e.experts.push_back((int32_t) i);
            e.n_tokens_of.push_back(count[i]);
        }
    }
    return e;
}

static event event_of(const expert_block & b, const std::vector<placed_pair> & pairs) {
    std::vector<int32_t> count((size_t) b.down->tensor->ne[2], 0);
    for (const placed_pair & p : pairs) {
        count[(size_t) p.expert]++;
    }
    return event_of(b.layer(), b.n_tokens(), count);
}

static event event_of(size_t layer, const ggml_tensor * ids, int64_t n_expert) {
    std::vector<int32_t> count((size_t) n_expert, 0);
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            count[(size_t) id_at(ids, t, k)]++;
        }
    }
    return event_of(layer, ids->ne[1], count);
}
// By our kernels.
std::unique_ptr<graph_plan> executor::plan_pairs(const expert_block & b, const std::vector<placed_pair> & pairs, float * rows, workspace & memory) const {
    std::vector<graph_plan::block_pair> all;
    for (const placed_pair & p : pairs) {
        all.push_back({ p.token, p.k, p.x });
    }
    return std::make_unique<graph_plan>(b, all, rows, memory, n_threads);
}

// Pairs whose rows go to the block's output (or to `rows`), by our kernels, or by ggml's where there are none (or none are wanted).
ggml_status executor::compute_on_cpu(const expert_block & b, const std::vector<placed_pair> & pairs, bool one_input, float * rows) {
    if (pairs.empty()) {
        return GGML_STATUS_SUCCESS;
    }
    if (have_kernels(b)) {
        block_rows.clear();
        const auto plan = plan_pairs(b, pairs, rows, block_rows);
        return compute_items(*plan, 0, plan->items.size());
    }
    std::vector<ggml_tensor *> weights, biases;
    const size_t n_tensors = 16 + 4 * (b.products.size() + b.chain.size());
    const std::unique_ptr<ggml_context, deleter> c(ggml_init({ n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, /*.no_alloc =*/ true }));
    for (const expert_block::product & p : b.products) {
        weights.push_back(p.weight->tensor);
    }
    weights.push_back(b.down->tensor);
    for (const expert_block::bias & bias : b.biases()) {
        ggml_tensor * of = const_cast<ggml_tensor *>(bias.of);
        biases.push_back(ggml_view_2d(c.get(), of, bias.n_rows, of->ne[1], of->nb[1], (size_t) bias.row * sizeof(float)));
        biases.back()->data   = (char *) of->data + (size_t) bias.row * sizeof(float);
        biases.back()->buffer = of->buffer;
    }
    const block_graph g = build_graph(c.get(), b, weights, biases, (int64_t) pairs.size(), one_input);
    ggml_cgraph * graph = ggml_new_graph_custom(c.get(), n_tensors, false);
    ggml_build_forward_expand(graph, g.output);
    block_memory = block_memory ? block_memory : ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    if (!ggml_gallocr_alloc_graph(block_memory, graph)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (size_t i = 0; i < pairs.size(); i++) {
        ((int32_t *) g.ids->data)[i] = pairs[i].expert;
        if (g.bias_ids) {
            ((int32_t *) g.bias_ids->data)[i] = pairs[i].expert;
        }
        if (i == 0 || !one_input) {
            memcpy((float *) g.x->data + (int64_t) i * b.n_in(), pairs[i].x, (size_t) b.n_in() * sizeof(float));
        }
    }
    const ggml_status status = ggml_backend_graph_compute(cpu, graph);
    for (size_t i = 0; i < pairs.size() && status == GGML_STATUS_SUCCESS; i++) {
        memcpy(b.output_row(pairs[i].token, pairs[i].k), (const float *) g.output->data + (int64_t) i * b.n_out(), (size_t) b.n_out() * sizeof(float));
    }
    return status;
}

static size_t n_experts_of(const std::vector<placed_pair> & pairs) {
    std::set<int32_t> experts;
    for (const placed_pair & p : pairs) {
        experts.insert(p.expert);
    }
    return experts.size();
}

// An expert that is named twice by one token must not stand twice in one row of ids: devices take that for an error, or worse.
static bool has_one_input(const expert_block & b, const event & e) {
    return b.n_tokens() == 1 && !b.x_per_pair() && (int64_t) e.experts.size() == b.n_used();
}

ggml_status executor::compute_block(const expert_block & b, const owned & of) {
    // The block's output may lie where its input is: llama.cpp's graph needs the input no longer once it has the first products, but we do.
    const int64_t per_token = b.x_per_pair() ? b.n_used() : 1, n_in = b.n_in();
    inputs.clear();
    float * x = (float *) inputs.take((size_t) (b.n_tokens() * per_token * n_in) * sizeof(float));
    std::vector<placed_pair> pairs;
    for (int64_t t = 0; t < b.n_tokens(); t++) {
        for (int64_t k = 0; k < per_token; k++) {
            memcpy(x + (t * per_token + k) * n_in, b.x_row(t, k), (size_t) n_in * sizeof(float));
        }
        for (int64_t k = 0; k < b.n_used(); k++) {
            pairs.push_back({ (int32_t) t, (int32_t) k, b.expert_of(t, k), -1, x + (t * per_token + (b.x_per_pair() ? k : 0)) * n_in });
        }
    }
    return of.cache && !b.products.empty() ? compute_with_device(b, of, pairs) : compute_here(b, of, pairs, has_one_input(b, event_of(b, pairs)));
}

// The experts of an event in RAM, from when their layer's router has chosen them to when they are computed.
struct executor::ram_visit {
    ram_visit(ram_cache & of, event e) : of(of), v(of.experts.begin(std::move(e))) {}
    ~ram_visit() {
        of.experts.wait(v);   // nothing may arrive in a slot of this event once it is over
        of.experts.end(v, {});
    }
    ram_visit(const ram_visit &) = delete;
    ram_visit & operator=(const ram_visit &) = delete;

    ram_cache & of;
    tier::visit v;
};

// Pairs that are computed on the CPU, wherever their experts are now: those in RAM while the others are read, and each of these as soon as it is there.
ggml_status executor::compute_here(const expert_block & b, const owned & of, const std::vector<placed_pair> & pairs, bool one_input) {
    if (!of.ram || pairs.empty()) {
        return compute_on_cpu(b, pairs, one_input, nullptr);
    }
    if (!visit || visit->v.layer != b.layer()) {
        visit = std::make_unique<ram_visit>(*of.ram, event_of(b, pairs));
    }
    const std::unique_ptr<ram_visit> ours = std::move(visit);
    tier & experts = of.ram->experts;
    std::vector<std::vector<placed_pair>> of_expert((size_t) b.down->tensor->ne[2]);
    for (const placed_pair & p : pairs) {
        of_expert[(size_t) p.expert].push_back(p);
    }
    float * rows = b.router_weights ? (float *) inputs.take((size_t) (b.n_tokens() * b.n_used() * b.n_out()) * sizeof(float)) : nullptr;
    std::vector<tier::arrived_expert> arrived;
    std::vector<placed_pair> now;
    std::map<size_t, std::unique_ptr<graph_plan>> begun;   // of experts that were there but for their down rows: all steps but the last are done
    half_rows.clear();
    bool failed;
    while (experts.next(ours->v, arrived, failed)) {
        if (failed) {
            of.model->set_failure(of.ram->error());
            return GGML_STATUS_FAILED;
        }
        ggml_status status = GGML_STATUS_SUCCESS;
        now.clear();
        for (const tier::arrived_expert & a : arrived) {
            const std::vector<placed_pair> & its = of_expert[(size_t) experts.expert_of(ours->v.layer, ours->v.e.experts[a.i])];
            if (!a.whole && !b.products.empty() && have_kernels(b) && status == GGML_STATUS_SUCCESS) {
                begun[a.i] = plan_pairs(b, its, rows, half_rows);
                status = compute_items(*begun[a.i], 0, begun[a.i]->items.size() - 1);
            } else if (a.whole && begun.count(a.i) && status == GGML_STATUS_SUCCESS) {
                status = compute_items(*begun[a.i], begun[a.i]->items.size() - 1, begun[a.i]->items.size());
            } else if (a.whole) {
                now.insert(now.end(), its.begin(), its.end());
            }
        }
        status = status == GGML_STATUS_SUCCESS ? compute_on_cpu(b, now, one_input, rows) : status;
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        for (const tier::arrived_expert & a : arrived) {
            if (a.whole) {
                experts.release(ours->v, a.i);
            }
        }
    }
    if (!rows) {
        return GGML_STATUS_SUCCESS;
    }
    block_rows.clear();
    const graph_plan sum(b, rows, block_rows, n_threads);
    return compute_items(sum, 0, sum.items.size());
}

ggml_status executor::compute_with_device(const expert_block & b, const owned & of, const std::vector<placed_pair> & pairs) {
    const auto start = std::chrono::steady_clock::now();
    const auto seconds_since = [](std::chrono::steady_clock::time_point then) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count(); };
    tier & experts = of.cache->experts;
    try {
        prepare_runner(*of.cache);
    } catch (const std::runtime_error & e) {
        of.model->set_fault(e.what());
        return GGML_STATUS_FAILED;
    }
    device_runner & device = *runner;
    // Whatever happens, the visit ends: its experts are pinned until then.
    struct open_visit {
        tier & experts;
        tier::visit v;
        tier::cost cost;
        std::chrono::steady_clock::time_point start;
        ~open_visit() {
            cost.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            experts.end(v, cost);
        }
    };
    open_visit opened = { experts, experts.begin(event_of(b, pairs)), { 0, 0, 0, 0, 0, b.n_tokens() * b.n_used() }, start };
    tier::visit & visit = opened.v;
    tier::cost & cost = opened.cost;
    const bool one_input = has_one_input(b, visit.e);
    std::vector<size_t> index((size_t) b.down->tensor->ne[2], 0);
    for (size_t i = 0; i < visit.e.experts.size(); i++) {
        index[(size_t) experts.expert_of(visit.layer, visit.e.experts[i])] = i;
    }
    // Each routed pair goes one way: to the device now, to the device when its expert has arrived, or to the CPU.
    std::vector<placed_pair> now, later, here;
    for (placed_pair p : pairs) {
        const size_t i = index[(size_t) p.expert];
        p.slot = visit.slot[i];
        (visit.awaited[i] != tier::arrival::none ? later : p.slot >= 0 ? now : here).push_back(p);
    }
    assert(now.size() + later.size() + here.size() == pairs.size());

    ggml_status status = GGML_STATUS_SUCCESS;
    uint64_t n_refused = 0;
    const auto on_cpu = [&](const std::vector<placed_pair> & some) {
        if (status == GGML_STATUS_SUCCESS && !some.empty()) {
            const auto began = std::chrono::steady_clock::now();
            status = compute_here(b, of, some, one_input);
            cost.cpu_seconds += seconds_since(began);
            cost.n_cpu_pairs += (int64_t) some.size();
            cost.cpu_bytes   += (double) n_experts_of(some) * (double) b.down->bytes_per_expert;
        }
    };
    const auto collect = [&](bool launched, const std::vector<placed_pair> & some) {
        // What a device cannot do, or fails to do, the CPU does.
        if (!some.empty() && (!launched || !device.collect(b))) {
            n_refused += some.size();
            on_cpu(some);
        }
    };
    bool launched = !now.empty() && device.launch(b, now, one_input);
    on_cpu(here);
    if (!later.empty()) {
        experts.wait(visit);
        std::vector<placed_pair> arrived, failed;
        for (placed_pair & p : later) {
            p.slot = visit.slot[index[(size_t) p.expert]];
            (p.slot >= 0 ? arrived : failed).push_back(p);
        }
        collect(launched, now);
        const auto began = std::chrono::steady_clock::now();
        launched = !arrived.empty() && device.launch(b, arrived, one_input);
        collect(launched, arrived);
        cost.late_seconds = seconds_since(began);
        on_cpu(failed);
    } else {
        collect(launched, now);
    }
    for (const int32_t slot : visit.slot) {
        of.model->count.n_on_device += slot >= 0;
    }
    of.model->count.n_refused += n_refused;
    return status;
}

// Once what this layer misses has been asked for, what the next one is likely to need.
void executor::look_ahead(ram_cache & ram, const std::vector<ggml_tensor *> & nodes, const ggml_tensor & product) {
    const ggml_tensor * x = product.src[1], * ids = product.src[2];
    if (x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[1] == 1 && !is_made_by(nodes, x)) {
        ram.look_ahead(visit->v.layer, (const float *) x->data, x->nb[2], x->ne[0], x->ne[2], ids->ne[0]);
    }
}

ggml_status executor::compute(ggml_cgraph * graph, weight_lookup weights_of) {
    const auto start = std::chrono::steady_clock::now();

    // llama.cpp's weights stand in for ours: they have the shape, ours have the bytes. They are put back before llama.cpp sees its graph again.
    struct swap { ggml_tensor * node, * original, * ours; };
    std::vector<swap> swapped;
    std::vector<ggml_tensor *> nodes;
    owned of = {};   // any of them: all belong to one model
    const ggml_tensor * checked_ids = nullptr;
    bool has_experts = false, has_kernels = false, one_event = true;   // all expert products here are of one layer and its ids
    owned first = {};
    const ggml_tensor * first_product = nullptr;
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && status == GGML_STATUS_SUCCESS; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        nodes.push_back(node);
        const owned w = node->src[0] ? weights_of(node->src[0]) : owned {};
        if (!w.weight || node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW) {
            continue;
        }
        of = w;
        swapped.push_back({ node, node->src[0], w.weight->tensor });
        has_kernels = has_kernels || w.weight->k;
        if (!of.model->usable()) {
            status = GGML_STATUS_FAILED;
        } else if (node->op == GGML_OP_MUL_MAT_ID) {
            one_event   = one_event && (!first.weight || (first.weight->layer == w.weight->layer && checked_ids == node->src[2]));
            first_product = first.weight ? first_product : node;
            first       = first.weight ? first : w;
            has_experts = true;
            const bool begins = begins_event(w);
            if ((begins || node->src[2] != checked_ids) && !check_ids(node->src[2], w, begins)) {
                status = GGML_STATUS_FAILED;
            }
            checked_ids = node->src[2];
        }
    }
    if (status == GGML_STATUS_SUCCESS) {
        memory.clear();
        using in = graph_plan::experts;
        // What a device computes comes back as rows, which ggml's nodes add up.
        const in with_ram = of.cache ? in::all_in_blocks : in::all_weighed;
        in how = !has_experts ? in::fused : of.ram ? with_ram : of.cache ? in::in_blocks : in::fused;
        if (has_experts && of.learned) {
            of.learned->tell(first.weight->layer, first_product, [this](step & s) { run_alone(s); });
        }
        if (has_experts && of.ram && !of.cache && one_event) {
            visit = std::make_unique<ram_visit>(*of.ram, event_of(first.weight->layer, checked_ids, first.weight->tensor->ne[2]));
            how = tier::all_there(visit->v) ? in::fused : how;   // as if they were mapped
            look_ahead(*of.ram, nodes, *first_product);
        }
        std::unique_ptr<graph_plan> plan(has_kernels || how != in::fused ? new graph_plan(nodes, weights_of, how, memory, n_threads) : nullptr);
        if (of.ram && how != in::fused && plan->leaves_experts) {
            visit.reset();
            of.model->set_fault("llama.cpp's graph has a product of experts in a form that edgemoe does not know: run it with all experts mapped (--ram mapped)");
            return GGML_STATUS_FAILED;
        }
        for (const swap & s : swapped) {
            s.node->src[0] = s.ours;
        }
        if (plan) {
            of.model->count.n_fused += plan->n_fused;
        }
        status = plan && plan->has_steps ? compute_plan(*plan, of) : ggml_backend_graph_compute(cpu, graph);
        visit.reset();
        for (const swap & s : swapped) {
            s.node->src[0] = s.original;
        }
    }
    if (of.model) {
        if (has_experts) {
            const auto spent = std::chrono::steady_clock::now() - start;
            of.model->count.compute_us += (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(spent).count();
        }
        if (status == GGML_STATUS_SUCCESS && !of.model->usable()) {
            status = GGML_STATUS_FAILED;
        }
    }
    return status;
}

} // namespace edgemoe
