"""Proof on the user's own model: the same tokens through plain llama.cpp and through edgemoe, and their logits compared.

With llama.cpp's kernels (exact=True) the logits must be equal, bit by bit: every byte, expert and stride is right. With edgemoe's own kernels, which add up in
another order, they must stay within a bound.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from llama_cpp import llama_cpp as C
from tqdm import tqdm

from edgemoe import _native, engine, machine
from edgemoe.errors import ModelError
from edgemoe.package import Source

PROMPT = "The lighthouse keeper counted the ships that passed in the night, and wrote their names into a long list. In the morning"
N_RANDOM_PROMPT = 32
# A sum in another order differs by 1e-7. Now and then that flips the rounding of an activation, or the choice of an expert, and each flip causes more, until the
# logits of a quantised model differ by 1 to 5 % rms. llama.cpp's own repacked kernels differ from its plain ones by as much, and so do both sides from the same
# weights in F32 (small demo model: llama.cpp by 3.8 %, edgemoe by 3.4 to 4.6 %, and from each other by 4.0 %).
BOUND = 0.1


@dataclass(frozen=True)
class Comparison:
    """edgemoe's logits against plain llama.cpp's, of all prompt and decoded tokens."""

    isa: str  # instruction set of edgemoe's kernels; "none": llama.cpp's computed everything
    max_difference: float  # of any logit
    rms_difference: float  # in standard deviations of plain's logits
    first_difference: int | None  # index of the first token position whose logits differ, counted from the start of the prompt
    n_greedy_equal: int  # decoded tokens for which both would have chosen the same


@dataclass(frozen=True)
class Report:
    """Speeds are tokens per second of a second pass over the same tokens, so that both sides find their weights in memory. edgemoe's are those of its kernels, or
    of llama.cpp's where only those were compared."""

    path: str
    reference: str
    n_prompt: int
    n_tokens: int
    bound: float
    exact: Comparison
    kernels: Comparison | None  # None: not asked for, or a dense model, which is llama.cpp's alone
    plain_prompt_rate: float
    plain_decode_rate: float
    edgemoe_prompt_rate: float
    edgemoe_decode_rate: float

    @property
    def ok(self) -> bool:
        return self.exact.max_difference == 0 and (self.kernels is None or self.kernels.rms_difference <= self.bound)

    def as_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        lines = [f"{self.path} against {self.reference}: {self.n_prompt} prompt and {self.n_tokens} decoded tokens"]
        if self.exact.max_difference == 0:
            lines.append("  exact    logits bit-identical")
        else:
            lines.append(f"  exact    max logit difference {self.exact.max_difference:.3g}, first at token {self.exact.first_difference}; {self._greedy(self.exact)}")
        if self.kernels:
            whose = "llama.cpp's, repacked" if self.kernels.isa == "none" else self.kernels.isa
            lines.append(f"  kernels  rms difference {self.kernels.rms_difference:.3g} of the logits' standard deviation (bound {self.bound:g}); {self._greedy(self.kernels)} ({whose})")
        lines.append(
            f"  speed    prompt {self.plain_prompt_rate:.1f} plain, {self.edgemoe_prompt_rate:.1f} edgemoe tok/s; "
            f"decode {self.plain_decode_rate:.1f} plain, {self.edgemoe_decode_rate:.1f} edgemoe tok/s (one pass each: no benchmark)"
        )
        return "\n".join([*lines, f"  {'OK' if self.ok else 'FAILED'}"])

    def _greedy(self, comparison: Comparison) -> str:
        return f"{comparison.n_greedy_equal} of {self.n_tokens} greedy choices agree"


def verify(
    path: str,
    n_tokens: int = 64,
    prompt: str = PROMPT,
    against: str | None = None,
    n_threads: int | None = None,
    bound: float = BOUND,
    exact: bool = False,
    progress: bool = False,
) -> Report:
    """Compares on the CPU. `exact` leaves out edgemoe's own kernels. `bound` is the largest rms difference that they may make, in standard deviations of plain's
    logits. `against` names the stacked GGUF that a package was made from; without it the package's own experts are put back together in memory, which takes as
    much as they are big. Raises ModelError when that does not fit or a model cannot be opened."""
    options = {
        "n_ctx": max(len(prompt.encode()), N_RANDOM_PROMPT) + n_tokens + 8,  # a token is at least a byte
        "n_threads": n_threads or machine.default_threads(),
        "n_batch": 512,
        "verbose": False,
        "logits_all": True,
    }
    with Source(path) as source:
        exact = exact or source.kind == "dense"
    # The first of two passes only warms up, for the speeds: not needed where none is told.
    n_exact_passes = 2 if exact else 1
    with tqdm(total=(2 + n_exact_passes + (0 if exact else 2)) * (1 + n_tokens), unit="step", leave=False, disable=not progress) as bar:
        # Plain first: only then has this process never seen edgemoe's device.
        bar.set_description("plain llama.cpp")
        with _reference(path, against) as (files, name):
            with closing(engine.open_plain(files, **options)) as llm:
                tokens = _prompt_tokens(llm, prompt)
                plain = _run(llm, tokens, n_tokens, None, 2, bar.update)
        bar.set_description("edgemoe, exact")
        with closing(engine.Llama(path, exact=True, **options)) as llm:
            ours = _run(llm, tokens, n_tokens, plain.continuation, n_exact_passes, bar.update)
        exact_part, kernels_part = _compared("none", plain, ours), None
        if not exact:
            bar.set_description("edgemoe")
            with closing(engine.Llama(path, **options)) as llm:
                ours = _run(llm, tokens, n_tokens, plain.continuation, 2, bar.update)
            kernels_part = _compared(_native.best_isa(), plain, ours)
    return Report(
        path=path,
        reference=name,
        n_prompt=len(tokens),
        n_tokens=n_tokens,
        bound=bound,
        exact=exact_part,
        kernels=kernels_part,
        plain_prompt_rate=plain.prompt_rate,
        plain_decode_rate=plain.decode_rate,
        edgemoe_prompt_rate=ours.prompt_rate,
        edgemoe_decode_rate=ours.decode_rate,
    )


