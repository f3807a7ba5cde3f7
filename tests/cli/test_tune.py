"""Tuning: the fastest right tile wins and is kept, a wrong one never is, and all that is out is said."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdispatch import _registry
from flashdispatch.cli import tile_search, tune
from flashdispatch.cli.gpu_clock import GpuClock
from flashdispatch.cli.tile_search import TuningError, Verdict, relative_error, rows, steps
from flashdispatch_registry import tile_store
from flashdispatch_registry.problem import Problem

Command = Callable[..., Any]

CPU = torch.device("cpu")
SIZES = (16, 32, 64, 128)

PROBLEM = Problem(
    arch="sm_90",
    dtype=torch.float32,
    batch=1,
    heads_q=2,
    heads_kv=2,
    seqlen_q=8,
    seqlen_k=8,
    head_dim=16,
    head_dim_v=16,
    scale=0.25,
    needs_grad=("q", "k", "v"),
)
FORWARD = replace(PROBLEM, needs_grad=())


class Tiled:
    """The reference, with kernels whose tiles cost what a test says and go wrong where it says."""

    def __init__(self, **costs: Mapping[int, float]) -> None:
        self.costs = {name: dict.fromkeys(SIZES, 1.0) | dict(costs.get(name, {})) for name in ("forward", "dq", "dkdv")}
        self.shipped = {"forward": 16, "dq": 16, "dkdv": 16}
        self.set: dict[str, int] = {}
        self.no_compile: set[tuple[str, int]] = set()
        self.no_launch: set[tuple[str, int]] = set()
        self.wrong: dict[tuple[str, int], float] = {}
        self.wild: set[tuple[str, int]] = set()
        self.dead = False
        self.seconds = 0.0
        self.passes: list[tuple[tuple[str, int], ...]] = []

    def kernels(self, problem: Problem) -> Sequence[str]:
        return ("forward", "dq", "dkdv") if problem.needs_grad else ("forward",)

    def tile_key(self, problem: Problem, kernel: str) -> str:
        return f"{kernel} d{problem.head_dim} {problem.band}"

    def tile_space(self, problem: Problem, kernel: str) -> Sequence[Mapping[str, int]]:
        return [{"block_m": size} for size in SIZES]

    def tile(self, problem: Problem, kernel: str) -> Mapping[str, int]:
        return {"block_m": self.set.get(self.tile_key(problem, kernel), self.shipped[kernel])}

    def set_tile(self, problem: Problem, kernel: str, tile: Mapping[str, int] | None) -> None:
        if tile is None:
            del self.set[self.tile_key(problem, kernel)]
        else:
            self.set[self.tile_key(problem, kernel)] = tile["block_m"]

    def prepare(self, problem: Problem) -> None:
        for kernel in self.kernels(problem):
            if (kernel, self.tile(problem, kernel)["block_m"]) in self.no_compile:
                raise RuntimeError("ptxas failed\nwith a long log")

    def launch(self, problem: Problem, kernels: Sequence[str]) -> float:
        """Runs the kernels of a pass; how wrong its results are."""
        used = tuple((kernel, self.tile(problem, kernel)["block_m"]) for kernel in kernels)
        if self.no_launch.intersection(used) or self.dead:
            raise OSError("out of shared memory")
        self.dead = bool(self.wild.intersection(used))
        self.passes.append(used)
        self.seconds = sum(self.costs[kernel][size] for kernel, size in used) * problem.seqlen_q / 8
        return sum(self.wrong.get(launch, 0.0) for launch in used)

    def forward(self, problem: Problem, q: Any, k: Any, v: Any, extras: Any) -> Any:
        off = self.launch(problem, ("forward",))
        result = _registry.registry().load("torch_reference").forward(problem, q, k, v, extras)
        return result._replace(out=result.out * (1 + off))

    def backward(self, problem: Problem, saved: Any, dout: Any, dlse: Any, needs: Any) -> Any:
        off = self.launch(problem, ("dq", "dkdv"))
        result = _registry.registry().load("torch_reference").backward(problem, saved, dout, dlse, needs)
        return result._replace(k=result.k * (1 + off))


class Clock:
    """What the backend says its last pass cost; each reading a little more, if the GPU gets slower."""

    def __init__(self, backend: Tiled, *, drift: float = 0.0) -> None:
        self.backend, self.drift, self.readings = backend, drift, 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.readings += 1
        return self.backend.seconds * (1 + self.drift * self.readings)


def tuned(backend: Tiled, kernel: str = "forward", problems: Sequence[Problem] = (PROBLEM,), **clock: float) -> Verdict:
    row = next(row for row in rows(backend, problems) if row.kernel == kernel)
    return tile_search.tune(backend, row, measure=Clock(backend, **clock), device=CPU)


# Choosing


def test_the_fastest_tile_wins_and_is_in_force() -> None:
    backend = Tiled(forward={16: 1.0, 32: 0.9, 64: 0.5, 128: 0.8})
    verdict = tuned(backend)
    assert (verdict.before, verdict.now) == ({"block_m": 16}, {"block_m": 64})
    assert (verdict.seconds_before, verdict.seconds_now, verdict.ratio) == (1.0, 0.5, 2.0)
    assert verdict.changed
    assert backend.tile(PROBLEM, "forward") == {"block_m": 64}


@pytest.mark.parametrize(("cost", "now"), [(0.995, 16), (0.985, 32)])
def test_the_old_tile_stays_unless_another_is_a_hundredth_faster(cost: float, now: int) -> None:
    backend = Tiled(forward={32: cost})
    verdict = tuned(backend)
    assert verdict.now == backend.tile(PROBLEM, "forward") == {"block_m": now}
    assert verdict.changed is (now == 32)


@pytest.mark.parametrize("drift", [0.004, -0.004])
def test_a_gpu_that_gets_slower_or_faster_favours_nobody(drift: float) -> None:
    assert not tuned(Tiled(), drift=drift).changed
    assert tuned(Tiled(forward={128: 0.97}), drift=drift).now == {"block_m": 128}


@pytest.mark.parametrize("off", [0.5, 0.001, float("nan")])
@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_a_wrong_tile_is_reported_and_never_wins(kernel: str, off: float) -> None:
    backend = Tiled(**{kernel: {32: 0.9, 64: 0.1}})
    backend.wrong[kernel, 64] = off
    verdict = tuned(backend, kernel)
    assert verdict.now == {"block_m": 32}
    (out,) = verdict.wrong
    assert out.tile == {"block_m": 64}
    assert out.reason.startswith(f"{'out' if kernel == 'forward' else 'dk'} is off by {off:.1e}, relative; right is")


def test_16_bit_may_round_more() -> None:
    half = replace(PROBLEM, dtype=torch.bfloat16)
    for off, wrong in ((0.01, 0), (0.03, 1)):
        backend = Tiled()
        backend.wrong["forward", 64] = off
        assert len(tuned(backend, problems=(half,)).wrong) == wrong


def test_what_does_not_compile_or_launch_is_skipped_with_its_reason() -> None:
    backend = Tiled(forward={32: 0.1, 64: 0.1, 128: 0.5})
    backend.no_compile.add(("forward", 32))
    backend.no_launch.add(("forward", 64))
    verdict = tuned(backend)
    assert verdict.now == {"block_m": 128}
    assert [(out.tile["block_m"], out.reason) for out in verdict.failed] == [
        (32, "RuntimeError: ptxas failed"),
        (64, "OSError: out of shared memory"),
    ]


def test_one_kernel_is_tuned_with_the_others_of_its_pass_as_they_are() -> None:
    backend = Tiled(dq={64: 0.5}, dkdv={32: 0.25})
    for row in rows(backend, (PROBLEM,)):
        tile_search.tune(backend, row, measure=Clock(backend), device=CPU)
    backward = [used for used in backend.passes if used[0][0] == "dq"]
    first_dkdv = next(at for at, used in enumerate(backward) if used[1][1] != 16)
    assert {used[0][1] for used in backward[:first_dkdv]} == set(SIZES)
    assert {used[0][1] for used in backward[first_dkdv:]} == {64}
    assert backend.set == {"forward d16 full": 16, "dq d16 full": 64, "dkdv d16 full": 32}


def test_all_problems_of_a_row_count() -> None:
    long = replace(FORWARD, seqlen_q=16, seqlen_k=16)
    verdict = tuned(Tiled(), problems=(FORWARD, long))
    assert verdict.row.problems == (FORWARD, long)
    assert verdict.seconds_before == pytest.approx(2**0.5)


# What goes wrong


def test_a_tile_in_force_that_does_not_run_leaves_nothing_to_compare_with() -> None:
    backend = Tiled(forward={64: 0.5})
    backend.no_launch.add(("forward", 16))
    with pytest.raises(TuningError, match=r"forward d16 full: the tile in force, block_m 16, does not run.* OSError"):
        tuned(backend)
    assert backend.tile(PROBLEM, "forward") == {"block_m": 16}


def test_a_candidate_that_breaks_the_gpu_is_named() -> None:
    backend = Tiled(forward={64: 0.5})
    backend.wild.add(("forward", 32))
    with pytest.raises(TuningError, match=r"since the tile block_m 32 ran \(OSError.* the one in force fails too"):
        tuned(backend)
    assert backend.tile(PROBLEM, "forward") == {"block_m": 16}


def test_an_interrupt_leaves_the_old_tile_in_force() -> None:
    backend = Tiled(forward={64: 0.5})
    (row, *_) = rows(backend, (FORWARD,))

    def interrupted(run: Callable[[], object]) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tile_search.tune(backend, row, measure=interrupted, device=CPU)
    assert backend.tile(PROBLEM, "forward") == {"block_m": 16}


def test_a_problem_is_tuned_with_all_that_it_has() -> None:
    given: list[Any] = []

    class Watching(Tiled):
        def forward(self, problem: Problem, q: Any, k: Any, v: Any, extras: Any) -> Any:
            given.append(extras)
            return super().forward(problem, q, k, v, extras)

    masked = replace(
        PROBLEM, attn_mask="float", attn_mask_shape=(1, 2, 8, 8), alibi=True, sinks=True, q_lens=True, kv_lens=True,
        dropout_p=0.5, needs_grad=("q", "k", "v", "attn_mask"),
    )  # fmt: skip
    backend = Watching(dq={32: 0.5})
    backend.wrong["dq", 64] = 0.5
    assert tuned(backend, "dq", (masked,)).now == {"block_m": 32}
    assert [None if x is None else tuple(x.shape) for x in given[0]] == [(1, 2, 8, 8), (2,), (2,), (1,), (1,), (2,)]
    given.clear()
    tuned(backend, problems=(replace(FORWARD, attn_mask="bool", attn_mask_shape=(1, 1, 8, 8)),))
    assert given[0].attn_mask.dtype is torch.bool
    assert given[0][1:] == (None,) * 5


def test_progress_ends_where_it_was_said_to() -> None:
    backend, taken = Tiled(), []
    backend.no_compile.add(("forward", 32))
    (row,) = rows(backend, (FORWARD,))
    tile_search.tune(backend, row, measure=Clock(backend), device=CPU, step=lambda: taken.append(1))
    assert len(taken) == steps(row)


def test_a_backend_that_compiles_side_by_side_is_given_all_candidates_first() -> None:
    asked: list[Any] = []

    class Parallel(Tiled):
        def prepare_tiles(self, problem: Problem, kernel: str, tiles: Any) -> None:
            asked.append((kernel, [tile["block_m"] for tile in tiles], list(self.passes)))

    tuned(Parallel())
    assert asked == [("forward", [32, 64, 128], [(("forward", 16),)])]


def test_a_compiler_that_dies_ends_its_row_and_no_other() -> None:
    class Dying(Tiled):
        def prepare_tiles(self, problem: Problem, kernel: str, tiles: Any) -> None:
            raise BrokenProcessPool("a child process terminated abruptly")

    backend = Dying()
    with pytest.raises(
        TuningError, match="forward d16 full: compiling its tiles ended with BrokenProcessPool: a child"
    ):
        tuned(backend)
    assert backend.tile(PROBLEM, "forward") == {"block_m": 16}


# Rows


def test_rows_are_in_the_order_of_the_kernels_and_know_their_pass() -> None:
    found = rows(Tiled(), (PROBLEM, FORWARD))
    assert [(row.kernel, row.forward, row.problems) for row in found] == [
        ("forward", True, (PROBLEM,)),
        ("dq", False, (PROBLEM,)),
        ("dkdv", False, (PROBLEM,)),
    ]
    assert [tile["block_m"] for tile in found[0].space] == list(SIZES)


def test_only_the_kernels_asked_for() -> None:
    assert [row.kernel for row in rows(Tiled(), (PROBLEM,), ("dkdv",))] == ["dkdv"]


def test_two_kernels_under_one_key_are_refused() -> None:
    class Confused(Tiled):
        def tile_key(self, problem: Problem, kernel: str) -> str:
            return "d16"

    with pytest.raises(TuningError, match="'d16' for two kernels, forward and dq"):
        rows(Confused(), (PROBLEM,))


def test_relative_error() -> None:
    inf = float("inf")
    wanted = torch.tensor([3.0, 4.0, -inf])
    assert relative_error(wanted, wanted) == 0
    assert relative_error(torch.tensor([3.0, 4.5, -inf]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.0, 0.0]), wanted) == inf
    assert relative_error(torch.tensor([1.0, 2.0]), torch.zeros(2)) == pytest.approx(5**0.5)
    assert relative_error(None, None) == 0
    assert relative_error(None, wanted) == inf
    assert relative_error(wanted[:2], wanted) == inf


# The command

SMALL = ("--seqlen", "8", "--batch", "1", "--heads", "2", "--head-dim", "16", "--dtype", "float32", "--no-causal")


@pytest.fixture
def tiled(add_backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Tiled]:
    """A backend `tiled` from a file of its own, and a clock in place of a GPU's."""
    monkeypatch.setenv(tile_store.CACHE_DIR, str(tmp_path / "cache"))

    def make(backend: Tiled | None = None, **changes: Any) -> Tiled:
        made = add_backend("tiled", Tiled(forward={64: 0.5}, dq={32: 0.5}) if backend is None else backend, **changes)
        (tmp_path / "fake_tiled.py").write_text("")
        monkeypatch.setattr(sys.modules["fake_tiled"], "__file__", str(tmp_path / "fake_tiled.py"), raising=False)
        monkeypatch.setattr(tune, "_gpu", lambda: (CPU, Clock(made)))
        return made

    return make


