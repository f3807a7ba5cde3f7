"""What a case is: one attention problem with the values and the memory of its tensors, as frozen data.

A case says everything but the device and the seed, and which of its dtypes is meant. It goes to JSON and back, so that
one line replays it (`Replay`), and `contradictions` says what keeps it from being a problem at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from flashdispatch_registry.problem import DTYPES

Values = Literal[
    "normal", "shifted_v", "peaked", "logits_minus_120", "all_equal", "zeros", "outliers",
    "needle", "subnormal", "huge", "ones", "v_ones", "uniform",
]  # fmt: skip
"""Value families.

normal            N(0, 1)
shifted_v         N(0, 1), and V one higher: sums of one sign show the bias of a low-precision accumulator
peaked            q times 4, k times 2: a few weights near 1
logits_minus_120  every score near -120, where exp(0 - lse) of a key that should be masked overflows
all_equal         every key the same vector, scores near 1000: the weights are all 1/n. The vector has one channel, a
                  power of two, so that no sum is rounded, and the queries differ: else the errors of all keys, or of
                  all rows, would be one error, and the noise model takes them for independent
zeros             q, k and v are 0
outliers          like activations: mean 0.5 and one channel in 16 eight times as large
needle            one key of each KV head has score 30, the others about 0: it alone matters to who sees it
subnormal         q near 2^-16, k near 2^12; V near 2^-18 and 2^-128 in turns: subnormal in float16, and in the others
huge              scores near 1e5, of both signs: the weights are 0 and 1
ones              q, k and v are 1
v_ones            q and k are 0, v is 1
uniform           q, k and v uniform in 0..1
"""

View = Literal[
    "contiguous", "transposed", "sliced", "padded_rows", "every_other", "unaligned", "expanded_batch", "expanded_heads",
    "last_dim_strided", "expanded_all", "sequence_first", "wide_tokens",
]  # fmt: skip
"""How a tensor lies in its storage. NaN stands everywhere that is not part of it.

contiguous        dense in the caller's order
transposed        dense in the other layout's order: (B, H, S, D) memory seen as (B, S, H, D), or the reverse
sliced            the middle heads of a tensor with three times as many, like q of packed qkv
padded_rows       rows of D + 8
every_other       every other sequence of a batch twice as large (``x[::2]``)
unaligned         contiguous, but one element past an aligned address
expanded_batch    stride 0 over the batch
expanded_heads    stride 0 over the heads
last_dim_strided  stride 2 in the last dim: the one form that has to be copied
expanded_all      one number, stride 0 everywhere: what ``out.sum().backward()`` sends
sequence_first    memory in the order (S, B, H, D), or (S, H, B, D) of the other layout
wide_tokens       all heads of a token, then 8192 elements of something else: a slice of cat([attention, mlp], -1)
"""

MaskPattern = Literal[
    "random", "all_true", "all_false", "first_half", "empty_rows", "band", "finfo_min", "finfo_min_row",
    "corner", "last_row_empty", "segments", "blocks",
]  # fmt: skip
"""What a mask says.

random            bool: 7 in 10 visible. float: N(0, 1), and one in 10 -inf
all_true, all_false
first_half        the first 58 % of the keys
empty_rows        like random, and every fourth row sees nothing
band              i - 9 <= j <= i, the rest -inf or False: whole tiles of a row are hidden
finfo_min         float: 0, and in one of 3 entries the most negative number of the dtype
finfo_min_row     the same, and row 1 is full of it
corner            the first half of the queries sees the first half of the keys, and nothing sees anything else
last_row_empty    j <= i, but the last query sees nothing
segments          three segments, and in each i - 4 <= j <= i: most key tiles are empty for most queries
blocks            blocks of 64 queries and 64 keys along the diagonal
"""

MaskView = Literal["contiguous", "expanded", "expanded_heads", "heads_last", "padded_rows", "far_rows"]
"""How a mask lies in its storage.

