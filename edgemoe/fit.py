"""What policies learn from training traces: tables by name, made with NumPy, saved beside a trace as .npz.

    usage      [L, E]               tokens that used the expert                                      static
    follow     [L, E, E]            of the tokens that used i, the share that used j in the next layer   st-moe
    temporal   [L, E, 2E + 1]       this layer's next event, from its probabilities, their moving average, and 1   temporal, spatio-temporal
    spatial    [3, L, E, E + 1]     the event 1, 2, 3 layers on, from this layer's probabilities and 1   spatio, promoe, mixtral-offloading, step
    mlp1, mlp2 [3, L, 64, D + 1], [3, L, E, 65]   the same from the router's input, where the trace has it
    maps, map_tokens [n, L, E], [n] the probabilities of n training tokens, and which tokens they were     finemoe
    sequences  [n, L, E]            tokens that used the expert, per training sequence                   moe-infinity

After the last layer "the next layer" is the first one of the next token. Predictions are ridge regressions on whether an expert was used, divided by how many are used: they
add up to about 1, as probabilities do. They are the best linear predictors of what the trace has; learned heads would be trained for the cache itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgemoe import npz
from edgemoe.errors import TraceError

AVERAGE_DECAY = 0.9  # of the moving average; the native side has the same
N_AHEAD = 3
N_MAPS = 1000
N_SEQUENCES = 100
RIDGE = 1e-3  # of the mean square of the inputs
ONE_THREAD = 2**18  # multiplications; OpenBLAS wakes its threads for more
N_HIDDEN = 64  # width of the perceptrons
EPOCHS, RATE, BATCH = 4, 2e-3, 256


def fit(traces, wanted: Iterable[str], progress: Callable[[str], None] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """The tables of these names, float32. Only decoded rows count, where there are any. Raises TraceError when traces do not fit each other or lack what is needed."""
    wanted, tables = set(wanted), {}
    data = _Rows(list(traces) if isinstance(traces, (list, tuple)) else [traces])
    if "spatial" in wanted and data.has_hidden:
        wanted |= {"mlp1"}
    for names, make in (
        ({"usage"}, _usage), ({"follow"}, _follow), ({"temporal"}, _temporal), ({"spatial"}, _spatial), ({"mlp1", "mlp2"}, _perceptrons), ({"maps", "map_tokens"}, _maps),
        ({"sequences"}, _sequences),
    ):
        if names & wanted:
            if progress:
                progress(min(names))
            tables |= make(data, np.random.default_rng(seed))
    return {name: np.ascontiguousarray(table, np.float32) for name, table in tables.items()}


def save(path: str | os.PathLike, tables: dict[str, np.ndarray]) -> None:
    """Writes beside the path, then renames. Raises TraceError."""
    npz.publish(Path(path), {name: (table.dtype, table.shape, [np.ascontiguousarray(table).tobytes()]) for name, table in tables.items()})


class _Rows:
    """The decoded rows of all sequences, one layer at a time: memory is that of a layer, not of the trace."""

    def __init__(self, traces: list):
        first = traces[0]
        for t in traces[1:]:
            if (t.n_layers, t.n_expert, t.n_used) != (first.n_layers, first.n_expert, first.n_used):
                raise TraceError(f"{t.where}: {t.n_layers} layers of {t.n_expert} experts, {t.n_used} used; {first.where} has {first.n_layers} of {first.n_expert}, {first.n_used} used")
        self.traces, self.n_layers, self.n_expert, self.n_used = traces, first.n_layers, first.n_expert, first.n_used
        self.kept = [self._decoded(t) for t in traces]
        lengths = [np.diff(np.append(0, np.cumsum(kept))[t.offsets]) for t, kept in zip(traces, self.kept)]
        self.starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        self.n_rows = int(self.starts[-1])
        if self.n_rows < 2:
            raise TraceError(f"{first.where}: {self.n_rows} tokens to learn from, wanted more")
        self.has_hidden = all(t.hidden is not None for t in traces)
        widths = sorted({t.hidden.shape[-1] for t in traces}) if self.has_hidden else []
        if len(widths) > 1:
            raise TraceError(f"{first.where}: hidden states of {widths[0]} and of {widths[1]} values; they are of different models")
        last = np.zeros(self.n_rows, bool)
        last[self.starts[1:][np.diff(self.starts) > 0] - 1] = True
        self.now = np.flatnonzero(~last)  # rows with a next token, which is the row after them
        # A layer is looked at as the one that predicts and, before and after, as one that is predicted.
        self.used = lru_cache(maxsize=N_AHEAD + 2)(self._used)
        self.probs = lru_cache(maxsize=1)(self._probs)

    @staticmethod
    def _decoded(t) -> np.ndarray:
        decoded = np.asarray(t.phase) == 1
        return decoded if decoded.any() else np.ones(len(decoded), bool)

    def column(self, name: str, layer: int) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(t, name)[:, layer])[kept] for t, kept in zip(self.traces, self.kept)])

    def _used(self, layer: int) -> np.ndarray:
        """float32 [rows, E]: 1 where the row used the expert."""
        found = np.zeros((self.n_rows, self.n_expert + 1), np.float32)
        ids = self.column("ids", layer).astype(np.int64)
        np.put_along_axis(found, np.minimum(ids, self.n_expert), 1, 1)  # the last column is for absent ones
        return found[:, : self.n_expert]

    def _probs(self, layer: int) -> np.ndarray:
        """float32 [rows, E]; of the chosen only, where the trace has no others; equal shares where it has none."""
        if any(t.probs is None for t in self.traces):
            used = self.used(layer)
            return used / np.maximum(1, used.sum(1, keepdims=True))
        values = self.column("probs", layer).astype(np.float32)
        if values.shape[1] == self.n_expert:
            return values
        found = np.zeros((self.n_rows, self.n_expert + 1), np.float32)
        np.put_along_axis(found, np.minimum(self.column("ids", layer).astype(np.int64), self.n_expert), values, 1)
        return found[:, : self.n_expert]

    def tokens(self) -> np.ndarray:
        return np.concatenate([np.asarray(t.token_ids)[kept] for t, kept in zip(self.traces, self.kept)])


def _usage(data: _Rows, rng) -> dict:
    return {"usage": np.stack([data.used(layer).sum(0, dtype=np.float64) for layer in range(data.n_layers)])}


def _ahead(data: _Rows, x: np.ndarray, layer: int, ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of x for which it is known what is used `ahead` layers on, and that; from the last layer on it is the next token's."""
    used = data.used((layer + ahead) % data.n_layers)
    return (x, used) if layer + ahead < data.n_layers else (x[data.now], used[data.now + 1])


