// The C border of edgemoe's native library. Python reads the declarations between the two cffi marks; there is no second copy of them.
//
// Errors: a function that can fail returns NULL or a negative number and leaves one line in edgemoe_last_error() (per thread).
// Strings returned belong to the object they came from and live as long as it.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// --- cffi begin ---

// A model on disk: a GGUF (one file or shards) or a package directory, opened and checked, nothing mapped.
typedef struct edgemoe_source edgemoe_source;

// A source whose experts are mapped, or in slots in RAM and on the disk, and for which a ggml buffer type exists. Must outlive every llama_model loaded with that buffer type.
typedef struct edgemoe_model edgemoe_model;

enum edgemoe_kind { EDGEMOE_DENSE, EDGEMOE_STACKED, EDGEMOE_PACKAGE };

struct edgemoe_source_info {
    int      kind;                // enum edgemoe_kind
    uint32_t n_files;             // splits that libllama is given
    uint32_t n_layers;            // layers with routed experts
    uint64_t expert_bytes;        // all routed experts
    uint64_t dense_bytes;         // everything else that llama.cpp loads
    const char * architecture;
    const char * fingerprint;     // of the package's source; "" for a GGUF
};

struct edgemoe_layer_info {
    uint32_t layer;               // index in the model: blk.<layer>
    uint32_t n_expert;
    uint32_t n_projections;
    uint64_t bytes_per_expert;
};

struct edgemoe_projection_info {
    const char * name;            // of the stacked tensor
    const char * type;            // ggml's name
    int64_t  n_in;                // length of a row
    int64_t  n_out;               // rows of one expert
    uint64_t bytes;               // of one expert
};

struct edgemoe_device_info {
    const char * name;
    const char * description;
    int          type;
    uint64_t     free_bytes;
    uint64_t     total_bytes;
};

// Counted since the model was opened. An event is one layer in one step, with the set of distinct experts that all its tokens need.
struct edgemoe_stats {
    uint64_t n_events;
    uint64_t n_pairs;             // routed (token, expert) pairs
    uint64_t n_accesses;          // A: distinct experts, summed over the events
    uint64_t n_computed_on_cpu;   // C: of these, computed on the CPU where they lie
    uint64_t n_on_device;         // of these, computed on the device of the expert cache
    uint64_t n_refused;           // routed pairs that the device should have computed, and did not: the CPU did
    uint64_t n_fused;             // events computed as one fused step by edgemoe's kernels
    uint64_t bytes_accessed;      // A in bytes
    uint64_t compute_us;          // inside the expert products
};

// What a policy has learned from training traces: an array, row-major.
struct edgemoe_table {
    const char *     name;
    const float *    data;
    const uint64_t * shape;
    uint32_t         n_dims;
};

// A score per expert of a layer, from outside: called after each of the layer's events; the lowest goes. last_use: number of the event (0: never); n_uses: tokens that
// used it; probs: what the router said of this event; score: to be filled, holds what it was filled with last.
typedef void (*edgemoe_score_function)(void * user, uint32_t layer, uint32_t n_expert, uint64_t n_events, const uint64_t * last_use, const uint64_t * n_uses,
                                       const float * probs, double * score);

// Learned heads: of each layer with experts what the input x of its router says of the layer's own next event, and of the layer that comes next: softmax(weights x + bias).
typedef struct edgemoe_heads edgemoe_heads;

struct edgemoe_head {
    const char *  type;           // of the weights, ggml's name: f16 or q8_0
    const void *  weights;        // as in a GGUF: a row of the model's width per expert that is predicted
    const float * bias;           // one per expert; NULL: none
};

