"""Coordinates: the mean kernel as one target vector per RAD image, the same for every architecture.

T (RAD images x r) is made from a factor B of the mean kernel, K_mean = B B^T:
1. the r strongest directions of B, centred: U S of its singular value decomposition U S V^T;
2. with a flattened spectrum: U S^power, because the first directions are the ones on which all clients agree anyway;
3. rows of length 1;
4. turned (orthogonal Procrustes) onto the coordinates of the last round, so that they stay put while clients learn.

A client's head on its encoder predicts an image's row of T. Only the mean kernel is needed, so secure sums, noise and
clients that join later work as with the kernel itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def coordinates(factor: Tensor, columns: int, power: float, last: Tensor | None = None) -> Tensor:
    """Return T from a factor B of the mean kernel, turned onto the coordinates `last` if there are any."""
    b = factor.double()
    t = flat_directions(b - b.mean(0), columns, power)
    t = F.normalize(t - t.mean(0), dim=1)
    return (t if last is None else turned(t, last.double())).float()


def flat_directions(b: Tensor, columns: int, power: float) -> Tensor:
    """Return U S^power with the `columns` largest singular values of b; columns of zeros if b has fewer."""
    u, s, _ = torch.linalg.svd(b, full_matrices=False)
    kept = s[:columns] > 1e-6 * s[0]  # the rest is rounding error that a small power would amplify
    u, s = u[:, :columns][:, kept], s[:columns][kept]
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # of an SVD they differ between machines
    return F.pad(u * signs * s**power, (0, columns - u.shape[1]))


def turned(t: Tensor, onto: Tensor) -> Tensor:
    """Return t Q with the orthogonal Q that minimises |t Q - onto|."""
    u, _, vh = torch.linalg.svd(t.T @ onto)
    return t @ (u @ vh)
