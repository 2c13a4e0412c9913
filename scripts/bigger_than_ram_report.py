"""What bench_bigger_than_ram.py found, as tables and as pictures (matplotlib).

memory-LIMIT.png: every variant's memory over time. neighbour.png: how long the neighbour's passes took.
"""

import json
from pathlib import Path
from statistics import median

import numpy as np
from memory_group import COLUMNS

from edgemoe.machine import parse_bytes

DPI = 130
PARTS = {"anon": "anonymous", "shmem": "shared", "file": "mapped files"}
HEAD = (
    "| limit | variant | decode, tok/s | × llama.cpp | tokens | slowest, s | load, s | prompt, s | MB read per token | major faults per token "
    "| peak MB: anonymous, mapped, group | rms | same best token | others' cores |"
)
ROOF = "| limit | variant | pool, MB | hits | waited for experts, ms per token | MB read per token | disk, GB/s | disk allows, tok/s | cores allow, tok/s | decode, tok/s | reached |"
BESIDE = "| beside the neighbour | passes | median, ms | p99, ms | max, ms | decode, tok/s |"


def spread(values: list[float], digits: int = 2) -> str:
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(head: str, lines: list[list[str]]) -> str:
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *("| " + " | ".join(line) + " |" for line in lines)])


def cells(row: dict) -> list[str]:
    variant = row["variant"] if not row["failed"] else f"{row['variant']} ({row['n_done']} of {row['n_rounds']} rounds: {row['failed']})"
    if "speeds" not in row:
        return [row["limit"], variant, *["–"] * 12]
    ratio = spread(row["ratios"]) if row.get("ratios") else "–"
    rms, same = (f"{row['parity']['rms']:.2g}", f"{row['parity']['same_best_token']}/{row['parity']['of']}") if "parity" in row else ("–", "–")
    peak = ", ".join(f"{row['peak'][name] / 1e6:.0f}" for name in ("anon", "file", "group"))
    return [
        row["limit"], variant, spread(row["speeds"]), ratio, str(row["n_tokens"]), f"{row['slowest_token_s']:.2f}", f"{row['load_s']:.1f}", f"{row['prompt_s']:.1f}",
        f"{row['read_bytes'] / 1e6:.1f}", f"{row['major_faults']:.0f}", peak, rms, same, f"{row['others']:.2f}",
    ]  # fmt: skip


def roof_cells(row: dict) -> list[str]:
    hits, n = (row.get(name, 0) for name in ("n_ram_hits", "n_ram_accesses"))
    pool = [f"{row['pool_bytes'] / 1e6:.0f}", f"{hits} of {n} ({hits / n:.1%})", f"{row['ram_stall_us'] / row['n_tokens'] / 1e3:.1f}"] if n else ["–"] * 3
    rates = [f"{row[name]:.1f}" if row[name] else "–" for name in ("by_disk", "by_cores")]
    return [row["limit"], row["variant"], *pool, f"{row['read_bytes'] / 1e6:.1f}", f"{row['disk_rate'] / 1e9:.2f}", *rates, spread(row["speeds"]), f"{row['reached']:.0%}"]


def beside_cells(name: str, found: dict) -> list[str]:
    if not found.get("pass_s"):
        return [name, found.get("failed", "no pass in the window"), *["–"] * 4]
    ms = np.array(found["pass_s"]) * 1e3
    rate = f"{found['tokens_per_s']:.2f}" if "tokens_per_s" in found else "–"
    return [name, str(len(ms)), f"{np.median(ms):.2f}", f"{np.percentile(ms, 99):.2f}", f"{ms.max():.2f}", rate]


def text(about: dict, rows: list[dict], beside: dict[str, dict]) -> str:
    parts = [json.dumps(about), table(HEAD, [cells(r) for r in rows])]
    roofs = [roof_cells(r) for r in rows if "reached" in r]
    parts += [table(ROOF, roofs)] if roofs else []
    parts += [table(BESIDE, [beside_cells(name, found) for name, found in beside.items()])] if beside else []
    return "\n\n".join(parts)


def draw_all(folder: Path, model: str, runs: dict, beside: dict) -> list[str]:
    """The files written. `runs`: limit -> variant -> runs, of which the first is drawn; `beside`: what ran -> {"pass_s"}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"memory-{limit}.png": _memory(model, limit, {name: every[0] for name, every in by_name.items()}) for limit, by_name in runs.items()}
    if beside:
        figures["neighbour.png"] = _neighbour(model, beside)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
        plt.close(figure)
    return [str(folder / name) for name in figures]


def _memory(model: str, limit: str, runs: dict[str, dict]):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs), 1, figsize=(9, 1 + 2.2 * len(runs)), sharex=True, sharey=True, squeeze=False)
    for axis, (name, run) in zip(axes[:, 0], runs.items()):
        columns = dict(zip(COLUMNS, np.array(run["samples"], dtype=float).T))
        seconds = columns["at"] - columns["at"][0]
        axis.stackplot(seconds, [columns[part] / 1e6 for part in PARTS], labels=PARTS.values(), alpha=0.7)
        axis.plot(seconds, columns["group"] / 1e6, color="0.2", lw=1, label="counted by the group")
        if limit != "none":
            axis.axhline(parse_bytes(limit) / 1e6, color="tab:red", ls="--", lw=1, label="limit")
        if "failed" not in run:
            axis.axvspan(*(run[side]["at"] - columns["at"][0] for side in ("begin", "end")), color="0.5", alpha=0.15, lw=0, label="decoding")
        axis.set_title(f"{name}{': ' + run['failed'] if 'failed' in run else ''}", fontsize=10, loc="left")
        axis.set_ylabel("MB")
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("seconds since the process started")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"{model}, limit {limit}", fontsize=11)
    figure.tight_layout()
    return figure


def _neighbour(model: str, beside: dict[str, dict]):
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axis = plt.subplots(figsize=(7, 5))
    for name, found in beside.items():
        ms = np.sort(found.get("pass_s", [])) * 1e3
        axis.plot(ms, 1 - np.arange(len(ms)) / max(len(ms), 1), drawstyle="steps-post", label=f"{name} ({len(ms)} passes)")
    axis.set(xscale="log", yscale="log", xlabel="a pass of the neighbour took longer than, ms", ylabel="share of its passes")
    for numbered in (axis.xaxis, axis.yaxis):
        numbered.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.xaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_title(f"{model}: another process beside it", fontsize=11)
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure
