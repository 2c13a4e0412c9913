"""What policies would have done on recorded routing: each policy at each capacity in each regime, counted by the engine's own cache.

A regime says what becomes of a miss. "load": it is read, and somebody waits, as with RAM over a disk. "cpu": it is computed where it lies, as with a GPU beside a CPU.
LRU and Belady with and without forced admission always run beside. Figures are over decoding; prompts fill the cache and are not counted. T, the decoded tokens, are
those of steps with at most 16 tokens.

    hit = hits / A         adjusted hit = hits / (A + P)         load per token = (D + P) * bytes of an expert / T

The share of the gap is (hits - hits of LRU) / (hits of Belady - hits of LRU) at the same capacity, regime and scope. Belady knows the future but does not prefetch: a policy
that does can have more than all of the gap, and pays for it in P.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from edgemoe import fit, policies
from edgemoe.errors import EdgemoeError
from edgemoe.head_outputs import outputs, with_heads
from edgemoe.heads import Heads
from edgemoe.machine import usable_cpus
from edgemoe.replay import DECODE, FIELDS, PROMPT, Replayed, replay, rows_of
from edgemoe.trace import NO_STAGE, Trace, TraceError
from edgemoe.trace_import import Facts, import_trace

REGIMES = ("load", "cpu")
LRU, BELADY, BELADY_FREE = "lru", "belady", "belady:force=0"
BESIDE = (LRU, BELADY, BELADY_FREE)
MOST_DECODE_TOKENS = 16  # of one step, as the native cache tells prompts from decoding
MOST_JOINED_BYTES = 1 << 30  # of hidden states, which are copied
MOST_SHARED_BYTES = 256 << 20  # of rows that are kept for all runs; those of larger traces are made anew for each
N_RESAMPLES = 1000
# Several settings of each policy that has any, for `--policy sweep`: the frontier is not a point per policy.
SWEEP = {
    "lrfu": "lambda=0.05|0.2|0.5|1",
    "frequency": "halve=2048|32768,strict=0|1",
    "placement": "every=8|16|32|64|128,decay=0.5|0.9",
    "stage": "longest=0|16|64",
    "stage+lru": "longest=0|16|64",
    "foresight": "every=16|64|256",
    "spatio-temporal": "R=0|2|8",
    "spatio": "R=0|2|8",
    "promoe": "k=1|2|0",
    "mixtral-offloading": "k=1|2",
    "st-moe": "k=1|2|0",
    "step": "k=1|2|0",
    "moe-infinity": "k=1|2|0",
}


class SimulationError(EdgemoeError):
    """Traces, capacities or policies that cannot be simulated as asked."""


# --- traces


def load_trace(path: str, expert_bytes: int = 0) -> Trace:
    """A trace, or a recording of somebody else's that `edgemoe trace import` can read as it is. expert_bytes: where the file does not say. Raises TraceError."""
    try:
        trace = Trace.load(path) if path.endswith(".npz") else import_trace(path, Facts())
    except TraceError as e:
        if "array meta is missing" not in str(e):
            raise
        trace = import_trace(path, Facts())
    if expert_bytes and not all(trace.meta["bytes_per_expert"]):
        trace = replace(trace, meta={**trace.meta, "bytes_per_expert": [expert_bytes] * trace.n_layers})
    return replace(trace, where=str(path))


def model_of(trace: Trace) -> tuple:
    """What must be equal for traces to be of one model, as far as they say."""
    return trace.n_layers, trace.n_expert, trace.n_used, trace.ids.dtype


def require_same_model(first: Trace, other: Trace) -> None:
    """Raises SimulationError."""
    marks = [t.meta["fingerprint"] for t in (first, other)]
    if model_of(first) != model_of(other) or (all(marks) and marks[0] != marks[1]):
        says = [f"{t.n_layers} layers of {t.n_expert} experts, {t.n_used} used" + (f", {m[:8]}" if m else "") for t, m in zip((first, other), marks)]
        raise SimulationError(f"{other.where}: found {says[1]}, wanted {says[0]} as in {first.where}")