// An expert cache: slots on a device; slots in RAM, where experts that are in none are on the disk.
struct edgemoe_cache_options {
    const char * device;          // as edgemoe_get_device names it; of slots on a device only
    uint32_t     n_slots;         // per layer; not in RAM, where most_bytes says how many
    bool         shared;          // a replay only: all layers have the slots together
    const uint64_t * costs;       // a replay with shared slots only: bytes of an expert, per layer, of which the slots may hold most_bytes; NULL: n_slots
    const char * policy;          // a name, or name:key=value,...
    const struct edgemoe_table * tables;   // what it has learned
    uint32_t     n_tables;
    bool         heads;           // events come with what learned heads say, which serves temporal, spatio-temporal and spatio instead of tables: of a replay in its rows, of a
    const edgemoe_heads * learned_heads;   // model from these, which may be closed then. Its two tiers have the same ones; those that come second are left out
    edgemoe_score_function score; // of the policy "custom"
    void *       user;
    const char * misses;          // cpu, load, auto
    bool         strict;          // a miss comes in only if it was used more often than what it replaces
    uint32_t     most_inserts;    // per event, for policies that bring misses in; 0: no limit
    bool         seed;            // prompts are a reason to come in
    const char * read_ahead;      // in RAM only: off, on, auto: what the next layer is likely to need is read before its router has chosen; NULL: off
    uint32_t     n_staging;       // slots for all layers together, through which prompts stream experts, and misses come that are not to stay
    bool         inline_loads;    // each load is done when it is asked for: nothing depends on time, and nothing overlaps
    uint64_t     most_block_bytes;   // per tensor; 0: as the device allows
    uint64_t     most_bytes;      // of all slots; on a device 0: as it has
    uint32_t     fail_every;      // for tests: every so manieth load fails; 0: none
    uint64_t     most_read;       // for tests, in RAM: bytes that one call of the system reads; 0: no limit
    bool         poison;          // for tests: slots hold NaN before an expert comes, where they should hold zeros
};

struct edgemoe_cache_info {
    uint64_t bytes;               // on the device
    bool     pinned;              // uploads go through pinned memory
    const char * misses;          // what is done with them now: cpu, load, split; off: the device is left alone, it is slower than the CPU
    double   cpu_rate;            // bytes per second of experts computed on the CPU, of the first layer's kind; 0: not measured yet
    double   load_rate;           // and loaded
};

// Bytes, but where it says otherwise.
struct edgemoe_ram_info {
    uint64_t budget;              // of the slots
    uint64_t staging;             // beside these, for the experts of a prompt on their way through
    uint64_t filled;              // of the budget
    uint32_t n_filled;            // slots
    bool     direct;              // reads go past the page cache
    uint64_t bytes_read;
    uint64_t n_reads;             // experts
    uint64_t busy_us;             // some read was on its way
};

enum edgemoe_tier { EDGEMOE_ON_DEVICE, EDGEMOE_IN_RAM };

// Events of decoding (up to 16 tokens) and of prompts are counted apart. A = hits + D + C.
enum edgemoe_phase { EDGEMOE_DECODE, EDGEMOE_PROMPT };

struct edgemoe_access_counts {
    uint64_t n_events;
    uint64_t n_accesses;          // A: distinct experts, summed over the events
    uint64_t n_hits;
    uint64_t n_demand;            // D: demand loads
    uint64_t n_computed;          // C: computed on the CPU
    uint64_t n_proactive;         // P: loads that no event waited for
    uint64_t n_evicted;
    uint64_t n_unused;            // of these: came in as P and were never used
    uint64_t n_failed;            // loads
    uint64_t bytes_loaded;        // by D and P
    uint64_t stall_us;            // waited for D
};

// A cache without a model: experts are in their slots as soon as they are asked for. For tests and simulation.
typedef struct edgemoe_replay edgemoe_replay;

// A recorded sequence. Rows are tokens in their order; rows of equal step went through the layers together. Row-major; NULL where nothing is known.
struct edgemoe_rows {
    uint64_t         n_rows;
    uint32_t         n_used;
    uint32_t         n_embd;
    const uint16_t * ids;            // [n_rows, n_layers, n_used]; 65535: fewer
    const int32_t *  step;           // [n_rows], not descending; NULL: each row its own
    const int32_t *  stage;          // [n_rows]
    const int32_t *  token_ids;      // [n_rows]
    const float *    chosen_probs;   // [n_rows, n_layers, n_used]
    const float *    probs;          // [n_rows, n_layers, n_expert]
    const float *    hidden;         // [n_rows, n_layers, n_embd]
    const float *    next;           // [n_rows, n_layers, n_expert]: learned heads, of this layer's next event
    const float *    successor;      // and of the layer that comes next
};

