"""A forward pass that can be repeated with the same result, and the upload of its images."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models.folding import FoldedCopy, make_folded_copy
from listwise.models.max_pool import replace_max_pools
from listwise.optional import runs_triton

# After so many copies in a row that were outdated by changes, the network itself is used.
_OUTDATED_COPIES = 3


class Forward:
    """Computes the descriptors of images, repeatably with the same random numbers.

    In half precision and on the CPU a `FoldedCopy` of the network is used, and `add_gradients` adds
    its gradients to those of the network. A network that cannot be copied is used itself, under
    autocast.

    Args:
        net: the network.
        autocast: dtype in which it runs; by default that of the caller's autocast, if any.
        compile: compile the network for each size of images; smaller batches are padded, so that
            all have one size.

    Attributes:
        fold: whether to use a folded copy of the network where it is faster.
        fallback: why the network is not compiled, or batch norm not folded; empty otherwise.
    """

    def __init__(self, net: nn.Module, autocast: torch.dtype | None, compile: bool = False) -> None:
        self.net = net
        self.device = next(net.parameters()).device
        inherited = torch.is_autocast_enabled(self.device.type)
        self.autocast = autocast or (
            torch.get_autocast_dtype(self.device.type) if inherited else None
        )
        if self.autocast == torch.float16:
            raise InputError(
                "the step does not run in float16: small gradients would become zero; "
                "use torch.bfloat16, as in torch.autocast(device, torch.bfloat16)"
            )
        self.compile = compile
        self.fold = True
        self.fallback = ""
        self._fast_pools = self.device.type == "cuda" and runs_triton(self.device)
        self._copy: FoldedCopy | None = None
        self._evaluation: Forward | None = None
        self._can_be_copied = True
        self._outdated_copies = 0
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self._sizes: dict[torch.Size, int] = {}
        self._dtypes = _float_dtypes(net)

    @property
    def module(self) -> nn.Module:
        """The network in use: the copy, or the network itself."""
        return self.net if self._copy is None else self._copy.module

    def __call__(self, images: Tensor) -> Tensor:
        """Compute descriptors [b, C] of images [b, 3, H, W], which may be on another device."""
        if not self.compile:
            return self.uncompiled(images)
        count = len(images)
        size = self._sizes[images.shape[1:]] = max(count, self._sizes.get(images.shape[1:], 0))
        if size > count:
            images = torch.cat([images, images[-1:].expand(size - count, -1, -1, -1)])
        images = self.ready(images)
        if self._compiled is None:
            options = compiler_options(self.device)
            self._compiled = torch.compile(self.module, dynamic=False, options=options)
        with self._best_kernels():
            return self._run(self._compiled, images)[:count]

    def uncompiled(self, images: Tensor) -> Tensor:
        """Compute descriptors without the compiler: [b, 3, H, W] -> [b, C]."""
        images = self.ready(images)  # first, because it may create the copy
        return self._run(self.module, images)

    def ready(self, images: Tensor) -> Tensor:
        """Prepare the network, and return the images on its device, in its memory order."""
        images = images.to(self.device, non_blocking=True)
        if not self.fold or (self.autocast is None and self.device.type != "cpu"):
            return images
        if self._copy is None and self._can_be_copied:
            random_state = self.random_state()  # dropout may draw numbers in the trial
            self._make_copy(images[:1])
            self.set_random_state(random_state)
        return images.contiguous(memory_format=torch.channels_last)

    def _make_copy(self, image: Tensor) -> None:
        """Create the folded copy, or note why it is not possible."""
        self._copy = make_folded_copy(self.net, image, self.autocast)
        if self._copy is not None and self._fast_pools:
            replace_max_pools(self._copy.module)
        if self._copy is None:
            self._note("batch norm is not folded: the network cannot be copied")
        elif self._copy.trial_failed:
            self._note("batch norm is not folded: in a trial, folding changed the descriptors")
        if self._copy is not None and self.autocast is None and not self._copy.folds:
            self._copy = None  # it would compute exactly what the network computes
        self._can_be_copied = self._copy is not None

    def evaluation_module(self, image: Tensor) -> nn.Module:
        """Return what computes descriptors in evaluation mode with the current weights.

        Args:
            image: [1, 3, H, W], for a trial if the network has not been copied yet.
        """
        training = self.net.training
        self.net.eval()
        try:
            # A copy is made for one mode, so training keeps its own.
            if self._evaluation is None:
                self._evaluation = Forward(self.net, self.autocast)
                self._evaluation.fold = self.fold
                self._evaluation._fast_pools = False  # mixed batches need pools of PyTorch
            self._evaluation.refresh()
            self._evaluation.ready(image)
            return self._evaluation.module
        finally:
            self.net.train(training)

    def _run(self, module: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        # Autocast caches cast weights. Those cast without a graph would get no gradient, and those
        # cast before an update are outdated.
        torch.clear_autocast_cache()
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            descriptors = module(images)
        if descriptors.ndim != 2 or len(descriptors) != len(images):
            raise InputError(
                f"the network returned {list(descriptors.shape)} for {len(images)} images: "
                "it must return one descriptor per image, [B, C]"
            )
        return descriptors

    @contextmanager
    def _best_kernels(self) -> Iterator[None]:
        """Let cuDNN try all its kernels on every new size if the network is compiled."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.compile
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def refresh(self) -> None:
        """Take the current weights of the network, and start with empty gradients."""
        if self._copy is not None and not self._copy.fits():
            self._copy = self._compiled = None
            self._outdated_copies += 1
            if self._outdated_copies == _OUTDATED_COPIES:
                self._can_be_copied = False
                self._note(
                    "batch norm is not folded: settings or hooks of the network change before "
                    "every update"
                )
        if self._copy is not None:
            self._outdated_copies = 0
            self._copy.refresh()
        self._dtypes = _float_dtypes(self.net)

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Backpropagate a gradient [b, C] through the graph of descriptors [b, C]."""
        with self._best_kernels():
            torch.autograd.backward(descriptors, gradient)
        if self._copy is not None:
            self._copy.collect()

    def add_gradients(self) -> None:
        """Add the gradients since `refresh` to `.grad` of the network."""
        if self._copy is not None:
            self._copy.add_gradients()

    def forget_sizes(self) -> None:
        """Do not pad batches to earlier sizes any more, because they were too large."""
        self._sizes.clear()

    def stop_compiling(self, error: Exception) -> bool:
        """Return whether an error comes from the compiler; if so, do not compile any more."""
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
        """Compute descriptors again, with the random state of the first time."""
        with torch.random.fork_rng(self._generators()):
            self.set_random_state(random_state)
            return self(images)

    def random_state(self) -> list[Tensor]:
        """Return the state of the random generators that the network uses."""
        states = [torch.cuda.get_rng_state(device) for device in self._generators()]
        return [torch.get_rng_state(), *states]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore a `random_state`."""
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._generators(), state[1:], strict=True):
            torch.cuda.set_rng_state(device_state, device)

    def drift(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the difference of two computations of descriptors [b, C]: above 1 is too large."""
        dtypes = {first.dtype, self.autocast or first.dtype, *self._dtypes}
        # Half of the digits: kernels may change the last few digits, other random numbers all.
        tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        distance = torch.linalg.vector_norm(second.detach() - first, dim=1).max()
        length = torch.linalg.vector_norm(first, dim=1).max()
        return torch.div(distance, length * tolerance)

    def _generators(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []


def _float_dtypes(net: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in net.parameters() if p.is_floating_point()}


def compiler_options(device: torch.device) -> dict[str, Any]:
    """Return the options of torch.compile for a network on a device."""
    # The compiler's own random numbers would differ between the two stages.
    options: dict[str, Any] = {"fallback_random": True}
    if (
        device.type == "cuda"
        and runs_triton(device)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    ):
        from listwise.models.fusion import ConvolutionFusion  # slow to import

        options["post_grad_custom_pre_pass"] = ConvolutionFusion()
    return options


def upload_ahead(crops: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the micro-batches [b, 3, H, W]; copy the next one from pinned memory meanwhile."""
    if device.type != "cuda" or not all(crop.is_pinned() for crop in crops):
        yield from crops
        return
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(crop: Tensor) -> Tensor:
        side.wait_stream(here)  # copy while one micro-batch is computed, not earlier
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