def joined(traces: list[Trace]) -> Trace:
    """One trace of the sequences of all. An array that one of them lacks is left out, and so are hidden states of more than MOST_JOINED_BYTES. Raises SimulationError."""
    first = traces[0]
    if len(traces) == 1:
        return first
    for other in traces[1:]:
        require_same_model(first, other)
    offsets, step_base, rows = [np.zeros(1, np.int64)], 0, 0
    for t in traces:
        offsets.append(t.offsets[1:] + rows)
        rows += t.n_tokens
    columns = {}
    for name in ("ids", "token_ids", "phase", "probs", "hidden", "stage", "head_t", "head_s"):
        arrays = [getattr(t, name) for t in traces]
        fits = all(a is not None and a.shape[1:] == arrays[0].shape[1:] for a in arrays)
        if fits and (name != "hidden" or sum(a.nbytes for a in arrays) <= MOST_JOINED_BYTES):
            columns[name] = np.concatenate(arrays)
    steps = []
    for t in traces if any(t.step is not None for t in traces) else []:
        steps.append((np.arange(t.n_tokens, dtype=np.int32) if t.step is None else t.step) + np.int32(step_base))
        step_base = int(steps[-1][-1]) + 1 if len(steps[-1]) else step_base
    meta = {**first.meta, "sequences": [s for t in traces for s in t.meta.get("sequences", [{}] * t.n_sequences)]}
    if "probs" not in columns:
        meta["probs"] = None
    if all("pieces" in t.meta for t in traces):
        meta["pieces"] = {token: text for t in traces for token, text in t.meta["pieces"].items()}
    where = ", ".join(t.where for t in traces)
    return Trace(**columns, step=np.concatenate(steps) if steps else None, offsets=np.concatenate(offsets), meta=meta, where=where)


def require_apart(train: list[Trace], test: list[Trace]) -> None:
    """Raises SimulationError when a sequence is in both: a policy must not be tested on what it has learned."""
    where = {mark: t.where for t in train for mark in t.sequence_hashes()}
    for t in test:
        common = [mark for mark in t.sequence_hashes() if mark in where]
        if common:
            n = f"{len(common)} sequence{'s are' if len(common) > 1 else ' is'}"
            raise SimulationError(f"{n} in both {where[common[0]]} (--train) and {t.where}: what a policy has learned must not be what it is tested on")


def require_not_learned(heads: Heads, test: list[Trace]) -> None:
    """Raises SimulationError when heads were trained on a sequence that they are to be tested on."""
    for t in test:
        if common := heads.trained_on(t):
            n = f"{len(common)} sequence{'s' * (len(common) > 1)}"
            raise SimulationError(f"{n} of {t.where}: {heads.where} was trained on {'them' if len(common) > 1 else 'it'}: heads must not be tested on what they have learned")


def joined_with_heads(traces: list[Trace], heads: Heads, progress: Callable[[int], None] | None = None) -> Trace:
    """As joined, with what the heads say on the hidden states of all rows. Raises SimulationError, HeadsError."""
    return with_heads(joined(traces), outputs(heads, traces, traces[0].n_expert, progress))


def decoded_tokens(rows: dict) -> int:
    """Of one sequence: its rows in steps that count as decoding."""
    if rows["step"] is None:
        return len(rows["ids"])
    _, n_in_step = np.unique(rows["step"], return_counts=True)
    return int(n_in_step[n_in_step <= MOST_DECODE_TOKENS].sum())


# --- what to run


@dataclass(frozen=True)
class Run:
    policy: str
    n_slots: int  # per layer
    misses: str


@dataclass
class Plan:
    runs: list[Run]
    shared: bool = False  # all layers have the slots together
    warm: bool = False  # the cache is kept from one sequence to the next
    left_out: dict[str, str] = field(default_factory=dict)  # policy: why


def read_capacities(text: str, n_expert: int) -> list[int]:
    """"12.5%,8" -> slots per layer, ascending; a percentage is of the experts of a layer, at least one. Raises SimulationError."""
    found = set()
    for part in (p.strip() for p in text.split(",")):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", part, re.ASCII)
        if not match or (not match[2] and "." in match[1]):
            raise SimulationError(f"capacity {part}: wanted slots per layer such as 8, or a share of the experts such as 12.5%")
        number = float(match[1])
        n = max(1, int(number * n_expert / 100)) if match[2] and number else int(number)
        if not 0 < n <= n_expert or number > 100 and match[2]:
            raise SimulationError(f"capacity {part}: wanted 1 to {n_expert} slots, a layer has {n_expert} experts")
        found.add(n)
    return sorted(found)