@dataclass
class _Run:
    logits: np.ndarray  # [n_prompt + n_tokens, n_vocab]
    continuation: list[int]  # the tokens that were fed after the prompt
    greedy: list[int]  # the tokens this model would have chosen at the same places
    prompt_rate: float
    decode_rate: float


def _run(llm, tokens: list[int], n_tokens: int, forced: list[int] | None, n_passes: int, tick: Callable[[], object]) -> _Run:
    """Prompt, then n_tokens single steps: greedy ones, or `forced` ones so that both models see the same tokens. What is returned is the last pass."""
    for _ in range(n_passes):
        llm.reset()
        start = time.perf_counter()
        llm.eval(tokens)
        tick()
        prompt_done = time.perf_counter()
        greedy = []
        for i in range(n_tokens):
            greedy.append(int(llm.scores[llm.n_tokens - 1].argmax()))
            llm.eval([forced[i] if forced else greedy[-1]])
            tick()
        decode_done = time.perf_counter()
    return _Run(
        logits=llm.scores[: llm.n_tokens].copy(),
        continuation=forced or greedy,
        greedy=greedy,
        prompt_rate=len(tokens) / (prompt_done - start),
        decode_rate=n_tokens / (decode_done - prompt_done),
    )


def _compared(isa: str, plain: _Run, ours: _Run) -> Comparison:
    difference = np.abs(plain.logits - ours.logits).max(axis=1)
    different = np.flatnonzero(~(difference == 0))  # a NaN counts as different
    rms = np.sqrt(np.mean((plain.logits - ours.logits) ** 2, dtype=np.float64))
    return Comparison(
        isa=isa,
        max_difference=_finite_or_inf(difference.max()),
        rms_difference=_finite_or_inf(rms / plain.logits.std(dtype=np.float64)) if rms != 0 else 0.0,
        first_difference=int(different[0]) if len(different) else None,
        n_greedy_equal=sum(a == b for a, b in zip(plain.continuation, ours.greedy)),
    )


def _finite_or_inf(x) -> float:
    """Infinity for NaN, which would compare as small."""
    return float(x) if x == x else float("inf")


def _prompt_tokens(llm, prompt: str) -> list[int]:
    """The prompt's tokens; for a model without a tokenizer, seeded random ids."""
    if C.llama_vocab_type(llm._model.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
        return np.random.default_rng(0).integers(0, llm.n_vocab(), N_RANDOM_PROMPT).tolist()
    return llm.tokenize(prompt.encode())


@contextmanager
def _reference(path: str, against: str | None):
    """The files that plain llama.cpp is given, in order, and what to call them."""
    with Source(path) as source:
        if against:
            with Source(against) as other:
                if other.kind == "package":
                    raise ModelError(f"{against}: is a package; --against wants the GGUF that {path} was made from")
                yield other.files, against
        elif source.kind == "package":
            descriptor = _stacked_again(source)
            try:
                yield [*source.files, f"/proc/self/fd/{descriptor}"], "plain llama.cpp on the same experts, stacked again in memory"
            finally:
                os.close(descriptor)
        else:
            yield source.files, "plain llama.cpp"


def _stacked_again(source: Source) -> int:
    """A memory file with the second split that the package's ghost only pretends to be. Returns its descriptor."""
    usable = machine.memory().usable
    if source.expert_bytes > usable:
        raise ModelError(
            f"{source.path}: its experts need {machine.human_bytes(source.expert_bytes)} of memory to be stacked again, {machine.human_bytes(usable)} are usable; "
            "compare with the GGUF it was made from: --against SOURCE.gguf"
        )
    sidecar = GGUFReader(Path(source.path) / "router.gguf")
    header = next(t for t in sidecar.tensors if t.name == "edgemoe.ghost").data.tobytes()
    descriptor = os.memfd_create("edgemoe-stacked")
    os.pwrite(descriptor, header, 0)
    os.ftruncate(descriptor, len(header) + source.expert_bytes + 64 * 4 * len(source.layers))
    offsets = {t.name: t.data_offset for t in GGUFReader(f"/proc/self/fd/{descriptor}").tensors}
    for i, layer in enumerate(source.layers):
        for p, projection in enumerate(layer.projections):
            for expert in range(layer.n_expert):
                os.pwrite(descriptor, source.read(i, p, expert), offsets[projection.name] + expert * projection.bytes)
    return descriptor
