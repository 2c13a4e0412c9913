"""The loss of learned heads: how much of the next event a soft choice of the B best experts covers, with its gradient written out.

    scores       s = p^R + p^T, for the refine stage + p^S                        [n, E]
    membership   m_i = sigmoid((s_i - theta) / tau), theta such that sum m = B    a top-B choice that is soft by tau
    loss         1 - sum m_i y_i / sum y_i                                        y: 1 for the experts that the next event uses

Source: the soft top-B coverage loss of the Cache-Aware Router paper, whose text was not at hand: membership, threshold and normalisation are our reading of it.

theta depends on the scores, too. From sum m = B follows, with a_i = m_i (1 - m_i) / tau, that d theta = sum a_i ds_i / sum a_i, and with g_i = dloss / dm_i

    dloss / ds_i = a_i (g_i - sum a_j g_j / sum a_j)

A score that rises pushes the others out: the gradient of a row adds up to 0.
"""

from __future__ import annotations

import numpy as np

MOST_ROUNDS = 60
STEEPEST = 60.0  # an exponent beyond which a sigmoid is 0 or 1 in any precision


def membership(scores: np.ndarray, slots: int, tau: float) -> np.ndarray:
    """m [n, E] of scores [n, E], in their precision. 0 < slots < E, tau > 0."""
    n_expert = scores.shape[1]
    assert 0 < slots < n_expert and tau > 0
    # All scores at the lowest, or at the highest, of the row: between these thresholds lies the one that is sought.
    shift = float(tau * np.log(slots / (n_expert - slots)))  # NumPy's own float64 would widen the scores
    low, high = scores.min(1) - shift, scores.max(1) - shift
    inner = np.partition(scores, (n_expert - slots - 1, n_expert - slots), axis=1)[:, n_expert - slots - 1 : n_expert - slots + 1]
    theta = np.clip(inner.mean(1), low, high)
    enough = slots * 8 * np.finfo(scores.dtype).eps * n_expert**0.5
    for _ in range(MOST_ROUNDS):
        m = _sigmoid((scores - theta[:, None]) / tau)
        excess = m.sum(1) - slots
        if np.abs(excess).max() <= enough:
            break
        low, high = np.where(excess > 0, theta, low), np.where(excess < 0, theta, high)
        slope = (m * (1 - m)).sum(1) / tau
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            newton = theta + excess / slope
        inside = (newton > low) & (newton < high)  # where the sum is flat, Newton's step leaves the bracket, or is none
        theta = np.where(excess == 0, theta, np.where(inside, newton, (low + high) / 2)).astype(scores.dtype)
    return m


def _sigmoid(x: np.ndarray) -> np.ndarray:
    np.clip(x, -STEEPEST, STEEPEST, out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1
    return np.reciprocal(x, out=x)


def coverage_loss(scores: np.ndarray, demand: np.ndarray, slots: int, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each row [n], and its gradient by the scores [n, E]. demand [n, E]: not negative; a row without any has loss 0."""
    m = membership(scores, slots, tau)
    total = demand.sum(1, keepdims=True)
    share = demand / np.where(total > 0, total, 1)
    loss = np.where(total[:, 0] > 0, 1 - (m * share).sum(1), 0)
    a = m * (1 - m)
    a_sum = a.sum(1, keepdims=True)
    mean = (a * share).sum(1, keepdims=True) / np.where(a_sum > 0, a_sum, 1)
    return loss.astype(scores.dtype), a * (mean - share) / tau  # g = -share


def through_softmax(probs: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """dloss / dz of probs = softmax(z), from dloss / dprobs; both [n, E]."""
    return probs * (gradient - (probs * gradient).sum(1, keepdims=True))
