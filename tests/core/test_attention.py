"""Linear attention against its definition: values, gradients, masks, scales, causality."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dofsweep.core import attention_chunks
from dofsweep.core.attention import (
    attention_reference,
    linear_attention,
    linear_attention_prefill,
    linear_attention_step,
)
from dofsweep.errors import StudentError

FORMS = ("quadratic", "chunked", "auto")


def make(
    L: int,
    M: int,
    D: int = 8,
    heads: tuple[int, int, int] = (4, 2, 2),
    batch: int = 1,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random log features of standard deviation ``spread`` and values; heads is (H, K, G)."""
    gen = torch.Generator().manual_seed(seed)
    H, K, G = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return (
        spread * normal(batch, H, L, M),
        spread * normal(batch, K, L, M),
        normal(batch, G, L, D),
    )


def with_grad(tensors: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def token_by_token(
    log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> Tensor:
    state, rows = None, []
    for i in range(log_q.shape[2]):
        mask = None if key_mask is None else key_mask[:, i : i + 1]
        q, k, value = (x[:, :, i : i + 1] for x in (log_q, log_k, v))
        row, state = linear_attention_step(q, k, value, state, mask)
        rows.append(row)
    return torch.cat(rows, 2)


@pytest.mark.parametrize("length", [1, 63, 257])
@pytest.mark.parametrize(("M", "D"), [(1, 8), (9, 64), (33, 80), (277, 8), (513, 128)])
def test_all_forms_equal_the_definition(length: int, M: int, D: int) -> None:
    heads = (2, 1, 1) if M > 33 else (4, 2, 2)
    inputs = make(length, M, D, heads)
    want = attention_reference(*inputs)
    single = tuple(x.float() for x in inputs)
    want_single = attention_reference(*single)
    for form in FORMS:
        torch.testing.assert_close(linear_attention(*inputs, form=form), want, rtol=0, atol=1e-10)
        got = linear_attention(*single, form=form)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want_single, rtol=0, atol=1e-5)
    for recurrent in (token_by_token, lambda *x: linear_attention_prefill(*x)[0]):
        torch.testing.assert_close(recurrent(*inputs), want, rtol=0, atol=1e-10)
        torch.testing.assert_close(recurrent(*single).double(), want_single, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "M", "D", "spread"),
    [(1, 9, 8, 1.0), (63, 33, 80, 3.0), (257, 9, 64, 10.0), (257, 1, 8, 30.0), (70, 277, 128, 1.0)],
)
def test_gradients_equal_the_definition(length: int, M: int, D: int, spread: float) -> None:
    inputs = make(length, M, D, (2, 1, 1) if M > 33 else (4, 2, 2), spread=spread)
    weight = torch.randn(1, inputs[0].shape[1], length, D, dtype=torch.float64)
    want = with_grad(inputs)
    (attention_reference(*want) * weight).sum().backward()
    for form in ("quadratic", "chunked"):
        got = with_grad(inputs)
        (linear_attention(*got, form=form) * weight).sum().backward()
        single = with_grad(inputs, torch.float32)
        (linear_attention(*single, form=form) * weight.float()).sum().backward()
        for exact, mine, rough in zip(want, got, single, strict=True):
            size = exact.grad.abs().max().item()
            torch.testing.assert_close(mine.grad, exact.grad, rtol=0, atol=1e-11 * (1 + size))
            if spread <= 3:
                torch.testing.assert_close(
                    rough.grad.double(), exact.grad, rtol=0, atol=2e-5 * (1 + size)
                )


def test_gradcheck_over_chunks_groups_and_padding() -> None:
    inputs = with_grad(make(11, 3, 2, (4, 2, 1), batch=2, spread=2.0))
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :2] = mask[1, 4] = mask[1, 9:] = False
    real = mask[:, None, :, None]

    def attend(*x: Tensor) -> Tensor:
        out = linear_attention(*x, mask, form="chunked", chunk_size=4)
        return torch.where(real, out, 0)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x), with_grad(make(7, 3, 2)))


