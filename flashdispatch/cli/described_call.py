"""A call described by options, shared by the commands that ask about one.

The call is made of tensors on torch's meta device, which have shapes and no memory, and goes through the same checks as
`flashdispatch.attention`: a machine without a GPU can ask about any GPU.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import torch
import typer
from torch import Tensor

import flashdispatch
from flashdispatch.cli.problem_text import LIMIT, read_problem
from flashdispatch_registry.errors import InvalidRequestError, InvalidTypeError, UnknownBackendError
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import DTYPES, Problem
from flashdispatch_registry.select import nearest

DTYPE_ALIASES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Layout(StrEnum):
    """The order of the dims."""

    bshd = "bshd"
    bhsd = "bhsd"


class Mask(StrEnum):
    """Kinds of attn_mask."""

    bool = "bool"
    float = "float"


_SHAPES, _MASKS, _RESULTS, CHOICE = "Shapes", "Masks and scores", "Results", "Choice and output"

AsProblem = Annotated[
    str | None,
    typer.Option(
        "--problem",
        metavar="JSON",
        help="A Problem, or the --json of an earlier run; [bold]-[/] reads stdin. Takes the place of the "
        "shapes, masks and results above.",
        rich_help_panel=CHOICE,
    ),
]
"""The other way to describe a call."""

# What makes a score dearer than a product and an exponential; `tune tiles` has these options, too.
Window = Annotated[
    tuple[str, str] | None,
    typer.Option("--window", metavar="LEFT RIGHT", help="Keys on each side, or [bold]none[/].", rich_help_panel=_MASKS),
]
MaskKind = Annotated[
    Mask | None, typer.Option(help="An attn_mask of queries by keys; a float one in q's dtype.", rich_help_panel=_MASKS)
]
Alibi = Annotated[bool, typer.Option("--alibi", help="ALiBi slopes.", rich_help_panel=_MASKS)]
Softcap = Annotated[float | None, typer.Option(help="cap·tanh(S/cap).", rich_help_panel=_MASKS)]
Dropout = Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability.", rich_help_panel=_MASKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedCall:
    """What the options say; each field is one option."""

    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help=f"{', '.join(DTYPES)}; or {', '.join(DTYPE_ALIASES)}.",
            rich_help_panel=_SHAPES,
        ),
    ] = "bfloat16"
    batch: Annotated[int, typer.Option(min=0, help="Sequences B.", rich_help_panel=_SHAPES)] = 1
    heads: Annotated[int, typer.Option(min=1, help="Query heads Hq.", rich_help_panel=_SHAPES)] = 16
    heads_kv: Annotated[
        int | None,
        typer.Option(
            min=1, help="Key/value heads Hkv; fewer than Hq is GQA.", show_default="Hq", rich_help_panel=_SHAPES
        ),
    ] = None
    seqlen: Annotated[
        int, typer.Option(min=0, help="Queries Sq and keys Sk of a sequence.", rich_help_panel=_SHAPES)
    ] = 4096
    seqlen_q: Annotated[
        int | None, typer.Option(min=0, help="Sq, where it differs.", show_default="--seqlen", rich_help_panel=_SHAPES)
    ] = None
    seqlen_k: Annotated[
        int | None, typer.Option(min=0, help="Sk, where it differs.", show_default="--seqlen", rich_help_panel=_SHAPES)
    ] = None
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim D of q and k.", rich_help_panel=_SHAPES)] = 128
    head_dim_v: Annotated[
        int | None, typer.Option(min=1, help="Head dim Dv of v.", show_default="D", rich_help_panel=_SHAPES)
    ] = None
    layout: Annotated[Layout, typer.Option(help="Order of the dims.", rich_help_panel=_SHAPES)] = Layout.bshd
    q_lens: Annotated[
        bool, typer.Option("--q-lens", help="Queries are padded, with lengths.", rich_help_panel=_SHAPES)
    ] = False
    kv_lens: Annotated[
        bool, typer.Option("--kv-lens", help="Keys are padded, with lengths.", rich_help_panel=_SHAPES)
    ] = False
    causal: Annotated[
        bool, typer.Option("--causal", help="The last query sees the last key.", rich_help_panel=_MASKS)
    ] = False
    top_left: Annotated[
        bool,
        typer.Option(
            "--top-left",
            help="Causal, the first query sees the first key (PyTorch's is_causal).",
            rich_help_panel=_MASKS,
        ),
    ] = False
    window: Window = None
    mask: MaskKind = None
    alibi: Alibi = False
    sinks: Annotated[bool, typer.Option("--sinks", help="A sink logit per head.", rich_help_panel=_MASKS)] = False
    softcap: Softcap = None
    dropout: Dropout = 0.0
    grad: Annotated[
        bool, typer.Option("--grad/--no-grad", help="Gradients of q, k and v.", rich_help_panel=_RESULTS)
    ] = False
    mask_grad: Annotated[
        bool, typer.Option("--mask-grad", help="A gradient of the float mask.", rich_help_panel=_RESULTS)
    ] = False
    sinks_grad: Annotated[
        bool, typer.Option("--sinks-grad", help="A gradient of the sinks.", rich_help_panel=_RESULTS)
    ] = False
    lse: Annotated[bool, typer.Option("--lse", help="Return the LSE.", rich_help_panel=_RESULTS)] = False
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="A bitwise repeatable backward.", rich_help_panel=_RESULTS)
    ] = False

    def plan(self, *, arch: str, backend: str | None) -> Plan:
        """What `flashdispatch.explain` says about the call on `arch`.

        Ends the command with a usage error when the options contradict each other.
        """
        if self.mask_grad and self.mask is not Mask.float:
            raise typer.BadParameter("only a float mask has a gradient: add --mask float", param_hint="--mask-grad")
        if self.sinks_grad and not self.sinks:
            raise typer.BadParameter("add --sinks", param_hint="--sinks-grad")
        length_q, length_k = (self.seqlen if length is None else length for length in (self.seqlen_q, self.seqlen_k))
        sides = _window(self.window)
        ends_at_itself = self.causal or (sides is not None and sides[1] == 0)
        if ends_at_itself and not self.top_left and self.kv_lens and not self.q_lens and length_q > 1:
            raise typer.BadParameter(
                "which query is the last one? Add --q-lens (queries have lengths too, and end where the keys end), or "
                "--top-left (query i sees keys 0..i, whatever the lengths)",
                param_hint=f"{'--causal' if self.causal else '--window'} with --kv-lens",
            )
        kind = _dtype(self.dtype)

        def sized(count: int, length: int, dim: int) -> Tensor:
            bshd = self.layout is Layout.bshd
            shape = (self.batch, length, count, dim) if bshd else (self.batch, count, length, dim)
            return _empty(shape, kind, requires_grad=self.grad)

        def lengths(wanted: bool) -> Tensor | None:
            return _empty((self.batch,), torch.int32) if wanted else None

        def per_head(wanted: bool, *, requires_grad: bool = False) -> Tensor | None:
            return _empty((self.heads,), torch.float32, requires_grad=requires_grad) if wanted else None

        attn_mask = None
        if self.mask is not None:
            mask_dtype = kind if self.mask is Mask.float else torch.bool
            attn_mask = _empty((1, 1, length_q, length_k), mask_dtype, requires_grad=self.mask_grad)
        heads_kv = self.heads if self.heads_kv is None else self.heads_kv
        with usage_errors():
            return flashdispatch.explain(
                sized(self.heads, length_q, self.head_dim),
                sized(heads_kv, length_k, self.head_dim),
                sized(heads_kv, length_k, self.head_dim if self.head_dim_v is None else self.head_dim_v),
                causal="top_left" if self.top_left else self.causal,
                window=sides,
                attn_mask=attn_mask,
                alibi_slopes=per_head(self.alibi),
                sinks=per_head(self.sinks, requires_grad=self.sinks_grad),
                q_lens=lengths(self.q_lens),
                kv_lens=lengths(self.kv_lens),
                softcap=self.softcap,
                dropout_p=self.dropout,
                layout=self.layout.value,
                return_lse=self.lse,
                deterministic=self.deterministic or None,
                backend=backend,
                arch=arch,
            )


def describes_a_call(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` the options of `DescribedCall`, before its own; it gets them as its argument `call`."""
    names = [field.name for field in fields(DescribedCall)]
    options = inspect.signature(DescribedCall).parameters
    hints = get_type_hints(DescribedCall, include_extras=True)
    own_hints = get_type_hints(command, include_extras=True)
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "call"]

    @functools.wraps(command)
    def with_call(**values: Any) -> None:
        command(call=DescribedCall(**{name: values.pop(name) for name in names}), **values)

    parameters = [options[name].replace(annotation=hints[name]) for name in names]
    parameters += [
        parameter.replace(annotation=own_hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own
    ]
    # Where typer looks for what it makes options of.
    with_call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_call


def plan_of(
    ctx: typer.Context,
    call: DescribedCall,
    problem: str | None,
    *,
    arch: str | None,
    otherwise: str,
    backend: str | None,
) -> Plan:
    """The plan of `call`, or of the Problem in the text `problem`, which then must be the whole description.

    `arch` None is the Problem's own, and `otherwise` for a call.
    """
    if problem is None:
        return call.plan(arch=otherwise if arch is None else arch, backend=backend)
    _reject_beside_problem(ctx)
    asked = _read(problem)
    with usage_errors():
        return flashdispatch.explain(asked, arch=arch, backend=backend)


@contextmanager
def usage_errors() -> Iterator[None]:
    """A call that means nothing is a command that means nothing. The message keeps its lines: it may hold a list."""
    try:
        yield
    except (InvalidRequestError, InvalidTypeError, UnknownBackendError) as error:
        said = str(error).replace(" meta,", ",")  # where our tensors are is no part of the question
        typer.echo(f"error: {said}", err=True)
        raise typer.Exit(2) from error


def _dtype(name: str) -> torch.dtype:
    try:
        return DTYPES[DTYPE_ALIASES.get(name, name)]
    except KeyError:
        known = [*DTYPES, *DTYPE_ALIASES]
        raise typer.BadParameter(
            f"{name!r} is none of {', '.join(known)}.{nearest(name, known)}", param_hint="--dtype"
        ) from None


def _empty(shape: tuple[int, ...], dtype: torch.dtype, *, requires_grad: bool = False) -> Tensor:
    # With the empty dims counted as 1: the strides of the others must fit as well.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= LIMIT:
        sizes = " x ".join(str(size) if size < LIMIT else "..." for size in shape)
        raise typer.BadParameter(f"a tensor of {sizes} is larger than any that torch can describe")
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def _window(texts: tuple[str, str] | None) -> tuple[int | None, int | None] | None:
    if texts is None:
        return None
    try:
        left, right = (None if text.lower() == "none" else int(text) for text in texts)
    except ValueError:
        raise typer.BadParameter(
            f"two sides, each a number of keys or none, got {' '.join(texts)!r}", param_hint="--window"
        ) from None
    return left, right


def _read(text: str) -> Problem:
    try:
        return read_problem(sys.stdin.read() if text == "-" else text)
    except UnicodeDecodeError:
        raise typer.BadParameter("stdin is no text", param_hint="--problem") from None
    except ValueError as error:
        raise typer.BadParameter(f"this is no Problem: {error}", param_hint="--problem") from None


def _reject_beside_problem(ctx: typer.Context) -> None:
    """--problem says it all: another description beside it must not be dropped in silence."""
    for field in fields(DescribedCall):
        source = ctx.get_parameter_source(field.name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + field.name.replace("_", "-")
            raise typer.BadParameter(f"{option} can't be combined with it", param_hint="--problem")
