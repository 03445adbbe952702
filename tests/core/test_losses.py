"""Layerwise losses against plain float64 autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dofsweep.core import losses
from dofsweep.core.attention import attention_reference, linear_attention
from dofsweep.core.losses import (
    StudentRows,
    attention_kl,
    output_loss,
    softmax_loss,
    softmax_losses,
    teacher_rows,
)
from dofsweep.core.window import Window
from dofsweep.errors import StudentError

SCALE = 0.3


def make_teacher_inputs(
    L: int, D: int = 8, heads: tuple[int, int] = (4, 2), batch: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,H,L,D], k and v [B,G,L,D]."""
    gen = torch.Generator().manual_seed(seed)
    H, G = heads
    return tuple(torch.randn(batch, n, L, D, generator=gen) for n in (H, G, G))


def prf(q: Tensor, k: Tensor, M: int, K: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Positive random features with K key heads, as leaves that want a gradient."""
    gen = torch.Generator().manual_seed(seed)
    H, G, D = q.shape[1], k.shape[1], q.shape[-1]
    z = torch.randn(K, M, D, generator=gen)
    k = k.repeat_interleave(K // G, 1)
    log_q = SCALE**0.5 * q @ z.repeat_interleave(H // K, 0).mT
    log_k = SCALE**0.5 * k @ z.mT - SCALE * k.square().sum(-1, keepdim=True) / 2
    return log_q.requires_grad_(), log_k.requires_grad_()


def masks(batch: int, L: int) -> Tensor:
    mask = torch.ones(batch, L, dtype=torch.bool)
    mask[0, : L // 3] = False
    mask[-1, L - L // 4 :] = False
    return mask


def visible(L: int, key_mask: Tensor | None) -> Tensor:
    keep = torch.ones(L, L, dtype=torch.bool).tril()
    return keep if key_mask is None else keep & key_mask[:, None, None, :]


def plain_logits(log_q: Tensor, log_k: Tensor) -> Tensor:
    log_k = log_k.repeat_interleave(log_q.shape[1] // log_k.shape[1], 1)
    return (log_q[:, :, :, None] + log_k[:, :, None]).logsumexp(-1)


def plain_teacher(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = SCALE * q.double() @ k.double().mT
    return logits.masked_fill(~visible(q.shape[2], key_mask), -1e30)


def mean_rows(x: Tensor, key_mask: Tensor | None) -> Tensor:
    return x.mean() if key_mask is None else x[key_mask[:, None].expand_as(x)].mean()


def plain_softmax_loss(
    log_q: Tensor, log_k: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None
) -> Tensor:
    keep = visible(q.shape[2], key_mask)
    p = plain_teacher(q, k, key_mask).softmax(-1)
    log_a = plain_logits(log_q, log_k).masked_fill(~keep, -1e30).log_softmax(-1)
    return mean_rows(-(p * log_a).sum(-1), key_mask)


def l2_loss(log_q: Tensor, log_k: Tensor, q: Tensor, k: Tensor, scale: float, *args, **options):
    """Of features of weight 1/M."""
    present = (log_k > -torch.inf).any(2).sum(-1).repeat_interleave(q.shape[1] // log_k.shape[1], 1)
    shift = -scale * q.square().sum(-1) / 2 - present[..., None].log()
    rows = StudentRows(log_q, log_k, row_shift=shift)
    return losses.l2_loss(rows, q, k, scale, *args, **options)


def plain_l2_loss(
    log_q: Tensor, log_k: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None
) -> Tensor:
    keep = visible(q.shape[2], key_mask)
    logits = plain_teacher(q, k, key_mask)
    top = logits.amax(-1, keepdim=True)
    kernel = (logits - top).exp()
    shift = top + SCALE * q.double().square().sum(-1, keepdim=True) / 2
    shifted = (plain_logits(log_q, log_k) - shift).masked_fill(~keep, -torch.inf)
    error = (shifted.exp() / log_q.shape[-1] - kernel).masked_fill(~keep, 0).square().sum(-1)
    return mean_rows(error / kernel.square().sum(-1), key_mask)


def assert_same_as_plain(loss, plain, log_q: Tensor, log_k: Tensor, tol: float = 2e-5) -> None:
    """Value and gradients of loss(log_q, log_k) are those of plain in float64."""
    exact = [x.detach().double().requires_grad_() for x in (log_q, log_k)]
    want, got = plain(*exact), loss(log_q, log_k)
    torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)
    want.backward()
    log_q.grad = log_k.grad = None
    got.backward()
    for mine, ref in zip((log_q, log_k), exact, strict=True):
        torch.testing.assert_close(
            mine.grad.double(), ref.grad, rtol=0, atol=tol * ref.grad.abs().max().item() + 1e-7
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("L", "M", "D", "heads", "K"),
    [
        (1, 9, 8, (2, 2), 2),
        (63, 1, 8, (2, 1), 1),
        (63, 33, 64, (4, 2), 2),
        (257, 9, 80, (4, 2), 4),
        (63, 277, 128, (2, 1), 1),
        (20, 513, 8, (1, 1), 1),
    ],
)
def test_softmax_loss(L: int, M: int, D: int, heads: tuple[int, int], K: int, padded: bool) -> None:
    q, k, _ = make_teacher_inputs(L, D, heads, batch=2)
    mask = masks(2, L) if padded else None
    log_q, log_k = prf(q, k, M, K)
    assert_same_as_plain(
        lambda a, b: softmax_loss(a, b, q, k, SCALE, mask, row_chunk=50),
        lambda a, b: plain_softmax_loss(a, b, q, k, mask),
        log_q,
        log_k,
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("L", "M", "K"), [(1, 9, 2), (63, 33, 2), (130, 9, 4)])
def test_l2_loss(L: int, M: int, K: int, padded: bool) -> None:
    q, k, _ = make_teacher_inputs(L, 8, batch=2)
    mask = masks(2, L) if padded else None
    log_q, log_k = prf(q, k, M, K)
    assert_same_as_plain(
        lambda a, b: l2_loss(a, b, q, k, SCALE, mask, row_chunk=50),
        lambda a, b: plain_l2_loss(a, b, q, k, mask),
        log_q,
        log_k,
    )


@pytest.mark.parametrize("padded", [False, True])
def test_output_loss(padded: bool) -> None:
    L = 130
    q, k, v = make_teacher_inputs(L, 8, batch=2)
    mask = masks(2, L) if padded else None
    target = plain_teacher(q, k, mask).softmax(-1) @ v.double().repeat_interleave(2, 1)

    def plain(log_q: Tensor, log_k: Tensor) -> Tensor:
        real = 1.0 if mask is None else mask[:, None, :, None]
        error = (attention_reference(log_q, log_k, v, mask) - target) * real
        return error.square().sum() / (target * real).square().sum()

    assert_same_as_plain(
        lambda a, b: output_loss(linear_attention(a, b, v, mask), target, mask),
        plain,
        *prf(q, k, 9, 2),
    )


def test_near_keys_have_no_l2_error() -> None:
    q, k, _ = make_teacher_inputs(40)
    log_q, log_k = (x.detach().requires_grad_() for x in prf(q, k, 6, 2))
    shift = -SCALE * q.square().sum(-1) / 2
    window = Window(7, 2)

    def plain(a: Tensor, b: Tensor) -> Tensor:
        logits = plain_teacher(q, k, None)
        top = logits.amax(-1, keepdim=True)
        kernel = (logits - top).exp()
        far = visible(40, None) & ~window.near(slice(0, 40), None, q.device)
        estimate = (plain_logits(a, b) + shift.double()[..., None] - top).exp()
        error = (estimate - kernel).masked_fill(~far, 0).square().sum(-1)
        return (error / kernel.square().sum(-1)).mean()

    assert_same_as_plain(
        lambda a, b: losses.l2_loss(StudentRows(a, b, window, shift), q, k, SCALE, row_chunk=9),
        plain,
        log_q,
        log_k,
    )
    with pytest.raises(StudentError, match="row_shift"):
        losses.l2_loss(StudentRows(log_q, log_k), q, k, SCALE)


@pytest.mark.parametrize("loss", [softmax_loss, l2_loss])
def test_row_chunks_change_nothing(loss) -> None:
    q, k, _ = make_teacher_inputs(70)
    features = prf(q, k, 9, 2)
    whole = loss(*features, q, k, SCALE, row_chunk=1000)
    for row_chunk in (1, 33, 70):
        torch.testing.assert_close(loss(*features, q, k, SCALE, row_chunk=row_chunk), whole)


def test_many_students_are_each_what_they_are_alone() -> None:
    q, k, _ = make_teacher_inputs(70)
    students = [prf(q, k, M, K, seed=M) for M, K in ((9, 2), (9, 2), (33, 4), (1, 2))]
    losses = softmax_losses([StudentRows(*s) for s in students], q, k, SCALE)[0]
    assert losses.shape == (4,)
    (losses * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    for i, (log_q, log_k) in enumerate(students):
        alone = [x.detach().requires_grad_() for x in (log_q, log_k)]
        loss = softmax_loss(*alone, q, k, SCALE)
        loss.backward()
        torch.testing.assert_close(losses[i], loss)
        for mine, ref in zip((log_q, log_k), alone, strict=True):
            torch.testing.assert_close(mine.grad, (i + 1) * ref.grad)


def test_a_perfect_student_has_no_divergence() -> None:
    """Features that spell the teacher's kernel out: one feature per key."""
    L = 40
    q, k, v = make_teacher_inputs(L, 8, (2, 2))
    log_k = torch.full((1, 2, L, L), -torch.inf)
    log_k.diagonal(dim1=-2, dim2=-1).zero_()
    log_q = (SCALE * q @ k.mT).requires_grad_()
    assert abs(attention_kl(StudentRows(log_q, log_k), q, k, SCALE).item()) < 1e-5
    loss = softmax_loss(log_q, log_k, q, k, SCALE)
    entropy = torch.special.entr(plain_teacher(q, k, None).softmax(-1)).sum(-1).mean()
    assert loss.item() == pytest.approx(entropy.item(), abs=1e-5)
    loss.backward()
    assert log_q.grad.abs().max() < 1e-7
    target = plain_teacher(q, k, None).softmax(-1) @ v.double()
    assert output_loss(linear_attention(log_q, log_k, v), target).item() < 1e-10
    size = SCALE * q.square().sum(-1, keepdim=True) / 2
    exact = log_q + size + torch.log(torch.tensor(float(L)))
    assert l2_loss(exact, log_k, q, k, SCALE).item() < 1e-10


@settings(deadline=None, max_examples=20)
@given(L=st.integers(2, 40), M=st.integers(1, 20), seed=st.integers(0, 99), size=st.floats(0, 20))
def test_divergence_is_not_negative_and_is_the_loss_less_the_entropy(
    L: int, M: int, seed: int, size: float
) -> None:
    q, k, _ = make_teacher_inputs(L, seed=seed)
    log_q, log_k = (size * x.detach() for x in prf(q, k, M, 2, seed))
    kl = attention_kl(StudentRows(log_q, log_k), q, k, SCALE).item()
    assert kl > -1e-4 * (1 + size)
    entropy = torch.special.entr(plain_teacher(q, k, None).softmax(-1)).sum(-1).mean().item()
    loss = softmax_loss(log_q, log_k, q, k, SCALE).item()
    assert loss - entropy == pytest.approx(kl, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("apart", [50.0, 120.0, 400.0])
def test_pairs_beyond_float32_have_their_loss_and_gradient(apart: float) -> None:
    """Queries and keys on disjoint features: b is exp(-apart) and below."""
    L = 30
    q, k, _ = make_teacher_inputs(L)
    log_q, log_k = (x.detach().clone() for x in prf(q, k, 6, 2))
    log_q[:, :, ::2, :3] -= apart
    log_q[:, :, 1::2, 3:] -= apart
    log_k[:, :, ::3, 3:] -= apart
    log_k[:, :, 1::3, :3] -= apart
    mask = masks(1, L)
    assert_same_as_plain(
        lambda a, b: softmax_loss(a, b, q, k, SCALE, mask, row_chunk=7),
        lambda a, b: plain_softmax_loss(a, b, q, k, mask),
        log_q.requires_grad_(),
        log_k.requires_grad_(),
        tol=2e-5,
    )


def test_norms_of_a_real_model_stay_finite() -> None:
    """s‖k‖² near 277: kernel values reach exp(277)."""
    q, k, v = (30 * x for x in make_teacher_inputs(100, 64, (2, 2)))
    q, k = (x / x.norm(dim=-1, keepdim=True) * (277 / SCALE) ** 0.5 for x in (q, k))
    q[:, :, 50:] = k[:, :, 50:]
    features = prf(q, k, 64, 2)
    for loss in (softmax_loss, l2_loss):
        for x in features:
            x.grad = None
        value = loss(*features, q, k, SCALE)
        value.backward()
        assert value.isfinite()
        assert all(x.grad.isfinite().all() for x in features)
    plain = plain_softmax_loss(*(x.double() for x in features), q, k, None)
    torch.testing.assert_close(
        softmax_loss(*features, q, k, SCALE).double(), plain, rtol=1e-5, atol=1e-4
    )
    assert linear_attention(*features, v).isfinite().all()


def test_absent_features_change_no_loss() -> None:
    """Unequal M per head is padded with -inf; M of the l2 loss counts present features."""
    q, k, v = make_teacher_inputs(40)
    log_q, log_k = (x.detach() for x in prf(q, k, 5, 2))
    padded = [torch.nn.functional.pad(x, (0, 3), value=-torch.inf) for x in (log_q, log_k)]
    padded = [x.requires_grad_() for x in padded]
    for loss in (softmax_loss, l2_loss):
        want, got = loss(log_q, log_k, q, k, SCALE), loss(*padded, q, k, SCALE)
        torch.testing.assert_close(got, want)
    (softmax_loss(*padded, q, k, SCALE) + l2_loss(*padded, q, k, SCALE)).backward()
    for x in padded:
        assert x.grad.isfinite().all()
        assert not x.grad[..., 5:].any()
    torch.testing.assert_close(linear_attention(*padded, v), linear_attention(log_q, log_k, v))


@pytest.mark.parametrize("loss", [softmax_loss, l2_loss])
def test_what_padding_holds_does_not_matter(loss) -> None:
    L = 40
    q, k, _ = make_teacher_inputs(L, batch=2)
    mask = masks(2, L)
    log_q, log_k = (x.detach() for x in prf(q, k, 5, 2))
    want = loss(log_q, log_k, q, k, SCALE, mask)
    dirty = [x.clone() for x in (log_q, log_k, q, k)]
    for x in dirty:
        x.transpose(1, 2)[~mask] = 1e4
    features = [x.requires_grad_() for x in dirty[:2]]
    got = loss(*features, *dirty[2:], SCALE, mask)
    torch.testing.assert_close(got, want)
    got.backward()
    for x in features:
        assert x.grad.isfinite().all()
        assert not x.grad.transpose(1, 2)[~mask].any()


def test_the_teacher_gets_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_teacher_inputs(20))
    features = [x.detach().requires_grad_() for x in prf(q, k, 5, 2)]
    softmax_loss(*features, q, k, SCALE).backward()
    l2_loss(*features, q, k, SCALE).backward()
    output_loss(linear_attention(*features, v.detach()), v.repeat_interleave(2, 1)).backward()
    assert q.grad is None
    assert k.grad is None
    assert v.grad is None
    assert not attention_kl(StudentRows(*features), q, k, SCALE).requires_grad


def test_bfloat16_features_get_bfloat16_gradients() -> None:
    q, k, _ = make_teacher_inputs(40)
    features = [x.detach().bfloat16().requires_grad_() for x in prf(q, k, 5, 2)]
    loss = softmax_loss(*features, q, k, SCALE)
    loss.backward()
    want = plain_softmax_loss(*(x.detach().double() for x in features), q, k, None)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert all(x.grad.dtype == torch.bfloat16 for x in features)


@pytest.mark.parametrize("rows", [slice(0, 30), slice(7, 19), slice(29, 30), slice(20, None)])
def test_teacher_rows(rows: slice) -> None:
    q, k, _ = make_teacher_inputs(30, batch=2)
    mask = masks(2, 30)
    want = plain_teacher(q, k, mask).softmax(-1)[:, :, rows, : rows.stop]
    got = teacher_rows(q, k, SCALE, rows, mask)
    real = mask[:, None, rows, None].expand_as(got)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    torch.testing.assert_close(got[real].double(), want[real], rtol=1e-5, atol=1e-6)


def test_inputs_that_do_not_fit_are_refused() -> None:
    q, k, _ = make_teacher_inputs(10)
    log_q, log_k = prf(q, k, 5, 2)
    with pytest.raises(StudentError, match="no student"):
        softmax_losses([], q, k, SCALE)
    with pytest.raises(StudentError, match="same call"):
        softmax_loss(log_q, log_k, q, k[:, :, :5], SCALE)
    with pytest.raises(StudentError, match="compute them from"):
        softmax_loss(log_q[:, :, :5], log_k[:, :, :5], q, k, SCALE)
    with pytest.raises(StudentError, match="padding mask"):
        softmax_loss(log_q, log_k, q, k, SCALE, torch.ones(1, 10))
    with pytest.raises(StudentError, match="row_chunk"):
        softmax_loss(log_q, log_k, q, k, SCALE, row_chunk=0)
    for loss in (softmax_loss, l2_loss):
        with pytest.raises(StudentError, match="no real token"):
            loss(log_q, log_k, q, k, SCALE, torch.zeros(1, 10, dtype=torch.bool))


@pytest.mark.parametrize("padded", [False, True])
def test_stacked_students_out_of_range_are_each_what_they_are_alone(padded: bool) -> None:
    """Three students of one shape, one of which has pairs that only logs can hold."""
    q, k, _ = make_teacher_inputs(30, batch=2)
    mask = masks(2, 30) if padded else None
    students = [[x.detach().clone() for x in prf(q, k, 6, 2, seed)] for seed in (1, 2, 3)]
    for side, feature in ((0, 0), (1, 3)):
        students[1][side][:, :, ::2, feature : feature + 3] -= 200.0
        students[1][side][:, :, 1::2, 3 - feature : 6 - feature] -= 200.0
    for pair in students:
        for x in pair:
            x.requires_grad_()
    losses = softmax_losses([StudentRows(*s) for s in students], q, k, SCALE, mask, row_chunk=7)[0]
    (losses * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    for i, pair in enumerate(students):
        exact = [x.detach().double().requires_grad_() for x in pair]
        plain = plain_softmax_loss(*exact, q, k, mask)
        ((i + 1) * plain).backward()
        torch.testing.assert_close(losses[i].double(), plain, rtol=2e-5, atol=2e-5)
        for mine, ref in zip(pair, exact, strict=True):
            torch.testing.assert_close(mine.grad.double(), ref.grad, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_teachers_output_comes_with_the_losses(dtype: torch.dtype) -> None:
    q, k, v = make_teacher_inputs(70, batch=2)
    mask = masks(2, 70)
    features = prf(q, k, 9, 2)
    rows = [StudentRows(*features)]
    losses, out = softmax_losses(rows, q, k, SCALE, mask, v=v.to(dtype))
    torch.testing.assert_close(losses, softmax_losses(rows, q, k, SCALE, mask)[0])
    want = plain_teacher(q, k, mask).softmax(-1) @ v.to(dtype).double().repeat_interleave(2, 1)
    real = mask[:, None, :, None].expand_as(out)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out[real], want.to(dtype)[real], rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


def plain_windowed_loss(
    features: list[Tensor], q: Tensor, k: Tensor, mask: Tensor | None, window: Window
) -> Tensor:
    """Every pair's weight written out: near ones are the teacher's own."""
    log_q, log_k, shift = features
    L = q.shape[2]
    near = window.near(slice(0, L), mask, q.device)
    teacher = plain_teacher(q, k, mask)
    logits = torch.where(near, teacher, plain_logits(log_q, log_k) + shift[..., None])
    log_a = logits.masked_fill(~visible(L, mask), -1e30).log_softmax(-1)
    return mean_rows(-(teacher.softmax(-1) * log_a).sum(-1), mask)


@pytest.mark.parametrize("apart", [0.0, 200.0])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "sinks"), [(1, 0), (5, 2), (30, 4), (70, 0)])
def test_windowed_students_of_one_pass(size: int, sinks: int, padded: bool, apart: float) -> None:
    """Two of one window, with and without pairs beyond float32, and one without a window."""
    L = 63
    q, k, _ = make_teacher_inputs(L, batch=2)
    mask, window = masks(2, L) if padded else None, Window(size, sinks)
    gen = torch.Generator().manual_seed(0)
    shift = torch.randn(2, 4, L, generator=gen)
    students = []
    for seed, shape in ((1, window), (2, window), (3, Window())):
        log_q, log_k = (x.detach().clone() for x in prf(q, k, 6, 2, seed))
        if seed == 2 and apart:
            log_q[:, :, ::2, :3] -= apart
            log_k[:, :, ::3, 3:] -= apart
        students.append(StudentRows(log_q.requires_grad_(), log_k.requires_grad_(), shape, shift))
    values, _ = softmax_losses(students, q, k, SCALE, mask, row_chunk=20)
    (values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    for i, s in enumerate(students):
        exact = [x.detach().double().requires_grad_() for x in (s.log_q, s.log_k)]
        plain = plain_windowed_loss([*exact, shift.double()], q, k, mask, s.window)
        ((i + 1) * plain).backward()
        torch.testing.assert_close(values[i].double(), plain, rtol=2e-5, atol=2e-5)
        for mine, ref in zip((s.log_q, s.log_k), exact, strict=True):
            grad = torch.zeros_like(ref) if ref.grad is None else ref.grad
            torch.testing.assert_close(mine.grad.double(), grad, rtol=1e-3, atol=2e-5)
