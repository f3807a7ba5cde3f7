"""Who names the backend, and who wins."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from typing import Any

import pytest

import flashdispatch
from flashdispatch import (
    BackendUnsupportedError,
    DisabledBackendError,
    UnknownBackendError,
    _forcing,
    attention,
    explain,
    use_backend,
)


@pytest.fixture
def spies(add_backend: Any) -> dict[str, Any]:
    return {name: add_backend(name) for name in ("one", "two", "three")}


def who(qkv: Any, **kwargs: Any) -> str | None:
    return explain(*qkv(), **kwargs).chosen


def test_auto_takes_the_highest_priority(qkv: Any, add_backend: Any) -> None:
    fast = add_backend("fast", priority={"*": 50})
    attention(*qkv())
    assert len(fast.problems) == 1
    assert who(qkv) == "fast"
    assert explain(*qkv()).forced is None


def test_precedence_argument_environment_context_default(qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flashdispatch.set_default_backend("three")
    assert who(qkv) == "three"
    with use_backend("two"):
        assert who(qkv) == "two"
        monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one")
        assert who(qkv) == "one"
        assert who(qkv, backend="torch_reference") == "torch_reference"
        attention(*qkv())
        assert [len(spy.problems) for spy in spies.values()] == [1, 0, 0]
        monkeypatch.delenv("FLASHDISPATCH_BACKEND")
        attention(*qkv())
        assert [len(spy.problems) for spy in spies.values()] == [1, 1, 0]
    attention(*qkv())
    assert [len(spy.problems) for spy in spies.values()] == [1, 1, 1]


def test_what_was_overridden_is_in_the_plan_and_logged_once(
    qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one")
    flashdispatch.set_default_backend("three")
    with use_backend("two"), caplog.at_level(logging.WARNING, "flashdispatch"):
        plan = explain(*qkv())
        attention(*qkv())
        attention(*qkv(seqlen_q=5))
    assert plan.forced is not None
    assert plan.forced.source == "FLASHDISPATCH_BACKEND"
    assert plan.forced.overridden == (("use_backend()", "two"), ("set_default_backend()", "three"))
    assert [record.getMessage() for record in caplog.records] == [
        "FLASHDISPATCH_BACKEND (one) overrides use_backend() (two), set_default_backend() (three)"
    ]


def test_forced_by_environment_but_unsupported_raises_with_all_reasons(
    qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_backend("narrow", softcap=False, window=False)
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "narrow")
    with pytest.raises(BackendUnsupportedError) as caught:
        attention(*qkv(), window=(3, 3), softcap=5.0)
    message = str(caught.value)
    assert "asked: cpu float32, B2 Hq4 Hkv4 Sq9 Sk9 D16, window(3, 3), softcap 5, forward only" in message
    assert "WINDOW: window is window(3, 3); takes no window" in message
    assert "SOFTCAP: softcap is 5; takes None" in message
    assert "narrow by FLASHDISPATCH_BACKEND can't run this" in message
    assert "can run it: torch_reference" in message
    assert "versions: python" in message
    assert caught.value.plan is not None
    assert [reason.code for reason in caught.value.plan.candidate("narrow").reasons] == ["WINDOW", "SOFTCAP"]
    assert isinstance(caught.value, NotImplementedError)


def test_unknown_name_says_what_is_registered_and_nearest(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "torch_refrence")
    with pytest.raises(UnknownBackendError, match="Did you mean 'torch_reference'") as caught:
        attention(*qkv())
    (registered,) = [line for line in str(caught.value).splitlines() if "registered: " in line]
    assert "torch_reference" in registered
    assert "asked: cpu float32" in str(caught.value)
    for call in (lambda: use_backend("nope").__enter__(), lambda: flashdispatch.set_default_backend("nope")):
        with pytest.raises(UnknownBackendError, match="no backend is called 'nope'"):
            call()


def test_disabled_beats_the_argument(qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "one, two")
    with pytest.raises(DisabledBackendError, match="FLASHDISPATCH_DISABLE=one,two, which beats everything"):
        attention(*qkv(), backend="one")
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one")
    with pytest.raises(DisabledBackendError, match="asked for by FLASHDISPATCH_BACKEND"):
        attention(*qkv())


def test_disabling_everything_leaves_nobody(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "torch_reference")
    with pytest.raises(flashdispatch.NoBackendError, match="DISABLED") as caught:
        attention(*qkv())
    assert "No backend can run this problem" in str(caught.value)


def test_disable_counts_at_once_on_a_cached_call(qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = qkv()
    chosen = explain(*inputs).chosen
    attention(*inputs)
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", str(chosen))
    assert explain(*inputs).chosen != chosen
    attention(*inputs)
    monkeypatch.delenv("FLASHDISPATCH_DISABLE")
    assert explain(*inputs).chosen == chosen


def test_unknown_disabled_name_is_logged_with_the_nearest(
    qkv: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "torch_refernce")
    attention(*qkv())
    assert "Did you mean 'torch_reference'" in caplog.text


def test_a_chain_is_tried_in_order_and_exclusive(qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_backend("first", softcap=False)
    add_backend("second", window=False)
    assert who(qkv, backend="first,second") == "first"
    assert who(qkv, backend=("first", "second"), softcap=5.0) == "second"
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "first,second")
    assert who(qkv, softcap=5.0) == "second"
    with pytest.raises(BackendUnsupportedError) as caught:
        attention(*qkv(), softcap=5.0, window=(1, 1))  # torch_reference could, and is not asked
    assert "first" in str(caught.value)
    assert "second" in str(caught.value)


def test_a_chain_passes_over_a_disabled_member(qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one,two")
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "one")
    assert who(qkv) == "two"


def test_auto_at_a_level_stops_the_search(qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_backend("two"):
        assert explain(*qkv(), backend="auto").forced is None
        monkeypatch.setenv("FLASHDISPATCH_BACKEND", "auto")
        assert explain(*qkv()).forced is None


def test_an_empty_environment_variable_is_unset(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "")
    assert explain(*qkv()).forced is None


def test_contexts_nest_and_end(qkv: Any, spies: Any) -> None:
    with use_backend("one"):
        with use_backend("two"):
            assert who(qkv) == "two"
        assert who(qkv) == "one"
        with pytest.raises(ZeroDivisionError), use_backend("three"):
            1 / 0  # noqa: B018
        assert who(qkv) == "one"
    assert explain(*qkv()).forced is None


def test_use_backend_decorates_a_function(qkv: Any, spies: Any) -> None:
    @use_backend("three")
    def inside() -> str | None:
        return who(qkv)

    assert inside() == "three"
    assert explain(*qkv()).forced is None


def test_two_threads_do_not_see_each_other(qkv: Any, spies: Any) -> None:
    inputs = qkv()
    seen: dict[str, list[str | None]] = {}
    meet = threading.Barrier(2)

    def work(name: str) -> None:
        seen[name] = [explain(*inputs).forced and "leaked"]
        with use_backend(name):
            for _ in range(20):
                meet.wait()
                seen[name].append(explain(*inputs).chosen)
                attention(*inputs)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    with use_backend("three"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert explain(*inputs).chosen == "three"
    for name in ("one", "two"):
        assert seen[name] == [None] + [name] * 20
        assert len(spies[name].problems) == 20


def test_async_tasks_do_not_see_each_other(qkv: Any, spies: Any) -> None:
    inputs = qkv()

    async def work(name: str) -> list[str | None]:
        seen = []
        with use_backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(explain(*inputs).chosen)
        return seen

    async def both() -> list[list[str | None]]:
        return await asyncio.gather(work("one"), work("two"))

    assert asyncio.run(both()) == [["one"] * 5, ["two"] * 5]


def test_overlapping_async_blocks_leave_nothing_behind(spies: Any) -> None:
    async def overlap() -> None:
        first, second = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            with use_backend("one"):
                first.set()
                await second.wait()

        async def two() -> None:
            await first.wait()
            with use_backend("two"):
                second.set()
                await asyncio.sleep(0.01)

        await asyncio.gather(one(), two())

    asyncio.run(overlap())
    assert _forcing.context() is None
    assert _forcing.mirror.names is None


def test_an_async_generator_closed_elsewhere_raises_nothing(spies: Any) -> None:
    async def inside() -> Any:
        with use_backend("one"):
            yield 1
            yield 2

    async def start_and_drop() -> None:
        generator = inside()
        await asyncio.create_task(generator.__anext__())
        await generator.aclose()

    asyncio.run(start_and_drop())
    assert _forcing.context() is None


def test_auto_that_overrules_somebody_says_so_in_the_plan(
    qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one")
    assert explain(*qkv(), backend="auto").notes == ("'auto' by backend argument, over one by FLASHDISPATCH_BACKEND",)


@pytest.mark.parametrize("value", [" ", ",", "auto,one"])
def test_an_environment_variable_that_names_nobody_is_named_itself(
    qkv: Any, spies: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", value)
    with pytest.raises(flashdispatch.SettingsError, match=f"FLASHDISPATCH_BACKEND={value!r}"):
        attention(*qkv())


def _in_child(queue: Any) -> None:
    import torch

    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    q = torch.randn(1, 3, 2, 8)
    queue.put((explain(q, q, q).chosen, tuple(attention(q, q, q).shape)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_after_import_works() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == ("torch_reference", (1, 3, 2, 8))
    child.join(timeout=60)
    assert child.exitcode == 0
