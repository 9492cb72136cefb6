"""The model: a small Qwen3-MoE, written for training on one CPU thread per process.

Shapes are noted as T tokens (batch times length), D width, E experts, K experts used, F width
of an expert, V vocabulary. Weights are float32; matrix products run in ``compute_dtype``.

Two pieces have a backward pass of their own. The experts, because autograd over a loop of
slices costs more than the products. And the head with the loss, because the gradient of the
logits is known as soon as they are, so that T x V numbers need never be kept.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN compiles a kernel for each new shape. Rounding the rows of every expert up to this
# keeps the number of shapes small; the added rows have weight 0.
ROW_MULTIPLE = 32
HEAD_CHUNK = 512


@dataclass(frozen=True)
class Config:
    """Shape of the model, under the names of the GGUF metadata."""

    vocab_size: int = 4096
    embedding_length: int = 192
    block_count: int = 6
    head_count: int = 3
    head_length: int = 64
    expert_count: int = 32
    expert_used_count: int = 4
    expert_feed_forward_length: int = 64
    rope_freq_base: float = 10_000.0
    norm_epsilon: float = 1e-6


class RMSNorm(nn.Module):
    """Scale to unit root mean square, times a weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding in the NEOX order: the two halves of a head are pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with several query heads on one key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, head = config.embedding_length, config.head_length
        self.heads, self.head = config.head_count, head
        self.q = nn.Parameter(torch.empty(self.heads * head, width))
        self.k = nn.Parameter(torch.empty(head, width))
        self.v = nn.Parameter(torch.empty(head, width))
        self.out = nn.Parameter(torch.empty(width, self.heads * head))
        self.q_norm = RMSNorm(head, config.norm_epsilon)
        self.k_norm = RMSNorm(head, config.norm_epsilon)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Return what attention adds; `x` is (batch, length, D)."""
        batch, length, _ = x.shape
        q, k, v = (x @ weight.to(x.dtype).T for weight in (self.q, self.k, self.v))
        q = q.view(batch, length, self.heads, self.head).transpose(1, 2)
        q = rotate(self.q_norm(q.float()), positions.cos, positions.sin).to(x.dtype)
        k = rotate(self.k_norm(k.float()), positions.cos, positions.sin).to(x.dtype)
        # All query heads share the keys, so they can be stacked as rows of one product.
        rows = q.reshape(batch, self.heads * length, self.head) / math.sqrt(self.head)
        scores = torch.bmm(rows, k.transpose(1, 2)).view(batch, self.heads, length, length)
        shares = torch.softmax(scores + positions.mask, dim=-1)
        mixed = torch.bmm(shares.view(batch, self.heads * length, length), v)
        mixed = mixed.view(batch, self.heads, length, self.head).transpose(1, 2)
        return mixed.reshape(batch, length, -1) @ self.out.to(x.dtype).T


class Positions:
    """Rotary tables and the causal mask for one length."""

    def __init__(self, config: Config, length: int, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, config.head_length, 2) / config.head_length
        angle = torch.outer(torch.arange(length), config.rope_freq_base**-exponent)
        angle = torch.cat((angle, angle), dim=-1)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.mask = torch.full((length, length), -torch.inf, dtype=dtype).triu(1)


class Plan:
    """Where each (token, slot) pair goes when pairs are grouped by expert.

    Attributes
    ----------
    segments : list of (expert, first row, last row)
    rows : Tensor of shape (P,), token of each row, 0 for padding
    places : Tensor of shape (T * K,), row of each pair
    """

    def __init__(self, chosen: Tensor, n_expert: int) -> None:
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=n_expert)
        padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        order = flat.argsort(stable=True)
        places = torch.arange(len(flat)) + shift.index_select(0, flat.index_select(0, order))
        self.rows = torch.zeros(int(ends[-1]), dtype=torch.long)
        self.rows[places] = order // chosen.shape[1]
        self.places = torch.empty_like(order)
        self.places[order] = places
        stops = ends.tolist()
        self.segments = [
            (expert, start, stop)
            for expert, (start, stop) in enumerate(itertools.pairwise([0, *stops]))
            if stop > start
        ]


class Experts(torch.autograd.Function):
    """Weighted sum of SwiGLU experts."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, plan: Plan):
        """Return (T, D) in float32; `weights` is (T, K), `gate_up` (E, 2F, D), `down` (E, D, F)."""
        tokens, used = weights.shape
        gate_up, down = gate_up.to(x.dtype), down.to(x.dtype)
        x_rows = x.index_select(0, plan.rows)
        hidden = x.new_empty(len(plan.rows), gate_up.shape[1])
        for expert, start, stop in plan.segments:
            torch.mm(x_rows[start:stop], gate_up[expert].T, out=hidden[start:stop])
        gate, up = hidden.chunk(2, dim=1)
        active = F.silu(gate) * up
        y_rows = torch.empty_like(x_rows)
        for expert, start, stop in plan.segments:
            torch.mm(active[start:stop], down[expert].T, out=y_rows[start:stop])
        per_slot = y_rows.index_select(0, plan.places).view(tokens, used, -1)
        ctx.save_for_backward(weights, gate_up, down, x_rows, hidden, active, y_rows)
        ctx.plan = plan
        return (per_slot.float() * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        """Repeat the forward steps in reverse, in the same grouped order."""
        weights, gate_up, down, x_rows, hidden, active, y_rows = ctx.saved_tensors
        plan = ctx.plan
        tokens, used = weights.shape
        row_weight = weights.new_zeros(len(plan.rows))
        row_weight[plan.places] = weights.reshape(-1)

        grad_rows = grad_y.to(x_rows.dtype).index_select(0, plan.rows)
        grad_weights = (grad_rows * y_rows).sum(1, dtype=torch.float32)
        grad_weights = grad_weights.index_select(0, plan.places).view(tokens, used)
        grad_rows = grad_rows * row_weight.to(grad_rows.dtype).unsqueeze(1)

        grad_down = torch.zeros_like(down)
        grad_active = torch.empty_like(active)
        for expert, start, stop in plan.segments:
            torch.mm(grad_rows[start:stop], down[expert], out=grad_active[start:stop])
            torch.mm(grad_rows[start:stop].T, active[start:stop], out=grad_down[expert])

        gate, up = hidden.chunk(2, dim=1)
        logistic = torch.sigmoid(gate)
        silu = gate * logistic
        grad_gate = grad_active * up * (logistic + silu * (1 - logistic))
        grad_hidden = torch.cat((grad_gate, grad_active * silu), dim=1)

        grad_gate_up = torch.zeros_like(gate_up)
        grad_x_rows = torch.empty_like(x_rows)
        for expert, start, stop in plan.segments:
            torch.mm(grad_hidden[start:stop], gate_up[expert], out=grad_x_rows[start:stop])
            torch.mm(grad_hidden[start:stop].T, x_rows[start:stop], out=grad_gate_up[expert])
        grad_x = grad_x_rows.index_select(0, plan.places).view(tokens, used, -1).sum(1)
        return grad_x, grad_weights, grad_gate_up.float(), grad_down.float(), None


class MixtureOfExperts(nn.Module):
    """Router and experts of one block.

    After a forward pass `chosen` holds the (T, K) expert ids and `probabilities` the router's
    mean probability of each expert, for the balance term of the loss.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        n_expert, width = config.expert_count, config.embedding_length
        ff = config.expert_feed_forward_length
        self.used = config.expert_used_count
        self.router = nn.Parameter(torch.empty(n_expert, width))
        self.gate_up = nn.Parameter(torch.empty(n_expert, 2 * ff, width))
        self.down = nn.Parameter(torch.empty(n_expert, width, ff))
        self.chosen: Tensor | None = None
        self.probabilities: Tensor | None = None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the experts add; `x` is (T, D) in float32."""
        logits = x @ self.router.T
        self.probabilities = logits.softmax(-1).mean(0)
        top, self.chosen = logits.topk(self.used, dim=-1)
        # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        weights = top.softmax(-1)
        plan = Plan(self.chosen, len(self.router))
        return Experts.apply(x.to(dtype), weights, self.gate_up, self.down, plan)


class Block(nn.Module):
    """Attention and mixture of experts, each on a normalised input and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.embedding_length, config.norm_epsilon)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.embedding_length, config.norm_epsilon)
        self.moe = MixtureOfExperts(config)

    def forward(self, x: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
        """Return the stream (batch, length, D), in float32 throughout."""
        x = x + self.attention(self.attention_norm(x).to(dtype), positions)
        flat = self.moe_norm(x).view(-1, x.shape[-1])
        return x + self.moe(flat, dtype).view_as(x)


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the next token, its gradients formed chunk by chunk."""

    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats; `x` is (T, D), `head` (V, D)."""
        head = head.to(x.dtype)
        grad_x = torch.empty_like(x)
        grad_head = torch.zeros(head.shape)
        total = 0.0
        for start in range(0, len(x), HEAD_CHUNK):
            rows, goal = x[start : start + HEAD_CHUNK], targets[start : start + HEAD_CHUNK]
            logits = (rows @ head.T).float()
            log_total = logits.logsumexp(-1, keepdim=True)
            total += (log_total - logits.gather(1, goal.unsqueeze(1))).sum().item()
            grad = (logits - log_total).exp_()
            grad.scatter_add_(1, goal.unsqueeze(1), grad.new_full((len(goal), 1), -1.0))
            grad = (grad / len(targets)).to(x.dtype)
            torch.mm(grad, head, out=grad_x[start : start + len(rows)])
            grad_head += grad.T @ rows
        ctx.save_for_backward(grad_x, grad_head)
        return torch.tensor(total / len(targets))

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Scale what the forward pass prepared."""
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_head * grad, None


class DemoModel(nn.Module):
    """Embedding, blocks, norm and an untied head."""

    def __init__(self, config: Config, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        width = config.embedding_length
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.block_count))
        self.norm = RMSNorm(width, config.norm_epsilon)
        self.head = nn.Parameter(torch.empty(config.vocab_size, width))
        self._positions: dict[int, Positions] = {}

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set all weights: norms to 1, the others drawn."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            if name == "embedding":
                std = 0.3
            elif name == "head" or name.endswith("router"):
                std = 0.02
            else:
                std = parameter.shape[-1] ** -0.5
                if name.endswith(("out", "down")):
                    std /= math.sqrt(2 * self.config.block_count)
            parameter.normal_(0.0, std, generator=generator)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the normalised stream (batch, length, D) before the head."""
        length = ids.shape[1]
        if length not in self._positions:
            self._positions[length] = Positions(self.config, length, self.compute_dtype)
        x = F.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x, self._positions[length], self.compute_dtype)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets`; both are (batch, length) ids."""
        x = self.hidden(ids).view(-1, self.config.embedding_length)
        return HeadLoss.apply(x.to(self.compute_dtype), self.head, targets.reshape(-1))

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return float32 logits (batch, length, V)."""
        return (
            self.hidden(ids).to(self.compute_dtype) @ self.head.to(self.compute_dtype).T
        ).float()
