"""Two processes on the CPU against one."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from custom_parts import pairwise_loss
from step_examples import (
    Crowded,
    SoftmaxLoss,
    assert_equal_gradients,
    gradients,
    make_batch,
    make_net,
    ordinary,
    tuple_batch,
)
from torch import nn
from two_processes import in_two_processes

from listwise.errors import InputError
from listwise.losses import (
    ContrastiveLoss,
    HierarchicalAPLoss,
    MatryoshkaLoss,
    MultiSimilarityLoss,
    ProxyAnchorLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    SmoothAPLoss,
    TripletLoss,
    class_balanced_weights,
)
from listwise.training import Trainer, prepare
from listwise.training.objective import CrossBatchMemory, bind_tuples
from listwise.training.step import MultistageStep


def mined_triplets():
    return bind_tuples(TripletLoss(form="log-exp"), 4)


def mined_tuples():
    return bind_tuples(ContrastiveLoss(), 2)


def mixed():
    return RecallAtKLoss([1, 2], 0.1, virtual=4)


def levels():
    return HierarchicalAPLoss(torch.tensor([[0, 0], [0, 1], [1, 2]]), temperature=0.1)


def lengths():
    return MatryoshkaLoss(QuantizedAPLoss(), [6, 3])


CASES = {
    # name: (loss, dtype, micro-batch, images of each process, weighting)
    "even": (SoftmaxLoss, torch.float64, 2, (6, 6), None),
    "uneven": (SoftmaxLoss, torch.float64, 3, (7, 4), None),
    "uneven, other way": (QuantizedAPLoss, torch.float64, 5, (3, 8), None),
    "one image": (QuantizedAPLoss, torch.float64, 4, (10, 1), class_balanced_weights),
    "one pass": (QuantizedAPLoss, torch.float64, 64, (7, 4), class_balanced_weights),
    "auto": (SoftmaxLoss, torch.float64, "auto", (7, 4), None),
    "float32": (QuantizedAPLoss, torch.float32, 3, (7, 4), class_balanced_weights),
    "smooth": (SmoothAPLoss, torch.float64, 3, (7, 4), class_balanced_weights),
    "triplets of the batch": (TripletLoss, torch.float64, 3, (7, 4), class_balanced_weights),
    "virtual examples": (mixed, torch.float64, 3, (7, 4), class_balanced_weights),
    "levels": (levels, torch.float64, 3, (7, 4), class_balanced_weights),
    "lengths": (lengths, torch.float64, 3, (7, 4), class_balanced_weights),
    "mined triplets": (mined_triplets, torch.float64, 3, (7, 5), None),
    "no query in a process": (mined_triplets, torch.float64, 3, (10, 2), None),
    "mined tuples": (mined_tuples, torch.float64, 3, (9, 5), None),
    "bfloat16 weights": (SoftmaxLoss, torch.bfloat16, 3, (7, 4), None),
}
if find_spec("pytorch_metric_learning"):
    CASES["adapted"] = MultiSimilarityLoss, torch.float64, 3, (7, 4), class_balanced_weights


def proxies():
    torch.manual_seed(2)
    return ProxyAnchorLoss(classes=5, dim=6, scale=4.0).double()


def run_proxies(rank):
    net, loss = make_net(), proxies()
    value = MultistageStep(net, loss, 3)(*share(make_batch(11), (7, 4), rank))
    return value, gradients(net), loss.proxies.grad


def run_memory(rank, parts=((7, 4), (5, 6))):
    """Two updates with a memory; the second batch has photos of the first."""
    net, memory = make_net(), CrossBatchMemory(9)
    step = MultistageStep(
        net, QuantizedAPLoss(), 3, memory=memory, weighting=class_balanced_weights
    )
    values = []
    for first, part_sizes in enumerate(parts):
        images, labels = make_batch(11 + first)
        batch = images[:11], labels[:11], torch.arange(11) + 4 * first
        values.append(step(*share(batch, part_sizes, rank)))
    return torch.stack(values), gradients(net), memory.state_dict()


class WithSpareParts(nn.Module):
    """A network with a layer that only some processes use and one that none does."""

    def __init__(self, net: nn.Module, use: bool) -> None:
        super().__init__()
        self.net = net
        self.use = use
        self.sometimes = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, images):
        descriptors = self.net(images)
        return descriptors * self.sometimes if self.use else descriptors


class FailsInProcess1(nn.Module):
    """A network that raises in process 1, in a forward with or without graph."""

    def __init__(self, net: nn.Module, error: Exception, with_graph: bool) -> None:
        super().__init__()
        self.net = net
        self.error = error
        self.with_graph = with_graph

    def forward(self, images):
        if dist.get_rank() == 1 and torch.is_grad_enabled() == self.with_graph:
            raise self.error
        return self.net(images)


def share(batch, parts, rank):
    """The part of a process of each tensor of a batch."""
    return [tensor.split(parts)[rank] for tensor in batch]


def case_batch(loss, size, dtype):
    if isinstance(loss, partial):
        return tuple_batch(loss.func, size // loss.keywords["tuples"].shape[1], dtype)
    return make_batch(size, dtype)


def run_case(rank, case):
    loss, dtype, micro_batch, parts, weighting = case
    net, batch = make_net(dtype), case_batch(loss(), sum(parts), dtype)
    step = MultistageStep(net, loss(), micro_batch, weighting=weighting)
    value = step(*share(batch, parts, rank))
    return value, gradients(net), step.counts


def run_twice(rank):
    net = make_net()
    step = MultistageStep(net, SoftmaxLoss(), 3)
    for _ in range(2):
        step(*share(make_batch(8), (4, 4), rank))
    return gradients(net)


def run_failure(rank, error, with_graph):
    """The exception that a failure of process 1 becomes here."""
    net = make_net()
    step = MultistageStep(FailsInProcess1(net, error, with_graph), SoftmaxLoss(), 2)
    try:
        step(*share(make_batch(8), (4, 4), rank))
    except Exception as caught:
        assert all(p.grad is None for p in net.parameters())
        return f"{type(caught).__name__}: {caught}"
    return "nothing"


def run_spare_parts(rank):
    net = WithSpareParts(make_net(), use=rank == 0)
    MultistageStep(net, SoftmaxLoss(), 3)(*share(make_batch(8), (4, 4), rank))
    return net.sometimes.grad, net.never.grad


def run_out_of_memory(rank):
    net = make_net()
    step = MultistageStep(Crowded(net, room=3 if rank == 1 else 100), SoftmaxLoss())
    step(*share(make_batch(11), (7, 4), rank))
    return step.micro_batch, gradients(net)


def run_whole_batch_loss(rank, folder, photos):
    """The errors of step and trainer for a loss that cannot be split."""
    messages = []
    plan = prepare(photos, {"loss": pairwise_loss, "device": "cpu", "val_fraction": 0.4})
    step = MultistageStep(make_net(), pairwise_loss, 2)
    for call in (lambda: step(*make_batch(8)), lambda: Trainer(plan, f"{folder}/run")):
        try:
            call()
        except InputError as error:
            messages.append(str(error))
    return messages


def work(rank, folder, photos):
    results = {name: run_case(rank, case) for name, case in CASES.items()}
    results["twice"] = run_twice(rank)
    results["fails at once"] = run_failure(rank, InputError("bad image"), with_graph=False)
    results["fails later"] = run_failure(rank, RuntimeError("bad kernel"), with_graph=True)
    results["out of memory"] = run_out_of_memory(rank)
    results["spare parts"] = run_spare_parts(rank)
    results["proxies"] = run_proxies(rank)
    results["memory"] = run_memory(rank)
    results["whole batch"] = run_whole_batch_loss(rank, folder, photos)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory, photos):
    """What each of the two processes got: a list of two dictionaries."""
    folder = tmp_path_factory.mktemp("two-processes")
    found = in_two_processes(work, folder, str(folder), str(photos))
    assert not (folder / "run").exists()
    return found


def whole(gradients):
    """All gradients as one: in float32 a small one among them is mostly the others' rounding."""
    return {"all": torch.cat([gradient.flatten() for gradient in gradients.values()])}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_loss_and_gradients_of_one(results, name):
    loss, dtype, micro_batch, parts, weighting = CASES[name]
    net, (images, labels) = make_net(dtype), case_batch(loss(), sum(parts), dtype)
    weights = None if weighting is None else weighting(labels).to(dtype)
    value, expected = ordinary(net, loss(), images, labels, weights=weights)
    # In float32 the sums are rounded in another order; float64 shows that they are the same.
    relative = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    view = whole if dtype == torch.float32 else dict
    passes = 1 if micro_batch in (64, "auto") else 2
    for result in results:
        actual_value, actual, counts = result[name]
        torch.testing.assert_close(actual_value, value, rtol=relative, atol=0)
        assert_equal_gradients(view(actual), view(expected), relative)
        assert counts.forwards == passes * sum(parts)
        assert counts.backwards == sum(parts)
    (_, first, _), (_, second, _) = results[0][name], results[1][name]
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_proxies_get_the_same_gradient_in_every_process(results):
    net, loss, (images, labels) = make_net(), proxies(), make_batch(11)
    value = loss(net(images), labels)
    value.backward()
    for result in results:
        actual_value, actual, to_proxies = result["proxies"]
        torch.testing.assert_close(actual_value, value.detach())
        assert_equal_gradients(actual, gradients(net), 1e-9)
        torch.testing.assert_close(to_proxies, loss.proxies.grad)
    assert torch.equal(results[0]["proxies"][2], results[1]["proxies"][2])


