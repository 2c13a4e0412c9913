"""How well cues and the shift of the routing find where a reasoning takes another line.

    python scripts/stage_quality.py                                   cues against labels made by hand, on chains of thought, and on answers without thinking
    python scripts/stage_quality.py --model demo.gguf                 also the shift against the labels: that of a model that reads the chains
    python scripts/stage_quality.py --trace t.npz [--cues set.json]   the shift too, against cues and the channel's end, on a trace with text

Texts are those of ../shared/cot. Their tokens are not known: pieces are words with the space before them, and counts of tokens are those that the data sets give.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np

from edgemoe import annotate
from edgemoe.routing_shift import ShiftOptions
from edgemoe.stage import CLOSE, CUES, OPEN, Automaton, boundaries, read_cues
from edgemoe.trace import Trace

ROOT = Path(__file__).parent.parent
COT = ROOT.parent / "shared" / "cot"
LABELS = ROOT / "tests" / "data" / "stage_labels.json"
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
PIECE = re.compile(r"\s?\w+|\W")


def thinking_of(text: str) -> str:
    return text.split("</think>")[0].split("<think>")[-1]


def sentence_starts(text: str) -> list[int]:
    """Of each sentence that is not empty, its first character."""
    starts, at = [], 0
    for gap in [*SENTENCE.finditer(text), None]:
        end = gap.start() if gap else len(text)
        if text[at:end].strip():
            starts.append(at)
        at = gap.end() if gap else end
    return starts


def cue_sentences(text: str, automaton: Automaton, min_stage: int = 0) -> list[tuple[int, str]]:
    """(sentence, kind) of every cue in a thinking."""
    starts = sentence_starts(text)
    found = boundaries(PIECE.findall(text), automaton, where="everywhere", min_stage=min_stage)
    return [(int(np.searchsorted(starts, b.char, side="right")) - 1, b.kind) for b in found if b.kind not in (OPEN, CLOSE)]


def matched(found: list[int], wanted: list[int], slack: int) -> int:
    """Pairs that are no further apart than slack, each used once; both ascending."""
    n = at = 0
    for place in wanted:
        while at < len(found) and found[at] < place - slack:
            at += 1
        if at < len(found) and found[at] <= place + slack:
            n, at = n + 1, at + 1
    return n


def chains(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def labelled() -> list[tuple[str, str, list[int]]]:
    """(name, thinking, labels) of the chains that were labelled. Exits when a text is another one than was labelled."""
    rows = {}
    found = []
    for each in json.loads(LABELS.read_text(encoding="utf-8"))["chains"]:
        rows.setdefault(each["file"], {r["item_id"]: r for r in chains(COT / each["file"])})
        text = rows[each["file"]][each["item_id"]]["full_response"]
        if hashlib.sha256(text.encode()).hexdigest() != each["sha256"]:
            sys.exit(f"{each['file']}: {each['item_id']}: is another text than was labelled")
        found.append((f"{each['file'].split('_')[1]} {each['item_id'][-2:]}", thinking_of(text), each["boundaries"]))
    return found


def against_labels(automaton: Automaton, min_stage: int) -> None:
    print("| chain | sentences | labels | cues | of these right (exactly / at most one sentence off) |\n|---|---|---|---|---|")
    totals, kinds = Counter(), Counter()
    for name, text, labels in labelled():
        cues = cue_sentences(text, automaton, min_stage)
        found = sorted({s for s, _ in cues})
        exact, near = (matched(found, labels, slack) for slack in (0, 1))
        print(f"| {name} | {len(sentence_starts(text))} | {len(labels)} | {len(found)} | {exact} / {near} |")
        totals.update(labels=len(labels), found=len(found), exact=exact, near=near)
        for s, kind in cues:
            kinds[kind, any(abs(s - at) <= 1 for at in labels)] += 1
    for name in ("exact", "near"):
        n, found, labels = totals[name], totals["found"], totals["labels"]
        print(f"{'exactly' if name == 'exact' else 'at most one sentence off'}: precision {n}/{found} = {n / found:.2f}, recall {n}/{labels} = {n / labels:.2f}")
    for kind in sorted({k for k, _ in kinds}):
        print(f"{kind}: {kinds[kind, True]} of {kinds[kind, True] + kinds[kind, False]} cues at most one sentence from a label")


def shift_against_labels(model: str, automaton: Automaton, quantiles: list[float]) -> None:
    """The shift of a model that reads the labelled chains, alone and with the cues, beside as many sentences drawn at random."""
    import edgemoe

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, closing(edgemoe.Llama(model, n_ctx=8192, logits_all=True, verbose=False)) as llm:
        with edgemoe.Recorder(llm, Path(folder, "read.npz")) as recorder:
            for name, text, _ in labelled():
                with recorder.sequence(name=name):
                    llm.eval(llm.tokenize(text.encode(), add_bos=False)[:8192])
        trace = Trace.load(Path(folder, "read.npz"))
        print(f"\n{Path(model).name} reads the labelled chains: {trace.n_tokens} tokens; precision, recall exactly; at most one sentence off; the same of as many sentences at random")
        print("| found by | boundaries | precision | recall | precision, near | recall, near | at random: near |\n|---|---|---|---|---|---|---|")
        for quantile in [None, *quantiles]:
            threshold = annotate.shift_threshold(trace, quantile) if quantile else np.inf
            for both in (False, True) if quantile else (True,):
                score(f"{'cues and ' if both and quantile else ''}{f'shift, quantile {quantile}' if quantile else 'cues'}", trace, automaton, ShiftOptions(threshold), both, rng)


def score(name: str, trace: Trace, automaton: Automaton, shift: ShiftOptions, with_cues: bool, rng) -> None:
    """A line of the table: what is found in every chain against its labels."""
    n, n_labels, right, by_chance = 0, 0, [0, 0], []
    for s, pieces, (_, text, labels) in zip(trace.sequences(), annotate.pieces_of(trace), labelled()):
        starts = sentence_starts(text)
        in_bytes = [len(text[:c].encode()) for c in starts]
        ends = np.cumsum([len(annotate.as_bytes(p)) for p in pieces])
        rows = [m.row for m in annotate.by_shift(s, trace.n_expert, shift)]
        found = {max(0, int(np.searchsorted(in_bytes, ends[r], side="left")) - 1) for r in rows} | ({c for c, _ in cue_sentences(text, automaton)} if with_cues else set())
        n, n_labels = n + len(found), n_labels + len(labels)
        right = [k + matched(sorted(found), labels, slack) for k, slack in zip(right, (0, 1))]
        by_chance.append(np.mean([matched(sorted(rng.choice(len(starts), len(found), replace=False)), labels, 1) for _ in range(100)]))
    shares = [x for k in right for x in (k / max(1, n), k / n_labels)]
    print(f"| {name} | {n} | {' | '.join(f'{x:.2f}' for x in shares)} | {sum(by_chance) / max(1, n):.2f}, {sum(by_chance) / n_labels:.2f} |")


def on_chains(automaton: Automaton, min_stage: int) -> None:
    print("\n| model | chains | tokens | boundaries | per chain: median, least to most | per 1000 tokens | most frequent cues |\n|---|---|---|---|---|---|---|")
    for path in sorted(COT.glob("markyx316_*.jsonl")):
        rows = chains(path)
        found = [boundaries(PIECE.findall(thinking_of(r["full_response"])), automaton, where="everywhere", min_stage=min_stage) for r in rows]
        counts, cues = [len(f) for f in found], Counter(b.cue for f in found for b in f)
        n_tokens = sum(r["trace_token_count"] for r in rows)
        top = ", ".join(f"{cue} {n}" for cue, n in cues.most_common(5))
        print(f"| {rows[0]['model_short_name']} | {len(rows)} | {n_tokens} | {sum(counts)} | {np.median(counts):.0f}, {min(counts)} to {max(counts)} | {1000 * sum(counts) / n_tokens:.1f} | {top} |")


def on_answers(automaton: Automaton) -> None:
    rows = chains(COT / "mbolt_qwen3-30b-a3b_gen500.jsonl")
    n_tokens = sum(r["n_tok"] for r in rows)
    for where in ("everywhere", "thinking"):
        cues = Counter(b.cue for r in rows for b in boundaries(PIECE.findall(r["out"]), automaton, where=where))
        n = sum(cues.values())
        print(f"\nanswers without thinking, cues {where}: {n} false boundaries in {n_tokens} tokens of {len(rows)} answers, {1000 * n / n_tokens:.3f} per 1000; {dict(cues)}")


def on_trace(path: str, automaton: Automaton, quantiles: list[float], slack: int) -> None:
    """The shift beside cues and the close of the thinking, which are told by the text, and beside as many boundaries at chance places."""
    trace = Trace.load(path)
    pieces = annotate.pieces_of(trace)
    where = annotate.where_of(pieces)
    cues = [annotate.by_cues(s, p, automaton, where) for s, p in zip(trace.sequences(), pieces)]
    n_tokens, n_close = trace.n_tokens, sum(m.kind == CLOSE for marks in cues for m in marks)
    print(f"\n{path}: {n_tokens} tokens, {sum(m.kind != CLOSE for c in cues for m in c)} cues, {n_close} ends of the thinking; right: at most {slack} tokens off")
    print("| windows | quantile | threshold | shifts | at a cue | at chance | ends of thinking found | at chance |\n|---|---|---|---|---|---|---|---|")
    for short, long in ((16, 128), (16, 64), (32, 128)):
        for quantile in quantiles:
            options = ShiftOptions(short=short, long=long)
            options = ShiftOptions(annotate.shift_threshold(trace, quantile, options), short, long)
            shifts = [annotate.by_shift(s, trace.n_expert, options) for s in trace.sequences()]
            chance = annotate.random_like(annotate.with_stages(trace, shifts, {}))
            line = []
            for marks in (shifts, chance):
                rows = [[m.row for m in each] for each in marks]
                line.append([sum(matched(r, [m.row for m in c if (m.kind == CLOSE) == close], slack) for r, c in zip(rows, cues)) for close in (False, True)])
            n = sum(map(len, shifts))
            print(f"| {short}, {long} | {quantile} | {options.threshold:.4f} | {n} | {line[0][0]} | {line[1][0]} | {line[0][1]} of {n_close} | {line[1][1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cues", metavar="FILE", help="instead of the default cues")
    parser.add_argument("--min-stage", type=int, default=0, metavar="N", help="debounce in words (default %(default)s)")
    parser.add_argument("--model", metavar="GGUF", help="a MoE model that reads the labelled chains, so that there is routing to shift")
    parser.add_argument("--trace", metavar="TRACE", help="a trace that says what text its tokens are")
    parser.add_argument("--quantile", type=float, nargs="+", default=[0.9, 0.95, 0.98], metavar="Q", help="thresholds of the shift (default %(default)s)")
    parser.add_argument("--slack", type=int, default=8, metavar="N", help="tokens between a shift and what it is compared with (default %(default)s)")
    options = parser.parse_args()
    automaton = Automaton(read_cues(options.cues) if options.cues else CUES)
    if options.trace:
        on_trace(options.trace, automaton, options.quantile, options.slack)
        return
    if not COT.exists():
        sys.exit(f"{COT}: not here")
    against_labels(automaton, options.min_stage)
    if options.model:
        shift_against_labels(options.model, automaton, options.quantile)
    on_chains(automaton, options.min_stage)
    on_answers(automaton)


if __name__ == "__main__":
    main()