def expanded(text: str) -> list[str]:
    """"placement:every=16|32,decay=0.5" -> both settings."""
    name, colon, rest = text.partition(":")
    if not colon or name.endswith(".py") or "fit=" in rest:
        return [text]
    choices = [[f"{key}={value}" for value in values.split("|")] for key, _, values in (p.partition("=") for p in rest.split(","))]
    return [f"{name}:{','.join(chosen)}" for chosen in product(*choices)]


def read_policies(asked: Iterable[str]) -> list[str]:
    """Policies as asked for, without repetitions; "all" is each with its defaults, "sweep" each with several settings."""
    groups = {
        "all": policies.names(),
        "sweep": [f"{name}:{SWEEP[name]}" if name in SWEEP else name for name in policies.names()],
    }
    texts = [t for word in asked for t in groups.get(word, [word])]
    return list(dict.fromkeys(setting for t in texts for setting in expanded(t)))


def why_not(policy: str, trace: Trace, learned: dict | None) -> str:
    """Why a policy has nothing to go by on this trace; empty when it has. Raises PolicyError for one that does not exist."""
    name = policies.name_of(policy)
    if "fit=" in policy:
        return ""
    heads = policies.heads_of(trace)
    missing = policies.lacks(name, learned, heads)
    if missing:
        return "needs --train" + (" or --heads" if name in policies.BY_HEADS else "") if learned is None else f"nothing to learn it from in the training traces ({', '.join(missing)})"
    if name in policies.BY_STAGES and (trace.stage is None or (trace.stage == NO_STAGE).all()):
        return "the traces have no stages"
    policies.policy(policy, learned, heads)
    return ""


def plan_runs(trace: Trace, asked: list[str], capacities: list[int], regimes: Iterable[str] = REGIMES, learned: dict | None = None, **how) -> Plan:
    """how: shared, warm. Raises PolicyError."""
    wanted = list(dict.fromkeys([*BESIDE, *asked]))
    left_out = {p: why for p in wanted if (why := why_not(p, trace, learned))}
    runs = [Run(p, n, misses) for n in capacities for misses in regimes for p in wanted if p not in left_out]
    return Plan(runs, left_out=left_out, **how)


# --- running


@dataclass
class Outcome:
    """counts: int64 [sequences, 2 (decoding, prompts), layers, fields of replay.FIELDS]."""

    run: Run
    counts: np.ndarray

    @property
    def bound(self) -> bool:
        """It knows the future."""
        return policies.name_of(self.run.policy) in policies.CHEATS


class _Rows:
    """The rows of every sequence, for several runs at once: kept when they are small, or else made whenever they are asked for."""

    def __init__(self, trace: Trace, with_hidden: bool):
        self.trace, self.with_hidden = trace, with_hidden
        width = sum(a[:1].size for a in (trace.probs, trace.head_t, trace.head_s) if a is not None)
        n_bytes = trace.n_tokens * (4 * width + 2 * trace.ids[:1].size)
        self.kept = list(self._made()) if n_bytes <= MOST_SHARED_BYTES and not with_hidden else None

    def _made(self):
        return (rows_of(self.trace, s, self.with_hidden) for s in range(len(self.trace.offsets) - 1))

    def __iter__(self):
        return iter(self.kept) if self.kept is not None else self._made()


def run_all(trace: Trace, plan: Plan, learned: dict | None = None, progress: Callable[[], None] | None = None, n_threads: int | None = None) -> list[Outcome]:
    """Replays every run of the plan, in its order, on as many threads as there are CPUs. progress: called after each sequence of each run. Raises PolicyError."""
    rows = _Rows(trace, False)
    stopped = threading.Event()

    def done() -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        if progress:
            progress()

    def one(run: Run) -> Outcome:
        chosen = policies.policy(run.policy, learned, policies.heads_of(trace))
        seen = _Rows(trace, True) if "mlp1" in chosen.learned else rows
        options = {"shared": plan.shared, "warm": plan.warm, "learned": learned, "rows": seen, "done": done}
        found: Replayed = replay(trace, run.policy, run.n_slots, run.misses, **options)
        return Outcome(run, found.counts)

    with ThreadPoolExecutor(n_threads or usable_cpus()) as pool:
        try:
            return list(pool.map(one, plan.runs))
        except BaseException:  # Ctrl-C, or a run that failed: the others need not go on
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# --- figures


