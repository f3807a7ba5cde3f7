"""FlashAttention-2 on a CPU, step by step: an honest backend whose single steps a mutant can replace.

The suite's own test (`selftest`) needs a backend that is right, and that rounds and works in tiles as a kernel does.
This is FlashAttention-2 (arXiv 2307.08691) in plain PyTorch, written for clarity, with every step a method of
`Emulation`. It has no code in common with the oracle or with any backend.

Forward, Algorithm 1, for a tile of queries i and then each tile of keys j, with the extra terms of the contract:

    S     = scale Q_i K_j^T, softcap, + bias, -inf where hidden                        line 8
    m_new = max(m, rowmax S)      P = exp(S - m_new)      alpha = exp(m - m_new)        line 9
    l     = alpha l + rowsum P                                                          line 9
    acc   = alpha acc + round(P o keep) V_j                                             line 10
    O_i   = acc / l               L_i = m + log l                                       lines 12, 13

Backward, Algorithm 2, for a tile of keys j and then each tile of queries i:

    delta = rowsum(dO o O) - dL                                                         line 4
    P     = exp(S - L_i)                                                                line 11
    dV_j += round(P o keep)^T dO_i                                                      line 12
    dP    = keep o (dO_i V_j^T)                                                         line 13
    dS    = P o (dP - delta_i)                                                          line 14
    dQ_i += round(dS) K_j         dK_j += round(dS)^T Q_i                               lines 15, 16

Rounding is the contract's: products, sums and statistics in float32; P and dS once to the storage dtype; O once; delta
from the stored O; dK and dV once per query head, before the sum over a GQA group, and once after it. 16-bit values are
multiplied as float32 numbers, whose products are exact: that is what tensor cores do, and faster on a CPU.

Letters: B batch, Hq/Hkv query and key/value heads, Sq/Sk lengths, D/Dv head dims, m/n rows and keys of a tile. Tensors
arrive as (B, S, H, D); tiles are (B, Hq, m, D), all batches and heads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashdispatch_conformance.philox import keep_mask
from flashdispatch_registry.backend import BackendSpec, Extras, Forward, Gradients, Needs
from flashdispatch_registry.layout import empty_output
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.support import HeadDims, Support

SUPPORT = Support(
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    head_dims=HeadDims(),
    head_dims_v=HeadDims(),
    devices=frozenset({"cpu"}),
    causal=frozenset({"bottom_right", "top_left"}),
    window=True,
    attn_mask=frozenset({"bool", "float"}),
    attn_mask_grad=True,
    alibi=True,
    sinks=True,
    sinks_grad=True,
    lengths=True,
    softcap=True,
    dropout=True,
    gqa=True,
    backward=True,
    lse=True,
    lse_grad=True,
    deterministic=True,
)
"""Everything in the contract, on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What all tiles of one call share."""

    problem: Problem
    extras: Extras
    q_len: Tensor
    """(B, 1, 1, 1) int64: queries of each sequence."""
    kv_len: Tensor
    """(B, 1, 1, 1) int64: keys of each sequence."""
    keep: Tensor | None
    """(B, Hq, Sq, Sk): 1 where dropout keeps a weight, else 0; None without dropout."""

    @property
    def rescue(self) -> float:
        """What dropout multiplies the kept weights by; 0 when none is kept."""
        p = self.problem.dropout_p
        return 0.0 if p >= 1.0 else 1.0 / (1.0 - p)


class State(NamedTuple):
    """The running values of a tile of query rows, float32."""

    m: Tensor
    """(B, Hq, m, 1): the largest score so far, -inf before the first."""
    l: Tensor  # noqa: E741 (the paper's letter)
    """(B, Hq, m, 1): the sum of exp(S - m) so far."""
    acc: Tensor
    """(B, Hq, m, Dv): the sum of exp(S - m) V so far."""


class Tile(NamedTuple):
    """Scores of a tile of queries by a tile of keys, (B, Hq, m, n) float32."""

    S: Tensor
    """-inf where hidden."""
    slope: Tensor | None
    """The derivative of the softcap, None without one."""


class Emulation:
    """FlashAttention-2 in tiles of `block_m` queries by `block_n` keys, as a flashdispatch Backend."""

    block_m = 64
    block_n = 64

    # The three functions of a Backend

    def prepare(self, problem: Problem) -> None:
        """There is nothing to compile."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """Algorithm 1."""
        call = self.call(problem, q, k, extras)
        O = q.new_empty(*_heads_first(q).shape[:3], v.shape[3])  # noqa: E741 (the paper's letter)
        lse = torch.empty(O.shape[:3], dtype=torch.float32)
        for rows in self.query_tiles(q):
            Q_i = self.load_rows(call, q, rows)
            state = self.start(call, v, rows)
            for keys in self.key_tiles(k):
                K_j, V_j = self.load_keys(call, k, keys), self.load_keys(call, v, keys)
                S = self.scores(call, Q_i, K_j, rows, keys).S
                state = self.update(call, state, S, V_j, rows, keys)
            O_i, L_i = self.finish(call, state)
            O[:, :, rows] = self.round_out(O_i, q.dtype)
            lse[:, :, rows] = L_i.squeeze(-1)
        out = empty_output(problem, q).copy_(_heads_first(O))
        saved = (q, k, v, out, lse, *extras.given(problem)) if problem.needs_backward else ()
        return Forward(out, lse if problem.needs_backward or problem.return_lse else None, saved)

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """Algorithm 2. All gradients are worked out, and those returned that are needed."""
        q, k, v, out, lse, *given = saved
        extras = Extras.restored(problem, given)
        call = self.call(problem, q, k, extras)
        group, mask = problem.group, extras.attn_mask
        dQ = torch.zeros(_heads_first(q).shape)
        dK, dV = (x.new_empty(_heads_first(x).shape) for x in (k, v))
        dmask = torch.zeros(mask.shape) if mask is not None and mask.is_floating_point() else None

        L = lse.unsqueeze(-1)  # (B, Hq, Sq, 1)
        delta = self.delta(call, out, dout, dlse, L)
        total = self.row_total(call, q, k, L) if dmask is not None else None
        for keys in self.key_tiles(k):
            K_j, V_j = self.load_keys(call, k, keys), self.load_keys(call, v, keys)
            dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
            for rows in self.query_tiles(q):
                Q_i, dO_i = self.load_rows(call, q, rows), self.load_rows(call, dout, rows)
                tile = self.backward_scores(call, Q_i, K_j, rows, keys)
                P = self.recomputed(tile.S, L[:, :, rows])
                if total is not None:
                    P = P / total[:, :, rows]
                dV_j = self.add(dV_j, self.matmul(self.round_weights(call, self.kept(call, P, rows, keys)).mT, dO_i))
                dP = self.kept(call, self.matmul(dO_i, V_j.mT), rows, keys) * call.rescue
                dS = P * (dP - delta[:, :, rows])
                if dmask is not None:
                    part = _of_mask(dmask, rows, keys)
                    part += dS.sum_to_size(part.shape)
                dR = self.round_scores(call, dS if tile.slope is None else dS * tile.slope)
                dQ[:, :, rows] = self.add_to_dq(call, dQ[:, :, rows], dR, K_j, keys)
                dK_j = self.add(dK_j, self.matmul(dR.mT, Q_i))
            dK[:, :, keys] = self.sum_of_group(self.scale_dk(call, dK_j), group, k.dtype)
            dV[:, :, keys] = self.sum_of_group(dV_j * call.rescue, group, v.dtype)
        dq = self.round_out(dQ * self.scale(call), q.dtype)
        return Gradients(
            q=_heads_first(dq) if needs.q else None,
            k=_heads_first(dK) if needs.k else None,
            v=_heads_first(dV) if needs.v else None,
            attn_mask=dmask.to(mask.dtype) if needs.attn_mask and dmask is not None and mask is not None else None,
            sinks=self.sinks_gradient(call, L, total, delta) if needs.sinks else None,
        )

    # The call and its tiles

    def call(self, problem: Problem, q: Tensor, k: Tensor, extras: Extras) -> Call:
        """What all tiles share."""
        batch, seqlen_q, heads, seqlen_k = q.shape[0], q.shape[1], q.shape[2], k.shape[1]

        def lengths(lens: Tensor | None, padded: int) -> Tensor:
            given = torch.full((batch,), padded) if lens is None else lens.long().clamp(0, padded)
            return given.view(batch, 1, 1, 1)

        keep = None
        if problem.dropout_p and extras.dropout_seed is not None:
            seed, offset = extras.dropout_seed.tolist()
            drawn = [
                torch.from_numpy(keep_mask(seed, offset, stream, seqlen_q, seqlen_k, min(problem.dropout_p, 1.0)))
                for stream in range(batch * heads)
            ]
            keep = torch.stack(drawn).view(batch, heads, seqlen_q, seqlen_k).float() if drawn else None
        return Call(
            problem=problem,
            extras=extras,
            q_len=lengths(extras.q_lens, seqlen_q),
            kv_len=lengths(extras.kv_lens, seqlen_k),
            keep=keep,
        )

    def query_tiles(self, q: Tensor) -> list[slice]:
        """The tiles of query rows."""
        return _tiles(q.shape[1], self.block_m)

    def key_tiles(self, k: Tensor) -> list[slice]:
        """The tiles of keys."""
        return _tiles(k.shape[1], self.block_n)

    def load_rows(self, call: Call, x: Tensor, rows: slice) -> Tensor:
        """A tile of q or dout, (B, Hq, m, D) float32: 0 past q_lens, where anything may stand."""
        tile = _heads_first(x)[:, :, rows].float()
        return torch.where(_index(rows).view(-1, 1) < call.q_len, tile, 0.0)

    def load_keys(self, call: Call, x: Tensor, keys: slice) -> Tensor:
        """A tile of k or v for each query head, (B, Hq, n, D) float32: 0 past kv_lens."""
        tile = _heads_first(x)[:, self.kv_heads(call)][:, :, keys].float()
        return torch.where(_index(keys).view(-1, 1) < call.kv_len, tile, 0.0)

    def kv_heads(self, call: Call) -> Tensor:
        """The key/value head of each query head, (Hq,)."""
        return torch.arange(call.problem.heads_q) // call.problem.group

    # Arithmetic

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """A product of tiles with float32 sums."""
        return a @ b

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        """One step of a float32 sum over tiles."""
        return total + part

    def round_weights(self, call: Call, P: Tensor) -> Tensor:
        """The P that enters a product, rounded to the storage dtype."""
        return P.to(call.problem.dtype).float()

    def round_scores(self, call: Call, dS: Tensor) -> Tensor:
        """The dS that enters a product, rounded to the storage dtype."""
        return dS.to(call.problem.dtype).float()

    def round_out(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """An output rounded to the storage dtype."""
        return x.to(dtype)

    # Scores

    def scale(self, call: Call) -> float:
        """What Q K^T is multiplied by."""
        return call.problem.scale

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        """S of one tile, in the contract's order: scale, softcap, bias, and what hides keys."""
        S, slope = self.scale(call) * self.matmul(Q_i, K_j.mT), None
        if call.problem.softcap is not None:
            unit = torch.tanh(S / call.problem.softcap)
            S, slope = call.problem.softcap * unit, 1.0 - unit.square()
        S = S + self.bias(call, rows, keys)
        return Tile(torch.where(self.visible(call, rows, keys), S, -torch.inf), slope)

    def backward_scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        """S as the backward makes it again: the same."""
        return self.scores(call, Q_i, K_j, rows, keys)

    def bias(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """What is added to the scores: a float mask and ALiBi; broadcasts to (B, Hq, m, n)."""
        mask, slopes = call.extras.attn_mask, call.extras.alibi_slopes
        bias = torch.zeros(1, 1, 1, 1)
        if mask is not None and mask.is_floating_point():
            bias = bias + _of_mask(mask, rows, keys).float()
        if slopes is not None:
            slopes = slopes.view(-1, call.problem.heads_q, 1, 1)  # (B or 1, Hq, 1, 1)
            bias = bias - slopes * (self.position(call, rows) - _index(keys)).abs()
        return bias

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """True where a query sees a key; broadcasts to (B, Hq, m, n)."""
        visible = self.inside_band(call, rows, keys) & self.inside_lengths(call, rows, keys)
        mask = call.extras.attn_mask
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & _of_mask(mask, rows, keys)
        return visible

    def inside_lengths(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """Neither the query nor the key is padding, (B, 1, m, n)."""
        return (_index(rows).view(-1, 1) < call.q_len) & (_index(keys) < call.kv_len)

    def inside_band(self, call: Call, rows: slice, keys: slice) -> Tensor:
        """Causal and window: p - left <= j <= p + right, (B, 1, m, n)."""
        left, right = self.band_limits(call)
        distance = _index(keys) - self.position(call, rows)  # j - p
        inside = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            inside &= distance >= -left
        if right is not None:
            inside &= distance <= right
        return inside

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        """How many keys are seen left and right of a position, None for all."""
        return call.problem.band.left, call.problem.band.right

    def position(self, call: Call, rows: slice) -> Tensor:
        """p(i) of each row, (B, 1, m, 1): from the end of the keys, or top-left from their beginning."""
        i = _index(rows).view(-1, 1)
        offset = torch.zeros_like(call.q_len) if call.problem.band.align == "top_left" else call.kv_len - call.q_len
        return i + offset

    # Online softmax

    def start(self, call: Call, v: Tensor, rows: slice) -> State:
        """Before the first tile of keys. A sink is one more column with value 0: m = sink, l = 1."""
        batch, _, _, head_dim_v = v.shape
        shape = (batch, call.problem.heads_q, rows.stop - rows.start)
        m, l = torch.full((*shape, 1), -torch.inf), torch.zeros(*shape, 1)  # noqa: E741
        if call.extras.sinks is not None:
            row = _index(rows).view(-1, 1) < call.q_len
            m = torch.where(row, call.extras.sinks.view(-1, 1, 1), m)
            l = torch.where(row, 1.0, l)  # noqa: E741
        return State(m, l, torch.zeros(*shape, head_dim_v))

    def update(self, call: Call, state: State, S: Tensor, V_j: Tensor, rows: slice, keys: slice) -> State:
        """One tile of keys more."""
        m_new = self.new_maximum(state.m, S)
        shift = torch.where(m_new == -torch.inf, 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
        P, alpha = torch.exp(S - shift), self.correction(state, shift, keys)
        acc = alpha * state.acc
        acc = self.add(acc, self.matmul(self.round_weights(call, self.kept(call, P, rows, keys)), V_j))
        return State(m_new, alpha * state.l + P.sum(-1, keepdim=True), acc)

    def new_maximum(self, m: Tensor, S: Tensor) -> Tensor:
        """The running maximum with one tile more, (B, Hq, m, 1)."""
        return torch.maximum(m, S.amax(-1, keepdim=True))

    def correction(self, state: State, shift: Tensor, keys: slice) -> Tensor:  # noqa: ARG002  mutants ask which tile
        """alpha: what the sums so far are multiplied by when the maximum rises."""
        return torch.exp(state.m - shift)

    def kept(self, call: Call, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """The part of P or dP that dropout keeps, not yet divided by 1 - p."""
        return x if call.keep is None else x * call.keep[:, :, rows, keys]

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        """O_i (B, Hq, m, Dv) and L_i (B, Hq, m, 1) in float32; a row that saw no key has 0 and -inf."""
        l = torch.where(state.l == 0, 1.0, state.l)  # noqa: E741
        return state.acc / l * call.rescue, state.m + torch.log(l)

    # Backward

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
        """Delta = rowsum(dO o O) - dL, (B, Hq, Sq, 1), from the stored O. dL counts where a row sees something."""
        every = slice(0, out.shape[1])
        delta = (self.load_rows(call, dout, every) * self.load_rows(call, out, every)).sum(-1, keepdim=True)
        return delta if dlse is None else delta - torch.where(lse == -torch.inf, 0.0, dlse.unsqueeze(-1))

    def recomputed(self, S: Tensor, lse: Tensor) -> Tensor:
        """P from the scores and the LSE; 0 in a row that sees nothing."""
        return torch.exp(S - torch.where(lse == -torch.inf, 0.0, lse))

    def row_total(self, call: Call, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """What exp(S - lse) sums to over a row, (B, Hq, Sq, 1): 1 but for the rounding of the LSE.

        A float mask may hold finfo.min. Next to it the LSE has no digits left for log l: P must be normalised again.
        """
        total = torch.zeros_like(lse)
        if call.extras.sinks is not None:
            total += self.recomputed(call.extras.sinks.view(-1, 1, 1), lse)
        for rows in self.query_tiles(q):
            Q_i = self.load_rows(call, q, rows)
            for keys in self.key_tiles(k):
                S = self.scores(call, Q_i, self.load_keys(call, k, keys), rows, keys).S
                total[:, :, rows] += self.recomputed(S, lse[:, :, rows]).sum(-1, keepdim=True)
        return torch.where(total == 0, 1.0, total)

    def add_to_dq(self, call: Call, dQ_i: Tensor, dR: Tensor, K_j: Tensor, keys: slice) -> Tensor:  # noqa: ARG002
        """One tile of keys more in dQ_i; the scale comes at the end."""
        return self.add(dQ_i, self.matmul(dR, K_j))

    def scale_dk(self, call: Call, dK_j: Tensor) -> Tensor:
        """dK_j with its scale, which the sum over queries left out."""
        return dK_j * self.scale(call)

    def sum_of_group(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """(B, Hq, n, D) rounded per query head, then summed over the query heads of each key/value head."""
        batch, heads, keys, head_dim = x.shape
        rounded = self.round_out(x, dtype).float().view(batch, heads // group, group, keys, head_dim)
        return self.round_out(rounded.sum(2), dtype)

    def sinks_gradient(self, call: Call, lse: Tensor, total: Tensor | None, delta: Tensor) -> Tensor | None:
        """-sum exp(sink - lse) delta over batch and rows, (Hq,)."""
        if call.extras.sinks is None:
            return None
        P = torch.where(lse == -torch.inf, 0.0, self.recomputed(call.extras.sinks.view(-1, 1, 1), lse))
        if total is not None:
            P = P / total
        return -(P * delta).sum((0, 2, 3))


class NarrowTiles(Emulation):
    """32 queries by 96 keys: sizes that differ, and tails elsewhere."""

    block_m = 32
    block_n = 96


class LargeTiles(Emulation):
    """128 by 128: most problems of the suite are one tile."""

    block_m = 128
    block_n = 128


def spec(name: str, backend: type[Emulation]) -> BackendSpec:
    """The declaration of an emulation, to be registered at run time and called by name. It must be importable."""
    return BackendSpec(
        name=name,
        factory=f"{backend.__module__}:{backend.__qualname__}",
        support=SUPPORT,
        by_name_only="an emulation, for the suite's own test",
        fused=False,
    )


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) seen as (B, H, S, D); its own inverse."""
    return x.transpose(1, 2)


def _tiles(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _index(tile: slice) -> Tensor:
    """The indices of a tile, (n,)."""
    return torch.arange(tile.start, tile.stop)


def _of_mask(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a broadcast mask that a tile sees: dims of size 1 are kept."""
    every = slice(None)
    return mask[:, :, rows if mask.shape[2] > 1 else every, keys if mask.shape[3] > 1 else every]
