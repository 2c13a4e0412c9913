"""Token pieces of any length. llama-cpp-python 0.3.36 reads pieces into 32 bytes and silently drops longer ones (runs of spaces in code, for one)."""

from __future__ import annotations

import ctypes

from llama_cpp import llama_cpp as C
from llama_cpp.llama_tokenizer import LlamaTokenizer


class WholePieceTokenizer(LlamaTokenizer):
    def _piece(self, token: int, special: bool, size: int = 64) -> bytes:
        buffer = (ctypes.c_char * size)()
        n = C.llama_token_to_piece(self._model.vocab, token, buffer, size, 0, special)
        return bytes(buffer[:n]) if n >= 0 else self._piece(token, special, -n)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        text = b"".join(self._piece(t, special) for t in tokens)
        # As in LlamaTokenizer: Llama 1 vocabularies put a space behind the start of the sequence.
        starts = len(tokens) > 0 and tokens[0] == self._model.token_bos()
        return text[1:] if starts and text[:1] == b" " else text