@dataclass(frozen=True)
class Rates:
    """Bytes per second. device None: what is computed in slots takes no time."""

    link: float = 16e9
    cpu: float = 12e9
    device: float | None = None


def seconds(loads: dict[str, np.ndarray], rates: Rates) -> np.ndarray:
    """Time that experts take, by bytes of each kind: "hits", "demand", "computed", "proactive". Experts only: attention, dense weights and the rest come on top.

    Slots and CPU compute at the same time. Demand loads are waited for. Proactive loads go on meanwhile, and only what the link has no spare time for is waited for. Where the
    CPU computes misses, an upload is read from the memory that it computes from, and costs it as much as an expert of its own.
    """
    in_slots = (loads["hits"] + loads["demand"]) / rates.device if rates.device else 0.0
    on_cpu = np.where(loads["computed"] > 0, loads["computed"] + loads["proactive"], 0.0) / rates.cpu
    busy = np.maximum(in_slots, on_cpu)
    return busy + loads["demand"] / rates.link + np.maximum(0.0, loads["proactive"] / rates.link - busy)


class Bootstrap:
    """Confidence intervals (95 %) over sequences, which are drawn again with replacement; all figures share the drawn ones, so that differences are paired."""

    def __init__(self, n_sequences: int, seed: int = 0, n_resamples: int = N_RESAMPLES):
        self.weights = None
        if n_sequences > 1:
            self.weights = np.random.default_rng(seed).multinomial(n_sequences, np.full(n_sequences, 1 / n_sequences), n_resamples).astype(np.float64)

    def sums(self, per_sequence: np.ndarray) -> np.ndarray:
        """[n_resamples] from [sequences]."""
        return self.weights @ per_sequence

    def interval(self, figure: Callable[[Callable], np.ndarray]) -> tuple[float, float] | None:
        """figure: from a function that sums over sequences. None: a single sequence, or nothing to divide by."""
        if self.weights is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            found = figure(self.sums)
        low, high = np.percentile(found, (2.5, 97.5)) if np.isfinite(found).all() else (np.nan, np.nan)
        return None if np.isnan(low) else (float(low), float(high))


@dataclass
class Figures:
    """One run over the sequences it saw. n_*: int64 [sequences] of decoding."""

    outcome: Outcome
    n_tokens: np.ndarray
    bytes_per_expert: np.ndarray  # [layers]; zeros: unknown
    rates: Rates

    def __post_init__(self):
        self.counts = dict(zip(FIELDS, self.outcome.counts[:, DECODE].sum(1).T))
        by_layer = dict(zip(FIELDS, self.outcome.counts[:, DECODE].transpose(2, 0, 1)))
        sizes = self.bytes_per_expert if self.bytes_per_expert.all() else np.ones(len(self.bytes_per_expert))
        kinds = {"hits": "n_hits", "demand": "n_demand", "computed": "n_computed", "proactive": "n_proactive"}
        self.bytes = {kind: by_layer[name] @ sizes for kind, name in kinds.items()}  # [sequences]; experts where bytes are unknown

    def hit(self, total=np.sum):
        return total(self.counts["n_hits"]) / total(self.counts["n_accesses"])

    def loaded(self, total=np.sum):
        """Bytes per token; experts per token where the size is unknown."""
        return total(self.bytes["demand"] + self.bytes["proactive"]) / total(self.n_tokens)

    def time(self, total=np.sum):
        """Seconds per token, in experts only."""
        sums = {kind: np.asarray(total(n), np.float64) for kind, n in self.bytes.items()}
        return seconds(sums, self.rates) / total(self.n_tokens)


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 else None


def gap_share(hits: int, lru: int, belady: int) -> float | None:
    return _share(hits - lru, belady - lru)


