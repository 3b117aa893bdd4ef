"""Adam, without the import of PyTorch's compiler."""

from collections.abc import Callable
from typing import Any

import torch

from listwise.imports import without_compiler


class Adam(torch.optim.Adam):
    """`torch.optim.Adam` that does not import the compiler of PyTorch, which takes seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with without_compiler():
            super().__init__(*args, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        with without_compiler():
            return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        with without_compiler():
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        with without_compiler():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state."""
        with without_compiler():
            super().load_state_dict(state_dict)
