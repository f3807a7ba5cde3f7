"""Runs units: each in a child process of a pool, so that a crash or a hang is that unit's outcome and no other's."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from flashdispatch_conformance import cases, catalogue, worker
from flashdispatch_conformance.check import Unit
from flashdispatch_conformance.extra import needs
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_conformance.worker import CASE, STAGE, Task
from flashdispatch_registry.errors import FlashDispatchError, UnknownBackendError

if TYPE_CHECKING:
    from pebble import ProcessFuture, ProcessPool

TIMEOUT = 120.0
"""Seconds that one unit may take on a GPU, compiling included."""

CPU_TIMEOUT = 900.0
"""Seconds that one unit may take on a CPU, where the largest ones take minutes."""

GPU_BYTES = 3 * 2**29
"""GPU memory for one child: its CUDA context, what PyTorch may keep between units, and a unit's own tensors."""

AHEAD = 2
"""Units beyond the number of children that are already on their way to them."""

TICK = 0.2
"""Seconds between two looks at what is running."""

LOG_TAIL = 40
"""Lines of a unit's log that go into its message when it has no result."""


class RunnerError(FlashDispatchError, RuntimeError):
    """The child processes can't do any work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How units are run."""

    backend: str
    device: torch.device
    seed: int = 0
    timeout: float | None = None
    """Seconds that one unit may take; None: `timeout_for` the device."""
    workers: int | None = None
    """Child processes; None: as many as the machine has room for."""
    plugins: tuple[str, ...] = ()
    """Modules that a child imports first, for backends that no installed plugin brings."""
    isolated: bool = True
    """False: everything in this process, where a crash or a hang ends the run. For backends registered at run time."""


def chosen(units: Sequence[Unit], patterns: Sequence[str]) -> tuple[Unit, ...]:
    """Units whose id matches one of `patterns`: a glob when it has ``*`` or ``?``, else a part of the id."""

    def matches(unit: Unit, pattern: str) -> bool:
        glob = any(letter in pattern for letter in "*?")
        return fnmatchcase(unit.id, pattern) if glob else pattern in unit.id

    return tuple(unit for unit in units if not patterns or any(matches(unit, pattern) for pattern in patterns))


def shard(units: Sequence[Unit], index: int, count: int) -> tuple[Unit, ...]:
    """The `index`-th of `count` parts, counted from 1: every `count`-th unit, so that each part has all kinds."""
    return tuple(units[index - 1 :: count])


