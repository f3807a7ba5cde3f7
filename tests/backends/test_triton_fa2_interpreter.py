"""triton_fa2 without a GPU: its kernels run by Triton's interpreter, in NumPy.

The interpreter is chosen when kernels are imported, so everything here happens in processes of its own. The named cases
of the conformance suite are shared out among as many as there are cores; each is a test that waits for its own result.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdispatch_conformance import run_case
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.cases import NAMED
from flashdispatch_registry.problem import DTYPE_NAMES

DTYPES = (torch.float16, torch.float32)
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
BLOCKS, FAULTS = (Path(__file__).with_name(f"triton_fa2_{name}.py") for name in ("blocks", "faults"))


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("FLASHDISPATCH_")}
    return ours | INTERPRETED | more


# The named cases


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, torch.dtype], Future[Any]]]:
    """Of every case and dtype that was asked for, in the order of the tests."""
    wanted = [
        (item.callspec.params["case"], item.callspec.params["dtype"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "results" in item.fixturenames
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ).difference(environment()):
            patch.delenv(name)
        for name, value in INTERPRETED.items():
            patch.setenv(name, value)
        # Not forked: a new process imports the kernels anew. All of them start with the first submissions.
        pool = ProcessPoolExecutor(
            os.cpu_count(), multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        )
        futures = {(case.id, dtype): pool.submit(run_case, case, "triton_fa2", dtype, "cpu") for case, dtype in wanted}
    yield futures
    pool.shutdown(cancel_futures=True)


PAIRS = 60_000
"""Most pairs of query and key, over batch and heads, that are interpreted in seconds. The GPU has the others."""
SHORT = [case for case in NAMED if case.batch * case.heads[0] * case.seqlens[0] * case.seqlens[1] <= PAIRS]
INTERPRETABLE = [
    (case, dtype)
    for dtype in DTYPES
    for at, case in enumerate(SHORT)
    # float32 is the same code with other products: every third case will do.
    if DTYPE_NAMES[dtype] in case.dtypes and (dtype == torch.float16 or at % 3 == 0 or "float16" not in case.dtypes)
]


@pytest.mark.parametrize(
    ("case", "dtype"), INTERPRETABLE, ids=[f"{DTYPE_NAMES[dtype]}-{case.id}" for case, dtype in INTERPRETABLE]
)
def test_case(case: Case, dtype: torch.dtype, results: dict[tuple[str, torch.dtype], Future[Any]]) -> None:
    result = results[case.id, dtype].result()
    assert result.outcome == "pass", result.report()


# The choice

CHOICE = """
import json, os
import torch
import flashdispatch
from flashdispatch_registry import Problem

def asked(dtype, backend=None):
    problem = Problem(
        arch="cpu", dtype=dtype, batch=1, heads_q=2, heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64,
        scale=0.125,
    )
    plan = flashdispatch.explain(problem, backend=backend)
    reasons = {c.name: [[r.code, r.field, r.got, r.allowed] for r in c.reasons] for c in plan.candidates}
    return {"chosen": plan.chosen, "reasons": reasons}

print(json.dumps({
    "float16": asked(torch.float16),
    "named": asked(torch.float16, "triton_fa2"),
    "bfloat16": asked(torch.bfloat16, "triton_fa2"),
}))
"""


def choice(**more: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], capture_output=True, text=True, timeout=120, env=environment(**more)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_interpreter_is_chosen_by_name_only() -> None:
    beside = choice()
    assert beside["float16"]["chosen"] == "torch_reference"
    assert beside["named"]["chosen"] == "triton_fa2"
    assert beside["named"]["reasons"]["triton_fa2"] == []
    alone = choice(FLASHDISPATCH_DISABLE="torch_reference")
    assert alone["float16"]["chosen"] is None
    for plan in (beside["float16"], alone["float16"]):
        assert [reason[:3] for reason in plan["reasons"]["triton_fa2"]] == [["NOT_AUTO", "backend", "auto"]]
    assert alone["named"]["chosen"] == "triton_fa2"


def test_the_interpreters_bfloat16_is_refused() -> None:
    plan = choice()["bfloat16"]
    assert plan["chosen"] is None
    ((code, field, got, allowed),) = plan["reasons"]["triton_fa2"]
    assert (code, field) == ("BACKEND_LIMIT", "dtype")
    assert "bfloat16" in got
    assert "multiplies bfloat16's raw bits" in allowed


# Which blocks a kernel visits, and in which order


@pytest.fixture(scope="module")
def blocks() -> Any:
    done = subprocess.run([sys.executable, str(BLOCKS)], capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("band", ["full", "left", "right", "left and right"])
@pytest.mark.parametrize("of", ["keys", "queries"])
def test_the_blocks_are_those_that_a_brute_force_search_finds(of: str, band: str, blocks: Any) -> None:
    found = blocks[of][band]
    assert found["faults"] == []
    # Else nothing is said about them.
    assert found["with_whole_blocks"] >= 50
    assert found["with_cut_blocks"] >= 50
    assert band == "full" or found["with_none"] >= 1


def test_heavy_blocks_of_two_heads_come_first_under_a_causal_mask(blocks: Any) -> None:
    one_head_after_the_other = [[0, 0], [1, 0], [0, 1], [1, 1]]  # [block, head]
    last_queries_first, first_keys_first = [[1, 0], [1, 1], [0, 0], [0, 1]], [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert blocks["written"] == {
        "forward full": one_head_after_the_other,
        "dq full": one_head_after_the_other,
        "dkdv full": one_head_after_the_other,
        "forward causal": last_queries_first,  # they see the most keys
        "dq causal": last_queries_first,
        "dkdv causal": first_keys_first,  # the most queries see them
    }


@pytest.mark.parametrize("at_once", [None, 1, 2, 5, 7])
def test_a_few_heads_at_a_time_take_turns_and_none_is_left_out(at_once: int | None, blocks: Any) -> None:
    """Three blocks of five heads."""
    step = at_once or 1
    turns = [range(first, min(first + step, 5)) for first in range(0, 5, step)]
    assert blocks["order"][str(at_once)] == [[block, head] for heads in turns for block in range(3) for head in heads]


# What was once wrong


@pytest.fixture(scope="module")
def errors() -> Any:
    done = subprocess.run([sys.executable, str(FAULTS)], capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "fault",
    [
        "strided lengths", "expanded lengths", "strided sinks", "expanded sinks", "strided slopes", "transposed slopes",
        "slopes expanded over the heads", "a strided seed", "a mask with the negative bit", "softcap 50", "softcap 1e6",
        "softcap 1e30", "saved tensors made dense",
    ],
)  # fmt: skip
def test_it_is_right_with(fault: str, errors: Any) -> None:
    assert errors[fault] < 3e-6


def test_the_kernels_take_sequences_that_are_packed_behind_each_other(errors: Any) -> None:
    assert errors["packed"] < 3e-6
