"""Pictures of simulated runs. Needs matplotlib, which edgemoe does not otherwise: pip install 'edgemoe[plot]'.

capacity-REGIME.png: hit rate and load against capacity. frontier-SLOTS-REGIME.png: hit rate against load, every policy with its settings, and the front of those that no
other beats in both. layers-SLOTS-REGIME.png: hit rate per layer. concentration.png: how many accesses the most used experts of a layer serve.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgemoe.errors import EdgemoeError
from edgemoe.policies import name_of
from edgemoe.trace import DECODE, Trace

REGIME_TEXT = {"load": "misses loaded", "cpu": "misses computed on the CPU"}
MARKERS = "osD^vP<X>pd*h"
DPI = 130
LOG_FROM = 20  # largest by smallest load, from which on the axis is logarithmic


def require() -> None:
    """Raises EdgemoeError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EdgemoeError("pictures need matplotlib: pip install 'edgemoe[plot]'") from None


def draw_all(trace: Trace, document: dict, folder: str) -> list[str]:
    """Draws everything that the runs of a report allow; returns the files. Raises EdgemoeError."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return [str(p) for p in _draw_all(trace, document, Path(folder))]
    except OSError as e:
        raise EdgemoeError(f"{folder}: {e.strerror}") from None


def _draw_all(trace: Trace, document: dict, folder: Path):
    looks = _looks([r["policy"] for r in document["runs"]])
    groups: dict[tuple, list[dict]] = {}
    for row in document["runs"]:
        if row["hit"] is not None:
            groups.setdefault((row["n_slots"], row["misses"]), []).append(row)
    for misses in dict.fromkeys(m for _, m in groups):
        members = {n: rows for (n, m), rows in groups.items() if m == misses}
        yield _save(_capacity(members, looks, misses, document), folder / f"capacity-{misses}.png")
    for (n_slots, misses), rows in groups.items():
        yield _save(_frontier(rows, looks, _title(document, n_slots, misses)), folder / f"frontier-{n_slots:03d}-{misses}.png")
        yield _save(_layers(rows, _title(document, n_slots, misses)), folder / f"layers-{n_slots:03d}-{misses}.png")
    yield _save(_concentration(trace), folder / "concentration.png")


def _save(figure, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return path


def _looks(names: list[str]) -> dict[str, dict]:
    """A colour and a marker per policy, whatever its settings."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(name_of(n) if not n.endswith(".py") else n for n in names))
    colours = [plt.get_cmap("tab20")(i) for i in [*range(0, 20, 2), *range(1, 20, 2)]]
    return {kind: {"color": colours[i % 20], "marker": MARKERS[i % len(MARKERS)]} for i, kind in enumerate(kinds)}


def _model(document: dict) -> str:
    return f"{document['model']}, {document['n_sequences']} sequences, {document['n_tokens']} tokens, {document['runs'][0]['n_accesses']} accesses"


def _slots(document: dict, n_slots: int) -> str:
    if document["scope"] == "model":
        return f"{n_slots * document['n_layers']} slots for all layers"
    return f"{n_slots} of {document['n_expert']} slots per layer"


def _title(document: dict, n_slots: int, misses: str) -> str:
    return f"{_model(document)}\n{_slots(document, n_slots)}, {REGIME_TEXT[misses]}"


def _load_of(rows: list[dict]) -> tuple[str, str]:
    """Field and axis label: MB where sizes are known."""
    if all(r["load_mb"] is not None for r in rows):
        return "load_mb", "load, MB per token"
    return "load_experts", "load, experts per token and layer"


def _scale(axis, values: list[float], which: str) -> None:
    """Logarithmic where loads span decades; zeros then sit at the edge."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [v for v in values if v > 0]
    if not positive or max(positive) / min(positive) <= LOG_FROM:
        return
    zeros = {"linthresh": 10 ** np.floor(np.log10(min(positive))), "linscale": 0.3} if min(values) <= 0 else None
    getattr(axis, f"set_{which}scale")(*(["symlog"] if zeros else ["log"]), **(zeros or {}))
    numbered = getattr(axis, f"{which}axis")
    numbered.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    if not zeros:
        numbered.set_major_locator(LogLocator(subs=(1, 2, 5)))
    numbered.set_minor_formatter(NullFormatter())


def _capacity(members: dict[int, list[dict]], looks: dict, misses: str, document: dict):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    rows = [r for each in members.values() for r in each]
    field, label = _load_of(rows)
    named = set()
    for policy in _by_hits(rows):
        kind = name_of(policy["policy"])
        points = sorted((n, r) for n, each in members.items() for r in each if r["policy"] == policy["policy"])
        style = looks[kind] | {"ls": "--" if policy["bound"] else "-", "lw": 2.5 if policy["policy"] == "lru" else 1.2, "ms": 4}
        left.plot([n for n, _ in points], [100 * r["hit"] for _, r in points], label=None if kind in named else _kind_label(kind, rows), **style)
        named.add(kind)
        right.plot([n for n, _ in points], [r[field] for _, r in points], **style)
    _scale(right, [r[field] for r in rows], "y")
    ticks = sorted(members)
    for axis, name in ((left, "hits, % of accesses"), (right, label)):
        axis.set(xlabel="slots per layer", ylabel=name)
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.grid(alpha=0.3)
    _legend(figure, left)
    figure.suptitle(f"{_model(document)}; {REGIME_TEXT[misses]}", y=0.98, fontsize=11)
    figure.tight_layout()
    return figure


def _label(row: dict) -> str:
    return row["policy"] + (" (bound)" if row["bound"] else "")


def _kind_label(kind: str, rows: list[dict]) -> str:
    """A policy and how many settings of it there are."""
    settings = {r["policy"]: r["bound"] for r in rows if name_of(r["policy"]) == kind}
    notes = ["bound"] * any(settings.values()) + [f"{len(settings)} settings"] * (len(settings) > 1)
    return kind + (f" ({', '.join(notes)})" if notes else "")


def _by_hits(rows: list[dict]) -> list[dict]:
    """One row per policy, the best first: by the sum of its hit rates, so that the order is about that of the curves."""
    total: dict[str, float] = {}
    for r in rows:
        total[r["policy"]] = total.get(r["policy"], 0.0) + r["hit"]
    first = {r["policy"]: r for r in reversed(rows)}
    return [first[p] for p in sorted(total, key=lambda p: -total[p])]


def _legend(figure, axis) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False, ncols=1 + len(labels) // 36)


def front(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points (load, hit) that no other beats: from the least load on, each with more hits than all with less load."""
    best, found = -1.0, []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[i][1] > best:
            best = points[i][1]
            found.append(i)
    return found


