"""Layer-wise learning rates and LoRA in the trainer."""

import pytest
import torch
from safetensors.torch import load_file
from timm.optim import param_groups_layer_decay
from torch import nn

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.training import Trainer, prepare, resume
from listwise.training.layers import layer_groups
from listwise.training.run.view import TrainView


@pytest.mark.parametrize("backbone", ["test_vit", "test_resnet", "test_convnext"])
def test_rates_are_those_of_timm(backbone):
    net = RetrievalNet(backbone, projection=8, weights="random")
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = {
        names[parameter]: group["rate_factor"]
        for group in layer_groups(net, 0.5)
        for parameter in group["params"]
    }
    expected = {
        names[parameter]: group["lr_scale"]
        for group in param_groups_layer_decay(net.backbone, layer_decay=0.5)
        for parameter in group["params"]
    }
    rest = {name: 1.0 for name in found if not name.startswith("backbone.")}
    assert len(rest) == 3
    assert found == expected | rest
    assert len(set(found.values())) > 3


def test_each_layer_learns_with_its_own_rate(photos, tmp_path):
    given = {"backbone": "test_vit", "weights": "random", "crops": {"size": 32}, "device": "cpu"}
    plan = prepare(photos, given | {"layer_decay": 0.5, "learning_rate": 1e-3, "warmup": 0})
    trainer = Trainer(plan, tmp_path / "run")
    trainer._set_learning_rate(0)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[-1] == 1e-3
    assert rates == pytest.approx([1e-3 * 0.5**i for i in reversed(range(len(rates)))])


def test_one_rate_by_default_and_for_networks_without_known_layers():
    net = RetrievalNet(nn.Conv2d(3, 4, 3))
    (group,) = layer_groups(net, 1.0)
    assert group["params"] == list(net.parameters())
    with pytest.raises(InputError, match="`layer_decay` needs a timm backbone"):
        layer_groups(net, 0.75)


def test_a_run_with_lora_resumes_with_the_same_bits(photos, tmp_path):
    given = {"backbone": "test_vit", "weights": "random", "crops": {"size": 32}, "device": "cpu"}
    given |= {"lora": 2, "batch_size": 6, "micro_batch": 3, "updates": 2, "learning_rate": 1e-2}
    given |= {"validate_every": 1, "checkpoint_every": 1, "val_max_side": 32, "workers": 0}
    plan = prepare(photos, given | {"patience": None})

    class Stop(TrainView):
        def update(self, report):
            if report.update == 2:
                raise KeyboardInterrupt

    Trainer(plan, tmp_path / "whole").fit()
    with pytest.raises(KeyboardInterrupt):
        Trainer(plan, tmp_path / "parts", Stop()).fit()
    resume(tmp_path / "parts").fit()
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        whole, parts = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)
    torch.manual_seed(plan.config.seed)
    start = RetrievalNet("test_vit", weights="random").state_dict()
    assert load_file(tmp_path / "whole/model/model.safetensors").keys() == start.keys()
    checkpoint = load_file(tmp_path / "whole/checkpoint.safetensors")
    original = "backbone.blocks.0.mlp.fc1.parametrizations.weight.original"
    assert torch.equal(checkpoint[f"net.{original}"], start["backbone.blocks.0.mlp.fc1.weight"])
