"""Pictures of bench_bigger_than_ram.py (matplotlib): memory-LIMIT.png, every variant's memory over time; neighbour.png, how long the neighbour's passes took."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from memory_group import COLUMNS  # noqa: E402

from edgemoe.machine import parse_bytes  # noqa: E402

DPI = 130
PARTS = {"anon": "anonymous", "shmem": "shared", "file": "mapped files"}


def draw_all(folder: Path, model: str, runs: dict, beside: dict) -> list[str]:
    """The files written. `runs`: limit -> variant -> runs, of which the first is drawn; `beside`: what ran -> {"pass_s"}."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"memory-{limit}.png": _memory(model, limit, {name: every[0] for name, every in by_name.items()}) for limit, by_name in runs.items()}
    if beside:
        figures["neighbour.png"] = _neighbour(model, beside)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
        plt.close(figure)
    return [str(folder / name) for name in figures]


def _memory(model: str, limit: str, runs: dict[str, dict]):
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
    figure, axis = plt.subplots(figsize=(7, 5))
    for name, found in beside.items():
        ms = np.sort(found.get("pass_s", [])) * 1e3
        axis.plot(ms, 1 - np.arange(len(ms)) / max(len(ms), 1), drawstyle="steps-post", label=f"{name} ({len(ms)} passes)")
    axis.set(xscale="log", yscale="log", xlabel="a pass of the neighbour took longer than, ms", ylabel="share of its passes")
    axis.set_title(f"{model}: another process beside it", fontsize=11)
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure
