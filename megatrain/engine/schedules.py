"""The course of the learning rate over a run."""

import math

from megatrain.config import RunConfig


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    train_config = config.train
    peak, warmup = train_config.learning_rate, min(train_config.warmup_steps, num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if train_config.schedule == "constant":
        return peak
    progress = (step - warmup + 1) / max(1, num_steps - warmup)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if train_config.schedule == "cosine" else 1 - progress
    return peak * (train_config.min_lr_ratio + (1 - train_config.min_lr_ratio) * share)
