"""The inputs of a case, and what must come out: attention in float64, for the first sequence and the first KV head.

One KV head with its whole group of query heads, because dk and dv sum over the group. By rows of queries at a time:
16k x 16k scores would be 2 GiB a temporary. Written from the definition, with no code of any backend; the conformance
suite is where correctness is proven, and this only keeps a wrong kernel's time out of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .grids import DTYPES, Case

ROWS = 1024


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one case, (B, S, H, D), dense. Everybody computes on this memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kv_lens: Tensor | None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """N(0, 1): constant data would run faster, through lower power, than any model's. Seeded."""
    generator = torch.Generator(device).manual_seed(20)

    def normal(length: int, heads: int, dim: int) -> Tensor:
        shape = (case.batch, length, heads, dim)
        return torch.randn(shape, dtype=DTYPES[case.dtype], device=device, generator=generator)

    return Inputs(
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.seqlen_k, case.heads_kv, case.head_dim),
        normal(case.seqlen_k, case.heads_kv, case.head_dim_v),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
        None if case.kv_lens is None else torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
    )


def inside_band(case: Case, rows: range, keys: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Bool (rows, keys): what the queries `rows` see of the first `keys` keys by position, bottom-right."""
    position = torch.arange(rows.start, rows.stop, device=device)[:, None] + (seqlen_k - case.seqlen_q)
    distance = torch.arange(keys, device=device)[None, :] - position
    band = case.band
    visible = torch.ones(distance.shape, dtype=torch.bool, device=device)
    if band.left is not None:
        visible &= distance >= -band.left
    if band.right is not None:
        visible &= distance <= band.right
    return visible


def part(case: Case, out: Tensor) -> tuple[Tensor, ...]:
    """What of an output (B, S, H, Dv) is compared: the first sequence, the query heads of the first KV head."""
    return (out[0, :, : case.group],)


def gradient_part(case: Case, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
    """The same of dq, dk and dv."""
    return dq[0, :, : case.group], dk[0, :, 0], dv[0, :, 0]


def truth(case: Case, given: Inputs, *, gradients: bool) -> tuple[Tensor, ...]:
    """`part` of the true output, or `gradient_part` of the true gradients, in float64."""
    n, m, device = case.seqlen_q, case.seqlen_k, given.q.device
    keys = m if case.kv_lens is None else case.kv_lens[0]
    K, V = given.k[0, :keys, 0].double(), given.v[0, :keys, 0].double()
    scale = case.head_dim**-0.5
    outs, dQs = [], []
    dK = torch.zeros(m, case.head_dim, dtype=torch.float64, device=device)
    dV = torch.zeros(m, case.head_dim_v, dtype=torch.float64, device=device)
    for head in range(case.group):
        for first in range(0, n, ROWS):
            rows = range(first, min(first + ROWS, n))
            Q = given.q[0, rows.start : rows.stop, head].double()
            T = scale * (Q @ K.T)
            slope: Tensor | float = 1.0
            if case.softcap is not None:
                T = case.softcap * torch.tanh(T / case.softcap)
                slope = 1 - (T / case.softcap) ** 2
            hidden = ~inside_band(case, rows, keys, keys, device)
            P = torch.softmax(T.masked_fill_(hidden, -torch.inf), dim=-1)
            O = P @ V  # noqa: E741 (the paper's letter)
            outs.append(O)
            if gradients:
                dO = given.dout[0, rows.start : rows.stop, head].double()
                dS = P * (dO @ V.T - (dO * O).sum(-1, keepdim=True)) * slope
                dQs.append(scale * (dS @ K))
                dK[:keys] += scale * (dS.T @ Q)
                dV[:keys] += P.T @ dO
    if gradients:
        return torch.cat(dQs).view(case.group, n, -1).transpose(0, 1), dK, dV
    return (torch.cat(outs).view(case.group, n, -1).transpose(0, 1),)


def relative_error(got: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """Frobenius norm of the difference over that of the truth, all tensors as one. NaN stays NaN."""
    off, size = 0.0, 0.0
    for mine, right in zip(got, true, strict=True):
        if mine.shape != right.shape:
            raise ValueError(f"shape {tuple(mine.shape)}; the truth has {tuple(right.shape)}")
        off += float((mine.detach().double() - right).square().sum())
        size += float(right.square().sum())
    return float((off / size) ** 0.5)
