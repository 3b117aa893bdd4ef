"""Three-stage backpropagation (section 3.3): the exact gradient at any batch size.

A listwise loss needs all descriptors of the batch at the same time, but not all graphs of the
network. By the chain rule, the gradient of the loss with respect to the weights is a sum over the
images of (gradient with respect to the descriptor) × (derivative of the descriptor). Three stages:

1. Compute the descriptors of the batch, micro-batch by micro-batch, without a graph.
2. Compute the loss and its gradient with respect to the descriptors, which are small.
3. Compute the descriptors again, micro-batch by micro-batch, with a graph, and backpropagate the
   gradient of stage 2; the gradients of the weights add up.

`MultistageStep._backpropagate` implements them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from listwise.errors import InputError
from listwise.losses.checks import check_count
from listwise.models.folding import KNOWN_PACKAGES
from listwise.models.net import live_batch_norms
from listwise.training.distributed import (
    failing_together,
    gather_numbers,
    gather_rows,
    sum_gradients,
    sum_over_processes,
    world,
)
from listwise.training.forward import (
    Fit,
    Forward,
    chosen_autocast,
    device_of,
    images_that_fit,
    upload_ahead,
)
from listwise.training.objective import (
    CrossBatchMemory,
    Loss,
    accepted_arguments,
    check_processes,
    loss_module,
)

# The part of a step's time that stage 1 takes: a backward pass takes as long as two forward passes.
STAGE_1 = 0.25


@dataclass
class Counts:
    """The cost of all steps so far, over all processes.

    Attributes:
        forwards: images that went forward through the network.
        backwards: images that went backward.
        updates: calls of the step.
    """

    forwards: int = 0
    backwards: int = 0
    updates: int = 0


class MultistageStep:
    """Computes the gradient of a loss over a whole batch, one micro-batch in memory at a time.

    A call adds to `.grad` of every trainable parameter what `loss(net(images), labels).backward()`
    would add. Under torch.distributed each process passes its own part of the batch and gets the
    loss and the gradient of the whole batch.

    Args:
        net: a module that maps images [b, 3, H, W] to descriptors [b, C]. A descriptor must depend
            on its own image alone, so batch norm must be frozen.
        loss: any callable of descriptors [B, C] and labels [B] that returns a scalar. If it is a
            module with parameters, they get their gradient too. Under torch.distributed it must
            also take `queries` (see `Loss`).
        micro_batch: number of images whose graph is in memory at a time. "auto" finds what fits,
            takes the whole batch in one pass if it can, and halves the micro-batch when CUDA
            memory runs out.
        memory: descriptors of earlier batches, which every query ranks too. The loss must take
            `weights` and `queries`. Each call then needs the numbers of the photos.
        weighting: a function from the labels [B] of the whole batch to the weights [B] of the
            queries, for a loss that takes `weights`.
        autocast: dtype in which the network runs, such as torch.bfloat16; the loss is computed
            outside autocast. Frozen batch norm is folded into the convolution before it; the
            gradients are those of the original parameters.
        compile: compile the network. This takes a minute or two at the first call, and again when
            a micro-batch has more or larger images than before. If the compiler fails, the step
            runs without it.

    Attributes:
        micro_batch: the number in use; "auto" becomes a number at the first call.
        choice: a sentence with the chosen micro-batch and the reason.
        counts: forwards, backwards and updates so far.
        on_progress: called with the part of a step that is done, from 0 to 1, after every
            micro-batch of stages 1 and 3.

    Examples:
        >>> from listwise.losses import QuantizedAPLoss
        >>> from listwise.models import RetrievalNet
        >>> net = RetrievalNet("resnet18", weights="random")
        >>> step = MultistageStep(net, QuantizedAPLoss(), micro_batch=4)
        >>> value = step(torch.rand(10, 3, 64, 64), torch.arange(10) // 2)
        >>> step.counts
        Counts(forwards=20, backwards=10, updates=1)
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        micro_batch: int | Literal["auto"] = "auto",
        *,
        memory: CrossBatchMemory | None = None,
        weighting: Callable[[Tensor], Tensor] | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        if micro_batch != "auto":
            micro_batch = check_count("`micro_batch`", micro_batch, 1, ' or "auto"')
        if isinstance(net, DistributedDataParallel):
            raise InputError(
                "the step sums gradients over processes itself, once: pass net.module instead of "
                "DistributedDataParallel, which would sum them in every micro-batch"
            )
        self._accepted = accepted_arguments(loss)
        if weighting is not None and "weights" not in self._accepted:
            raise InputError(
                "this loss does not take weights: leave `weighting` out, or give the loss an "
                "argument `weights`"
            )
        if memory is not None and not {"weights", "queries"} <= self._accepted:
            raise InputError(
                "this loss cannot rank the photos of a memory: leave `memory` out, or give the "
                "loss the arguments `weights` and `queries`"
            )
        self.net = net
        self.loss = loss
        self.memory = memory
        self.weighting = weighting
        self.autocast = autocast
        self.compile = compile
        self.micro_batch: int | Literal["auto"] = micro_batch
        self.choice = "" if micro_batch == "auto" else f"micro-batches of {micro_batch}, as given"
        self.counts = Counts()
        self.on_progress: Callable[[float], object] = lambda part: None
        self._given: int | Literal["auto"] = micro_batch
        self._forward: Forward | None = None
        self._fit: Fit | None = None
        self._fit_shape: torch.Size | None = None
        self._checked = False

    def __call__(self, images: Tensor, labels: Tensor, photos: Tensor | None = None) -> Tensor:
        """Add the gradient of the loss of a batch to `.grad`, and return the loss.

        Args:
            images: [B, 3, H, W] on any device; they are copied to the network's device one
                micro-batch at a time.
            labels: [B], equal for images that are relevant to each other.
            photos: [B] the number of the photo of each image, if there is a memory.

        Returns:
            The loss, a scalar without a graph.
        """
        if not torch.is_grad_enabled():
            raise InputError(
                "the step computes gradients, which are switched off: call it outside of "
                "torch.no_grad() and torch.inference_mode()"
            )
        check_processes(self.loss, world()[1])
        if self.memory is not None and (photos is None or photos.shape != labels.shape):
            raise InputError("the memory needs `photos`: give the number of the photo per image")
        parameters = _trainable(self.net, self.loss)
        forward = self.forward()
        with torch.autocast(forward.device.type, enabled=False):
            with failing_together(forward.device):
                _check(self.net, images, labels)
                if not self._checked:
                    _check_alone(self.net, forward, images[:2])
                    self._checked = True
            parts = gather_numbers(len(images), forward.device)
            micro_batch = self._choose_micro_batch(forward, images, max(parts))
            while True:
                random_state = forward.random_state()
                try:
                    with _accumulated_gradients(parameters):
                        forward.refresh()
                        value, *seen = self._backpropagate(
                            forward, images, labels, photos, parts, micro_batch
                        )
                        sum_gradients(parameters)
                    break
                except torch.OutOfMemoryError as error:
                    micro_batch = self._choose_smaller(micro_batch, error)
                    forward.forget_sizes()
                except Exception as error:
                    if not forward.stop_compiling(error):
                        raise
                # Outside of the handler, in which the error keeps the tensors alive.
                torch.cuda.empty_cache()
                forward.set_random_state(random_state)
        if self.memory is not None:
            self.memory.add(*seen)
        size = sum(parts)
        self.counts.forwards += size if micro_batch >= max(parts) else 2 * size
        self.counts.backwards += size
        self.counts.updates += 1
        return value

    @property
    def fallback(self) -> str:
        """The reason why the network is not compiled or folded as requested; else empty."""
        return "" if self._forward is None else self._forward.fallback

    def forward(self) -> Forward:
        """Return the forward pass; a new one if the device or autocast has changed."""
        device = device_of(self.net)
        settings = device, chosen_autocast(device, self.autocast)
        found = self._forward
        if found is None or (found.device, found.autocast) != settings:
            found = self._forward = Forward(self.net, self.autocast, self.compile)
        return found

    def keep_micro_batch(self) -> int:
        """Use the micro-batch of the last call from now on, and return it."""
        if self.micro_batch != "auto":
            self._given = self.micro_batch
        return int(self.micro_batch)

    def _backpropagate(
        self,
        forward: Forward,
        images: Tensor,
        labels: Tensor,
        photos: Tensor | None,
        parts: Sequence[int],
        micro_batch: int,
    ) -> tuple[Tensor, ...]:
        """Run the three stages for the images [parts[rank], 3, H, W] of this process.

        Return the loss, and what a memory needs of all processes: descriptors [B, C], labels [B]
        and photos [B], if they are given.
        """
        device, rank = forward.device, world()[0]
        start = sum(parts[:rank])
        stop = start + parts[rank]
        crops = torch.split(images, micro_batch)
        # If the whole batch fits, stage 1 keeps its graph and stage 3 does not compute it again.
        one_pass = micro_batch >= max(parts)

        # Stage 1: descriptors.
        pieces, random_states = [], []
        with failing_together(device), torch.set_grad_enabled(one_pass):
            for crop in upload_ahead(crops, device):
                random_states.append(forward.random_state())
                pieces.append(forward(crop))
                self.on_progress(STAGE_1 * len(pieces) / len(crops))

        # Stage 2: the loss, and its gradient with respect to the descriptors.
        descriptors = gather_rows(torch.cat(pieces).detach(), parts).requires_grad_()
        labels = gather_rows(labels.to(device), parts)
        seen = [descriptors.detach(), labels]
        if photos is not None:
            photos = gather_rows(photos.to(device), parts)
            seen.append(photos)
        queries = (start, stop) if len(parts) > 1 else None
        with failing_together(device):
            value = self._compute_loss(descriptors, labels, photos, queries)
            torch.autograd.backward(value)
            if descriptors.grad is None:
                raise InputError("the loss does not depend on the descriptors: it has no gradient")
        value, gradient = value.detach(), descriptors.grad
        sum_over_processes([value, gradient])

        # Stage 3: the descriptors again, with a graph, to backpropagate the gradient.
        gradients = torch.split(gradient[start:stop], micro_batch)
        with failing_together(device):
            if one_pass:
                forward.backward(pieces[0], gradients[0])
                return value, *seen
            drifts = []
            for crop, piece, state, gradient in zip(
                upload_ahead(crops, device), pieces, random_states, gradients, strict=True
            ):
                again = forward.recompute(crop, state)
                forward.backward(again, gradient)
                drifts.append(forward.drift(piece, again))
                self.on_progress(STAGE_1 + (1 - STAGE_1) * len(drifts) / len(crops))
            if torch.stack(drifts).max() > 1:
                raise InputError(
                    "the network computed different descriptors in stages 1 and 3 for the same "
                    "images and random state, so its gradients would be wrong: it must not change "
                    "its own state in forward, and must draw random numbers from PyTorch's "
                    "generators only"
                )
        return value, *seen

    def _compute_loss(
        self,
        descriptors: Tensor,
        labels: Tensor,
        photos: Tensor | None,
        queries: tuple[int, int] | None,
    ) -> Tensor:
        """Compute the loss of a batch [B, C], [B] and [B], or the share of some rows, with graph.

        The photos of a memory are further images of the batch that are not queries: they have no
        weight.
        """
        weights = None if self.weighting is None else self.weighting(labels)
        if self.memory is not None and photos is not None:
            references, reference_labels = self.memory.references(photos)
            if references is not None and len(references):
                queries = queries or (0, len(labels))
                if weights is None:
                    weights = torch.ones_like(descriptors[:, 0]).float()
                weights = torch.cat([weights, weights.new_zeros(len(references))])
                descriptors = torch.cat([descriptors, references.to(descriptors)])
                labels = torch.cat([labels, reference_labels.to(labels)])
        options = {"weights": weights, "queries": queries}
        given = {name: option for name, option in options.items() if option is not None}
        value = self.loss(descriptors, labels, **given)
        if not isinstance(value, Tensor) or value.numel() != 1:
            made = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"the loss must return a scalar tensor, not {made}")
        if not value.requires_grad:
            raise InputError("the loss does not depend on the descriptors: it has no gradient")
        return value.reshape(())

    def _choose_micro_batch(self, forward: Forward, images: Tensor, batch: int) -> int:
        """Choose the micro-batch for at most `batch` images per process; the same in all."""
        if self._given != "auto":
            return self._given
        with failing_together(forward.device):
            if self._fit is None or self._fit_shape != images.shape[1:]:
                self._fit, self._fit_shape = images_that_fit(forward, images), images.shape[1:]
        everywhere = min(gather_numbers(self._fit.images, forward.device))
        self.micro_batch, self.choice = replace(self._fit, images=everywhere).choose(batch)
        return self.micro_batch

    def _choose_smaller(self, micro_batch: int, error: torch.OutOfMemoryError) -> int:
        """Halve a micro-batch that ran out of memory; raise the error if that is not possible."""
        if self._given != "auto":
            advice = (
                f'micro-batches of {micro_batch} do not fit: make `micro_batch` smaller, or "auto"'
            )
            raise torch.OutOfMemoryError(f"{advice} ({error})") from error
        if micro_batch == 1:
            advice = "a single image does not fit: use smaller crops, a smaller backbone or"
            raise torch.OutOfMemoryError(f"{advice} autocast=torch.bfloat16 ({error})") from error
        smaller = micro_batch // 2
        self._fit = Fit(smaller, smaller, f"{micro_batch} ran out of memory")
        self.choice = f"micro-batches of {smaller}: {self._fit.reason}"
        self.micro_batch = smaller
        return smaller


