"""The error tree. Each error is also the builtin that a caller would expect.

FlashDispatchError
├── InvalidRequestError (ValueError)            a call that no backend could give a meaning to
├── InvalidTypeError (TypeError)                an argument of the wrong type
├── UnknownBackendError (ValueError)            a backend name that is not registered
├── DisabledBackendError (ValueError)           a backend both forced and disabled
├── SettingsError (ValueError)                  an environment variable with a bad value
├── BackendUnsupportedError (NotImplementedError)   the forced backend can't run this, with all its reasons
├── NoBackendError (NotImplementedError)        no backend can run this, with everyone's reasons
├── SecondDerivativeError (RuntimeError)        a gradient of attention differentiated again
├── ForwardModeError (NotImplementedError)      forward-mode derivatives of attention
├── RecomputeError (RuntimeError)               checkpointing recomputed with another backend
├── BackendContractError (RuntimeError)         a backend returned what the contract does not allow
├── ColdKernelError (RuntimeError)              a kernel would have to be compiled while a CUDA graph is captured
├── FallbackError (RuntimeError)                FLASHDISPATCH_FALLBACK=error refused a slow path
├── PluginError (RuntimeError)                  a plugin broke the rules (strict mode, or run-time registration)
└── BackendLoadError (RuntimeError)             a backend's code could not be imported

Warnings: FlashDispatchWarning (UserWarning) ← FallbackWarning, SettingsWarning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdispatch_registry.plan import Plan
    from flashdispatch_registry.problem import Problem


class FlashDispatchError(Exception):
    """Base of all errors raised on purpose. `plan` (and through it the problem) says what was asked and why not.

    Picklable, so that it survives the way back from a worker process.
    """

    def __init__(self, message: str, *, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan

    @property
    def problem(self) -> Problem | None:
        """What was asked; None when it never became a problem."""
        return self.plan.problem if self.plan is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.plan)


def _rebuild(kind: type[FlashDispatchError], message: str, plan: Plan | None) -> FlashDispatchError:
    return kind(message, plan=plan)


class InvalidRequestError(FlashDispatchError, ValueError):
    """A call that no backend could give a meaning to: shapes, values or arguments that contradict each other."""


class InvalidTypeError(FlashDispatchError, TypeError):
    """An argument of the wrong type."""


class UnknownBackendError(FlashDispatchError, ValueError):
    """A backend name that is not registered; the message has the registered and the nearest names."""


class DisabledBackendError(FlashDispatchError, ValueError):
    """A backend that is forced and, by FLASHDISPATCH_DISABLE, disabled."""


class SettingsError(FlashDispatchError, ValueError):
    """An environment variable with a value that means nothing."""


class BackendUnsupportedError(FlashDispatchError, NotImplementedError):
    """The forced backend can't run this problem; the message has all its reasons."""


class NoBackendError(FlashDispatchError, NotImplementedError):
    """No backend can run this problem; the message has every backend's reasons."""


class SecondDerivativeError(FlashDispatchError, RuntimeError):
    """A gradient of attention was differentiated again; attention is differentiable once."""


class ForwardModeError(FlashDispatchError, NotImplementedError):
    """Forward-mode derivatives (torch.autograd.forward_ad, jvp) of attention; it has reverse mode only."""


class RecomputeError(FlashDispatchError, RuntimeError):
    """Activation checkpointing recomputed a forward with another backend than the backward was planned for."""


class BackendContractError(FlashDispatchError, RuntimeError):
    """A backend returned what the contract does not allow: a wrong shape or dtype, a missing LSE or gradient."""


class ColdKernelError(FlashDispatchError, RuntimeError):
    """A kernel would have to be compiled or loaded while a stream is capturing; `prepare` does it ahead."""


class FallbackError(FlashDispatchError, RuntimeError):
    """Only an unfused or quadratic backend can run this GPU problem, and FLASHDISPATCH_FALLBACK=error."""


class PluginError(FlashDispatchError, RuntimeError):
    """A plugin could not be taken: it failed to load, has a name that is taken, or another contract version."""


class BackendLoadError(FlashDispatchError, RuntimeError):
    """A backend's code could not be imported on first use."""


class FlashDispatchWarning(UserWarning):
    """Base of all warnings."""


class FallbackWarning(FlashDispatchWarning):
    """Auto-selection took an unfused or quadratic backend for a GPU problem."""


class SettingsWarning(FlashDispatchWarning):
    """An environment variable that looks like one of ours and is none."""