def _frontier(rows: list[dict], looks: dict, title: str):
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 6))
    field, label = _load_of(rows)
    for kind in dict.fromkeys(name_of(r["policy"]) for r in _by_hits(rows)):
        settings = sorted((r for r in rows if name_of(r["policy"]) == kind), key=lambda r: r[field])
        look = looks[kind]
        hollow = {"markerfacecolor": "none"} if settings[0]["bound"] else {}
        axis.plot([r[field] for r in settings], [100 * r["hit"] for r in settings], ls="", ms=8 if kind == "lru" else 6, label=_kind_label(kind, rows), **look, **hollow)
    online = [r for r in rows if not r["bound"]]
    best = [online[i] for i in front([(r[field], r["hit"]) for r in online])]
    axis.plot([r[field] for r in best], [100 * r["hit"] for r in best], color="0.3", lw=1, drawstyle="steps-post", label="front, without bounds:", zorder=0)
    _scale(axis, [r[field] for r in rows], "x")
    _number(axis, best, field)
    axis.set(xlabel=label, ylabel="hits, % of accesses")
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.3, which="both")
    _legend(figure, axis)
    figure.tight_layout()
    return figure


def _number(axis, best: list[dict], field: str) -> None:
    """Numbers the points of the front and says beside the picture what they are: names would lie over each other."""
    for i, row in enumerate(best, 1):
        above = {"xytext": (-4, 5), "ha": "right"} if i % 2 else {"xytext": (4, -12), "ha": "left"}
        axis.annotate(str(i), (row[field], 100 * row["hit"]), textcoords="offset points", fontsize=8, color="0.2", **above)
        axis.plot([], [], ls="", label=f"{i}  {row['policy']}")


def _layers(rows: list[dict], title: str):
    import matplotlib.pyplot as plt

    ordered = _by_hits(rows)
    shares = np.array([np.divide(r["layers"]["hits"], np.maximum(r["layers"]["accesses"], 1)) for r in ordered]).T * 100
    figure, axis = plt.subplots(figsize=(2.5 + 0.42 * len(ordered), 2 + 0.2 * len(shares)))
    image = axis.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
    axis.set_xticks(range(len(ordered)), [_label(r) for r in ordered], rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_ylabel("layer with experts")
    axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axis, label="hits, % of accesses", pad=0.02)
    axis.set_title(title, fontsize=10, loc="left")
    return figure


def concentration(trace: Trace) -> np.ndarray:
    """[layers, experts]: share of a layer's decoded accesses that its 1, 2, ... most used experts serve."""
    ids = trace.ids[trace.phase == DECODE]
    counts = np.array([np.bincount(ids[:, layer][ids[:, layer] != trace.absent].ravel(), minlength=trace.n_expert) for layer in range(trace.n_layers)])
    ordered = -np.sort(-counts, axis=1)
    return np.cumsum(ordered, 1) / np.maximum(ordered.sum(1, keepdims=True), 1)


def _concentration(trace: Trace):
    import matplotlib.pyplot as plt

    shares = 100 * concentration(trace)
    n = np.arange(1, trace.n_expert + 1)
    figure, axis = plt.subplots(figsize=(7, 5))
    axis.fill_between(n, shares.min(0), shares.max(0), alpha=0.25, label="all layers")
    axis.plot(n, np.median(shares, 0), label="median layer")
    axis.plot(n, 100 * n / trace.n_expert, color="0.6", ls=":", label="if all were used alike")
    axis.set(xlabel="most used experts of a layer", ylabel="share of its accesses, %", xlim=(1, trace.n_expert), ylim=(0, 101))
    axis.set_title(f"{trace.meta['model']}: all sequences together", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False)
    return figure
