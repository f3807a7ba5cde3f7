"""The child's side of isolation: one process that runs one unit after another, and says what it is doing.

Everything that a unit prints, and a Python stack when it crashes or is about to be ended by the watchdog, goes to the
unit's own log, which the parent reads when no result came back.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashdispatch_conformance import catalogue, stage
from flashdispatch_conformance.check import Check, Unit
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target, ends_the_run, raised
from flashdispatch_registry.problem import DTYPE_NAMES

LOST_DEVICE = 113
"""Exit code of a child that was given a unit after its CUDA context was lost: the unit has not been tried."""

STAGE, CASE = "[stage] ", "[case] "
"""Start a line of the log that says what the unit does from there on, and with which of its cases."""

CACHE_BYTES = 2**30
"""What PyTorch may keep of a GPU's memory between two units of one child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit for a child."""

    check: str | Check
    """Its id in the catalogue; a check that is not listed there comes whole."""
    dtype: torch.dtype
    backend: str
    device: str
    seed: int
    log: Path
    timeout: float
    """Seconds after which the parent ends the child."""


_lost = ""
"""Why the device answers nothing more in this process."""


def start(plugins: Sequence[str]) -> None:
    """Makes a process ready for units: one thread, and the modules that register backends.

    The operator's Ctrl-C is the parent's, which ends its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # stdout is the parent's answer; what an import prints is none
    faulthandler.enable()
    torch.set_num_threads(1)
    stage.watch(_say)
    import_plugins(plugins)


def import_plugins(names: Sequence[str]) -> None:
    """Imports modules that call `flashdispatch.register` when they are imported."""
    for name in names:
        importlib.import_module(name)


def run(task: Task) -> Result:
    """Runs one unit. Ends the process where an earlier one has cost it the device."""
    _log_to(task.log)
    if _lost:
        os.write(2, f"not tried: {_lost}\n".encode())
        os._exit(LOST_DEVICE)
    # Before the parent ends the process, it says where it hangs.
    faulthandler.dump_traceback_later(max(task.timeout - 1.0, task.timeout * 0.8), exit=False)
    try:
        unit = Unit(catalogue.BY_ID[task.check] if isinstance(task.check, str) else task.check, task.dtype)
        device = torch.device(task.device)
        result = run_unit(unit, Target(backend=task.backend, dtype=unit.dtype, device=device, seed=task.seed))
        return _settled(result, device)
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def run_unit(unit: Unit, target: Target) -> Result:
    """The unit's result; an exception that its check lets through is an error like any other.

    Raises UnknownBackendError when there is no such backend, KeyboardInterrupt when the operator ends the run.
    """
    try:
        return unit.check.run(target)
    except BaseException as error:  # the other units must run
        if ends_the_run(error, target.backend):
            raise
        return failed(unit, target.backend, raised(error), traceback.format_exc())


def failed(unit: Unit, backend: str, *messages: str, seconds: float = 0.0) -> Result:
    """The outcome error of a unit whose check did not come to an end."""
    dtype = DTYPE_NAMES[unit.dtype]
    return Result(check=unit.check.id, backend=backend, dtype=dtype, outcome="error", messages=messages, run_s=seconds)


def _settled(result: Result, device: torch.device) -> Result:
    """`result`, once the device is known to answer, or known to be lost."""
    global _lost
    if device.type != "cuda":
        return result
    try:
        torch.cuda.synchronize(device)
        if torch.cuda.memory_reserved(device) > CACHE_BYTES:
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001  whatever it is, this process can use the device no more
        _lost = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return replace(result, messages=(*result.messages, f"the device was lost to its process: {_lost}"))
    return result


def _log_to(path: Path) -> None:
    """Has all output of this process go to `path` from now on: Python's, C's and CUDA's."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _say(kind: str, text: str) -> None:
    os.write(2, f"[{kind}] {text}\n".encode())
