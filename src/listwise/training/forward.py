"""A forward pass that can be done again and give the same descriptors."""

import torch
from torch import Tensor, nn

from listwise.errors import InputError


class Forward:
    """Images to descriptors through a network, repeatable with the same random numbers.

    Args:
        net: images [b, 3, H, W] to descriptors [b, C], with at least one parameter.
        autocast: dtype for autocast; the caller's autocast, if any, when None.
    """

    def __init__(self, net: nn.Module, autocast: torch.dtype | None) -> None:
        self.net = net
        self.device = next(net.parameters()).device
        inherited = torch.is_autocast_enabled(self.device.type)
        self.autocast = autocast or (
            torch.get_autocast_dtype(self.device.type) if inherited else None
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Descriptors [b, C] of images [b, 3, H, W], which may lie on another device."""
        # Autocast keeps its casts of the weights: casts made without graph would cut the weights
        # off from their gradients, and casts made before an update are of the old weights.
        torch.clear_autocast_cache()
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            descriptors: Tensor = self.net(images.to(self.device, non_blocking=True))
        if descriptors.ndim != 2 or len(descriptors) != len(images):
            raise InputError(
                f"the network made {list(descriptors.shape)} of {len(images)} images; "
                "it must return one descriptor for each image: [B, C]"
            )
        return descriptors

    def again(self, images: Tensor, random_state: list[Tensor]) -> Tensor:
        """Descriptors of the same images, drawn with the random state of the first time."""
        with torch.random.fork_rng(self._generators()):
            self.set_random_state(random_state)
            return self(images)

    def random_state(self) -> list[Tensor]:
        """The state of the generators that the network draws from."""
        states = [torch.cuda.get_rng_state(device) for device in self._generators()]
        return [torch.get_rng_state(), *states]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Go back to a `random_state`."""
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._generators(), state[1:], strict=True):
            torch.cuda.set_rng_state(device_state, device)

    def drift(self, first: Tensor, second: Tensor) -> Tensor:
        """How far two computations of descriptors [b, C] are apart: a scalar, 1 is too far."""
        dtypes = {first.dtype, self.autocast or first.dtype}
        dtypes |= {p.dtype for p in self.net.parameters() if p.is_floating_point()}
        # Half of the digits: kernels may differ in the last few, another random number in all.
        tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        distance = torch.linalg.vector_norm(second.detach() - first, dim=1).max()
        length = torch.linalg.vector_norm(first, dim=1).max()
        return torch.div(distance, length * tolerance)

    def _generators(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []
