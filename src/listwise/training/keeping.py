"""Decide where the decoded photos of a run are kept."""

import os

import torch

from listwise.data.gpu_photos import gpu_decodes
from listwise.data.kept_photos import KeptPhotos
from listwise.training.memory import free_bytes, readable_bytes

# Parts of the free memory that photos may take. The step needs most of a GPU's memory, and pinned
# host memory cannot be moved to disk.
GPU_PART, HOST_PART = 1 / 4, 1 / 2


def keep_photos(
    count: int, decoded_bytes: int, device: torch.device
) -> tuple[KeptPhotos | None, str]:
    """Choose the memory in which decoded photos are kept: of the GPU, of the host, or none.

    Args:
        count: number of photos.
        decoded_bytes: memory that they take.
        device: the device of the training.

    Returns:
        The place for the photos, None if they are not kept; and a sentence about it, which is empty
        if the device does not decode photos itself.
    """
    if not gpu_decodes(device):
        return None, ""
    needed = readable_bytes(decoded_bytes)
    on_gpu = int(GPU_PART * free_bytes(device))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_host = int(HOST_PART * free_bytes(torch.device("cpu"))) // processes
    if decoded_bytes <= on_gpu:
        line = (
            f"decoded photos are kept in GPU memory: {needed} of {readable_bytes(on_gpu)} allowed"
        )
        return KeptPhotos(count, device, decoded_bytes, on_device=True), line
    if decoded_bytes <= on_host:
        line = (
            f"decoded photos are kept in host memory: {needed} of {readable_bytes(on_host)} "
            f"allowed; the GPU may use {readable_bytes(on_gpu)} for them"
        )
        return KeptPhotos(count, device, decoded_bytes, on_device=False), line
    return None, (
        f"photos are decoded again in every update: they would take {needed} of memory, more than "
        f"allowed on the GPU ({readable_bytes(on_gpu)}) and on the host ({readable_bytes(on_host)})"
    )
