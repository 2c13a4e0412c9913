"""Recording the routing of a running model as a trace.

>>> llm = edgemoe.Llama("model.gguf", n_ctx=4096)
>>> with edgemoe.Recorder(llm, "trace.npz", hidden=True) as recorder:
...     for prompt in prompts:
...         with recorder.sequence(name=prompt[:40]):
...             llm(prompt, max_tokens=200, temperature=0)
>>> trace = edgemoe.Trace.load("trace.npz")

What is recorded is what the experts are asked for: a row for each token that is computed. The last token that is sampled is not, so it has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as C

from edgemoe import __version__, _native
from edgemoe.engine import Llama
from edgemoe.errors import EdgemoeError, TraceError
from edgemoe.trace import DECODE, FORMAT, PROMPT, TraceWriter, absent, ids_dtype

RULES = {  # what is said about the probabilities in a trace, by how the model makes them
    "chosen": "{}, of the chosen experts, before llama.cpp normalises or scales them",
    "all": "{}, of every expert, without the bias that some models choose by",
}


class Recorder:
    """Writes a trace of what `llm` computes within recorder.sequence(); leaving the context writes the file.

    full_probs: the probabilities of all experts instead of those of the chosen. hidden: also what each router saw, 2 * n_embd bytes per token and layer.
    Large arrays wait on disk beside `path`. When the context is left by Ctrl-C the sequences that are complete are written, by another exception nothing is.

    A prompt of several tokens is computed in micro-batches, rows of one share a step. In the last layer llama.cpp computes only those tokens of a prompt whose
    logits are wanted (the last one, unless logits_all=True): the others are absent there. Tokens of an eval call with more than one token are prompt rows,
    and so are those of the first call of a sequence.

    Raises TraceError when the file cannot be written, EdgemoeError when the model has no routers to hear.
    """

    def __init__(self, llm: Llama, path: str | os.PathLike, *, full_probs: bool = False, hidden: bool = False, source: str = "", options: dict | None = None):
        """`source` and `options` are kept in the trace: where the prompts came from, and how they were answered."""
        self.llm = llm
        layers = llm.source.layers
        if not layers:
            raise EdgemoeError(f"{llm.model_path}: a dense model has no routing to record")
        if not llm._experts.tap:
            raise EdgemoeError(f"{llm.model_path}: llama.cpp has all experts on the GPU, and nobody listens to the routers: open the model with tap=True")
        if llm._ctx.listener:
            raise EdgemoeError(f"{llm.model_path}: is being recorded already")
        self.n_layers, self.n_expert, self.n_embd = len(layers), max(layer.n_expert for layer in layers), llm.n_embd()
        named = "expert_used_count"
        self.n_used = (llm.kv_overrides or {}).get(f"{llm.source.architecture}.{named}") or llm.source.integer(named)
        self.full_probs, self.hidden = full_probs, hidden
        self.meta = {
            "format": FORMAT,
            "model": llm.metadata.get("general.name") or os.path.basename(llm.model_path.rstrip("/")),
            "architecture": llm.source.architecture,
            "fingerprint": llm.source.package_fingerprint(),
            "n_expert": self.n_expert,
            "n_used": self.n_used,
            "layers": [layer.layer for layer in layers],
            "bytes_per_expert": [layer.bytes_per_expert for layer in layers],
            "n_embd": self.n_embd,
            "probs": "all" if full_probs else "chosen",
            "probs_are": "",
            "recorded": {"how": "edgemoe trace", "version": __version__, "llama_cpp": llama_cpp.__version__, "options": options or {}},
            "source": source,
            "sequences": [],
            "pieces": {},
        }
        self._ffi, self._lib = _native.load()
        self.writer = TraceWriter(path, self.meta, probs=self.n_expert if full_probs else self.n_used, hidden=self.n_embd if hidden else 0)
        try:
            self._handle = llm._experts.open_recorder(self.n_used, self.n_expert, self.n_embd, C.llama_n_ubatch(llm.ctx))
        except EdgemoeError:
            self.writer.close()
            raise
        self._open = False  # within a sequence
        self._phase = None  # of the batches that come; None: the sequence has just begun
        llm._ctx.listener = self

    @property
    def n_tokens(self) -> int:
        """Rows so far, those of the open sequence too."""
        return self.writer.n_tokens

    @property
    def n_sequences(self) -> int:
        """Complete ones."""
        return self.writer.n_sequences

    @contextmanager
    def sequence(self, **notes) -> Iterator[None]:
        """What is computed within is one sequence, from an empty KV cache on. `notes` (numbers, short texts) are kept in meta["sequences"]. An exception drops it."""
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()
        self._open, self._phase = True, None
        try:
            yield
            if self.writer.n_open:
                self._keep_pieces(set(self.writer.small["token_ids"][-self.writer.n_open :]))
                self.meta["sequences"].append(notes)
                self.writer.end_sequence()
        finally:
            self._open = False
            self.writer.drop_sequence()

    def _keep_pieces(self, tokens: set[int]) -> None:
        """The text of each. Bytes that are no UTF-8 by themselves become surrogates, as in Python's file names."""
        pieces = self.meta["pieces"]
        for token in sorted(t for t in tokens if str(t) not in pieces):
            pieces[str(token)] = self.llm.detokenize([token], special=True).decode("utf-8", "surrogateescape")

    def evaluates(self, n_tokens: int) -> None:
        """Called by the Llama before it computes so many tokens, in one batch or several."""
        self._phase = PROMPT if self._phase is None or n_tokens > 1 else DECODE

    @contextmanager
    def batch(self, batch) -> Iterator[None]:
        """Around each llama_decode."""
        if not self._open:
            yield
            return
        tokens, outputs = self._checked(batch)
        n = len(tokens)
        shape = (n, self.n_layers)
        rows = {"ids": np.full((*shape, self.n_used), absent(np.uint16), np.uint16)}
        name, width = ("probs", self.n_expert) if self.full_probs else ("chosen", self.n_used)
        rows[name] = np.zeros((*shape, width), np.float16)
        if self.hidden:
            rows["hidden"] = np.zeros((*shape, self.n_embd), np.float16)
        to = self._ffi.new("struct edgemoe_recording *", {"n_tokens": n, "outputs": self._ffi.from_buffer("int8_t[]", outputs)})
        for field, array in rows.items():
            setattr(to, field, self._ffi.cast("uint16_t *", array.ctypes.data))
        self._lib.edgemoe_recorder_begin(self._handle, to)
        complete = False
        try:
            yield
            complete = True
        finally:
            n_steps = self._lib.edgemoe_recorder_end(self._handle)
            if complete and n_steps < 0:
                raise EdgemoeError(f"{self.llm.model_path}: {_native.last_error()}")
        gating = _native.text(self._lib.edgemoe_recorder_gating(self._handle))
        if self.full_probs and gating == "softmax over the chosen":
            gating = "softmax over all (the model takes it over the chosen)"
        self.meta["probs_are"] = RULES[self.meta["probs"]].format(gating)
        step = np.arange(n) // C.llama_n_ubatch(self.llm.ctx)
        assert n_steps == step[-1] + 1
        ids = rows["ids"].astype(ids_dtype(self.n_expert))  # absent stays absent: all bits are set
        self.writer.append(ids, tokens, PROMPT if self._phase is None else self._phase, step, rows[name], rows.get("hidden"))

    def _checked(self, batch) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and output flags of a batch that can be recorded."""
        n = batch.n_tokens
        if not batch.token or not batch.logits or len({batch.seq_id[i][0] for i in range(n)}) != 1:
            raise EdgemoeError(f"{self.llm.model_path}: only batches of tokens of one sequence can be recorded")
        return np.ctypeslib.as_array(batch.token, (n,)).copy(), np.ctypeslib.as_array(batch.logits, (n,)).copy()

    def finish(self) -> None:
        """Writes the trace: the sequences that are complete. Raises TraceError, also when there is none."""
        if not self.n_sequences:
            raise TraceError(f"{self.writer.path}: no sequence was recorded")
        self.writer.finish()

    def close(self) -> None:
        """Stops listening; what was not finished is gone."""
        if self._handle:
            if self.llm._experts.handle:
                self.llm._ctx.listener = None
                self._lib.edgemoe_recorder_close(self._handle)
            self._handle = None
            self.writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind, *exc) -> None:
        try:
            if kind is None or (issubclass(kind, KeyboardInterrupt) and self.n_sequences):
                self.finish()
        finally:
            self.close()
