"""The top of a spectrum by block subspace iteration, with a proof that the bracket is right.

Σ is positive semi-definite, J x J; V has r orthonormal columns, taken as Ritz vectors, so that
VᵀΣV = diag(θ). With V⊥ completing V, Σ has the blocks diag(θ), R = V⊥ᵀΣV and C = V⊥ᵀΣV⊥. Known at
the price of one product ΣV are θ, e = tr C = tr Σ − Σθ_i, the residuals r_i = ‖Σv_i − θ_i v_i‖ =
‖R e_i‖, and ‖C‖²_F = ‖Σ‖²_F − Σθ_i² − 2 Σr_i². Let f(w) = w/(w + λ) and N_r = Σ f(θ_i).

**Above.** The eigenvalues of Σ majorise those of its diagonal blocks and f is concave, so
N <= N_r + tr f(C), and tr f(C) <= e/(λ + e/(J − r)) by concavity once more.

**Below.** Inverting Σ + λ by blocks, N = N_r + tr f(C) − δ, where with
ρ = Σ r_i²/(λ(θ_i + λ)) < 1

    δ <= Σ r_i²/(θ_i + λ)² + Σ r_i² / (λ (1 − ρ) (θ_i + λ)),

since both Schur complements are at least λ. By Cauchy-Schwarz tr f(C) >= e²/(‖C‖²_F + λe) =
e/(λ + μ), where μ = ‖C‖²_F / e is the mean of C's eigenvalues weighted by themselves. So for any
ν with μ <= ν <= θ_r, the bound N >= N_r + e/(λ + ν) is true at **every** λ >= λ_min as soon as

    Σ r_i² · (1 + (1 + μ/λ_min)/(1 − ρ_min)) <= e (ν − μ).                                (*)

All this holds for the first p Ritz pairs as well, with what is left out added to e and ‖C‖²_F. So
pairs at the end that have not converged serve as guards, and the p is taken whose bracket is
narrowest.

**How it is stored.** A record knows values and their tail, and its lower bound takes the last value
for the largest of the others. So after θ_1 … θ_p stand k copies of ν, the least that satisfies (*),
where k counts the guards θ_{p+1}, θ_{p+2}, … that are at least ν. The lower bound of that list is
N_p + e/(λ + ν) again. The upper one stays true, since Σ's eigenvalues still majorise the list:
each entry is at most the Ritz value in its place. If no guard reaches ν, k is 0 and θ_p takes the
part of ν.

The search for V runs in float32, whose rounding only makes V a little worse; θ, e, r_i and ‖C‖_F
are then taken in float64 and (*) is checked with these.

Sizes: H heads, J rows of Σ, r columns of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_RANK = 32
GUARDS = 8
"""Ritz pairs beyond those that will be kept: their company makes the kept ones converge."""
MARGIN = 1.0
"""Part of the width allowed that the estimate in float32 must meet before float64 is asked."""
MAX_ROUNDS = 12

FLOAT32_CLEAR = 2e-6
"""Relative to the largest, a Ritz value below this is lost in the rounding of float32."""

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class CertifiedTop:
    """Lower bounds of the largest eigenvalues for which the bracket is proven, and the rest."""

    values: Tensor
    """float64, descending, shape [p + k]."""
    tail: float


def certified_top(
    sigma: Tensor,
    single: Tensor,
    *,
    lam_min: float,
    rel_width: float,
    max_rank: int,
    generator: torch.Generator,
) -> CertifiedTop | None:
    """Largest eigenvalues of one Σ, enough for a bracket narrower than rel_width at lam_min.

    The block starts with FIRST_RANK columns. Each round multiplies it by Σ once, and that product
    serves twice: for the Ritz values of the block, and as the next, better block. The estimate
    they give says how many columns are wanted.

    Args:
        sigma: positive semi-definite, float64, shape [J, J].
        single: the same in float32.
        lam_min: smallest λ at which the bracket will be asked for.
        rel_width: greatest width of the bracket, relative to its lower end.
        max_rank: largest block to try.
        generator: of the random start, on the device of sigma.
    Returns:
        The certified part of the spectrum, or None: a dense decomposition is then the cheaper way.
    """
    n_rows = len(sigma)
    trace = float(torch.diagonal(sigma).sum())
    square = float(torch.linalg.vector_norm(sigma) ** 2)
    rank = min(FIRST_RANK, max_rank)
    if rank < 1:
        return None
    block = _orthonormal(single @ _random(n_rows, rank, single, generator))
    for _ in range(MAX_ROUNDS):
        product = single @ block
        ritz, turn = torch.linalg.eigh((block.T @ product).double())
        ritz, turn = ritz.flip(0).clamp_min(0.0), turn.flip(1)
        keep, excess = _wanted(ritz, trace, n_rows, lam_min, rel_width)
        if excess <= 1.0:
            # Σv_i/θ_i rather than v_i: a step nearer to the eigenvectors, already paid for. Below
            # the rounding of float32 it would only be noise.
            clear = int((ritz[: keep + GUARDS] > FLOAT32_CLEAR * ritz[0]).sum())
            nearer = product @ (turn[:, :clear] / ritz[:clear]).float()
            found = _certify(sigma, nearer, trace, square, lam_min)
            if found is not None and _width(found, n_rows, lam_min) <= rel_width:
                return found
            excess = 1.2
        rank = _next_rank(ritz, rank, excess)
        if rank > max_rank:
            return None
        fresh = _random(n_rows, rank - block.shape[1], single, generator)
        block = _orthonormal(torch.cat([product @ turn.float(), single @ fresh], dim=1))
    return None


def _certify(
    sigma: Tensor, block: Tensor, trace: float, square: float, lam: float
) -> CertifiedTop | None:
    """Rayleigh-Ritz in float64 on the block [J, r]; the p <= r pairs that pass (*), if any.

    The block need not be orthonormal, only well conditioned: with the Cholesky factor L of
    VᵀV = LLᵀ, the columns of VL^-T are, and all that is wanted follows from three r x r products.
    """
    n_rows = len(sigma)
    # As rows, since BLAS multiplies a wide matrix by Σ twice as fast as Σ by a tall one.
    basis = block.T.double().contiguous()
    product = basis @ sigma
    factor, failed = torch.linalg.cholesky_ex(basis @ basis.T)
    if int(failed):  # rounding made two columns alike: another round will part them
        return None
    ritz, turn = torch.linalg.eigh(_sandwich(factor, basis @ product.T))
    squares = _sandwich(factor, product @ product.T)  # of Σv_i in a turned basis
    ritz, turn = ritz.flip(0).clamp_min(0.0), turn.flip(1)
    dust = n_rows * _EPS
    residual = ((turn * (squares @ turn)).sum(0) - ritz.square()).clamp_min(0.0)
    residual += dust * ritz.square()  # what that difference may have lost

    tail = trace - ritz.cumsum(0)
    settled = (tail <= dust * trace).nonzero()
    if len(settled):  # nothing is left that float64 could tell from zero
        return CertifiedTop(ritz[: int(settled[0]) + 1], 0.0)
    left = residual.cumsum(0)
    rest = (square - ritz.square().cumsum(0) - 2 * left).clamp_min(0.0) + dust * square
    mean = rest / tail
    rho = (residual / (lam * (ritz + lam))).cumsum(0)
    cap = mean + left * (1 + (1 + mean / lam) / (1 - rho)) / tail  # the least ν of (*)
    proven = (rho < 1) & (cap <= ritz)
    if not bool(proven.any()):
        return None
    guards = _guards_above(ritz, cap)
    cap = torch.where(guards > 0, cap, ritz)
    width = _bracket_widths(cap, tail - guards * cap, n_rows, lam)
    best = int(width.masked_fill(~proven, float("inf")).argmin())
    added = cap[best].expand(int(guards[best]))
    return CertifiedTop(
        torch.cat([ritz[: best + 1], added]), float(tail[best] - guards[best] * cap[best])
    )


def _guards_above(ritz: Tensor, cap: Tensor) -> Tensor:
    """For each p, how many of θ_{p+1}, θ_{p+2}, … are at least cap_p; int64, shape [r]."""
    above = (ritz >= cap[:, None]).sum(1)
    return (above - torch.arange(1, len(ritz) + 1, device=ritz.device)).clamp_min(0)


def _sandwich(factor: Tensor, inner: Tensor) -> Tensor:
    """L^-1 A L^-T for a lower factor L and a symmetric A, both r x r."""
    left = torch.linalg.solve_triangular(factor, inner, upper=False)
    both: Tensor = torch.linalg.solve_triangular(factor, left.T, upper=False)
    return 0.5 * (both + both.T)


def _bracket_widths(last: Tensor, tail: Tensor, n_rows: int, lam: float) -> Tensor:
    """Width of the bracket at λ when a list of values ends in last and leaves tail; any shape."""
    return tail / (lam + tail / n_rows) - tail / (lam + last)


def _width(found: CertifiedTop, n_rows: int, lam: float) -> float:
    """Width of the bracket at λ relative to its lower end."""
    last, tail = found.values[-1], found.values.new_tensor(found.tail)
    low = (found.values / (found.values + lam)).sum() + tail / (lam + last)
    return float(_bracket_widths(last, tail, n_rows, lam) / low)


def _wanted(
    ritz: Tensor, trace: float, n_rows: int, lam: float, rel_width: float
) -> tuple[int, float]:
    """How many of these Ritz values would do, and else how much too wide the bracket still is.

    ν is not known to float32. It is about half of θ_p where a spectrum falls exponentially, and
    less where it falls like a power.
    """
    tail = (trace - ritz.cumsum(0)).clamp_min(0.0)
    low = (ritz / (ritz + lam)).cumsum(0)
    excess = _bracket_widths(0.5 * ritz, tail, n_rows, lam) / (rel_width * low)
    enough = (excess <= MARGIN).nonzero()
    if len(enough) and int(enough[0]) + GUARDS // 2 < len(ritz):
        return int(enough[0]) + 1, 1.0
    return len(ritz), max(float(excess[-1]) / MARGIN, 1.01)


def _next_rank(ritz: Tensor, rank: int, excess: float) -> int:
    """Columns at which a spectrum that falls like j^-b narrows its bracket by the excess.

    The width goes like tail · θ, that is like j^(1 − 2b); b is read between half and three quarters
    of the block, where Ritz values have converged.
    """
    half, later = float(ritz[rank // 2]), float(ritz[3 * rank // 4])
    if later <= 0.0:
        return rank + GUARDS
    power = max(torch.log(torch.tensor(half / later)).item() / 0.405, 1.0)
    factor = min(max(excess ** (1 / (2 * power - 1)), 1.0), 3.0)
    return int(rank * factor) + GUARDS


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _random(n_rows: int, columns: int, like: Tensor, generator: torch.Generator) -> Tensor:
    draw = torch.randn(n_rows, columns, generator=generator, device=generator.device)
    return draw.to(like)
