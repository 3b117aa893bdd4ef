"""Start the projection of a network as a square-rooted PCA of training photos.

A random projection has to be learned from nothing, in few updates. The principal directions of the
pooled vectors are a better start: on landmark photos, the untrained network is already better than
with a random projection, and so is the trained one.
"""

import math

import torch
from torch import Tensor, nn

PHOTOS = 4096  # maximum number of photos that are described
_POWER = 0.25  # of the variances that directions are divided by, as in the paper's whitening
_SHRINKAGE = 0.1  # part of the mean variance in each variance, also for directions without any


def start_projection(layer: nn.Linear, vectors: Tensor) -> bool:
    """Set a layer to the principal directions of vectors, divided by their variance^0.25.

    Args:
        layer: from C to D dimensions.
        vectors: unit vectors that the layer gets as its input: [n, C].

    Returns:
        Whether the layer was changed: it is not if D is larger than C, or if n is less than two.
    """
    dim, width = layer.weight.shape
    if dim > width or len(vectors) < 2:
        return False
    rows = vectors.double()
    mean = rows.mean(dim=0)
    rows = rows - mean
    variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
    variances = (1 - _SHRINKAGE) * variances.clamp(min=0) + _SHRINKAGE * variances.mean()
    if not variances.mean() > 0:
        return False
    weight = (directions * variances**-_POWER).T.flip(0)[:dim]
    # The same size of the weights as at a random start, so that the learning rate suits them.
    weight = weight / (weight.std() * math.sqrt(3 * width))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-(weight @ mean))
    return True