def summary(f: Figures, references: dict[str, Figures], boot: Bootstrap, per_sequence: bool = False) -> dict:
    """The row of a run: names and units as in the module's text. references: of LRU and both Beladys at the same capacity and regime."""
    run, lru = f.outcome.run, references[LRU]
    totals = {name: int(n.sum()) for name, n in f.counts.items()}
    n_tokens, n_layers = int(f.n_tokens.sum()), f.outcome.counts.shape[2]
    loads = totals["n_demand"] + totals["n_proactive"]
    known = bool(f.bytes_per_expert.all())
    hits_of = {p: int(r.counts["n_hits"].sum()) for p, r in references.items()}
    per_token = float(f.time()) if n_tokens and known else None
    prompt = dict(zip(FIELDS, f.outcome.counts[:, PROMPT].sum((0, 1)).tolist()))
    row = {
        "policy": run.policy,
        "bound": f.outcome.bound,
        "n_slots": run.n_slots,
        "misses": run.misses,
        "n_tokens": n_tokens,
        **totals,
        "hit": _share(totals["n_hits"], totals["n_accesses"]),
        "hit_ci": boot.interval(f.hit),
        "hit_minus_lru": _share(totals["n_hits"] - hits_of[LRU], totals["n_accesses"]),
        "hit_minus_lru_ci": boot.interval(lambda total: f.hit(total) - lru.hit(total)),
        "adjusted_hit": _share(totals["n_hits"], totals["n_accesses"] + totals["n_proactive"]),
        "load_experts": _share(loads, n_tokens * n_layers),
        "load_mb": float(f.loaded() / 1e6) if n_tokens and known else None,
        "load_mb_ci": _scaled(boot.interval(f.loaded), 1e-6) if known else None,
        "load_mb_minus_lru_ci": _scaled(boot.interval(lambda total: f.loaded(total) - lru.loaded(total)), 1e-6) if known else None,
        "gap_share": gap_share(totals["n_hits"], hits_of[LRU], hits_of[BELADY]),
        "gap_share_free": gap_share(totals["n_hits"], hits_of[LRU], hits_of[BELADY_FREE]),
        "expert_ms": per_token * 1e3 if per_token is not None else None,
        "tokens_per_s": 1 / per_token if per_token else None,
        "n_prompt_loads": prompt["n_demand"] + prompt["n_proactive"],
    }
    row["layers"] = {name: f.outcome.counts[:, DECODE, :, FIELDS.index(f"n_{name}")].sum(0).tolist() for name in ("accesses", "hits")}
    if per_sequence:
        row["sequences"] = {"n_tokens": f.n_tokens.tolist(), **{name: n.tolist() for name, n in f.counts.items()}}
    return row


def _scaled(interval: tuple[float, float] | None, by: float) -> tuple[float, float] | None:
    return interval and (interval[0] * by, interval[1] * by)


def figures_of(trace: Trace, outcomes: list[Outcome], rates: Rates) -> list[Figures]:
    n_tokens = np.array([decoded_tokens(rows_of(trace, s)) for s in range(len(trace.offsets) - 1)])
    sizes = np.array(trace.meta["bytes_per_expert"], np.float64)
    return [Figures(o, n_tokens, sizes, rates) for o in outcomes]


def summaries(trace: Trace, outcomes: list[Outcome], rates: Rates = Rates(), per_sequence: bool = False, seed: int = 0) -> list[dict]:
    """A row for each outcome, in their order."""
    boot = Bootstrap(len(trace.offsets) - 1, seed)
    found = figures_of(trace, outcomes, rates)
    beside = {}
    for f in found:
        if f.outcome.run.policy in BESIDE:
            beside.setdefault((f.outcome.run.n_slots, f.outcome.run.misses), {})[f.outcome.run.policy] = f
    return [summary(f, beside[f.outcome.run.n_slots, f.outcome.run.misses], boot, per_sequence) for f in found]


def learn(
    train: list[Trace], wanted: Iterable[str], progress: Callable[[str], None] | None = None, heads: tuple[str, ...] = (), seed: int = 0
) -> dict[str, np.ndarray] | None:
    """The tables that these policies need, fitted to the training traces; None without any. progress: called with the name of each table. heads: of HEADS, that serve instead of
    tables. Raises TraceError."""
    tables = {t for p in wanted if "fit=" not in p for t in policies.lacks(policies.name_of(p), None, heads)}
    if not train:
        return None
    return fit.fit(train, tables, progress, seed) if tables else {}