def kept() -> Mapping[str, Any]:
    (entry,) = (entry for entry in _registry.registry().entries() if entry.name == "tiled")
    assert entry.spec is not None
    return tile_store.load("tiled", tile_store.fingerprint_of(entry.spec))


def test_what_won_is_shown_and_kept(tiled: Callable[..., Tiled], command: Command, tmp_path: Path) -> None:
    tiled()
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL, width=160)
    assert (ran.code, ran.err) == (0, "")
    assert "space 3 rows of the tile table, 12 tiles" in ran.words
    assert "forward d16 full block_m 16 block_m 64 1000000.0 500000.0 2.00" in ran.words
    assert "dkdv d16 full block_m 16 the same 1500000.0 1500000.0 1.00" in ran.words
    (path,) = (tmp_path / "cache" / "tiles").glob("tiled-*.json")
    assert f"kept in {path}" in ran.words
    assert kept() == {
        "forward d16 full": {"block_m": 64},
        "dq d16 full": {"block_m": 32},
        "dkdv d16 full": {"block_m": 16},
    }


def test_the_results_as_json(tiled: Callable[..., Tiled], command: Command) -> None:
    backend = tiled()
    backend.no_compile.add(("forward", 128))
    found = json.loads(command("tune", "tiles", "--backend", "tiled", "--kernel", "forward", "--json", *SMALL).out)
    (row,) = found["rows"]
    assert Path(found["path"]).is_file()
    assert found["fingerprint"]["gpu"] == ("none" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert (row["before"], row["now"], row["changed"]) == ({"block_m": 16}, {"block_m": 64}, True)
    assert (row["microseconds_before"], row["microseconds_now"], row["ratio"]) == (1e6, 0.5e6, 2.0)
    assert row["failed"] == [{"tile": {"block_m": 128}, "reason": "RuntimeError: ptxas failed"}]
    assert row["wrong"] == []


def test_failures_are_counted_by_kind(tiled: Callable[..., Tiled], command: Command) -> None:
    backend = tiled()
    backend.no_compile |= {("forward", 32), ("forward", 128)}
    ran = command("tune", "tiles", "--backend", "tiled", "--no-grad", *SMALL, width=160)
    assert ran.code == 0
    assert "skipped forward d16 full: 2 × RuntimeError, such as block_m 32: RuntimeError: ptxas failed" in ran.words


def test_a_wrong_candidate_is_said_loudly_and_is_a_1(tiled: Callable[..., Tiled], command: Command) -> None:
    backend = tiled()
    backend.wrong["forward", 64] = 0.5
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL, width=200)
    assert ran.code == 1
    assert "WRONG forward d16 full, block_m 64: out is off by 5.0e-01" in ran.words
    assert "wrong: forward d16 full, block_m 64" in ran.err
    assert kept()["forward d16 full"] == {"block_m": 16}


