"""Muon for the matrices of attention and experts, AdamW for everything else.

Each parameter is updated by one process only, so the work is shared and no state is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MATRICES = (
    *("attention.q", "attention.k", "attention.v", "attention.out"),
    *("moe.gate_up", "moe.down"),
)
MUON_RATE, MUON_MOMENTUM = 0.04, 0.95
ADAM_RATE, ADAM_BETAS, ADAM_EPSILON = 6e-3, (0.9, 0.95), 1e-10

# Quintic iteration that drives all singular values towards 1 (Jordan et al., 2024, "Muon").
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def is_matrix(name: str) -> bool:
    """Tell whether a parameter is Muon's: attention and expert matrices."""
    return name.endswith(MATRICES)


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest matrices with singular values of about 1; shape (n, rows, columns)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.transpose(1, 2) if tall else x).float()


class Muon:
    """Momentum whose update is made orthogonal."""

    def __init__(self, name: str, weight: Tensor, dtype: torch.dtype) -> None:
        # Gate and up are stored as one tensor but are two matrices.
        ff = weight.shape[1] // 2 if name.endswith("gate_up") else weight.shape[-2]
        self.weight = weight.view(-1, ff, weight.shape[-1])
        self.momentum = torch.zeros_like(self.weight)
        self.rate = MUON_RATE * math.sqrt(max(1.0, ff / weight.shape[-1]))
        self.dtype = dtype

    def step(self, grad: Tensor, scale: float) -> None:
        """Update the weight in place; `scale` multiplies the learning rate."""
        grad = grad.view_as(self.weight)
        self.momentum.lerp_(grad, 1 - MUON_MOMENTUM)
        update = grad.lerp(self.momentum, MUON_MOMENTUM)
        self.weight.add_(orthogonalise(update, self.dtype), alpha=-scale * self.rate)


class Adam:
    """Adam without weight decay."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.mean, self.square = torch.zeros_like(weight), torch.zeros_like(weight)
        self.steps = 0

    def step(self, grad: Tensor, scale: float) -> None:
        """Update the weight in place; `scale` multiplies the learning rate."""
        first, second = ADAM_BETAS
        self.steps += 1
        self.mean.lerp_(grad, 1 - first)
        self.square.mul_(second).addcmul_(grad, grad, value=1 - second)
        spread = (self.square / (1 - second**self.steps)).sqrt_().add_(ADAM_EPSILON)
        rate = scale * ADAM_RATE / (1 - first**self.steps)
        self.weight.addcdiv_(self.mean, spread, value=-rate)


def share_of(rank: int, world: int, parameters: dict[str, Tensor]) -> list[str]:
    """Return the names that process `rank` updates, with about equal work for each process."""
    load = [0] * world
    mine: list[str] = []
    for name in sorted(parameters, key=lambda each: -_cost(each, parameters[each])):
        lightest = load.index(min(load))
        load[lightest] += _cost(name, parameters[name])
        if lightest == rank:
            mine.append(name)
    return mine


def _cost(name: str, weight: Tensor) -> int:
    # Measured in passes over the weight: Newton-Schulz is worth about ten of Adam's.
    return weight.numel() * (10 if is_matrix(name) else 1)