def _follow(data: _Rows, rng) -> dict:
    tables = []
    for layer in range(data.n_layers):
        now, then = _ahead(data, data.used(layer), layer, 1)
        tables.append(_product(now, then) / np.maximum(1, now.sum(0, dtype=np.float64))[:, None])
    return {"follow": np.stack(tables)}


def _moving_average(data: _Rows, x: np.ndarray) -> np.ndarray:
    """Over the rows of each sequence, from 0 on, each row included."""
    place = np.arange(data.n_rows) - np.repeat(data.starts[:-1], np.diff(data.starts))
    average = x * np.float32(1 - AVERAGE_DECAY)
    # 1 + d + d^2 + ... = (1 + d)(1 + d^2)(1 + d^4)...: each round doubles how far back a row reaches, until what lies there does not count any more.
    back = 1
    while back <= place.max() and AVERAGE_DECAY**back > 1e-9:
        average[back:] += average[:-back] * np.where(place[back:] >= back, AVERAGE_DECAY**back, 0).astype(np.float32)[:, None]
        back *= 2
    return average


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x.T @ y, float64. Small ones in pieces that BLAS gives to one thread each: beside other programs its threads wait for each other for much longer than they compute. The
    worst is its routine for a matrix by itself, which NumPy would call for x.T @ x."""
    n = ONE_THREAD // (x.shape[1] * y.shape[1])
    if n < 32:
        return (x.T @ (y.copy() if y is x else y)).astype(np.float64)
    whole = len(x) // n * n
    pieces = np.matmul(x[:whole].reshape(-1, n, x.shape[1]).transpose(0, 2, 1), y[:whole].reshape(-1, n, y.shape[1]))
    return pieces.sum(0, dtype=np.float64) + x[whole:].T @ y[whole:]


def _regress(x: np.ndarray, y: np.ndarray, n_used: int) -> np.ndarray:
    """[outputs, inputs + 1]: ridge regression of y / n_used on (x, 1)."""
    x = np.concatenate([x, np.ones((len(x), 1), np.float32)], 1)
    square = _product(x, x)
    penalty = RIDGE * max(np.trace(square) / len(square), 1e-12) * np.eye(len(square))
    penalty[-1, -1] = 0  # the constant is free
    return np.linalg.solve(square + penalty + 1e-9 * np.eye(len(square)), _product(x, y)).T / n_used


def _temporal(data: _Rows, rng) -> dict:
    tables = []
    for layer in range(data.n_layers):
        x = data.probs(layer)
        x = np.concatenate([x, _moving_average(data, x)], 1)
        tables.append(_regress(x[data.now], data.used(layer)[data.now + 1], data.n_used))
    return {"temporal": np.stack(tables)}


def _spatial(data: _Rows, rng) -> dict:
    table = np.zeros((N_AHEAD, data.n_layers, data.n_expert, data.n_expert + 1), np.float32)
    for layer in range(data.n_layers):
        within = range(1, min(N_AHEAD, data.n_layers - 1 - layer) + 1)  # of the same token: they share their input
        for group in filter(len, (within, range(len(within) + 1, N_AHEAD + 1))):
            known = [_ahead(data, data.probs(layer), layer, ahead) for ahead in group]
            found = _regress(known[0][0], np.concatenate([y for _, y in known], 1), data.n_used)
            table[group[0] - 1 : group[-1], layer] = found.reshape(len(group), data.n_expert, -1)
    return {"spatial": table}


def _perceptrons(data: _Rows, rng) -> dict:
    """ProMoE's predictors: one hidden layer, trained with Adam on the squared error of y / n_used."""
    n_in = data.traces[0].hidden.shape[-1]
    first = np.zeros((N_AHEAD, data.n_layers, N_HIDDEN, n_in + 1), np.float32)
    second = np.zeros((N_AHEAD, data.n_layers, data.n_expert, N_HIDDEN + 1), np.float32)
    for layer in range(data.n_layers):
        x = data.column("hidden", layer).astype(np.float32)
        scale = np.sqrt((x**2).mean()) + 1e-9
        for ahead in range(1, N_AHEAD + 1):
            known, y = _ahead(data, x, layer, ahead)
            w1, w2 = _train(known / scale, y / data.n_used, rng)
            w1[:, :-1] /= scale
            first[ahead - 1, layer], second[ahead - 1, layer] = w1, w2
    return {"mlp1": first, "mlp2": second}


