"""The suite's own test: it must pass what is right, and find what is wrong by the gate that is there for it.

The honest emulation of FlashAttention-2 has to be conformant on every unit of `units`, in several tile sizes; and every
mutant has to be flagged on the same units by the finding that it names. A survivor, or a mutant that only something
else flags, is a failure of the suite. It needs no GPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

import flashdispatch
from flashdispatch_conformance.catalogue import BY_ID
from flashdispatch_conformance.check import ALL_DTYPES, BF16, F32, Unit
from flashdispatch_conformance.emulation import Emulation, LargeTiles, NarrowTiles, spec
from flashdispatch_conformance.mutants import MUTANTS, Mutant
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.selftest_report import HonestResult, MutantResult, SelftestReport
from flashdispatch_conformance.trial import Target

NAMED: tuple[str, ...] = (
    "named/length_1", "named/length_63", "named/length_64", "named/length_65", "named/no_keys", "named/cross_wide",
    "named/cross_tall", "named/keys_200_minus_120", "named/causal_wide", "named/causal_wide_top_left",
    "named/causal_tall", "named/d40", "named/d63", "named/d64_dv128", "named/gqa_8_2", "named/window_63",
    "named/window_64", "named/mask_bool_keys", "named/mask_bool_empty_rows", "named/mask_float_grad",
    "named/mask_float32_shared_grad", "named/mask_float_band", "named/mask_float_finfo_min_row", "named/lens_causal",
    "named/lens_kv_only", "named/alibi_causal", "named/softcap_peaked", "named/sinks_window_gqa",
    "named/sinks_empty_rows", "named/dropout", "named/dropout_lens_gqa", "named/scale_negative", "named/scale_one",
    "named/peaked", "named/all_equal", "named/lse_gradient", "named/forward_only", "named/deterministic",
    "named/view_transposed", "named/dout_every_other", "named/bhsd", "named/everything",
)  # fmt: skip
"""Cases that are run in every dtype, by id: every feature, and the first of every mutant."""

OTHERS: tuple[str, ...] = (
    "probe/counting_causal", "probe/counting_lens", "probe/counting_65536", "probe/address_gqa", "probe/integer_causal",
    "probe/zeros", "property/m02_shifted_keys", "property/m06_repeated_heads", "property/m08_causal_prefix",
    "property/m13_equal_keys", "property/m14_doubled_keys", "condition/second_shape", "condition/repeats",
)  # fmt: skip
"""Probes, properties and conditions that are run in bfloat16, by id."""

LONG: tuple[str, ...] = ("named/keys_8192", "named/queries_8192")
"""Cases that take long on a CPU and are run in bfloat16 and float32, by id."""

HONEST: Mapping[str, type[Emulation]] = {
    "fa2_emulation": Emulation,
    "fa2_emulation_narrow": NarrowTiles,
    "fa2_emulation_large": LargeTiles,
}
"""The emulations that must be conformant, by the name they are registered under."""

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what comes next."""

KINDS: Mapping[str, str] = {
    r"not bitwise (repeatable|that of the first)|is another one when": "repeatable",
    r"^inputs were written to": "inputs written",
    r"has (shape|dtype|device|strides|requires_grad)": "form",
    r"^the core took": "problem",
    r"refus|is not declared": "refusal",
    r"^backend \w+ returned": "contract",
}
"""What a message that is about no single tensor's values says, by how it reads."""


def units() -> tuple[Unit, ...]:
    """What everything is run on."""
    chosen = ((NAMED, ALL_DTYPES), (LONG, (BF16, F32)), (OTHERS, (BF16,)))
    return tuple(Unit(BY_ID[name], dtype) for names, dtypes in chosen for name in names for dtype in dtypes)


def findings(result: Result) -> frozenset[str]:
    """What a result holds against a backend, in a small vocabulary.

    ``"<tensor>: <gate>"`` for a gate of `tolerance` that a tensor breaks (``"lse: max"``, ``"dq: finite"``); a word of
    `KINDS`; ``"raises"`` when the backend raised; and for any other message, as probes have them, the id of the check.
    """
    found = {f"{name.split()[0]}: {failure.gate}" for name, z in result.stats.items() for failure in z.failures}
    broken = [failure.message for z in result.stats.values() for failure in z.failures]
    if result.outcome == "not_run":
        return frozenset()
    if result.outcome == "error":
        return frozenset(found | {"raises"})
    for message in result.messages:
        if any(message.startswith(text) for text in broken):
            continue
        found.add(next((kind for pattern, kind in KINDS.items() if re.search(pattern, message)), result.check))
    return frozenset(found)


def run_selftest(
    progress: Progress | None = None,
    *,
    mutants: Sequence[Mutant] = MUTANTS,
    honest: Mapping[str, type[Emulation]] = HONEST,
    on: Sequence[Unit] | None = None,
) -> SelftestReport:
    """Runs the self-test on this machine's CPU, in one thread.

    `progress` hears of each emulation and mutant before it is run. Raises ValueError when a mutant names a first unit
    that is not among `on` (None: `units`), PluginError when one of the names is taken.
    """
    start, chosen, done = time.perf_counter(), units() if on is None else tuple(on), 0
    total = len(honest) + len(mutants)
    known = {unit.id for unit in chosen}
    for mutant in mutants:
        if mutant.first not in known:
            raise ValueError(f"mutant {mutant.name} is to be run on {mutant.first} first, which is not among the units")

    def step(name: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, name)
        done += 1

    fair, tried = [], []
    with _one_thread():
        for name, backend in honest.items():
            step(name)
            fair.append(_run_honest(name, backend, chosen))
        for mutant in mutants:
            step(mutant.name)
            tried.append(_run_mutant(mutant, chosen))
    if progress is not None:
        progress(total, total, "")
    return SelftestReport(honest=tuple(fair), mutants=tuple(tried), seconds=time.perf_counter() - start)


def _run_honest(name: str, backend: type[Emulation], on: Iterable[Unit]) -> HonestResult:
    with _registered(name, backend):
        results = [_run(unit, name) for unit in on]
    broken = tuple(result.report() for result in results if result.outcome != "pass" or result.refused)
    return HonestResult(name=name, units=len(results), broken=broken)


def _run_mutant(mutant: Mutant, on: Sequence[Unit]) -> MutantResult:
    """Runs the mutant until its named finding is made, its first unit first."""
    by_id = {unit.id: unit for unit in on}
    first = by_id.pop(mutant.first)
    flagged: dict[str, tuple[str, ...]] = {}
    count = 0
    name = f"mutant_{mutant.name}"
    with _registered(name, mutant.backend):
        for unit in (first, *by_id.values()):
            found = findings(_run(unit, name))
            count += 1
            if found:
                flagged[unit.id] = tuple(sorted(found))
            if mutant.finding in found:
                break
    return MutantResult(mutant=mutant, units=count, flagged=flagged)


def _run(unit: Unit, backend: str) -> Result:
    return unit.check.run(Target(backend=backend, dtype=unit.dtype, device=torch.device("cpu")))


@contextmanager
def _registered(name: str, backend: type[Emulation]) -> Iterator[None]:
    flashdispatch.register(spec(name, backend))
    try:
        yield
    finally:
        flashdispatch.unregister(name)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
