"""Who may name the backend, and who wins.

Precedence: FLASHDISPATCH_DISABLE beats everything; then the `backend=` argument > FLASHDISPATCH_BACKEND >
`use_backend()` > `set_default_backend()` > automatic. The operator's environment thus beats library code, while a test
that passes the argument gets exactly what it asks for. Names may be a chain ``"a,b"``: tried in order, and nobody else
is. ``"auto"`` at any level means: stop looking, choose automatically.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple

import torch

from flashdispatch import _settings
from flashdispatch._registry import AUTO, Names, check_registered
from flashdispatch_registry.errors import InvalidRequestError, InvalidTypeError, SettingsError
from flashdispatch_registry.plan import Forced, Source

log = logging.getLogger("flashdispatch")

_context: ContextVar[Names | None] = ContextVar("flashdispatch_backend", default=None)


class _Mirror(threading.local):
    """What `use_backend` says, where torch.compile can see it: Dynamo guards a threading.local and not a ContextVar."""

    def __init__(self) -> None:
        self.names: Names | None = None


mirror = _Mirror()

_default: Names | None = None


class Asked(NamedTuple):
    """What each source asks for, as read at one call. Hashable: part of the plan cache's key."""

    argument: str | Names | None
    environment: str | None
    context: Names | None
    default: Names | None


@contextmanager
def use_backend(names: str | Names) -> Iterator[None]:
    """Runs `names` inside the ``with`` block (or the decorated function), in this thread and async task only.

    ``use_backend("torch_reference")`` is strict: a call that it can't run raises with all reasons.
    ``use_backend("a,b")`` or ``("a", "b")`` is a chain, tried in order. Blocks nest; the inner one wins. The
    environment variable FLASHDISPATCH_BACKEND and a call's own `backend=` win over it.

    A function compiled by torch.compile sees the block of its own thread. Where async tasks switch inside overlapping
    blocks, or a block reaches another thread through copied context (`asyncio.to_thread`), only eager calls follow:
    give compiled ones `backend=`.

    Entering the block raises UnknownBackendError when a name is not registered, and InvalidTypeError or
    InvalidRequestError for what is no name.
    """
    chain = parse(names)
    if torch.compiler.is_dynamo_compiling():
        # Dynamo can't trace a ContextVar; inside a traced region the mirror is all there is.
        before = mirror.names
        mirror.names = chain
        try:
            yield
        finally:
            mirror.names = before
        return
    check_registered(chain, "use_backend()")
    token = _context.set(chain)
    mirror.names = chain
    try:
        yield
    finally:
        with suppress(ValueError):  # an async generator may be closed in another context, whose variable is not ours
            _context.reset(token)
        mirror.names = _context.get()


def set_default_backend(names: str | Names | None) -> None:
    """Sets what every call of this process runs unless somebody says otherwise; None goes back to automatic.

    Raises UnknownBackendError when a name is not registered, InvalidTypeError or InvalidRequestError for what is none.
    """
    global _default
    chain = None if names is None else parse(names)
    if chain is not None:
        check_registered(chain, "set_default_backend()")
    _default = chain


def default() -> Names | None:
    """What `set_default_backend` last said."""
    return _default


context = _context.get
"""What the innermost `use_backend` block of this thread or task says. The method itself: it is on every call's way."""


def parse(names: object) -> Names:
    """``"a,b"`` or ``("a", "b")`` -> ``("a", "b")``.

    Raises InvalidTypeError for anything else and InvalidRequestError for an empty chain.
    """
    if isinstance(names, str):
        chain = _settings.names(names)
    elif isinstance(names, tuple) and all(isinstance(name, str) for name in names):
        chain = names
    else:
        raise InvalidTypeError(
            "a backend is named by a string ('torch_reference', or 'a,b' for a chain) or a tuple of strings, got "
            f"{names!r}"
        )
    if not chain:
        raise InvalidRequestError(f"no backend name in {names!r}; leave it out to choose automatically")
    if "auto" in chain and chain != AUTO:
        raise InvalidRequestError(f"'auto' stands alone: a chain is exclusive, so it can't end in {','.join(chain)!r}")
    return chain


def resolve(asked: Asked) -> tuple[Forced | None, tuple[str, ...]]:
    """The strongest source wins: (what it forces, notes for the plan).

    Nothing is forced when nobody names a backend, or when the winner says ``"auto"``; whom it overruled is then a note.
    """
    said: list[tuple[Source, Names]] = []
    if asked.argument is not None:
        said.append(("backend argument", parse(asked.argument)))
    if asked.environment:
        try:
            said.append(("FLASHDISPATCH_BACKEND", parse(asked.environment)))
        except InvalidRequestError as error:
            raise SettingsError(f"FLASHDISPATCH_BACKEND={asked.environment!r}: {error}") from None
    if asked.context is not None:
        said.append(("use_backend()", asked.context))
    if asked.default is not None:
        said.append(("set_default_backend()", asked.default))
    if not said:
        return None, ()
    (source, names), weaker = said[0], said[1:]
    overridden = tuple((other, ",".join(chain)) for other, chain in weaker if chain != names)
    _log_overridden(source, names, overridden)
    if names == AUTO:
        return None, tuple(f"'auto' by {source}, over {value} by {other}" for other, value in overridden)
    return Forced(names, source, overridden), ()


_logged: set[tuple[Source, Names, tuple[tuple[Source, str], ...]]] = set()


def _log_overridden(source: Source, names: Names, overridden: tuple[tuple[Source, str], ...]) -> None:
    if overridden and (source, names, overridden) not in _logged:
        _logged.add((source, names, overridden))
        losers = ", ".join(f"{other} ({value})" for other, value in overridden)
        log.warning("%s (%s) overrides %s", source, ",".join(names), losers)
