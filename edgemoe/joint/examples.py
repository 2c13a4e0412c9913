"""Texts to post-train on: questions with answers, cut into tokens by the model's own GGUF. What is learned from, and what heads foretell, is the answer; questions are context.

A file is JSON lines: `question` or `problem` or `prompt`, with `answer` or `solution` or `response`; or `text`, of which everything counts. Other files are texts, one a line.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from edgemoe.arguments import read_text
from edgemoe.errors import EdgemoeError

QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "solution", "response")
LEAST_ANSWER = 2  # tokens: heads foretell one from another


class ExamplesError(EdgemoeError):
    """Texts that cannot be trained on."""


@dataclass(frozen=True)
class Example:
    """tokens: all of them. start: the first one that counts. mark: of the question, for telling apart what is learned and what is held out."""

    tokens: list[int]
    start: int
    mark: str


def read_examples(paths: list[str], vocabulary: Vocabulary, longest: int) -> list[Example]:
    """Cut off after `longest` tokens; what then has no answer left is left out. Raises ExamplesError, TraceError."""
    found = []
    for path in paths:
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                question, answer = _parts(line, f"{path}: line {number}", str(path).endswith((".jsonl", ".json")))
                first, rest = vocabulary.cut(question, answer)
                tokens = (first + rest)[:longest]
                if len(tokens) - len(first) >= LEAST_ANSWER:
                    mark = hashlib.blake2b((question or answer).encode(), digest_size=8).hexdigest()
                    found.append(Example(tokens, len(first), mark))
    if not found:
        raise ExamplesError(f"{', '.join(map(str, paths))}: nothing to learn from within {longest} tokens")
    return found


def _parts(line: str, where: str, is_json: bool) -> tuple[str, str]:
    if not is_json:
        return "", line
    try:
        record = json.loads(line)
    except ValueError as e:
        raise ExamplesError(f"{where}: not JSON: {e}") from None
    record = record if isinstance(record, dict) else {}
    if isinstance(record.get("text"), str):
        return "", record["text"]
    question, answer = (next((record[name] for name in names if isinstance(record.get(name), str)), None) for names in (QUESTIONS, ANSWERS))
    if question is None or answer is None:
        raise ExamplesError(f"{where}: wanted {' or '.join(QUESTIONS)} with {' or '.join(ANSWERS)}, or text")
    return question, answer


def parted(examples: list[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """To learn from, and held out: by question, so that one question is on one side. Raises ExamplesError."""
    marks = sorted({e.mark for e in examples})
    if len(marks) < 2:
        raise ExamplesError(f"found {len(marks)} different question, wanted 2 or more: some are held out")
    order = np.random.default_rng([seed, 1]).permutation(len(marks))
    out = {marks[i] for i in order[: min(max(1, round(share * len(marks))), len(marks) - 1)]}
    return [e for e in examples if e.mark not in out], [e for e in examples if e.mark in out]


def batches(examples: list[Example], n_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """All examples once, in an order of chance, in batches of at least n_tokens (the last one may have fewer); of similar lengths within a batch, since shorter ones are filled up."""
    order = np.random.default_rng([seed, 2, epoch]).permutation(len(examples))
    pool, found = 16 * max(1, n_tokens // max(1, int(np.mean([len(e.tokens) for e in examples])))), []
    for start in range(0, len(order), pool):
        part: list[int] = []
        for i in sorted(order[start : start + pool], key=lambda i: len(examples[i].tokens)):
            part.append(int(i))
            if sum(len(examples[j].tokens) for j in part) >= n_tokens:
                found.append(part)
                part = []
        if part:
            found.append(part)
    return [found[i] for i in np.random.default_rng([seed, 3, epoch]).permutation(len(found))]


def micro_batches(batch: list[int], examples: list[Example], most: int) -> list[list[int]]:
    """A batch in parts of at most so many tokens, filled up ones included; one example at least."""
    parts: list[list[int]] = []
    width = 0
    for i in sorted(batch, key=lambda i: len(examples[i].tokens)):
        width = len(examples[i].tokens)
        if parts and (len(parts[-1]) + 1) * width <= most:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


@contextmanager
def _silence():
    """llama.cpp warns that a vocabulary without a model has no context length."""
    import ctypes

    from llama_cpp import _logger, llama_cpp as C

    @C.llama_log_callback
    def ignore(level, line, user_data):
        pass

    C.llama_log_set(ignore, ctypes.c_void_p(0))
    try:
        yield
    finally:
        C.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))


class Vocabulary:
    """Tokens and chat template of a GGUF. Raises ExamplesError where llama.cpp cannot read its vocabulary."""

    def __init__(self, path: str | os.PathLike):
        import llama_cpp
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        with _silence():
            try:
                self.model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            except ValueError as e:
                raise ExamplesError(f"{path}: {e}") from None
        eos = self.model.token_eos()
        self.eos = [eos] if eos >= 0 else []
        template = self.model.metadata.get("tokenizer.chat_template")
        piece = {name: self.model.detokenize([t], special=True).decode("utf-8", "replace") if t >= 0 else "" for name, t in (("eos", eos), ("bos", self.model.token_bos()))}
        self.formatter = Jinja2ChatFormatter(template, piece["eos"], piece["bos"]) if template else None

    def cut(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of the question as the chat template has it, and of the answer with the token that ends it."""
        if not question:
            tokens = self.model.tokenize(answer.encode(), add_bos=True, special=False) + self.eos
            return tokens[:1], tokens[1:]
        if self.formatter is None:
            first = self.model.tokenize(f"{question}\n".encode(), add_bos=True, special=False)
        else:
            prompt = self.formatter(messages=[{"role": "user", "content": question}]).prompt
            first = self.model.tokenize(prompt.encode(), add_bos=False, special=True)
        return first, self.model.tokenize(answer.encode(), add_bos=False, special=False) + self.eos
