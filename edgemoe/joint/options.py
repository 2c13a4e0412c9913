"""What can be chosen in joint post-training, and what is refused. The rate over the steps: a warm-up, then a cosine to a tenth, or constant."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgemoe.errors import EdgemoeError

TRAINED = {"routers": ("routers",), "experts": ("routers", "experts"), "all": ("routers", "experts", "other")}
SCHEDULES = ("cosine", "constant")
LAST_SHARE = 0.1  # of the rate, at the end of a cosine


class JointError(EdgemoeError):
    """Options, checkpoints or a saved state that cannot be trained with."""


@dataclass(frozen=True)
class JointOptions:
    mode: str = "temporal"  # or "spatio-temporal"
    weight: float = 0.3  # lambda; 0: the control, in which the model hears of the language alone and heads learn beside it
    train: str = "routers"  # of TRAINED
    slots: int = 0  # B; 0: two and a half times as many as a token uses
    tau: float = 0.01
    steps: int = 200
    batch_tokens: int = 4096
    micro_tokens: int = 4096  # that are computed together
    context: int = 1024  # longest example
    rate: float = 1e-4
    head_rate: float = 1e-3
    warmup: int = 10  # steps
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of the model's gradient; 0: none
    seed: int = 0
    holdout: float = 0.05
    held_out_tokens: int = 20000  # that are looked at, at most
    save_every: int = 50  # steps

    def check(self) -> None:
        """Raises JointError."""
        if self.mode not in ("temporal", "spatio-temporal"):
            raise JointError(f"mode {self.mode!r}, wanted temporal or spatio-temporal")
        if self.train not in TRAINED:
            raise JointError(f"train {self.train!r}, wanted one of {', '.join(TRAINED)}")
        if self.schedule not in SCHEDULES:
            raise JointError(f"schedule {self.schedule!r}, wanted one of {', '.join(SCHEDULES)}")
        for name, value, least in (("lambda", self.weight, 0), ("rate", self.rate, 0), ("head rate", self.head_rate, 0), ("clip", self.clip, 0), ("weight decay", self.weight_decay, 0)):
            if not (math.isfinite(value) and value >= least):
                raise JointError(f"{name} {value:g}, wanted {least} or more")
        if not (0 < self.tau < math.inf):
            raise JointError(f"tau {self.tau:g}, wanted a number above 0")
        for name in ("steps", "batch_tokens", "micro_tokens", "context"):
            if getattr(self, name) < 1:
                raise JointError(f"{name.replace('_', ' ')} {getattr(self, name)}, wanted 1 or more")

    def n_slots(self, n_expert: int, n_used: int) -> int:
        """B. Raises JointError."""
        found = self.slots or min(n_used * 5 // 2, n_expert - 1)
        if not 0 < found < n_expert:
            raise JointError(f"slots {found}, wanted 1 to {n_expert - 1}: a layer has {n_expert} experts")
        return found

    def rate_share(self, step: int) -> float:
        """What the rates are multiplied with in a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
