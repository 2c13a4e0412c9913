#!/usr/bin/env python3
"""Expert slots on a device: speed, hit rate and traffic at several slot counts and miss modes, against the same model without slots, each with its parity check.

    .venv/bin/python scripts/bench_device_cache.py models/demo.gguf --device CPU
    .venv/bin/python scripts/bench_device_cache.py models/demo.gguf --device Vulkan0 --gpu-layers -1 --slots 5%,25%,100% --misses cpu,load,auto --json OUT.json

Every variant reads a prompt of text, decodes the reference's own greedy continuation (so that all see the same tokens and routing), and reads a second prompt with its slots
full. Variants run one after the other, `--rounds` times, with "no slots" first and last in every round; figures are medians over the rounds, ratios are to the mean of the two
"no slots" of the same round. In the window: llama_decode with its batch. Outside: loading, the prompt and N_WARM tokens before the timed decode, copying logits.
Parity: logits of all decoded tokens against plain llama.cpp on the CPU, rms in standard deviations, and how often both would have chosen the same token; with --exact on the CPU device
the rms must be 0. With --gpu-layers, llama.cpp with its experts on the CPU (what `--n-cpu-moe` does) and llama.cpp all on the GPU are measured too.
"""

import argparse
import ctypes
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np
from llama_cpp import llama_cpp as C

import edgemoe
from edgemoe import engine, machine
from edgemoe.devices import devices

ROOT = Path(__file__).parent.parent
N_WARM = 32
PHASES = ("prompt", "decode", "second_prompt")
PARITY_BOUND = 0.1  # standard deviations of the logits, rms; as edgemoe verify


def texts() -> str:
    return "\n".join(p.read_text() for p in (ROOT / "README.md", ROOT / "docs" / "formats.md", ROOT / "docs" / "tree.md"))


class Experts(engine._Plain):
    """llama.cpp alone, dense layers on the GPU; its experts there, too, or on the CPU."""

    def __init__(self, path: str, on_cpu: bool):
        super().__init__([path])
        self.path, self.on_cpu = path, on_cpu

    def load(self, params):
        if self.on_cpu:
            C._lib.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
            self.overrides = (engine._BufferOverride * 2)(engine._BufferOverride(b"ffn_(up|down|gate|gate_up)_exps", C._lib.ggml_backend_cpu_buffer_type()), engine._BufferOverride(None, None))
            params.tensor_buft_overrides = ctypes.cast(self.overrides, ctypes.c_void_p)
        return engine._load_from_file(self.path.encode(), params)


def open_llama_cpp(path: str, on_cpu: bool, **options):
    import llama_cpp

    with engine._announced(Experts(path, on_cpu)) as reasons, engine._explained(path, reasons):
        return llama_cpp.Llama(path, **options)


def feed(llm, tokens: list[int]) -> tuple[float, np.ndarray]:
    """Seconds, and the last token's logits."""
    start = time.perf_counter()
    llm.eval(tokens)
    pointer = C.llama_get_logits_ith(llm.ctx, -1)  # waits for a device
    seconds = time.perf_counter() - start
    return seconds, np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def measure(llm, prompt: list[int], second: list[int], continuation: list[int] | None, n_decode: int) -> dict:
    """Greedy where there is no continuation."""
    first_seconds, logits = feed(llm, prompt)
    all_logits, seconds, fed = [], [], []
    before = None
    for i in range(N_WARM + n_decode):
        token = continuation[i] if continuation else int(logits.argmax())
        if i == N_WARM:
            before = stats_of(llm)
        s, logits = feed(llm, [token])
        fed.append(token)
        all_logits.append(logits)
        seconds.append(s)
    after = stats_of(llm)
    used = {name: after[name] - before[name] for name in after}
    second_seconds, last = feed(llm, second)
    return {
        "prompt": len(prompt) / first_seconds,
        "decode": 1 / median(seconds[N_WARM:]),
        "second_prompt": len(second) / second_seconds,
        "logits": np.stack([*all_logits, last]),
        "tokens": fed,
        "stats": used,
    }


def stats_of(llm) -> dict:
    return {k: v for k, v in llm.expert_stats().items() if isinstance(v, int)} if hasattr(llm, "expert_stats") else {}


def slot_counts(text: str, n_expert: int) -> list[int]:
    return [max(1, round(n_expert * float(t[:-1]) / 100)) if t.endswith("%") else int(t) for t in text.split(",")]


def row(name: str, results: list[dict], base: list[tuple[float, float, float]], reference: dict, n_decode: int) -> dict:
    """Medians over the rounds. `base`: what the variant without slots did in each round."""
    logits = [r["logits"] for r in results]
    rms = max(float(np.sqrt(np.mean((x - reference["logits"]) ** 2)) / reference["logits"].std()) for x in logits)
    same = min(int((x.argmax(1) == reference["logits"].argmax(1)).sum()) for x in logits)
    s = results[-1]["stats"]
    out = {"variant": name, "rms": rms, "same_best_token": same, "of": len(reference["logits"])}
    for i, phase in enumerate(PHASES):
        out[phase] = median(r[phase] for r in results)
        out[f"{phase}_ratio"] = median(r[phase] / b[i] for r, b in zip(results, base)) if base else 1.0
    if s.get("n_decode_accesses"):
        out |= {
            "hit": s["n_decode_hits"] / s["n_decode_accesses"], "n_hits": s["n_decode_hits"], "n_accesses": s["n_decode_accesses"],
            "demand_per_token": s["n_decode_demand"] / n_decode, "proactive_per_token": s["n_proactive"] / n_decode, "mb_per_token": s["bytes_loaded"] / n_decode / 1e6,
            "stall_ms_per_token": s["stall_us"] / n_decode / 1e3, "n_refused": s["n_refused"],
        }
    return out


HEAD = "| variant | prompt, tok/s | × no slots | decode, tok/s | × no slots | second prompt × | hits | D, P per token | MB loaded per token | rms | same best token |"


def table(rows: list[dict]) -> str:
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for r in rows:
        slots = (f"{r['n_hits']} of {r['n_accesses']} ({r['hit']:.1%}) | {r['demand_per_token']:.1f}, {r['proactive_per_token']:.1f} | {r['mb_per_token']:.1f}" if "hit" in r else "– | – | –")
        ok = "" if r["rms"] <= PARITY_BOUND else " **!**"
        lines.append(
            f"| {r['variant']} | {r['prompt']:.1f} | {r['prompt_ratio']:.2f} | {r['decode']:.1f} | {r['decode_ratio']:.2f} | {r['second_prompt_ratio']:.2f} | {slots} | {r['rms']:.2g}{ok} | "
            f"{r['same_best_token']}/{r['of']} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF")
    parser.add_argument("--device", default="CPU", help="where the slots are (default %(default)s)")
    parser.add_argument("--gpu-layers", type=int, default=0, help="dense layers on the GPU: -1 all (default 0)")
    parser.add_argument("--slots", default="5%,12.5%,25%,50%,100%", help="per layer, numbers or shares (default %(default)s)")
    parser.add_argument("--misses", default="cpu,load,auto", help="default %(default)s")
    parser.add_argument("--policy", help="default: the mode's own")
    parser.add_argument("--exact", action="store_true", help="llama.cpp's kernels on the CPU")
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write everything to this file")
    o = parser.parse_args()
    options = dict(n_ctx=2 * o.n_prompt + N_WARM + o.n_decode + 8, n_batch=512, n_ubatch=512, n_threads=o.threads, verbose=False)
    on_gpu = options | {"n_gpu_layers": o.gpu_layers}
    source = edgemoe.Source(o.model)
    n_expert = max(layer.n_expert for layer in source.layers)

    with closing(engine.open_plain([o.model], **options)) as llm:
        tokens = llm.tokenize(texts().encode())
        prompt, second = tokens[: o.n_prompt], tokens[o.n_prompt : 2 * o.n_prompt]
        if len(second) < o.n_prompt:
            sys.exit(f"--n-prompt {o.n_prompt}: the texts have {len(tokens)} tokens, wanted {2 * o.n_prompt}")
        reference = measure(llm, prompt, second, None, o.n_decode)

    no_slots = ("no slots", lambda: edgemoe.Llama(o.model, slots=0, exact=o.exact, **on_gpu))
    variants = [no_slots]
    if o.gpu_layers:
        variants += [("llama.cpp, experts on CPU", lambda: open_llama_cpp(o.model, True, **on_gpu)), ("llama.cpp, all on GPU", lambda: open_llama_cpp(o.model, False, **on_gpu))]
    for n in slot_counts(o.slots, n_expert):
        for misses in o.misses.split(","):
            if n >= n_expert and misses != o.misses.split(",")[0]:
                continue  # nothing is missed
            make = lambda n=n, misses=misses: edgemoe.Llama(o.model, slots=n, device=o.device, misses=misses, policy=o.policy, exact=o.exact, **on_gpu)  # noqa: E731
            variants.append((f"{n} slots ({n / n_expert:.0%}), misses {misses}", make))
    variants.append(("no slots again", no_slots[1]))

    device = next((d for d in devices() if d.name == o.device), None)
    about = {
        "model": Path(o.model).name, "cpu": machine.cpu_name(), "threads": o.threads, "device": o.device, "description": device.description if device else "",
        "gpu_layers": o.gpu_layers, "exact": o.exact, "n_prompt": o.n_prompt, "n_decode": o.n_decode, "policy": o.policy,
    }
    results: dict[str, list[dict]] = {name: [] for name, _ in variants}
    rows: list[dict] = []
    for i in range(o.rounds):
        for name, make in variants:
            print(f"round {i + 1} of {o.rounds}: {name}", file=sys.stderr)
            with closing(make()) as llm:
                results[name].append(measure(llm, prompt, second, reference["tokens"], o.n_decode))
        base = [tuple((a[p] + b[p]) / 2 for p in PHASES) for a, b in zip(results["no slots"], results["no slots again"])]
        rows = [row(name, results[name], base, reference, o.n_decode) for name, _ in variants]
        if o.json:  # after every round: a run that is cut short leaves what it had
            Path(o.json).write_text(json.dumps({"about": about | {"rounds": i + 1}, "rows": rows}, indent=1))
    print(json.dumps(about | {"rounds": o.rounds}))
    print(table(rows))
    # A variant of llama.cpp's own that differs is shown, not judged.
    bound = 0 if o.exact and o.device == "CPU" and not o.gpu_layers else PARITY_BOUND
    return int(any(r["rms"] > bound for r in rows if not r["variant"].startswith("llama.cpp")))


if __name__ == "__main__":
    sys.exit(main())