def rising(length: int, M: int, step: float, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Keys whose features climb by about ``step`` a token, so that references must follow."""
    log_q, log_k, v = make(length, M, 4, (2, 1, 1), spread=20.0, seed=seed)
    return log_q, log_k + step * torch.arange(length)[:, None], v


@pytest.mark.parametrize("step", [-40.0, -3.0, 0.9, 7.0, 60.0])
def test_climbing_and_falling_keys(step: float) -> None:
    """Values and gradients where a chunk needs several references."""
    inputs = rising(90, 5, step)
    weight = torch.randn(1, 2, 90, 4, dtype=torch.float64)
    want = with_grad(inputs)
    out = attention_reference(*want)
    (out * weight).sum().backward()
    for form in ("quadratic", "chunked"):
        got = with_grad(inputs)
        mine = linear_attention(*got, form=form)
        (mine * weight).sum().backward()
        torch.testing.assert_close(mine, out, rtol=0, atol=1e-10)
        for exact, x in zip(want, got, strict=True):
            torch.testing.assert_close(x.grad, exact.grad, rtol=0, atol=1e-9)
    torch.testing.assert_close(token_by_token(*inputs), out, rtol=0, atol=1e-10)


def test_several_passes_are_taken_and_end() -> None:
    """The climbing keys above do reach the rare path."""
    _, log_k, _ = rising(64, 5, 7.0)
    start = log_k[:, :, 0].ceil()
    passes = list(attention_chunks.later_passes(log_k, start))
    assert len(passes) > 3
    served = torch.stack([p.rows for p in passes]).sum(0)
    late = (log_k.cummax(2).values - start[:, :, None]).amax(-1) > attention_chunks.MAX_RISE
    assert torch.equal(served, late.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["quadratic", "chunked"])
@pytest.mark.parametrize("huge", [1e4, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
def test_a_later_key_moves_no_bit(form: str, huge: float, dtype: torch.dtype) -> None:
    log_q, log_k, v = make(150, 33, 16, batch=2, spread=15.0, dtype=dtype)
    before = linear_attention(log_q, log_k, v, form=form)
    for at in (1, 63, 64, 100, 149):
        keys, values = log_k.clone(), v.clone()
        keys[:, :, at:] = torch.randn_like(keys[:, :, at:])
        keys[:, :, at, ::2] = huge
        values[:, :, at] = 1e30
        after = linear_attention(log_q, keys, values, form=form)
        assert torch.equal(before[:, :, :at], after[:, :, :at])
        prefilled = linear_attention_prefill(log_q, keys, values)[0]
        assert torch.equal(
            linear_attention_prefill(log_q, log_k, v)[0][:, :, :at], prefilled[:, :, :at]
        )


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(2, 140),
    at=st.integers(1, 139),
    M=st.integers(1, 12),
    lift=st.floats(-1e5, 1e5),
    seed=st.integers(0, 99),
)
def test_causality_holds_for_any_lift(length: int, at: int, M: int, lift: float, seed: int) -> None:
    at = min(at, length - 1)
    log_q, log_k, v = make(length, M, 5, spread=25.0, dtype=torch.float32, seed=seed)
    before = linear_attention(log_q, log_k, v)
    log_k = torch.cat([log_k[:, :, :at], log_k[:, :, at:] + lift], 2)
    assert torch.equal(before[:, :, :at], linear_attention(log_q, log_k, v)[:, :, :at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distance", [0.0, 200.0, -3e4])
def test_a_single_token_returns_its_value(dtype: torch.dtype, distance: float) -> None:
    log_q, log_k, v = make(1, 7, 16, spread=30.0, dtype=dtype)
    log_q, log_k, v = with_grad((log_q + distance, log_k - distance, v))
    for form in FORMS:
        out = linear_attention(log_q, log_k, v, form=form)
        assert torch.equal(out, v.repeat_interleave(2, 1))
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (log_q, log_k, v))
    torch.testing.assert_close(v.grad, torch.full_like(v, 2))
    for recurrent in (linear_attention_step, linear_attention_prefill):
        args = (
            (log_q, log_k, v) if recurrent is linear_attention_prefill else (log_q, log_k, v, None)
        )
        assert torch.equal(recurrent(*args)[0], v.repeat_interleave(2, 1))


def test_exponents_of_a_real_model_float32() -> None:
    """s‖k‖² near 277, as GPT-2 has: no overflow, no vanished row, 2e-4 of the float64 result."""
    gen = torch.Generator().manual_seed(3)
    q, k = (
        17 * torch.nn.functional.normalize(torch.randn(1, 2, 300, 64, generator=gen), dim=-1)
        for _ in range(2)
    )
    z = torch.randn(2, 64, 64, generator=gen)
    log_q, log_k = q @ z.mT, k @ z.mT - 277 / 2
    v = torch.randn(1, 2, 300, 8, generator=gen)
    want = attention_reference(log_q, log_k, v)
    for got in (linear_attention(log_q, log_k, v), token_by_token(log_q, log_k, v)):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)


def test_queries_and_keys_on_disjoint_features() -> None:
    """Row sums of exp(-600) times the largest key and query: the weights are still right."""
    log_q, log_k, v = make(130, 6, 4, (1, 1, 1), dtype=torch.float32)
    log_q[..., :3] -= 300
    log_k[..., 3:] -= 300
    want = attention_reference(log_q, log_k, v)
    got = linear_attention(log_q, log_k, v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(token_by_token(log_q, log_k, v).double(), want, rtol=0, atol=1e-4)


MASKS = {
    "left": [0] * 70 + [1] * 60,
    "right": [1] * 61 + [0] * 69,
    "inner": [1] * 5 + [0] * 66 + [1] * 59,
    "late start": [0] * 129 + [1],
    "none real": [0] * 130,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("form", ["quadratic", "chunked"])
def test_padding_adds_nothing(kind: str, form: str) -> None:
    """Real rows equal attention over the real tokens alone, whatever padding holds."""
    log_q, log_k, v = make(130, 9, 4, (4, 2, 1), batch=2, spread=4.0)
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[1] = torch.tensor(MASKS[kind], dtype=torch.bool)
    for x in (log_q, log_k, v):
        x[1, :, ~mask[1]] = 1e6
    inputs = with_grad((log_q, log_k, v))
    out = linear_attention(*inputs, mask, form=form)
    assert out.isfinite().all()
    alone = [x.detach()[1:, :, mask[1]] for x in inputs]
    if mask[1].any():
        want = attention_reference(*alone)
        torch.testing.assert_close(out[1:, :, mask[1]], want, rtol=0, atol=1e-10)
        stepped = token_by_token(*(x.detach() for x in inputs), mask)
        torch.testing.assert_close(stepped[1:, :, mask[1]], want, rtol=0, atol=1e-10)
    torch.where(mask[:, None, :, None], out, 0).square().sum().backward()
    for x in inputs:
        assert x.grad.isfinite().all()
        assert not x.grad[1, :, ~mask[1]].any()


def test_mask_of_ones_changes_nothing() -> None:
    inputs = make(100, 9, dtype=torch.float32)
    ones = torch.ones(1, 100, dtype=torch.bool)
    assert torch.equal(linear_attention(*inputs), linear_attention(*inputs, ones))


def test_absent_features_add_nothing() -> None:
    log_q, log_k, v = make(100, 9)
    want = attention_reference(log_q[..., :6], log_k[..., :6], v)
    log_q[..., 6:] = log_k[..., 6:] = -torch.inf
    inputs = with_grad((log_q, log_k, v))
    out = linear_attention(*inputs)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    assert not inputs[0].grad[..., 6:].any()
    torch.testing.assert_close(token_by_token(log_q, log_k, v), want, rtol=0, atol=1e-10)


def test_a_feature_that_appears_late() -> None:
    log_q, log_k, v = make(100, 5)
    log_k[:, :, :70, 3] = -torch.inf
    want = attention_reference(log_q, log_k, v)
    for got in (linear_attention(log_q, log_k, v), token_by_token(log_q, log_k, v)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("heads", [(6, 6, 6), (6, 6, 2), (6, 2, 2), (6, 6, 1), (6, 1, 1)])
def test_head_grouping(heads: tuple[int, int, int]) -> None:
    """Query head h uses feature-key head h // (H/K) and value head h // (H/G)."""
    H, K, G = heads
    log_q, log_k, v = make(70, 5, 4, heads, batch=2)
    out = linear_attention(log_q, log_k, v)
    for h in range(H):
        one = attention_reference(log_q[:, [h]], log_k[:, [h // (H // K)]], v[:, [h // (H // G)]])
        torch.testing.assert_close(out[:, [h]], one, rtol=0, atol=1e-10)
    torch.testing.assert_close(token_by_token(log_q, log_k, v), out, rtol=0, atol=1e-10)


def test_prefill_goes_on_from_a_state() -> None:
    log_q, log_k, v = make(200, 9, spread=8.0)
    want = attention_reference(log_q, log_k, v)
    state, rows = None, []
    for start, stop in ((0, 1), (1, 90), (90, 91), (91, 200)):
        q, k, value = (x[:, :, start:stop] for x in (log_q, log_k, v))
        out, state = linear_attention_prefill(q, k, value, None, state)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, 2), want, rtol=0, atol=1e-10)


def test_the_state_counts_on_in_float32_under_bfloat16() -> None:
    """A bfloat16 sum of ones stops at 256."""
    shape = (1, 1, 1, 3)
    zeros, state = torch.zeros(shape, dtype=torch.bfloat16), None
    sizes = set()
    for i in range(1000):
        value = torch.full((1, 1, 1, 2), float(i % 2), dtype=torch.bfloat16)
        out, state = linear_attention_step(zeros, zeros, value, state)
        sizes.add(state.nbytes)
    assert state.Z.dtype == state.S.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(state.Z * state.log_scale.exp(), torch.full((1, 1, 3), 1000.0))
    torch.testing.assert_close(out, torch.full_like(out, 0.5))
    assert sizes == {4 * (3 * 2 + 3 + 3)}


def test_the_state_given_is_not_changed() -> None:
    log_q, log_k, v = make(3, 4)
    _, state = linear_attention_prefill(log_q[:, :, :2], log_k[:, :, :2], v[:, :, :2])
    kept = [x.clone() for x in (state.S, state.Z, state.log_scale)]
    last = (log_q[:, :, 2:], log_k[:, :, 2:], v[:, :, 2:])
    linear_attention_step(*last, state)
    linear_attention_prefill(*last, None, state)
    for old, now in zip(kept, (state.S, state.Z, state.log_scale), strict=True):
        assert torch.equal(old, now)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    log_q, log_k, v = make(600, 9, 8, dtype=dtype)
    want = attention_reference(log_q, log_k, v).to(dtype)
    got = linear_attention(log_q, log_k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_inputs_in_another_layout() -> None:
    log_q, log_k, v = make(70, 5)
    moved = with_grad(
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (log_q, log_k, v))
    )
    torch.testing.assert_close(
        linear_attention(*moved), attention_reference(log_q, log_k, v), rtol=0, atol=1e-10
    )
    linear_attention(*moved).sum().backward()


def test_nothing_quadratic_is_kept_for_the_backward_pass() -> None:
    L, M, D = 2048, 4, 4
    inputs = with_grad(make(L, M, D, (1, 1, 1), dtype=torch.float32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        linear_attention(*inputs)
    assert sum(kept) <= L * (2 * M + 2 * D + 1)


def broken() -> list[tuple[str, tuple[Tensor, ...], dict[str, object], str]]:
    q, k, v = make(6, 3, 2, (4, 2, 2))
    mask = torch.ones(1, 6, dtype=torch.bool)
    return [
        ("features", (q, k[..., :2], v), {}, "belong together"),
        ("tokens", (q, k, v[:, :, :5]), {}, "belong together"),
        ("batch", (q, k.repeat(2, 1, 1, 1), v), {}, "belong together"),
        ("key heads", (q, make(6, 3, 2, (3, 3, 3))[1], v), {}, "do not divide"),
        ("value heads", (q, k, make(6, 3, 2, (4, 4, 4))[2]), {}, "do not divide"),
        ("empty", (q[:, :, :0], k[:, :, :0], v[:, :, :0]), {}, "none may be empty"),
        ("rank", (q[0], k, v), {}, "floating-point"),
        ("integers", (q.long(), k, v), {}, "floating-point"),
        ("mask dtype", (q, k, v, mask.float()), {}, r"mask\.bool\(\)"),
        ("mask length", (q, k, v, mask[:, :5]), {}, "padding mask"),
        ("mask rank", (q, k, v, mask[:, None, None].expand(1, 1, 6, 6)), {}, "padding mask"),
        ("form", (q, k, v), {"form": "fast"}, "use 'auto'"),
        ("chunk", (q, k, v), {"chunk_size": 0}, "at least 1"),
        ("chunk of quadratic", (q, k, v), {"form": "quadratic", "chunk_size": 4}, "has none"),
    ]


@pytest.mark.parametrize("case", broken(), ids=lambda case: case[0])
def test_what_does_not_fit_is_refused(case) -> None:
    _, tensors, options, message = case
    with pytest.raises(StudentError, match=message):
        linear_attention(*tensors, **options)


def test_a_wrong_state_is_refused() -> None:
    log_q, log_k, v = make(2, 3)
    _, state = linear_attention_prefill(log_q, log_k, v)
    more = make(1, 4)
    with pytest.raises(StudentError, match="same student"):
        linear_attention_step(*more, state)
    with pytest.raises(StudentError, match="one token"):
        linear_attention_step(log_q, log_k, v, state)