expanded        one number a row, with stride 0 over the keys
expanded_heads  one mask, with stride 0 over the heads
heads_last      (B, Sq, Sk, H) in memory, as a table of relative positions gives it: keys are H apart
padded_rows     rows of Sk + 8
far_rows        rows 2^24 elements apart, so that offsets pass 2^31 at row 128
"""

Gradient = Literal["q", "k", "v", "sinks"]
Tier = Literal["full", "deep"]


Part = Literal["gradients", "out", "lse"]
"""The calls of a case: differentiable with its backward, without gradients, and with the LSE returned."""

PARTS: tuple[Part, ...] = ("gradients", "out", "lse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """An attn_mask: `shape` as the caller gives it, broadcastable to (B, Hq, Sq, Sk)."""

    shape: tuple[int, ...]
    kind: Literal["bool", "float", "float32"] = "bool"
    """"float" has q's dtype."""
    pattern: MaskPattern = "random"
    view: MaskView = "contiguous"
    grad: bool = False

    def to_json(self) -> dict[str, Any]:
        """A plain dict of what differs from the defaults."""
        return _to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Reads what `to_json` wrote. Unknown and missing keys raise ValueError."""
        return cls(**_from_json(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. Forward, LSE and the gradients named by `grads` are all checked."""

    id: str
    why: str
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    """The dtypes that it is run in, by name."""
    tier: Tier = "full"
    """The smallest tier that has it. deep: too long or too large for every run."""
    batch: int = 1
    distinct: int | None = None
    """How many different sequences the batch has: sequence b has the values of sequence b % distinct. So a huge batch
    is cheap to draw, and its truth is worked out once. None: all are different."""
    heads: tuple[int, int] = (2, 2)
    """Hq, Hkv."""
    seqlens: tuple[int, int] = (64, 64)
    """Sq, Sk."""
    dims: tuple[int, int] = (64, 64)
    """D, Dv."""
    causal: bool | Literal["top_left"] = False
    window: tuple[int | None, int | None] | None = None
    mask: Mask | None = None
    alibi: Literal["heads", "batch"] | None = None
    """Slopes of shape (Hq,) or (B, Hq)."""
    sinks: bool = False
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | tuple[int, int] = 0
    """An int, or (seed, offset) given as a tensor."""
    layout: Literal["bshd", "bhsd"] = "bshd"
    deterministic: bool | None = None
    grads: tuple[Gradient, ...] = ("q", "k", "v")
    """Inputs that want a gradient, besides a mask with `Mask.grad`; empty is a forward-only case."""
    calls: tuple[Part, ...] = PARTS
    """The calls that the case makes. Leaving one out saves the kernels that it alone would need."""
    dout: bool = True
    """A gradient arrives for the output."""
    dlse: bool = False
    """A gradient arrives for the LSE, which is then an output of the differentiable call."""
    values: Values = "normal"
    q_view: View = "contiguous"
    k_view: View = "contiguous"
    v_view: View = "contiguous"
    dout_view: View = "contiguous"

    @property
    def needs_grad(self) -> tuple[str, ...]:
        """Names of the inputs that want a gradient, in the order of `Problem.needs_grad`."""
        wanted = {*self.grads, *(("attn_mask",) if self.mask is not None and self.mask.grad else ())}
        return tuple(name for name in ("q", "k", "v", "attn_mask", "sinks") if name in wanted)

    @property
    def sequences(self) -> int:
        """How many sequences have values of their own: `distinct`, or the whole batch."""
        return self.batch if self.distinct is None else self.distinct

    def to_json(self) -> dict[str, Any]:
        """A plain dict of what differs from the defaults; `from_json` reads it back to an equal case."""
        return _to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Reads what `to_json` wrote. Unknown and missing keys raise ValueError: nothing is dropped or made up."""
        values = _from_json(cls, data)
        if isinstance(values.get("mask"), dict):
            values["mask"] = Mask.from_json(values["mask"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one line of JSON replays: a case in one dtype with one seed."""

    case: Case
    dtype: str
    seed: int = 0

    def line(self) -> str:
        """``{"case": {...}, "dtype": "bfloat16", "seed": 0}``: the argument of ``flashdispatch conformance replay``."""
        return json.dumps({"case": self.case.to_json(), "dtype": self.dtype, "seed": self.seed})

    @classmethod
    def parse(cls, line: str) -> Replay:
        """Reads a line back. Raises ValueError for what is no JSON, has other keys, or is no problem at all."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        shaped = isinstance(data, dict) and isinstance(data.get("case"), dict)
        if not shaped:
            raise ValueError('expected an object like {"case": {...}, "dtype": "bfloat16", "seed": 0}')
        values = _from_json(cls, data)
        replay = cls(case=Case.from_json(values.pop("case")), **values)
        if replay.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {replay.dtype!r}")
        if type(replay.seed) is not int:
            raise ValueError(f"seed must be an integer, got {replay.seed!r}")
        if wrong := contradictions(replay.case):
            raise ValueError("; ".join(wrong))
        return replay


def _to_json(record: Case | Mask) -> dict[str, Any]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    changed = {item.name: values[item.name] for item in fields(record) if values[item.name] != item.default}
    return {
        name: value.to_json() if isinstance(value, Mask) else list(value) if isinstance(value, tuple) else value
        for name, value in changed.items()
    }


def _from_json(cls: type[Case | Mask | Replay], data: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `cls`, with tuples for lists."""
    known = {item.name for item in fields(cls)}
    if unknown := set(data) - known:
        raise ValueError(f"unknown {cls.__name__} fields: {', '.join(sorted(unknown))}")
    needed = {"Case": ("id", "why"), "Mask": ("shape",), "Replay": ("case", "dtype")}[cls.__name__]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{cls.__name__} needs {', '.join(missing)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


# What keeps a case from being a problem


def contradictions(case: Case) -> list[str]:
    """What makes the case no valid problem, each as one sentence; empty when it can be built and called.

    Only the call's contract and the values count, never what some backend can run.
    """
    wrong = list(_types(case))
    return wrong or [*_sizes(case), *_lengths(case), *_masks(case), *_numbers(case), *_gradients(case), *_copies(case)]


def _is_ints(value: object, count: int | None = None, least: int = 0) -> bool:
    numbers = isinstance(value, tuple) and all(type(number) is int and number >= least for number in value)
    return numbers and (count is None or len(value) == count)  # type: ignore[arg-type]


def _types(case: Case) -> Iterator[str]:
    """Wrong words and types; after them the other questions make no sense."""
    words = {
        "tier": get_args(Tier), "layout": ("bshd", "bhsd"), "values": get_args(Values),
        "causal": (True, False, "top_left"), "alibi": (None, "heads", "batch"), "deterministic": (None, True, False),
        "sinks": (True, False), "dout": (True, False), "dlse": (True, False),
        **dict.fromkeys(("q_view", "k_view", "v_view", "dout_view"), get_args(View)),
    }  # fmt: skip
    for name, allowed in words.items():
        value = getattr(case, name)
        if not any(value is word or (isinstance(value, str) and value == word) for word in allowed):
            yield f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
    for name, names in (("dtypes", tuple(DTYPES)), ("grads", get_args(Gradient)), ("calls", PARTS)):
        value = getattr(case, name)
        if not isinstance(value, tuple) or len(set(value)) < len(value) or not set(value) <= set(names):
            yield f"{name} must be different words of {', '.join(names)}, got {value!r}"
    if not case.dtypes:
        yield "dtypes is empty: the case would never be run"
    if type(case.batch) is not int or case.batch < 0:
        yield f"batch must be an integer >= 0, got {case.batch!r}"
    if case.distinct is not None and type(case.distinct) is not int:
        yield f"distinct must be an integer or None, got {case.distinct!r}"
    for name, least in (("heads", 1), ("seqlens", 0), ("dims", 1)):
        if not _is_ints(getattr(case, name), 2, least):
            yield f"{name} must be two integers >= {least}, got {getattr(case, name)!r}"
    for name in ("q_lens", "kv_lens"):
        if getattr(case, name) is not None and not _is_ints(getattr(case, name)):
            yield f"{name} must be integers >= 0 or None, got {getattr(case, name)!r}"
    window = case.window
    if window is not None and not (
        isinstance(window, tuple) and len(window) == 2 and _is_ints(tuple(side for side in window if side is not None))
    ):
        yield f"window must be (left, right), each an integer >= 0 or None, got {window!r}"
    for name in ("scale", "softcap", "dropout_p"):
        value = getattr(case, name)
        absent = value is None and name != "dropout_p"
        if not absent and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            yield f"{name} must be a finite number, got {value!r}"
    seed = case.dropout_seed if isinstance(case.dropout_seed, tuple) else (case.dropout_seed, 0)
    if len(seed) != 2 or not all(type(part) is int and -(2**63) <= part < 2**63 for part in seed):
        yield f"dropout_seed must be an integer of 64 bits, or two of them (seed, offset), got {case.dropout_seed!r}"
    if case.mask is not None:
        yield from _mask_types(case.mask)


def _mask_types(mask: Mask) -> Iterator[str]:
    if not _is_ints(mask.shape) or not 2 <= len(mask.shape) <= 4:
        yield f"a mask has 2 to 4 dims, got the shape {mask.shape!r}"
    for name, allowed in (
        ("kind", ("bool", "float", "float32")),
        ("pattern", get_args(MaskPattern)),
        ("view", get_args(MaskView)),
        ("grad", (True, False)),
    ):
        if getattr(mask, name) not in allowed:
            yield f"a mask's {name} must be one of {', '.join(map(repr, allowed))}, got {getattr(mask, name)!r}"


def _sizes(case: Case) -> Iterator[str]:
    if case.heads[0] % case.heads[1]:
        yield f"heads {case.heads}: Hq must be a multiple of Hkv"


def _lengths(case: Case) -> Iterator[str]:
    for name, lens, limit in (("q_lens", case.q_lens, case.seqlens[0]), ("kv_lens", case.kv_lens, case.seqlens[1])):
        if lens is not None and len(lens) != case.batch:
            yield f"{name} has {len(lens)} lengths for a batch of {case.batch}"
        elif lens is not None and any(length > limit for length in lens):
            yield f"{name} {lens} must be within 0..{limit}"
    right = 0 if case.causal else None if case.window is None else case.window[1]
    no_q_lens = case.kv_lens is not None and case.q_lens is None
    if right == 0 and case.causal != "top_left" and no_q_lens and case.seqlens[0] > 1:
        yield "kv_lens without q_lens leave it open where causal queries end: give q_lens too"
    for tensor, lens in (("q", case.q_lens), ("k", case.kv_lens), ("v", case.kv_lens), ("dout", case.q_lens)):
        view = getattr(case, f"{tensor}_view")
        if lens and view in ("expanded_batch", "expanded_all"):
            real = max(lens) if view == "expanded_batch" else min(max(lens), 1)
            if lens[0] < real:  # sequence 0 holds the values of all, and has NaN past its own length
                yield f"{tensor} is {view} and sequence 0 is shorter than others: its padding would be their values"


def _masks(case: Case) -> Iterator[str]:
    mask = case.mask
    if mask is None:
        return
    full = (case.batch, case.heads[0], *case.seqlens)[-len(mask.shape) :]
    if any(have not in (1, want) for have, want in zip(mask.shape, full, strict=True)):
        yield f"a mask of shape {mask.shape} can't be broadcast to {full}"
    if mask.grad and mask.kind == "bool":
        yield "a bool mask has no gradient"
    if mask.kind == "bool" and mask.pattern in ("finfo_min", "finfo_min_row"):
        yield f"the pattern {mask.pattern} needs a float mask"
    if mask.view == "far_rows" and mask.shape[-1] > 2**24:
        yield "rows that are 2^24 elements apart have no room for more keys than that"


def _numbers(case: Case) -> Iterator[str]:
    scale = 1.0 / math.sqrt(case.dims[0]) if case.scale is None else case.scale
    made_of_scale = {"logits_minus_120": 120.0, "needle": 30.0, "all_equal": 1.0, "huge": 60.0}
    if case.values in made_of_scale:
        if scale == 0:
            yield f"the values {case.values} are made from the scale, which is 0"
        elif made_of_scale[case.values] / abs(scale) > 60000.0:
            yield f"the scale {scale:g} is too small for the values {case.values}: float16 ends at 65504"
    if case.softcap is not None and case.softcap <= 0:
        yield f"softcap must be > 0, got {case.softcap:g}"
    if not 0 <= case.dropout_p <= 1:
        yield f"dropout_p must be within 0..1, got {case.dropout_p:g}"


def _gradients(case: Case) -> Iterator[str]:
    if "sinks" in case.grads and not case.sinks:
        yield "a gradient of sinks is wanted, and there are none"
    if not case.dout and not case.dlse:
        yield "neither dout nor dlse arrives: there is nothing to differentiate"
    if case.dlse and not case.needs_grad:
        yield "dlse arrives, and nothing wants a gradient"


def _copies(case: Case) -> Iterator[str]:
    count = case.distinct
    if count is None:
        return
    if not 1 <= count <= case.batch or case.batch % count:
        yield f"distinct {count} must divide the batch {case.batch}"
        return
    for name, lens in (("q_lens", case.q_lens), ("kv_lens", case.kv_lens)):
        if lens is not None and len(lens) == case.batch and lens != lens[:count] * (case.batch // count):
            yield f"{name} must repeat every {count} sequences, as the values do"
    if case.dropout_p:
        yield "dropout drops by the sequence's number: no two sequences of a batch are alike"
    if "sinks" in case.grads or (case.mask is not None and case.mask.grad):
        yield "the gradients of mask and sinks are summed over the whole batch, and the truth has its first part alone"
