"""A forward pass that can be done again and give the same descriptors, and what feeds it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models.folding import Twin, make_twin

# Random numbers of the compiler's own would differ between the two stages.
COMPILER_OPTIONS: dict[str, Any] = {"fallback_random": True}
# Copies in a row that a change to the network made useless, before the network itself computes.
_USELESS_COPIES = 3


class Forward:
    """Images to descriptors through a network, repeatable with the same random numbers.

    In half precision the network's `Twin` computes in its place; the gradients are the network's
    own after `give_gradients`. A network that cannot be copied computes itself, under autocast.

    If `autocast` is None, the caller's is used, if any. With `compile` the network is compiled for
    each size of images, and smaller batches are filled up, so that there is one size only;
    `fallback` says why it is not, if the compiler fails, and why batch norm is not folded, if it
    could not be.
    """

    def __init__(self, net: nn.Module, autocast: torch.dtype | None, compile: bool = False) -> None:
        self.net = net
        self.device = next(net.parameters()).device
        inherited = torch.is_autocast_enabled(self.device.type)
        self.autocast = autocast or (
            torch.get_autocast_dtype(self.device.type) if inherited else None
        )
        self.compile = compile
        self.fallback = ""
        self._twin: Twin | None = None
        self._can_be_copied = True
        self._useless_copies = 0
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self._sizes: dict[torch.Size, int] = {}
        self._dtypes = _float_dtypes(net)

    @property
    def module(self) -> nn.Module:
        """The network that computes."""
        return self.net if self._twin is None else self._twin.module

    def __call__(self, images: Tensor) -> Tensor:
        """Descriptors [b, C] of images [b, 3, H, W], which may lie on another device."""
        if not self.compile:
            return self.uncompiled(images)
        count = len(images)
        size = self._sizes[images.shape[1:]] = max(count, self._sizes.get(images.shape[1:], 0))
        if size > count:
            images = torch.cat([images, images[-1:].expand(size - count, -1, -1, -1)])
        images = self.ready(images)
        if self._compiled is None:
            self._compiled = torch.compile(self.module, dynamic=False, options=COMPILER_OPTIONS)
        with self._best_kernels():
            return self._run(self._compiled, images)[:count]

    def uncompiled(self, images: Tensor) -> Tensor:
        """Descriptors as by a call, but never compiled: [b, 3, H, W] -> [b, C]."""
        images = self.ready(images)  # first: it may make the module
        return self._run(self.module, images)

    def ready(self, images: Tensor) -> Tensor:
        """Images where and as the network takes them; the network is made ready to compute."""
        images = images.to(self.device, non_blocking=True)
        if self.autocast is None:
            return images
        if self._twin is None and self._can_be_copied:
            random_state = self.random_state()  # dropout may draw numbers in the trial
            self._twin = make_twin(self.net, images[:1], self.autocast)
            self.set_random_state(random_state)
            self._can_be_copied = self._twin is not None
            if self._twin is None:
                self._note("the network cannot be copied, so its batch norm is not folded")
            elif self._twin.trial_failed:
                self._note("batch norm is not folded: in a trial that changed the descriptors")
        return images.contiguous(memory_format=torch.channels_last)

    def _run(self, module: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        # Autocast keeps its casts of the weights: casts made without graph would cut the weights
        # off from their gradients, and casts made before an update are of the old weights.
        torch.clear_autocast_cache()
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            descriptors = module(images)
        if descriptors.ndim != 2 or len(descriptors) != len(images):
            raise InputError(
                f"the network made {list(descriptors.shape)} of {len(images)} images; "
                "it must return one descriptor for each image: [B, C]"
            )
        return descriptors

    @contextmanager
    def _best_kernels(self) -> Iterator[None]:
        """Meanwhile cuDNN tries its kernels on every new size, which pays where compiling does."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.compile
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def refresh(self) -> None:
        """Take over the network's weights as they are now, and start from empty gradients."""
        if self._twin is not None and not self._twin.fits():
            self._twin = self._compiled = None
            self._useless_copies += 1
            if self._useless_copies == _USELESS_COPIES:
                self._can_be_copied = False
                self._note(
                    "the network's settings or hooks change before every update, so its batch norm "
                    "is not folded"
                )
        if self._twin is not None:
            self._useless_copies = 0
            self._twin.refresh()
        self._dtypes = _float_dtypes(self.net)

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Carry a gradient [b, C] back through the graph of descriptors [b, C]."""
        with self._best_kernels():
            torch.autograd.backward(descriptors, gradient)
        if self._twin is not None:
            self._twin.collect()

    def give_gradients(self) -> None:
        """See that what `backward` found since `refresh` is in `.grad` of the network."""
        if self._twin is not None:
            self._twin.give_back()

    def forget_sizes(self) -> None:
        """Fill up no batch to the sizes so far: they were too large."""
        self._sizes.clear()

    def stop_compiling(self, error: Exception) -> bool:
        """Whether an error is the compiler's; if so, the network runs without it from now on."""
        if not self.compile:
            return False
        from torch._dynamo.exc import TorchDynamoException  # slow to import

        if not isinstance(error, TorchDynamoException):
            return False
        reason = " ".join(str(error).strip().partition("\n\n")[0].split())
        self._note(f"the network is not compiled, so it runs slower: {reason}")
        self.compile, self._compiled = False, None
        return True

    def _note(self, reason: str) -> None:
        """Add a reason to `fallback`."""
        self.fallback = "; ".join(filter(None, [self.fallback, reason]))

    def recompute(self, images: Tensor, random_state: list[Tensor]) -> Tensor:
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
        dtypes = {first.dtype, self.autocast or first.dtype, *self._dtypes}
        # Half of the digits: kernels may differ in the last few, another random number in all.
        tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        distance = torch.linalg.vector_norm(second.detach() - first, dim=1).max()
        length = torch.linalg.vector_norm(first, dim=1).max()
        return torch.div(distance, length * tolerance)

    def _generators(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []


def _float_dtypes(net: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in net.parameters() if p.is_floating_point()}


def arriving(crops: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The micro-batches [b, 3, H, W], in turn; those in pinned memory are sent ahead, one each."""
    if device.type != "cuda" or not all(crop.is_pinned() for crop in crops):
        yield from crops
        return
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(crop: Tensor) -> Tensor:
        side.wait_stream(here)  # beside the work of one micro-batch, and not further ahead
        with torch.cuda.stream(side):
            return crop.to(device, non_blocking=True)

    coming = send(crops[0])
    for following in (*crops[1:], None):
        here.wait_stream(side)
        arrived = coming
        arrived.record_stream(here)
        if following is not None:
            coming = send(following)
        yield arrived
