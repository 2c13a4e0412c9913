"""Stages in the simulator: sets chosen at cues, at shifts of the routing and at both, beside as many choices at chance places and at equal distances, and beside what needs no
stages. Prints a Markdown table per capacity.

    edgemoe trace import ../shared/traces/gptoss20b/mmlu_test.npz --expert-bytes 13219200 --out test.npz
    python scripts/bench_stages.py test.npz --train dev.npz --sequences 60

hit: of the accesses A in decoding; P: experts brought in, which are charged (adjusted hit = hits / (A + P)); ms/token: experts only, as `edgemoe simulate` predicts it. 95 %: of the
time saved over the same number of choices at equal distances, over sequences drawn again.
"""

import argparse

from edgemoe import annotate, simulate
from edgemoe.annotate import Mark
from edgemoe.routing_shift import ShiftOptions
from edgemoe.simulate import Bootstrap, Figures, Outcome, Rates, Run
from edgemoe.replay import replay
from edgemoe.stage import CUES, Automaton, read_cues
from edgemoe.trace import Trace


def marks_by_cues(trace: Trace, automaton: Automaton, min_stage: int) -> list[list[Mark]]:
    pieces = annotate.pieces_of(trace)
    return annotate.all_by_cues(trace, pieces, automaton, annotate.where_of(pieces), min_stage)


def stagings(trace: Trace, train: Trace, options) -> dict[str, list[list[Mark]]]:
    """Boundaries by the name of how they were found."""
    automaton = Automaton(read_cues(options.cues) if options.cues else CUES)
    shift = ShiftOptions(annotate.shift_threshold(train, options.quantile), min_stage=max(ShiftOptions.min_stage, options.min_stage))
    cues = marks_by_cues(trace, automaton, options.min_stage)
    shifts = [annotate.by_shift(s, trace.n_expert, shift) for s in trace.sequences()]
    both = [annotate.merged([*a, *b], options.min_stage) for a, b in zip(cues, shifts)]
    found = {"cues": cues, "shift": shifts, "cues and shift": both}
    like = annotate.with_stages(trace, cues, {})
    found |= {f"at random {seed}": annotate.random_like(like, seed) for seed in range(options.draws)}
    found["at equal distances"] = annotate.evenly_like(like)
    for most in options.max_stage:
        name = f"cues, and after {most}"
        found[name] = [annotate.filled(s, marks, most) for s, marks in zip(trace.sequences(), cues)]
        like = annotate.with_stages(trace, found[name], {})
        found |= {f"as many as {name}, at random": annotate.random_like(like), f"as many as {name}, at equal distances": annotate.evenly_like(like)}
    return found | {f"every {n}": annotate.every(trace, n) for n in options.every}


def coherence(trace: Trace, marks: list[list[Mark]]) -> tuple[float, int]:
    n = annotate.n_dominant_of(trace)
    each = [o for s, m in zip(trace.sequences(), marks) for o in annotate.tcseq(annotate.stage_counts(s, [x.row for x in m], trace.n_expert), n)]
    return sum(each) / max(1, len(each)), len(each)


def figures(trace: Trace, policy: str, n_slots: int, misses: str, learned) -> Figures:
    found = replay(trace, policy, n_slots, misses, learned=learned)
    return simulate.figures_of(trace, [Outcome(Run(policy, n_slots, misses), found.counts)], Rates())[0]


def line(name: str, f: Figures, even: Figures | None, boot: Bootstrap) -> str:
    n = {k: int(v.sum()) for k, v in f.counts.items()}
    saved = boot.interval(lambda total: 1e3 * (even.time(total) - f.time(total))) if even and even is not f else None
    interval = f"{saved[0]:+.2f} to {saved[1]:+.2f}" if saved else ""
    adjusted = n["n_hits"] / (n["n_accesses"] + n["n_proactive"])
    return f"| {name} | {n['n_hits']}/{n['n_accesses']} | {100 * f.hit():.2f} | {n['n_proactive']} | {100 * adjusted:.2f} | {f.loaded() / 1e6:.1f} | {1e3 * f.time():.2f} | {interval} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a trace that says what text its tokens are")
    parser.add_argument("--train", required=True, help="another, for static and the threshold of the shift")
    parser.add_argument("--sequences", type=int, metavar="N", help="only the first N")
    parser.add_argument("--capacity", default="12.5%,25%,50%")
    parser.add_argument("--misses", choices=("cpu", "load"), default="cpu")
    parser.add_argument("--policy", nargs="+", default=["lru", "lfu", "static", "placement"], help="beside the stages (default %(default)s)")
    parser.add_argument("--stage", default="stage", help="the stage policy with its parameters (default %(default)s)")
    parser.add_argument("--cues", metavar="FILE")
    parser.add_argument("--min-stage", type=int, default=0, metavar="N")
    parser.add_argument("--max-stage", type=int, nargs="*", default=[], metavar="N", help="also cues with stages parted that are longer")
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--every", type=int, nargs="*", default=[64], metavar="N")
    parser.add_argument("--draws", type=int, default=3, help="of random boundaries (default %(default)s)")
    options = parser.parse_args()
    trace, train = Trace.load(options.trace), Trace.load(options.train)
    simulate.require_apart([train], [trace])
    if options.sequences:
        trace = trace.select(range(min(options.sequences, trace.n_sequences)))
    found = stagings(trace, train, options)
    print(f"{trace.n_tokens} tokens in {trace.n_sequences} sequences of {trace.meta['model']}; {options.stage}; misses: {options.misses}\n")
    print("| boundaries | how many | TCseq |\n|---|---|---|")
    for name, marks in found.items():
        overlap, n = coherence(trace, marks)
        print(f"| {name} | {n} | {overlap:.3f} |")
    staged = {name: annotate.with_stages(trace, marks, {}) for name, marks in found.items()}
    learned = simulate.learn([train], options.policy)
    boot = Bootstrap(trace.n_sequences)
    for n_slots in simulate.read_capacities(options.capacity, trace.n_expert):
        print(f"\n{n_slots} of {trace.n_expert} slots\n\n| policy | hits/A | hit % | P | adjusted % | MB/token | ms/token | saved, 95 % |\n|---|---|---|---|---|---|---|---|", flush=True)
        even = figures(staged["at equal distances"], options.stage, n_slots, options.misses, None)
        for policy in options.policy:
            print(line(policy, figures(trace, policy, n_slots, options.misses, learned), even, boot), flush=True)
        for name, each in staged.items():
            f = even if name == "at equal distances" else figures(each, options.stage, n_slots, options.misses, None)
            print(line(f"{options.stage}, {name}", f, even, boot), flush=True)
        for name in ("cues", "at equal distances"):
            print(line(f"oracle, {name}", figures(staged[name], "oracle", n_slots, options.misses, None), even, boot), flush=True)


if __name__ == "__main__":
    main()