// What to do with misses, from measurements alone: for tests and simulation.
typedef struct edgemoe_choice edgemoe_choice;

// Writes what the routers of a model's own context choose into arrays of the caller. Must be closed before the model.
typedef struct edgemoe_recorder edgemoe_recorder;

// One batch: L layers with experts, K used and E in all, D the width of the router's input. A row that llama.cpp does not compute is left as it is.
struct edgemoe_recording {
    int64_t        n_tokens;
    const int8_t * outputs;       // [n_tokens]: whose logits are wanted
    uint16_t *     ids;           // [n_tokens][L][K], by falling probability
    uint16_t *     chosen;        // [n_tokens][L][K]: their probabilities as half floats, before llama.cpp normalises or scales them; NULL: not wanted
    uint16_t *     probs;         // [n_tokens][L][E]: of all experts; NULL: not wanted
    uint16_t *     hidden;        // [n_tokens][L][D]: the router's input; NULL: not wanted
};

const char * edgemoe_last_error(void);

// One line that says why this ggml cannot be used, or NULL.
const char * edgemoe_check_ggml(int api_version, const char * version);

// Registers the device with the ggml that this library is bound to. Idempotent. 0, or -1.
int edgemoe_init(void);

// ggml's devices, ours among them once it is registered. `type` is enum ggml_backend_dev_type: 0 CPU, 1 GPU, 2 integrated GPU, 3 accelerator.
uint32_t edgemoe_device_count(void);
int      edgemoe_get_device(uint32_t index, struct edgemoe_device_info * info);

// The kernels for rows as they lie in a GGUF, for tests and measurements. `isa`: avx2, avxvnni or avx512; NULL is the best one of this CPU.
// y[t * n_rows + r] = row r of w times x[t * n ...], after x is rounded as ggml does it for `type`; `tiled` takes the form that prompts use.
// 0; 1 when this CPU or this type has no such kernel; -1 for a wrong argument.
int          edgemoe_kernel_multiply(const char * type, const char * isa, bool tiled, const void * w, size_t row_bytes, int64_t n, int64_t n_rows, const float * x,
                                     int64_t n_tokens, float * y);
const char * edgemoe_best_isa(void);

// check_blobs: of a package look into every blob, as opening a model does.
edgemoe_source * edgemoe_source_open(const char * path, bool check_blobs);
void             edgemoe_source_close(edgemoe_source * source);
void             edgemoe_source_get_info(const edgemoe_source * source, struct edgemoe_source_info * info);
const char *     edgemoe_source_file(const edgemoe_source * source, uint32_t index);
int              edgemoe_source_get_layer(const edgemoe_source * source, uint32_t index, struct edgemoe_layer_info * info);
int              edgemoe_source_get_projection(const edgemoe_source * source, uint32_t index, uint32_t projection, struct edgemoe_projection_info * info);
// An integer of the model's metadata; `fallback` when the key is absent or no integer. Parses the header again: for reports, not for hot paths.
int64_t          edgemoe_source_integer(const edgemoe_source * source, const char * key, int64_t fallback);
// Reads one projection of one expert into dst, which has room for its bytes. 0, or -1.
int              edgemoe_source_read(const edgemoe_source * source, uint32_t index, uint32_t projection, uint32_t expert, void * dst);

