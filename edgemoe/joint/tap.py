"""Hears the routers of a transformers model: what each layer saw and said, with the graph that gradients flow back through; and the heads that listen to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from edgemoe.heads import MODES
from edgemoe.joint.options import JointError

ROUTER_CLASSES = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "Ernie4_5_MoeTopKRouter", "GptOssTopKRouter")  # return logits, weights, chosen; p^R is their softmax


@dataclass
class Heard:
    """Of n tokens in L layers: hidden [n, L, D], probs p^R [n, L, E], chosen [n, L, K]."""

    hidden: torch.Tensor
    probs: torch.Tensor
    chosen: torch.Tensor

    def demand(self) -> torch.Tensor:
        """p^R of the chosen experts, 0 elsewhere, [n, L, E]."""
        return self.probs * torch.zeros_like(self.probs).scatter_(-1, self.chosen, 1.0)

    def detached(self) -> Heard:
        return Heard(self.hidden.detach(), self.probs.detach(), self.chosen)


class RouterTap:
    """Hooks on all routers of a model. layers: their block numbers; routers: the modules, in this order. Raises JointError for a model whose routers are not known."""

    def __init__(self, model: nn.Module):
        found = []
        for name, module in model.named_modules():
            number = re.search(r"\.layers\.(\d+)\.", name)
            if type(module).__name__ in ROUTER_CLASSES and number:
                found.append((int(number[1]), module))
        if not found:
            raise JointError(f"{type(model).__name__}: has no routers that are known: wanted a class of {', '.join(ROUTER_CLASSES)}")
        found.sort(key=lambda pair: pair[0])
        self.layers, self.routers = [number for number, _ in found], [module for _, module in found]
        self.n_expert, self.n_embd = self.routers[0].weight.shape
        self.n_used = int(self.routers[0].top_k)
        if any(r.weight.shape != self.routers[0].weight.shape for r in self.routers):
            raise JointError("layers with different numbers of experts cannot be trained jointly yet")
        self._said: dict[int, tuple] = {}
        self._hooks = [router.register_forward_hook(self._hear(i)) for i, router in enumerate(self.routers)]

    def _hear(self, index: int):
        def hook(module, inputs, output):
            self._said[index] = (inputs[0].reshape(-1, self.n_embd), output[0], output[2])

        return hook

    def take(self) -> Heard:
        """What was heard in the last pass; float32."""
        said = [self._said.pop(i) for i in range(len(self.routers))]
        probs = torch.softmax(torch.stack([logits for _, logits, _ in said], 1).float(), -1)
        return Heard(torch.stack([hidden for hidden, _, _ in said], 1).float(), probs, torch.stack([chosen for _, _, chosen in said], 1))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class CacheHeads(nn.Module):
    """Heads of L layers, float32: parameters "head_t.weight" [L, E, D] and "head_t.bias" [L, E], and the same of head_s. They start as the native routers: W_T of layer l as the router
    of l, W_S as that of the next layer, of the last layer as the first one's."""

    def __init__(self, tap: RouterTap, mode: str):
        super().__init__()
        weight = torch.stack([r.weight.detach().float() for r in tap.routers])
        bias = torch.stack([r.bias.detach().float() if getattr(r, "bias", None) is not None else torch.zeros(tap.n_expert, device=weight.device) for r in tap.routers])
        for head in MODES[mode]:
            ahead = 0 if head == "head_t" else -1
            self.register_module(head, nn.ParameterDict({"weight": nn.Parameter(weight.roll(ahead, 0)), "bias": nn.Parameter(bias.roll(ahead, 0))}))
        self.mode = mode

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Probabilities [n, L, E] by head, of router inputs [n, L, D]."""
        found = {}
        for head in MODES[self.mode]:
            part = getattr(self, head)
            found[head] = torch.softmax(torch.einsum("nld,led->nle", hidden, part["weight"]) + part["bias"], -1)
        return found
