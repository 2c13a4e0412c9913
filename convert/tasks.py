"""The work on a package in units for a few threads: one blob, or one stretch of model.gguf.

Workers take tasks and touch nothing shared but the source, which they only read. Results, the progress bar and
the first error are handled in task order by the one thread that asks.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

from .pieces import cut

MODEL_TASK_BYTES = 32 << 20
BATCH = 16


@dataclass(frozen=True)
class Task:
    """`nbytes` of file `path` (inside the package) from byte `at`. `where` names it in messages."""

    where: str
    path: Path
    at: int
    nbytes: int
    pieces: Callable  # made when the task runs: a model has thousands of blobs
    is_blob: bool


def blob_tasks(plan):
    """One task per expert, layer by layer."""
    return [Task(f"layer {layer.index}, expert {expert}", layer.path(expert), 0, layer.blob_bytes,
                 partial(layer.pieces, expert), True)
            for layer in plan.layers for expert in range(layer.n_expert)]


def model_tasks(plan):
    """model.gguf in stretches."""
    return [Task("model.gguf", Path("model.gguf"), at, nbytes, run.copy, False)
            for at, run, nbytes in cut(plan.model, MODEL_TASK_BYTES)]


def run_tasks(tasks, work, n_jobs, label="", progress=False):
    """work(task) for every task on `n_jobs` threads; returns the results in task order.

    The first exception in task order is raised, once the batches that have begun are done; the rest is dropped.
    """
    results = []
    advance, close = _bar(sum(task.nbytes for task in tasks), label) if progress else (lambda n: None, lambda: None)
    # A blob may take less time than two threads need to hand one over.
    batches = [tasks[i:i + BATCH] for i in range(0, len(tasks), BATCH)]
    with ThreadPoolExecutor(n_jobs) as pool:
        futures = [pool.submit(lambda batch: [work(task) for task in batch], batch) for batch in batches]
        try:
            for batch, future in zip(batches, futures):
                results += future.result()
                advance(sum(task.nbytes for task in batch))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            close()
    return results


def _bar(total, label):
    # Imported here: without a bar it is a tenth of the time to start.
    from tqdm import tqdm

    bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False)
    return bar.update, bar.close