def _train(x: np.ndarray, y: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray]:
    """W1 [N_HIDDEN, inputs + 1], W2 [E, N_HIDDEN + 1]: y is about W2 (relu(W1 (x, 1)), 1)."""
    w1 = np.concatenate([rng.normal(0, (2 / x.shape[1]) ** 0.5, (N_HIDDEN, x.shape[1])), np.zeros((N_HIDDEN, 1))], 1).astype(np.float32)
    w2 = np.concatenate([np.zeros((y.shape[1], N_HIDDEN)), y.mean(0)[:, None]], 1).astype(np.float32)
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in (w1, w2)]
    one, step = np.ones((BATCH, 1), np.float32), 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows, step = order[start : start + BATCH], step + 1
            inputs = np.concatenate([x[rows], one], 1)
            before = inputs @ w1.T
            inner = np.concatenate([np.maximum(before, 0), one], 1)
            error = (inner @ w2.T - y[rows]) / BATCH
            gradients = (((error @ w2[:, :-1]) * (before > 0)).T @ inputs, error.T @ inner)
            for w, g, (m, v) in zip((w1, w2), gradients, moments):
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                w -= RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return w1, w2


def _maps(data: _Rows, rng) -> dict:
    """A full store replaces its most redundant pair: here tokens are drawn until it is full, and then, of twice as many, the nearest neighbours are dropped."""
    drawn = rng.choice(data.n_rows, min(2 * N_MAPS, data.n_rows), replace=False)
    maps = np.stack([data.probs(layer)[drawn] for layer in range(data.n_layers)], 1)
    flat = maps.reshape(len(drawn), -1)
    flat = flat / np.maximum(1e-9, np.linalg.norm(flat, axis=1, keepdims=True))
    alike = flat @ flat.T
    np.fill_diagonal(alike, -1)
    kept = np.ones(len(drawn), bool)
    nearest = alike.argmax(1)
    likeness = alike[np.arange(len(drawn)), nearest]
    for _ in range(len(drawn) - N_MAPS):
        gone = int(likeness.argmax())
        kept[gone] = False
        alike[:, gone] = likeness[gone] = -2
        for i in np.flatnonzero(kept & (nearest == gone)):
            nearest[i] = alike[i].argmax()
            likeness[i] = alike[i, nearest[i]]
    return {"maps": maps[kept], "map_tokens": data.tokens()[drawn][kept].astype(np.float32)}


def _sequences(data: _Rows, rng) -> dict:
    lengths = np.diff(data.starts)
    chosen = rng.permutation(np.flatnonzero(lengths > 0))[:N_SEQUENCES]
    counts = np.zeros((len(chosen), data.n_layers, data.n_expert), np.float32)
    for layer in range(data.n_layers):
        used = data.used(layer)
        for i, s in enumerate(chosen):
            counts[i, layer] = used[data.starts[s] : data.starts[s + 1]].sum(0)
    return {"sequences": counts}
