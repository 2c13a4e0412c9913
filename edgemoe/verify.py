"""Proof on the user's own model: the same tokens through plain llama.cpp and through edgemoe, logits compared bit by bit."""

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

from edgemoe import engine, machine
from edgemoe.errors import ModelError
from edgemoe.package import Source

PROMPT = "The lighthouse keeper counted the ships that passed in the night, and wrote their names into a long list. In the morning"
N_RANDOM_PROMPT = 32
N_PASSES = 2


@dataclass(frozen=True)
class Report:
    """Speeds are tokens per second of a second pass over the same tokens, so that both sides find their weights in memory."""

    path: str
    reference: str
    n_prompt: int
    n_tokens: int
    max_difference: float  # largest difference of any logit, prompt and decoded tokens
    bound: float
    greedy_equal: bool
    first_difference: int | None  # index of the first token position whose logits differ, counted from the start of the prompt
    plain_prompt_rate: float
    plain_decode_rate: float
    edgemoe_prompt_rate: float
    edgemoe_decode_rate: float

    @property
    def ok(self) -> bool:
        return self.greedy_equal and self.max_difference <= self.bound

    def as_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        same = "bit-identical" if self.max_difference == 0 else f"max logit difference {self.max_difference:.3g} (bound {self.bound:g}), first at token {self.first_difference}"
        return "\n".join(
            [
                f"{self.path} against {self.reference}: {self.n_prompt} prompt and {self.n_tokens} decoded tokens",
                f"  logits   {same}",
                f"  greedy   {'the same tokens' if self.greedy_equal else 'DIFFERENT tokens'}",
                f"  speed    prompt {self.plain_prompt_rate:.1f} plain, {self.edgemoe_prompt_rate:.1f} edgemoe tok/s; "
                f"decode {self.plain_decode_rate:.1f} plain, {self.edgemoe_decode_rate:.1f} edgemoe tok/s (one pass each: no benchmark)",
                f"  {'OK' if self.ok else 'FAILED'}",
            ]
        )


def verify(
    path: str,
    n_tokens: int = 64,
    prompt: str = PROMPT,
    against: str | None = None,
    n_threads: int | None = None,
    bound: float = 0.0,
    progress: bool = False,
) -> Report:
    """Compares on the CPU. `against` names the stacked GGUF that a package was made from; without it the package's own experts are put
    back together in memory, which takes as much as they are big. Raises ModelError when that does not fit or a model cannot be opened."""
    options = {
        "n_ctx": max(len(prompt.encode()), N_RANDOM_PROMPT) + n_tokens + 8,  # a token is at least a byte
        "n_threads": n_threads or machine.default_threads(),
        "n_batch": 512,
        "verbose": False,
        "logits_all": True,
    }
    with tqdm(total=2 * N_PASSES * (1 + n_tokens), unit="step", leave=False, disable=not progress) as bar:
        # Plain first: only then has this process never seen edgemoe's device.
        bar.set_description("plain llama.cpp")
        with _reference(path, against) as (files, name):
            with closing(engine.open_plain(files, **options)) as llm:
                tokens = _prompt_tokens(llm, prompt)
                plain = _run(llm, tokens, n_tokens, None, bar.update)
        bar.set_description("edgemoe")
        with closing(engine.Llama(path, **options)) as llm:
            ours = _run(llm, tokens, n_tokens, plain.continuation, bar.update)
    difference = np.abs(plain.logits - ours.logits).max(axis=1)
    different = np.flatnonzero(~(difference == 0))  # a NaN counts as different
    worst = float(difference.max())
    return Report(
        path=path,
        reference=name,
        n_prompt=len(tokens),
        n_tokens=n_tokens,
        max_difference=worst if worst == worst else float("inf"),
        bound=bound,
        greedy_equal=plain.continuation == ours.greedy,
        first_difference=int(different[0]) if len(different) else None,
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


def _run(llm, tokens: list[int], n_tokens: int, forced: list[int] | None, tick: Callable[[], object]) -> _Run:
    """Prompt, then n_tokens single steps: greedy ones, or `forced` ones so that both models see the same tokens. The first pass only warms up."""
    for _ in range(N_PASSES):
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
