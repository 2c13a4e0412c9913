"""A conversation with a model: the messages so far, and one reply at a time. Knows nothing of terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import jinja2
from llama_cpp import llama_cpp as C

from edgemoe.errors import EdgemoeError
from edgemoe.estimate import Estimate


class ContextFull(EdgemoeError):
    """The conversation no longer fits the context."""


class TemplateError(EdgemoeError):
    """The model has no chat template, or its template refuses the conversation."""


@dataclass
class Reply:
    """What one reply cost. Times are those of llama.cpp's own counters: prompt tokens are the ones that were really read, not those found in the KV cache."""

    text: str = ""
    finish_reason: str = ""  # "stop", "length" (max_tokens), "context" (context full) or "interrupted"
    n_prompt: int = 0
    n_answer: int = 0
    prompt_s: float = 0.0
    answer_s: float = 0.0
    wall_s: float = 0.0
    experts: dict[str, int] = field(default_factory=dict)

    @property
    def prompt_rate(self) -> float:
        return self.n_prompt / self.prompt_s if self.prompt_s else 0.0

    @property
    def answer_rate(self) -> float:
        return self.n_answer / self.answer_s if self.answer_s else 0.0

    def line(self) -> str:
        """One line for a human."""
        parts = [f"prompt {self.n_prompt} tokens, {self.prompt_rate:.1f} tok/s", f"answer {self.n_answer} tokens, {self.answer_rate:.1f} tok/s"]
        e = self.experts
        if e.get("n_accesses"):
            parts.append(f"experts {e['n_accesses']} accesses, {e['n_computed_on_cpu']} computed on the CPU, {e['bytes_accessed'] / 1e6:.0f} MB of weights")
        asked = e.get("n_decode_accesses", 0)
        if asked:
            parts.append(
                f"slots {e['n_decode_hits']} hits of {asked} ({e['n_decode_hits'] / asked:.0%}), D {e['n_decode_demand']}, P {e['n_proactive']}, C {e['n_decode_computed']}, "
                f"{e['bytes_loaded'] / 1e6:.0f} MB loaded, {e['stall_us'] / 1e6:.2f} s waited"
            )
        if e.get("n_ram_accesses"):
            parts.append(
                f"RAM {e['n_ram_hits']} hits of {e['n_ram_accesses']} ({e['n_ram_hits'] / e['n_ram_accesses']:.0%}), D {e['n_ram_demand']}, P {e['n_ram_proactive']}, "
                f"{e['ram_bytes_read'] / 1e6:.0f} MB from disk, {e['ram_prompt_bytes_read'] / 1e6:.0f} MB more for the prompt, {e['ram_stall_us'] / 1e6:.2f} s waited"
            )
        return " | ".join(parts)

    def as_dict(self) -> dict:
        return asdict(self) | {"prompt_rate": self.prompt_rate, "answer_rate": self.answer_rate}


class Session:
    """`llm` is an edgemoe.Llama (or a llama_cpp.Llama). `expected`: how fast it should decode, if somebody said so. `sampling` is passed on to its completion calls:
    temperature, top_p, seed, max_tokens, ..."""

    def __init__(self, llm, system: str = "", expected: Estimate | None = None, **sampling):
        self.llm = llm
        self.expected = expected
        self.sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.replies: list[Reply] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def require_template(self) -> None:
        """Raises TemplateError when the model brings no chat template and none was chosen."""
        # Without one llama_cpp falls back to the Llama 2 format without a word, which most models answer with nonsense.
        if self.llm.chat_handler is None and "tokenizer.chat_template" not in self.llm.metadata and self.llm.chat_format == "llama-2":
            raise TemplateError("this model has no chat template: use `edgemoe run PATH --raw -p TEXT`, or choose a format with --chat-format (chatml, llama-3, ...)")

    def say(self, text: str) -> Iterator[str]:
        """Adds a user message and yields the answer piece by piece. Afterwards self.replies[-1] has its figures; an interrupted answer stays in the
        history as far as it came. Raises ContextFull, TemplateError; both leave the history as it was."""
        self.require_template()
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            chunks = self.llm.create_chat_completion(asked, stream=True, **self.sampling)
            yield from self._collect(chunk["choices"][0] for chunk in chunks)
        except (jinja2.TemplateError, TypeError, UnicodeError) as e:
            raise TemplateError(f"the model's chat template failed: {e}") from e
        except ValueError as e:
            raise self._explained(e) from e
        self.messages = [*asked, {"role": "assistant", "content": self.replies[-1].text}]

    def complete(self, text: str) -> Iterator[str]:
        """Continues `text` as it stands: no template, no history."""
        try:
            chunks = self.llm.create_completion(text, stream=True, **self.sampling)
            yield from self._collect(chunk["choices"][0] for chunk in chunks)
        except ValueError as e:
            raise self._explained(e) from e

    def _explained(self, error: ValueError) -> Exception:
        if "exceed context window" in str(error):
            n_tokens = str(error).split("(")[1].split(")")[0]
            return ContextFull(f"the context is full: the text so far has {n_tokens} tokens, the context holds {self.llm.n_ctx()}")
        return error if isinstance(error, EdgemoeError) else TemplateError(f"the model's chat template refuses: {error}")

    def _collect(self, choices) -> Iterator[str]:
        reply = Reply()
        before = _counts(self.llm)
        C.llama_perf_context_reset(self.llm.ctx)
        start = time.perf_counter()
        try:
            for choice in choices:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reply.finish_reason = choice["finish_reason"] or reply.finish_reason
                reply.text += piece
                if piece:
                    yield piece
        except KeyboardInterrupt:
            reply.finish_reason = "interrupted"
        finally:
            self._measure(reply, before, start)
        self.replies.append(reply)

    def _measure(self, reply: Reply, before: dict[str, int], start: float) -> None:
        reply.wall_s = time.perf_counter() - start
        perf = C.llama_perf_context(self.llm.ctx)
        reply.n_prompt, reply.prompt_s = perf.n_p_eval, perf.t_p_eval_ms / 1000
        reply.n_answer, reply.answer_s = perf.n_eval, perf.t_eval_ms / 1000
        reply.experts = {name: n - before[name] for name, n in _counts(self.llm).items()}
        if reply.finish_reason == "length" and self.llm.n_tokens >= self.llm.n_ctx() - 1:
            reply.finish_reason = "context"


def _counts(llm) -> dict[str, int]:
    return llm.expert_stats() if hasattr(llm, "expert_stats") else {}
