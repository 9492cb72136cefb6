"""How far one next-token distribution is from another, over the whole vocabulary in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmoe_lab.errors import SettingsError
from bmoe_lab.kernels import compiled

__all__ = ["Divergence", "TokenLoss", "divergence", "log_softmax_at", "token_loss"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What one distribution says about the token that came.

    Attributes
    ----------
    nll : float
        Negative log-probability of the token, in nats; ``inf`` if it was excluded.
    top : int
        The most likely token (ties to the lower id).
    """

    nll: float
    top: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """One distribution against a baseline, at one position.

    Attributes
    ----------
    nll : float
        Negative log-probability of the token that came, in nats.
    top : int
        The most likely token (ties to the lower id).
    kl : float
        KL(baseline || this), in nats; never negative, exactly 0 for equal logits, ``inf`` where
        the baseline allows a token that this distribution excludes.
    agrees : bool
        Whether both have the same most likely token.
    """

    nll: float
    top: int
    kl: float
    agrees: bool


def token_loss(logits: npt.NDArray[np.float32], token: int) -> TokenLoss:
    """Return the loss of `token` under the softmax of `logits`.

    Parameters
    ----------
    logits : numpy.ndarray of float32, shape (n_vocab,)
        Raw logits; ``-inf`` excludes a token.
    token : int
        The token that came.

    Raises
    ------
    SettingsError
        If a logit is NaN or ``+inf``, or all are ``-inf``: the run is broken.

    Examples
    --------
    >>> import numpy as np
    >>> token_loss(np.zeros(4, dtype=np.float32), token=2)
    TokenLoss(nll=1.3862943611198906, top=0)
    """
    _check_token(logits, token)
    top, log_sum = _log_sum(logits)
    _check_sum(log_sum)
    return TokenLoss(log_sum - float(logits[token]), top)


def log_softmax_at(logits: npt.NDArray[np.float32], token: int) -> float:
    """Return the natural-log probability of `token` under the softmax of `logits`.

    Parameters
    ----------
    logits : numpy.ndarray of float32, shape (n_vocab,)
        Raw logits; ``-inf`` excludes a token.
    token : int
        The token that came.

    Raises
    ------
    SettingsError
        If a logit is NaN or ``+inf``, or all are ``-inf``: the run is broken.

    Examples
    --------
    >>> import numpy as np
    >>> log_softmax_at(np.zeros(4, dtype=np.float32), token=2)
    -1.3862943611198906
    """
    return -token_loss(logits, token).nll


def divergence(
    baseline: npt.NDArray[np.float32], logits: npt.NDArray[np.float32], token: int
) -> Divergence:
    """Return how far the softmax of `logits` is from that of `baseline`.

    Parameters
    ----------
    baseline, logits : numpy.ndarray of float32, shape (n_vocab,)
        Raw logits of the lossless run, then of the run being judged; ``-inf`` excludes a token.
    token : int
        The token that came.

    Raises
    ------
    SettingsError
        If the shapes differ, a logit is NaN or ``+inf``, or all are ``-inf``.

    Notes
    -----
    With P the baseline and Q the other, the sum is taken over ``P log(P/Q) - P + Q``, whose terms
    are never negative (Csiszár, "Why least squares and maximum entropy?", Annals of Statistics 19,
    1991). It equals KL because both sum to one, and it does not lose a small KL to cancellation.
    llama.cpp's ``--kl-divergence`` reports the same quantity (pull request 5076) from logits that
    it rounds to 16 bits.

    Examples
    --------
    >>> import numpy as np
    >>> same = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    >>> divergence(same, same, token=2).kl
    0.0
    """
    if baseline.shape != logits.shape:
        raise SettingsError(
            f"logits must have the shape of baseline, {baseline.shape}; got {logits.shape}. "
            "Compare runs of one model."
        )
    _check_token(logits, token)
    base_top, base_sum = _log_sum(baseline)
    top, log_sum = _log_sum(logits)
    _check_sum(base_sum)
    _check_sum(log_sum)
    kl = _kl(baseline, base_sum, logits, log_sum)
    return Divergence(log_sum - float(logits[token]), top, kl, base_top == top)


def _check_token(logits: npt.NDArray[np.float32], token: int) -> None:
    if logits.ndim != 1 or not 0 <= token < logits.shape[0]:
        raise SettingsError(
            f"token must be an index into one row of logits; got {token!r} for shape "
            f"{logits.shape}. Pass the logits that predict this token."
        )


def _check_sum(log_sum: float) -> None:
    if not math.isfinite(log_sum):
        raise SettingsError(
            f"logits must have a finite log-sum-exp; got {log_sum!r} (NaN, +inf or nothing but "
            "-inf). The run is broken: stop it and check the policy's weights."
        )


@compiled
def _log_sum(logits: npt.NDArray[np.float32]) -> tuple[int, float]:
    """Return argmax (ties to the lower id) and log-sum-exp; NaN anywhere gives NaN."""
    top = 0
    largest = -np.inf
    for v in range(logits.shape[0]):
        value = np.float64(logits[v])
        if np.isnan(value):
            return 0, np.nan
        if value > largest:
            largest = value
            top = v
    if not np.isfinite(largest):
        return top, largest
    total = 0.0
    for v in range(logits.shape[0]):
        total += math.exp(np.float64(logits[v]) - largest)
    return top, largest + math.log(total)


@compiled
def _kl(
    baseline: npt.NDArray[np.float32],
    base_sum: float,
    logits: npt.NDArray[np.float32],
    log_sum: float,
) -> float:
    total = 0.0
    for v in range(baseline.shape[0]):
        log_p = np.float64(baseline[v]) - base_sum
        log_q = np.float64(logits[v]) - log_sum
        p = math.exp(log_p)
        if p == 0.0:
            total += math.exp(log_q)
            continue
        gap = log_p - log_q
        if gap == np.inf:
            return np.inf
        if gap < -1.0:
            total += p * gap - p + math.exp(log_q)
        else:
            # p log(p/q) - p + q = p (gap + exp(-gap) - 1), exact to the last bits for tiny gaps.
            total += p * (gap + math.expm1(-gap))
    return total