def test_the_memory_is_the_same_in_every_process(results):
    values, expected, state = run_memory(0, ((11,), (11,)))
    for result in results:
        actual_values, actual, actual_state = result["memory"]
        torch.testing.assert_close(actual_values, values)
        assert_equal_gradients(actual, expected, 1e-9)
        torch.testing.assert_close(actual_state, state)
    first, second = (result["memory"][2] for result in results)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_gradients_there_before_are_not_summed_again(results):
    net, (images, labels) = make_net(), make_batch(8)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels)
    for result in results:
        assert_equal_gradients(result["twice"], {k: 2 * g for k, g in expected.items()}, 1e-9)


@pytest.mark.parametrize(
    ("case", "message"),
    [("fails at once", "InputError: bad image"), ("fails later", "RuntimeError: bad kernel")],
)
def test_a_failure_in_one_process_is_raised_in_both(results, case, message):
    assert results[1][case] == message
    assert results[0][case] == (
        "RuntimeError: this training step failed in process 1; "
        "see the error message of that process"
    )


def test_processes_take_the_smaller_micro_batch_together(results):
    net, (images, labels) = make_net(), make_batch(11)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels)
    for result in results:
        micro_batch, actual = result["out of memory"]
        assert micro_batch == 3
        assert_equal_gradients(actual, expected, 1e-9)


def test_a_parameter_used_in_one_process_has_a_gradient_in_both(results):
    for result in results:
        sometimes, never = result["spare parts"]
        assert torch.equal(sometimes, results[0]["spare parts"][0])
        assert sometimes.norm() > 0
        assert never is None


def test_a_loss_of_whole_batches_reports_what_several_processes_need(results):
    for result in results:
        messages = result["whole batch"]
        needed = "queries=(start, stop) that makes it return the share of these rows of the batch"
        assert len(messages) == 2
        assert all(needed in message and "\n" not in message for message in messages)