// `isa`: of the kernels, as above; "none" leaves all arithmetic to ggml, so that results are bit-identical to llama.cpp's. `ram`: NULL maps all experts; otherwise
// they are in slots of ram->most_bytes, and read from the disk when they are wanted. A dense model has no use for that. The model takes over what the source has
// opened: the source can be used as long as the model is open, or not at all when this fails, and must be closed as ever.
edgemoe_model *        edgemoe_model_open(edgemoe_source * source, const char * isa, const struct edgemoe_cache_options * ram);
void                   edgemoe_model_close(edgemoe_model * model);
// A ggml_backend_buffer_type_t for llama_model_tensor_buft_override, and the pattern that goes with it.
void *                 edgemoe_model_buffer_type(edgemoe_model * model);
const char *           edgemoe_expert_pattern(void);
// The pattern of the experts' biases, which have to be where their experts are when llama.cpp puts other weights on a GPU: it computes a node where its weight is.
const char *           edgemoe_expert_bias_pattern(void);
// The pattern of the dense weights that our kernels may compute with as well; "" when there are none.
const char *           edgemoe_dense_pattern(edgemoe_model * model);
// A package: path of the second split for llama_model_load_from_splits (after edgemoe_source_file 0). NULL for a GGUF.
const char *           edgemoe_model_ghost(edgemoe_model * model);
// To be called once libllama has loaded, and before anything is computed: waits until the experts are checked and mapped, which goes on in the
// background from edgemoe_model_open on. -1: the package is damaged. libllama's own mappings of the model's files are guarded against truncation from here on.
int                    edgemoe_model_loaded(edgemoe_model * model);
// NULL, or one line: what made the last results unusable (a file cut while running, a fork, a bad expert id).
const char *           edgemoe_model_fault(edgemoe_model * model);
// NULL, or one line: what made the last computation fail, though another may succeed (an expert could not be read). Asking forgets it.
const char *           edgemoe_model_take_failure(edgemoe_model * model);
void                   edgemoe_model_get_stats(const edgemoe_model * model, struct edgemoe_stats * stats);

// Puts expert slots on a device; once per model, before anything is computed. 0; 1 when the device has no room for so many; -1.
int                    edgemoe_model_open_cache(edgemoe_model * model, const struct edgemoe_cache_options * options);
// These ask for slots on a device, or in RAM.
void                   edgemoe_model_get_cache_info(const edgemoe_model * model, struct edgemoe_cache_info * info);
void                   edgemoe_model_get_ram_info(const edgemoe_model * model, struct edgemoe_ram_info * info);
// Bytes of the budget that an expert of a layer takes in RAM.
uint64_t               edgemoe_model_get_ram_cost(const edgemoe_model * model, uint32_t layer);
// `tier` is enum edgemoe_tier, `layer` an index among the layers with experts.
int                    edgemoe_model_get_access_counts(const edgemoe_model * model, int tier, int phase, uint32_t layer, struct edgemoe_access_counts * counts);
// Fills `experts` (room for as many as the layer has) with those that are in their slots and returns how many; -1.
int                    edgemoe_model_get_residents(const edgemoe_model * model, int tier, uint32_t layer, int32_t * experts);
// Fills `uses` (room likewise) with how many tokens have used each expert; -1. The tier's policy counts them: clearing the cache begins anew, and prompts count where the
// policy hears them.
int                    edgemoe_model_get_uses(const edgemoe_model * model, int tier, uint32_t layer, uint64_t * uses);
// All tiers there are.
void                   edgemoe_model_wait_cache(edgemoe_model * model);    // until nothing is on its way
void                   edgemoe_model_stop_cache(edgemoe_model * model);    // for good: before contexts are freed
void                   edgemoe_model_clear_cache(edgemoe_model * model);   // between computations

// What policies may want to know: that a new text begins; and of the batch that comes next, where it is computed as one, its tokens (NULL: not known) and its stage (-1).
void                   edgemoe_model_begin_sequence(edgemoe_model * model);
bool                   edgemoe_model_wants_tokens(const edgemoe_model * model);
void                   edgemoe_model_announce(edgemoe_model * model, const int32_t * token_ids, int64_t n_tokens, int32_t stage);

// A ggml_backend_sched_eval_callback with its user data for llama_context_params: listens to the routers of one context while a recorder is open.
bool                   edgemoe_model_eval(void * node, bool ask, void * model);
// n_ubatch: of the context. NULL on failure.
edgemoe_recorder *     edgemoe_recorder_open(edgemoe_model * model, int32_t n_used, int32_t n_expert, int32_t n_embd, int64_t n_ubatch);
void                   edgemoe_recorder_close(edgemoe_recorder * recorder);
// All that llama_decode computes between the two is one batch of one sequence. end returns how many micro-batches it was computed in; -1.
void                   edgemoe_recorder_begin(edgemoe_recorder * recorder, const struct edgemoe_recording * to);
int64_t                edgemoe_recorder_end(edgemoe_recorder * recorder);
// How the probabilities of the last batch were made of the router's logits.
const char *           edgemoe_recorder_gating(const edgemoe_recorder * recorder);

