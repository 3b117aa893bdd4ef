"""A moving average of the weights of a network during training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_KEY = "average"


class WeightAverage:
    """An exponential moving average (EMA) of the weights that an optimizer trains.

    The average of a weight is part of its state in the optimizer, so a checkpoint of the optimizer
    has it.

    Args:
        net: the network.
        optimizer: the optimizer of its weights.
        decay: share of the average that an update keeps, from 0 to 1. The first updates keep less,
            because the average starts with the weights after the first of them.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._net, self._optimizer, self._decay = net, optimizer, decay

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Add the weights after an update, counted from 0, to the average."""
        weights, averages = [], []
        for weight in self._net.parameters():
            state = self._optimizer.state.get(weight)
            if state:  # else it has no gradient and does not change
                if _KEY not in state:
                    state[_KEY] = weight.detach().clone()
                weights.append(weight.detach())
                averages.append(state[_KEY])
        share = 1 - min(self._decay, (1 + update) / (10 + update))
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network its average weights inside this context."""
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for weight in self._net.parameters():
                average = self._optimizer.state.get(weight, {}).get(_KEY)
                if average is not None:
                    kept.append((weight, weight.detach().clone()))
                    weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for trained, value in kept:
                    trained.copy_(value)
