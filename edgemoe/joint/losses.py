"""The coverage loss of edgemoe.coverage in PyTorch, differentiable in scores and in demand, for all layers at once.

    L_T     scores p^R + p^T of a token, covering the layer's event of the next token
    L_ST    the mean of that and of scores p^R + p^T of a token + p^S of the layer before, which for the first layer is the last one, of the token before

Demand is the next token's p^R, of the experts that it is sent to: the model can move it, in joint training. Source: as edgemoe.coverage, whose reading this is; there demand is 1 for
each expert that is used, since a trace cannot be moved.
"""

from __future__ import annotations

import torch

ROUNDS = 50
STEEPEST = 60.0


def membership(scores: torch.Tensor, slots: int, tau: float) -> torch.Tensor:
    """m [..., E] of scores [..., E]: sigmoid((s - theta) / tau), its sum `slots`. theta is found by halving; it enters with its first derivative, sum a_i ds_i / sum a_i."""
    n_expert = scores.shape[-1]
    assert 0 < slots < n_expert and tau > 0
    with torch.no_grad():
        shift = tau * torch.log(torch.tensor(slots / (n_expert - slots), dtype=torch.float64)).item()
        low, high = scores.amin(-1, keepdim=True) - shift, scores.amax(-1, keepdim=True) - shift
        for _ in range(ROUNDS):
            theta = (low + high) / 2
            enough = torch.sigmoid(((scores - theta) / tau).clamp(-STEEPEST, STEEPEST)).sum(-1, keepdim=True) > slots
            low, high = torch.where(enough, theta, low), torch.where(enough, high, theta)
        theta = (low + high) / 2
        m = torch.sigmoid(((scores - theta) / tau).clamp(-STEEPEST, STEEPEST))
        a = m * (1 - m)
        share = a / a.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    theta = theta + (share * (scores - scores.detach())).sum(-1, keepdim=True)
    return torch.sigmoid(((scores - theta) / tau).clamp(-STEEPEST, STEEPEST))


def coverage_loss(scores: torch.Tensor, demand: torch.Tensor, slots: int, tau: float) -> torch.Tensor:
    """Loss [...] of scores and demand [..., E]: 1 - sum m y / sum y; 0 where there is no demand."""
    total = demand.sum(-1)
    covered = (membership(scores, slots, tau) * demand).sum(-1)
    return torch.where(total > 0, 1 - covered / torch.where(total > 0, total, 1), 0)


def joint_loss(mode: str, native: torch.Tensor, demand: torch.Tensor, heads: dict[str, torch.Tensor], slots: int, tau: float) -> torch.Tensor:
    """Loss [T - 1, L] of a sequence: of what is foretold at token t for token t + 1.

    native: p^R [T, L, E]; demand [T, L, E]; heads: p^T as "head_t" and, for spatio-temporal, p^S as "head_s" [T, L, E] (of layer l: what it says about l + 1)."""
    kept = native[:-1] + heads["head_t"][:-1]
    loss = coverage_loss(kept, demand[1:], slots, tau)
    if mode == "spatio-temporal":
        before = torch.cat([heads["head_s"][:-1, -1:], heads["head_s"][1:, :-1]], 1)
        loss = (loss + coverage_loss(kept + before, demand[1:], slots, tau)) / 2
    return loss