def _trainable(net: nn.Module, loss: Loss) -> list[nn.Parameter]:
    """Return the parameters that get a gradient."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the network has no trainable parameter: set requires_grad on some")
    parameters += [p for p in loss_module(loss).parameters() if p.requires_grad]
    return list(dict.fromkeys(parameters))  # one that both have gets one gradient


def _check(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Raise an `InputError` if the images, labels or batch norm cannot be used."""
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise InputError(f"`{name}` must be a tensor, not {type(given).__name__}")
    if images.ndim != 4 or len(images) == 0 or labels.shape != images.shape[:1]:
        raise InputError(
            f"images {list(images.shape)} and labels {list(labels.shape)} do not match; "
            "give [B, 3, H, W] and [B], with at least one image in every process"
        )
    live = live_batch_norms(net)
    if live:
        raise InputError(
            f"batch norm {live[0]!r} ({len(live)} in all) is not frozen, so descriptors depend on "
            "the other images of a micro-batch: freeze it with .eval()"
        )


@torch.no_grad()
def _check_alone(net: nn.Module, forward: Forward, images: Tensor) -> None:
    """Raise an `InputError` if the descriptor of an image depends on others of its micro-batch.

    Only networks with own modules are tried, in evaluation mode; random ones cannot be compared.
    """
    modes = [(part, part.training) for part in net.modules()]
    if len(images) < 2 or all(
        type(part).__module__.startswith(KNOWN_PACKAGES) for part, _ in modes
    ):
        return
    random_state = forward.random_state()
    try:
        net.eval()
        alone, again = (forward.uncompiled(images[:1]) for _ in range(2))
        together = forward.uncompiled(images)[:1]
    finally:
        for part, mode in modes:
            part.train(mode)
        forward.set_random_state(random_state)
    if torch.equal(alone, again) and forward.drift(together, alone) > 1:
        raise InputError(
            "the descriptor of an image depends on the other images of its micro-batch: use no "
            "statistics over the batch in the network, such as x.mean(0)"
        )


@contextmanager
def _accumulated_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Start with empty gradients; add the earlier ones at the end, or restore them on failure."""
    earlier = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