def compile_order(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """First one unit of each kernel, then a second one of each, and so on.

    Children so compile different kernels at the same time, and the units that come later find them on disk.
    """
    ranks: defaultdict[tuple[object, ...], int] = defaultdict(int)
    ranked = []
    for unit in units:
        key = _kernel(unit)
        ranked.append((ranks[key], unit))
        ranks[key] += 1
    return tuple(unit for _, unit in sorted(ranked, key=lambda pair: pair[0]))


def _kernel(unit: Unit) -> tuple[object, ...]:
    """What a kernel is compiled for, as far as a case says it; checks of other kinds count as one kernel a kind."""
    case = cases.BY_ID.get(unit.check.id)
    if case is None:
        return (unit.dtype, unit.check.id.partition("/")[0])
    mask = None if case.mask is None else (case.mask.kind, case.mask.grad)
    band = (bool(case.causal), case.window is not None)
    scores = (mask, case.alibi, case.sinks, case.softcap is not None, case.dropout_p > 0)
    lengths = (case.q_lens is not None, case.kv_lens is not None)
    return (unit.dtype, case.dims, band, scores, lengths, bool(case.grads), case.deterministic)


def timeout_for(device: torch.device) -> float:
    """Seconds that one unit may take on `device`, if nobody says."""
    return TIMEOUT if device.type == "cuda" else CPU_TIMEOUT


def workers_for(device: torch.device) -> int:
    """How many children `device` and this machine's cores have room for."""
    cores = len(os.sched_getaffinity(0))
    if device.type != "cuda":
        return cores
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(cores - 1, free // GPU_BYTES))


def workers_of(settings: Settings) -> int:
    """How many children a run has at most."""
    if not settings.isolated:
        return 1
    return workers_for(settings.device) if settings.workers is None else settings.workers


Watch = Callable[[Sequence[str]], None]
"""Told from time to time which units are running."""


def nobody(running: Sequence[str]) -> None:
    """Watches nothing."""
    del running


def run(units: Sequence[Unit], settings: Settings, watch: Watch = nobody) -> Generator[Result]:
    """Runs `units` and yields their results in the order in which they finish.

    Units that must have the machine to themselves come last, one at a time. Closing the iterator, or an exception in
    its consumer such as KeyboardInterrupt, ends the children. Raises UnknownBackendError when a child knows no such
    backend, RunnerError when children can't even start.
    """
    if not settings.isolated:
        yield from _here(units, settings, watch)
        return
    together = compile_order(unit for unit in units if not unit.check.alone)
    alone = [unit for unit in units if unit.check.alone]
    for group, count in ((together, min(workers_of(settings), len(together))), (alone, 1)):
        if group:
            with Children(settings, count) as children:
                yield from children.results(group, watch)


def _here(units: Sequence[Unit], settings: Settings, watch: Watch) -> Iterator[Result]:
    for unit in units:
        watch([unit.id])
        target = Target(backend=settings.backend, dtype=unit.dtype, device=settings.device, seed=settings.seed)
        yield worker.run_unit(unit, target)


@dataclass(frozen=True, slots=True)
class _Attempt:
    unit: Unit
    log: Path


class Children:
    """A pool of `count` child processes, what they were given, and what became of it. They end with the context."""

    def __init__(self, settings: Settings, count: int) -> None:
        needs("pebble", "running each check in a process of its own")
        self.settings, self.count = settings, count
        self.timeout = timeout_for(settings.device) if settings.timeout is None else settings.timeout
        self.logs = tempfile.TemporaryDirectory(prefix="flashdispatch-conformance-")
        self.waiting: deque[Unit] = deque()
        self.given: dict[Future[Result], _Attempt] = {}
        self.attempts = 0
        self.idle_breaks = 0
        """Times that the pool broke since the last result."""
        self.pool = self._new_pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._end()
        self.logs.cleanup()

    def results(self, units: Sequence[Unit], watch: Watch = nobody) -> Iterator[Result]:
        """Results of `units` as they finish. The errors of `run`."""
        self.waiting.extend(units)
        while self.waiting or self.given:
            self._give()
            done, _ = wait(self.given, timeout=TICK, return_when=FIRST_COMPLETED)
            watch([attempt.unit.id for future, attempt in self.given.items() if future.running()])
            for result in map(self._take, done):
                if result is not None:
                    self.idle_breaks = 0
                    yield result

    def _new_pool(self) -> ProcessPool:
        from pebble import ProcessPool

        return ProcessPool(
            max_workers=self.count,
            initializer=worker.start,
            initargs=(self.settings.plugins,),
            context=get_context("spawn"),  # a forked child can't use CUDA
        )

    def _end(self) -> None:
        self.pool.stop()  # type: ignore[no-untyped-call]  # pebble's only untyped one
        self.pool.join()

    def _give(self) -> None:
        while self.waiting and len(self.given) < self.count + AHEAD:
            unit = self.waiting.popleft()
            attempt = _Attempt(unit, Path(self.logs.name, f"{self.attempts}.log"))
            self.attempts += 1
            try:
                future = self._schedule(attempt)
            except RuntimeError:  # the pool broke a moment ago
                self.waiting.appendleft(unit)
                self._break()
                return
            self.given[future] = attempt

    def _schedule(self, attempt: _Attempt) -> ProcessFuture[Result]:
        check = attempt.unit.check
        task = Task(
            check=check.id if catalogue.BY_ID.get(check.id) is check else check,
            dtype=attempt.unit.dtype,
            backend=self.settings.backend,
            device=str(self.settings.device),
            seed=self.settings.seed,
            log=attempt.log,
            timeout=self.timeout,
        )
        return self.pool.schedule(worker.run, args=(task,), timeout=self.timeout)

    def _take(self, future: Future[Result]) -> Result | None:
        """The result of what was given to a child; None when it is to be tried again."""
        from pebble import ProcessExpired

        attempt = self.given.pop(future, None)
        if attempt is None:  # already back among those that wait, since the pool broke
            return None
        unit, backend = attempt.unit, self.settings.backend
        try:
            return future.result()
        except BrokenProcessPool:
            self.waiting.appendleft(unit)
            self._break()
            return None
        except ProcessExpired as error:
            log = _Log.read(attempt.log)
            if error.exitcode == worker.LOST_DEVICE and not log.stage:
                self.waiting.appendleft(unit)
                return None
            return worker.failed(unit, backend, f"its process {_ended(error.exitcode)}{log.where}", *log.tail)
        except TimeoutError:
            log = _Log.read(attempt.log)
            said = f"no result within {self.timeout:g} s: its process was ended{log.where}; --timeout gives it more"
            return worker.failed(unit, backend, said, *log.tail, seconds=self.timeout)
        except UnknownBackendError as error:
            raise UnknownBackendError(
                f"{error}\n  the child processes of this run don't know it: if it is registered at run time, name the "
                "module that does so with --plugin, or run without isolation (--in-process)"
            ) from error

    def _break(self) -> None:
        """Goes on with a new pool after children died between two units, or before their first one."""
        self.idle_breaks += 1
        self.waiting.extendleft(attempt.unit for attempt in self.given.values())
        self.given.clear()
        self._end()
        if self.idle_breaks > 1:
            raise RunnerError(
                "the child processes end before they have done anything; what they say is above.\n"
                "  to see more, run one check in this process: flashdispatch conformance run --in-process -k UNIT_ID"
            )
        self.pool = self._new_pool()


@dataclass(frozen=True, slots=True)
class _Log:
    """What a unit left behind that has no result."""

    stage: str
    tail: tuple[str, ...]
    """The end of what it printed, and the command that runs its last case again where it had several."""

    @classmethod
    def read(cls, path: Path) -> _Log:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        stages = [line.removeprefix(STAGE) for line in lines if line.startswith(STAGE)]
        drawn = [line.removeprefix(CASE) for line in lines if line.startswith(CASE)]
        said = [line for line in lines if not line.startswith((STAGE, CASE))]
        text = "\n".join(said[-LOG_TAIL:]).strip()
        return cls(stages[-1] if stages else "", (*([text] if text else []), *drawn[-1:]))

    @property
    def where(self) -> str:
        return f" while {self.stage}" if self.stage else ""


def _ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may be out of memory)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