def test_a_row_that_can_not_be_tuned_does_not_end_the_others(tiled: Callable[..., Tiled], command: Command) -> None:
    backend = tiled()
    backend.no_launch.add(("dq", 16))
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL, width=200)
    assert ran.code == 1
    assert "error dq d16 full: the tile in force, block_m 16, does not run" in ran.words
    assert kept() == {"forward d16 full": {"block_m": 64}}


def test_an_interrupted_tuning_has_kept_its_finished_rows(
    tiled: Callable[..., Tiled], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiled()
    clock = Clock(backend)

    def interrupted(run: Callable[[], object]) -> float:
        if backend.passes[-1][0][0] == "dq":
            raise KeyboardInterrupt
        return clock(run)

    monkeypatch.setattr(tune, "_gpu", lambda: (CPU, interrupted))
    assert command("tune", "tiles", "--backend", "tiled", *SMALL).code != 0
    assert kept() == {"forward d16 full": {"block_m": 64}}


def test_a_cache_that_can_not_be_written_is_said_before_anything_is_measured(
    tiled: Callable[..., Tiled], command: Command, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    backend = tiled()
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL)
    assert ran.code == 1
    assert "can't be written" in ran.err
    assert "FLASHDISPATCH_CACHE_DIR names another folder" in ran.err
    assert backend.passes == []


def test_a_backend_from_no_file_is_said_before_anything_is_measured(
    tiled: Callable[..., Tiled], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiled()
    monkeypatch.setattr(sys.modules["fake_tiled"], "__file__", None)
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL)
    assert (ran.code, ran.err) == (1, "error: tiled: fake_tiled comes from no file, so its tiles can't be kept\n")
    assert backend.passes == []


@pytest.mark.parametrize("width", [80, 120])
def test_a_dry_run_states_the_space_and_measures_nothing(
    width: int, tiled: Callable[..., Tiled], command: Command, tmp_path: Path
) -> None:
    backend = tiled()
    ran = command(
        "tune", "tiles", "--backend", "tiled", "--head-dim", "64", "--seqlen", "512", "--dry-run", width=width
    )
    assert (ran.code, ran.err, backend.passes) == (0, "", [])
    assert not (tmp_path / "cache").exists()
    assert "space 6 rows of the tile table, 24 tiles" in ran.words
    assert "dkdv dkdv d64 causal 4 B32 Hq32 S512 D64 causal, with gradients" in ran.words
    assert max(map(len, ran.out.splitlines())) <= width


def test_masks_and_scores_can_be_tuned_for(tiled: Callable[..., Tiled], command: Command) -> None:
    tiled()
    asked = ("--window", "15", "0", "--mask", "float", "--alibi", "--softcap", "30", "--dropout", "0.1", "--no-grad")
    ran = command("tune", "tiles", "--backend", "tiled", "--head-dim", "64", "--dry-run", *asked, width=200)
    assert ran.code == 0
    assert "S4096 D64 window(15, 0), float mask, ALiBi, softcap 30.0, dropout 0.1, forward only" in ran.words


def test_a_dry_run_as_json(tiled: Callable[..., Tiled], command: Command) -> None:
    tiled()
    ran = command("tune", "tiles", "--backend", "tiled", "--dry-run", "--json", "--arch", "sm_80", "--kernel", "dq")
    found = json.loads(ran.out)
    assert (found["backend"], found["arch"], found["dry_run"]) == ("tiled", "sm_80", True)
    assert [row["key"] for row in found["rows"]] == [
        f"dq d{d} {band}" for d in (64, 128) for band in ("full", "causal")
    ]
    assert found["rows"][0]["space"] == [{"block_m": size} for size in SIZES]


def test_shapes_that_the_backend_refuses_are_listed(tiled: Callable[..., Tiled], command: Command) -> None:
    tiled(softcap=False, dtypes=frozenset({torch.float32}))
    asked = ("tune", "tiles", "--backend", "tiled", "--dry-run", "--head-dim", "16", "--no-causal")
    some = command(*asked, "--dtype", "float32", "--dtype", "float16")
    assert some.code == 0
    assert "space 3 rows" in some.words
    assert some.words.count("DTYPE dtype is float16; takes float32") == 1
    none = command(*asked)
    assert none.code == 1
    assert "DTYPE dtype is bfloat16; takes float32" in none.words
    as_json = command(*asked, "--json")
    assert (as_json.code, json.loads(as_json.out)["rows"]) == (1, [])
    assert json.loads(as_json.out)["refused"][0]["reasons"][0]["code"] == "DTYPE"


def test_without_a_gpu_it_says_what_is_missing(
    add_backend: Any, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_backend("tiled", Tiled())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = command("tune", "tiles", "--backend", "tiled", *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "error: tiles are measured on a GPU, and torch sees none here; --dry-run states what would be measured\n"
    )


def test_a_backend_without_tiles_names_those_with_some(add_backend: Any, command: Command) -> None:
    add_backend("tiled", Tiled())
    ran = command("tune", "tiles", "--backend", "torch_reference", "--dry-run")
    assert (ran.code, ran.out) == (1, "")
    assert "backend torch_reference can't be tuned; these can: " in ran.err
    assert "tiled" in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--backend", "tiled,torch_reference"], "one backend by its name, got 'tiled,torch_reference'"),
        (["--backend", "auto"], "one backend by its name, got 'auto'"),
        (["--backend", "tilde"], "Did you mean 'tiled'?"),
        (
            ["--backend", "tiled", "--kernel", "dkd"],
            "no kernel 'dkd'; they have forward, dq, dkdv. Did you mean 'dkdv'?",
        ),
        (["--backend", "tiled", "--dtype", "int8"], "'int8' is none of float16"),
        (["--backend", "tiled", "--heads", "3", "--heads-kv", "2"], "Hq must be a multiple of Hkv"),
        (["--backend", "tiled", "--seqlen", "0"], "--seqlen"),
        ([], "--backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_understood_is_a_2(
    args: list[str], said: str, tiled: Callable[..., Tiled], command: Command
) -> None:
    tiled()
    ran = command("tune", "tiles", "--dry-run", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_another_architecture_can_only_be_asked_about(tiled: Callable[..., Tiled], command: Command) -> None:
    tiled()
    ran = command("tune", "tiles", "--backend", "tiled", "--arch", "sm_61")
    assert ran.code == 2
    assert "add --dry-run" in ran.err


# The clock


@pytest.mark.gpu
def test_the_clock_counts_the_gpus_work_and_not_the_hosts() -> None:
    device = torch.device("cuda", 0)
    clock = GpuClock(device)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def products(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                x @ x

        return run

    one, four = clock(products(1)), clock(products(4))
    assert 3 < four / one < 5
    assert 5e-5 < one < 5e-3
    small = torch.zeros(8, device=device)

    def mostly_host() -> None:
        sum(range(20_000))
        small.add_(1)

    assert clock(mostly_host) < 5e-5
