"""Which backbone to take where nobody names one."""

from typing import Final

from listwise.machine import Machine

SMALL_BACKBONE: Final = "tf_efficientnet_lite0"
"""For machines without a GPU."""

GPU_BACKBONE: Final = "resnet50"


def choose_backbone(machine: Machine) -> tuple[str, str]:
    """The timm backbone to use off the shelf on a machine, and the reason."""
    if machine.device.startswith("cuda"):
        return GPU_BACKBONE, "there is a GPU"
    return SMALL_BACKBONE, "there is no GPU, and this one is small"
