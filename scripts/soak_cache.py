#!/usr/bin/env python3
"""Expert slots under random use for as long as you like: batches of random sizes, resets, new contexts, every miss mode. Memory must stay flat and the logits plain llama.cpp's.
With --ram most laps have a pool in RAM of a random size, and the rest of the experts on the disk, with and without slots on the device above it.

    .venv/bin/python scripts/soak_cache.py models/demo-small.gguf --device CPU --minutes 20
    .venv/bin/python scripts/soak_cache.py models/demo-small.gguf --ram --minutes 20
    GGML_VK_VISIBLE_DEVICES=0 .venv/bin/python scripts/soak_cache.py models/demo-small.gguf --device Vulkan0 --minutes 20

Each lap opens the model with random slots, policy and miss mode, feeds random batches with resets in between, and compares the logits of the lap's last tokens with plain
llama.cpp's on the same tokens. Prints a line per lap; exit code 1 when logits differ by more than the bound, or when memory of this process or of the device has grown by more than
--grow MB from the end of the fourth lap to the last.
"""

import argparse
import random
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as C

import edgemoe
from edgemoe import engine, machine
from edgemoe.devices import devices
from edgemoe.ram_plan import plan_ram

BOUND = 0.3  # of one token's logits, rms in standard deviations; with llama.cpp's kernels on the CPU device nothing may differ


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def anonymous_mb() -> float:
    """Without the mapped model."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(int(f[1]) for f in fields if f[0] == "Anonymous:") / 1e3


def free_on(device: str) -> int:
    return next((d.free for d in devices() if d.name == device), 0)


def logits(llm) -> np.ndarray:
    return np.ctypeslib.as_array(C.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--ram", action="store_true", help="pools in RAM, too")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", type=float, default=60, metavar="MB", help="growth that passes (default %(default)s)")
    o = parser.parse_args()
    rng = random.Random(o.seed)
    options = dict(n_ctx=512, n_batch=256, n_ubatch=64, n_threads=machine.default_threads(), verbose=False)
    with edgemoe.Source(o.model) as source:
        n_expert = max(layer.n_expert for layer in source.layers)
        sizes = plan_ram(source, "mapped", n_ctx=512).token_bytes * 9 // 8, source.expert_bytes
    plain = engine.open_plain([o.model], **options, op_offload=False)
    end, lap, worst, n_tokens = time.monotonic() + 60 * o.minutes, 0, 0.0, 0
    before, device_before = None, 0
    while time.monotonic() < end or lap < 5:
        lap += 1
        slots, misses, policy = rng.randint(1, n_expert), rng.choice(["cpu", "load", "auto"]), rng.choice(["lru", "placement:every=8", "placement"])
        exact = rng.random() < 0.5
        bound = 0 if exact and o.device == "CPU" else BOUND
        ram, read_ahead = "mapped", "off"
        if o.ram and rng.random() < 0.8:
            ram, read_ahead, slots = rng.randint(*sizes), rng.choice(["off", "on", "auto"]), rng.choice([0, slots])
        pool = dict(ram=ram, ram_policy=rng.choice(["lru", "lrfu:lambda=0.1", "placement:every=8"]), read_ahead=read_ahead)
        with closing(edgemoe.Llama(o.model, slots=slots, device=o.device, misses=misses, policy=policy, exact=exact, **pool, **options)) as llm:
            for _ in range(rng.randint(1, 6)):
                llm.reset()
                fed = []
                while sum(map(len, fed)) < 300:
                    fed.append([rng.randrange(llm.n_vocab()) for _ in range(rng.choice([1, 1, 1, 2, 5, 8, 16, 17, 60, 200]))])
                    llm.eval(fed[-1])
                    if rng.random() < 0.03:
                        llm.clear_cache()
                n_tokens += sum(map(len, fed))
            # In the same batches: llama.cpp's own sums depend on them.
            plain.reset()
            for batch in fed:
                plain.eval(batch)
            expected = logits(plain)
            difference = float(np.sqrt(np.mean((logits(llm) - expected) ** 2)) / expected.std())
            worst = max(worst, difference)
            refused = llm.expert_stats()["n_refused"]
        now, device_free = anonymous_mb(), free_on(o.device)
        if lap == 4:
            before, device_before = now, device_free
        print(f"lap {lap}: {slots} slots, {misses}, {policy}{', exact' if exact else ''}, RAM {ram}, ahead {read_ahead}: rms {difference:.3g}, refused {refused}, anonymous {now:.0f} MB, resident {resident_mb():.0f} MB, device free {device_free / 1e6:.0f} MB", flush=True)
        if not difference <= bound or refused:  # NaN is no small difference
            print("FAILED: the logits differ" if not difference <= bound else "FAILED: the device refused pairs")
            return 1
    grown, device_grown = now - before, (device_before - device_free) / 1e6
    ok = grown <= o.grow and device_grown <= o.grow
    print(f"{'OK' if ok else 'FAILED'}: {lap} laps, {n_tokens} tokens, worst rms {worst:.3g}, memory grew by {grown:.0f} MB here and {device_grown:.0f} MB on the device since lap 4")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