// Names of the policies with their parameters and defaults, one per line.
const char *           edgemoe_policies(void);

// n_expert: per layer. One head per layer, or NULL for none of the kind; copied.
edgemoe_heads *        edgemoe_heads_open(const uint32_t * n_expert, uint32_t n_layers, uint32_t n_embd, const struct edgemoe_head * next, const struct edgemoe_head * successor);
void                   edgemoe_heads_close(edgemoe_heads * heads);
// What an engine would hear: router inputs [n_rows][n_embd] of a layer are rounded to half floats, and so are the probabilities [n_rows][experts that are predicted]. 0, or -1.
int                    edgemoe_heads_evaluate(const edgemoe_heads * heads, bool successor, uint32_t layer, const float * hidden, uint32_t n_rows, float * probs);

edgemoe_replay *       edgemoe_replay_open(const uint32_t * n_expert, uint32_t n_layers, const struct edgemoe_cache_options * options);
void                   edgemoe_replay_close(edgemoe_replay * replay);
// `n` distinct experts of a layer in ascending order, with the number of tokens that use each, of n_tokens. 0, or -1.
int                    edgemoe_replay_event(edgemoe_replay * replay, uint32_t layer, const int32_t * experts, const int32_t * n_tokens_of, uint32_t n, int64_t n_tokens);
// The same, but the event does not end before edgemoe_replay_release: its experts stay pinned.
int                    edgemoe_replay_hold(edgemoe_replay * replay, uint32_t layer, const int32_t * experts, const int32_t * n_tokens_of, uint32_t n, int64_t n_tokens);
void                   edgemoe_replay_release(edgemoe_replay * replay);
// A whole sequence, which begins with what is in the cache. What it points to is not needed afterwards. 0, or -1.
int                    edgemoe_replay_sequence(edgemoe_replay * replay, const struct edgemoe_rows * rows);
// Empty slots, nothing learned since it was opened; counters stay.
void                   edgemoe_replay_clear(edgemoe_replay * replay);
void                   edgemoe_replay_get_counts(const edgemoe_replay * replay, int phase, uint32_t layer, struct edgemoe_access_counts * counts);
int                    edgemoe_replay_get_residents(const edgemoe_replay * replay, uint32_t layer, int32_t * experts);

// `misses`: cpu, load, auto.
edgemoe_choice *       edgemoe_choice_open(const char * misses);
void                   edgemoe_choice_close(edgemoe_choice * choice);
const char *           edgemoe_choice_mode(const edgemoe_choice * choice);   // cpu, load, split, off
uint32_t               edgemoe_choice_n_to_load(const edgemoe_choice * choice, uint32_t n_misses);
// Measured: bytes per second computed on the CPU, and loaded; and a step that took so long for so many routed pairs.
void                   edgemoe_choice_rates(edgemoe_choice * choice, double cpu, double load);
void                   edgemoe_choice_step(edgemoe_choice * choice, double seconds, int64_t n_pairs);
// Prompts: routed pairs per second on the CPU and experts per second on the device, measured (0: nothing new); then how many of `n` missing experts to stream,
// whose numbers of tokens are given, the largest first, when one takes load_seconds (0: not measured yet).
uint32_t               edgemoe_choice_n_to_stream(edgemoe_choice * choice, double pairs_per_second, double experts_per_second, const int32_t * n_tokens_of, uint32_t n,
                                                  double load_seconds);

// Ctrl-C inside llama_decode: between watch(true) and watch(false) SIGINT sets a flag that edgemoe_interrupted reads, and nothing else. It is a
// ggml_abort_callback; its argument is ignored. The handler that was installed before (Python's) is put back by watch(false) and not called: its
// exception could come up in any callback that libllama makes into Python. Who watches raises it instead.
void edgemoe_watch_interrupts(bool on);
bool edgemoe_interrupted(void * unused);

// --- cffi end ---

#ifdef __cplusplus
}
#endif
