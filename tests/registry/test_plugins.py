"""Discovery with fake entry points: whatever a plugin does, the others work and what happened is on record."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest

from flashdispatch_registry import Code, KnownIssue, hookimpl, plugins
from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.errors import BackendLoadError, PluginError
from flashdispatch_registry.plugins import PluginPolicy, PluginRecord, Registry


@dataclass
class Distribution:
    name: str
    version: str


@dataclass
class FakeEntryPoint:
    """What the registry reads of `importlib.metadata.EntryPoint`."""

    name: str
    dist: Distribution | None
    loads: Callable[[], object]
    value: str = "somewhere"

    def load(self) -> object:
        return self.loads()


def plugin(*specs: object, issues: Iterable[object] = ()) -> types.SimpleNamespace:
    """A plugin object that yields these records."""

    @hookimpl
    def flashdispatch_backends() -> Iterable[object]:
        return specs

    @hookimpl
    def flashdispatch_known_issues() -> Iterable[object]:
        return issues

    return module(flashdispatch_backends=flashdispatch_backends, flashdispatch_known_issues=flashdispatch_known_issues)


def module(**members: object) -> Any:
    made = types.ModuleType("a_plugin")
    vars(made).update(members)
    return made


def raising(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch) -> Install:
    """``install(("entry_point", "distribution", plugin or loader), ...)``: all the entry points there are."""

    def make(*points: tuple[str, str, object]) -> None:
        found = [
            FakeEntryPoint(name, Distribution(dist, "1.0"), loads if callable(loads) else lambda loads=loads: loads)
            for name, dist, loads in points
        ]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "flashdispatch" else [])

    return make


def record_of(registry: Registry, name: str) -> PluginRecord:
    (record,) = [record for record in registry.plugins() if record.name == name]
    return record


def names(registry: Registry) -> list[str]:
    return [entry.name for entry in registry.entries()]


def codes(registry: Registry, name: str) -> list[Code]:
    (entry,) = [entry for entry in registry.entries() if entry.name == name]
    return [fault.code for fault in entry.faults]


# Discovery


def test_backends_come_in_by_name_and_plugins_with_built_in_ones_first(install, spec) -> None:
    install(
        ("zeta", "alpha-dist", plugin(spec("zeta"), spec("beta"))),
        ("ours", "flashdispatch", plugin(spec("ours"))),
        ("eta", "Alpha_Dist", plugin(spec("eta"))),
    )
    registry = Registry()
    assert names(registry) == ["beta", "eta", "ours", "zeta"]
    assert [record.name for record in registry.plugins()] == ["ours", "eta", "zeta"]
    assert record_of(registry, "zeta").backends == ("zeta", "beta")
    assert {record.distribution for record in registry.plugins()} == {"flashdispatch", "alpha-dist"}


def test_discovery_is_lazy_and_happens_once(install, spec) -> None:
    loads: list[int] = []

    def load() -> object:
        loads.append(1)
        return plugin(spec("a"))

    install(("a", "outside", load))
    registry = Registry()
    assert loads == []
    registry.entries()
    registry.plugins()
    registry.known_issues()
    assert loads == [1]


def test_threads_that_ask_at_once_discover_once_and_see_the_same(install, spec) -> None:
    loads: list[int] = []
    inside = threading.Event()

    def load() -> object:
        loads.append(1)
        inside.wait(0.05)
        return plugin(spec("a"), spec("b"))

    install(("a", "outside", load))
    registry = Registry()
    start = threading.Barrier(8)
    seen: list[tuple[str, ...]] = []

    def ask() -> None:
        start.wait()
        seen.append(tuple(names(registry)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [1]
    assert seen == [("a", "b")] * 8
    assert registry.generation == 1


def test_a_plugin_that_asks_for_the_backends_while_it_is_imported_harms_nobody(install, spec) -> None:
    registry = Registry()
    seen: list[list[str]] = []

    def load() -> object:
        seen.append(names(registry))
        return plugin(spec("curious"))

    install(("a", "a-dist", plugin(spec("a"))), ("curious", "b-dist", load), ("z", "z-dist", plugin(spec("z"))))
    assert names(registry) == ["a", "curious", "z"]
    assert seen == [["a"]]
    assert [record.problem for record in registry.plugins()] == ["", "", ""]


def test_known_issues_of_every_plugin_are_collected(install, spec) -> None:
    issue = KnownIssue(backend="other", reason="wrong", url="https://example.org", when=lambda _: True)
    install(("a", "outside", plugin(issues=[issue])), ("b", "outside", plugin(spec("b"), issues=[issue])))
    assert Registry().known_issues() == (issue, issue)


def test_a_plugin_without_a_distribution_is_taken(monkeypatch, spec) -> None:
    point = FakeEntryPoint("a", None, lambda: plugin(spec("a")))
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [point])
    assert record_of(Registry(), "a").distribution == "unknown"


def test_an_empty_answer_is_no_problem(install) -> None:
    install(("nothing", "outside", plugin()))
    registry = Registry()
    assert names(registry) == []
    assert record_of(registry, "nothing").problem == ""


# Broken plugins


@pytest.mark.parametrize(
    "error", [ImportError("no libcuda"), SyntaxError("bad"), RuntimeError("boom"), SystemExit(3), AssertionError()]
)
def test_a_plugin_that_raises_at_import_is_recorded_and_harms_nobody(install, spec, caplog, error) -> None:
    install(("broken", "b-dist", raising(error)), ("good", "c-dist", plugin(spec("good"))))
    registry = Registry()
    with caplog.at_level(logging.WARNING, logger="flashdispatch"):
        assert names(registry) == ["broken", "good"]
    record = record_of(registry, "broken")
    assert record.status == "failed"
    assert record.problem == f"{type(error).__name__}: {error}"
    assert "raise error" in record.traceback
    assert codes(registry, "broken") == [Code.LOAD_FAILED]
    assert codes(registry, "good") == []
    assert "plugin broken (b-dist)" in caplog.text


def test_a_keyboard_interrupt_is_not_swallowed(install) -> None:
    install(("a", "outside", raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        Registry().entries()


@hookimpl
def flashdispatch_kernels() -> Iterable[object]:
    return []


@hookimpl(specname="flashdispatch_backends")
def wants_an_argument(problem: object) -> Iterable[object]:
    return []


@hookimpl(specname="flashdispatch_backends")
def answers_none() -> Any:
    return None


@hookimpl(specname="flashdispatch_backends")
def raises_half_way() -> Iterator[BackendSpec]:
    raise RuntimeError("half way")
    yield


@hookimpl
def _bad_versions() -> Iterable[KnownIssue]:
    yield KnownIssue(backend="x", reason="", url="", when=lambda _: True, versions="older than 2")


BROKEN_HOOKS = {
    "an unknown hook": (
        lambda: module(flashdispatch_kernels=flashdispatch_kernels),
        "unknown hook 'flashdispatch_kernels'",
    ),
    "a hook with an argument": (lambda: module(hook=wants_an_argument), "problem"),
    # In alphabetical order: pluggy before 1.7 takes the unknown hook in before it refuses the faulty one.
    "both": (lambda: module(flashdispatch_a=flashdispatch_kernels, hook=wants_an_argument), "problem"),
    "None for an answer": (lambda: module(hook=answers_none), "NoneType"),
    "an error half way": (lambda: module(hook=raises_half_way), "half way"),
    "text for a spec": (lambda: plugin("tiny"), "flashdispatch_backends() yielded 'tiny', which is no BackendSpec"),
    "text for an issue": (lambda: plugin(issues=["bug"]), "yielded 'bug', which is no KnownIssue"),
    "versions that mean nothing": (lambda: module(flashdispatch_known_issues=_bad_versions), "older than 2"),
}


@pytest.mark.parametrize("what", BROKEN_HOOKS)
def test_a_plugin_with_a_broken_hook_is_recorded_and_leaves_nothing_behind(install, spec, what: str) -> None:
    make, text = BROKEN_HOOKS[what]
    install(
        ("a", "a-dist", plugin(spec("a"))),
        ("broken", "b-dist", make()),
        ("z", "z-dist", plugin(spec("z"))),
    )
    registry = Registry()
    assert names(registry) == ["a", "broken", "z"]
    record = record_of(registry, "broken")
    assert record.status == "failed"
    assert text in record.problem
    assert record.traceback
    assert record.backends == ()
    assert [record_of(registry, name).problem for name in "az"] == ["", ""]


def test_a_plugin_of_which_one_record_is_wrong_brings_none(install, spec) -> None:
    install(("mixed", "outside", plugin(spec("fine"), "not fine")))
    registry = Registry()
    assert names(registry) == ["mixed"]


def test_a_failed_plugin_does_not_hold_the_name_of_anothers_backend(install, spec) -> None:
    install(("tiny", "a-broken", raising(ImportError("old"))), ("tiny", "b-good", plugin(spec("tiny"))))
    registry = Registry()
    assert codes(registry, "tiny") == []
    (entry,) = registry.entries()
    assert entry.distribution == "b-good"
    assert [record.status for record in registry.plugins()] == ["failed", "loaded"]


def test_a_failed_plugin_does_not_hide_a_backend_that_loaded(install, spec) -> None:
    install(("a", "a-good", plugin(spec("tiny"))), ("tiny", "b-broken", raising(ImportError("new"))))
    assert codes(Registry(), "tiny") == []


def test_a_failed_plugins_name_is_free_for_a_backend_of_any_other_entry_point(install, spec) -> None:
    install(
        ("tiny", "a-broken", raising(ImportError("old"))),
        ("b", "b-dist", plugin(spec("tiny"))),
        ("c", "c-dist", plugin(spec("tiny"))),
    )
    assert codes(Registry(), "tiny") == [Code.DUPLICATE_NAME]


def test_a_failed_built_in_keeps_its_name(install, spec) -> None:
    install(("ours", "flashdispatch", raising(ImportError("bad"))), ("x", "outside", plugin(spec("ours"))))
    registry = Registry()
    assert codes(registry, "ours") == [Code.LOAD_FAILED]
    assert "built in" in record_of(registry, "x").problem


# Names


def test_a_name_brought_twice_is_used_by_neither_and_names_both(install, spec) -> None:
    install(("a", "a-dist", plugin(spec("tiny"))), ("b", "b-dist", plugin(spec("tiny"), spec("other"))))
    registry = Registry()
    assert names(registry) == ["other", "tiny"]
    assert codes(registry, "tiny") == [Code.DUPLICATE_NAME]
    assert codes(registry, "other") == []
    problem = record_of(registry, "b").problem
    assert "a-dist 1.0 and b-dist 1.0" in problem
    assert "neither is used" in problem


def test_a_name_brought_three_times_names_all_three(install, spec) -> None:
    install(*[(name, f"{name}-dist", plugin(spec("tiny"))) for name in "abc"])
    registry = Registry()
    assert codes(registry, "tiny") == [Code.DUPLICATE_NAME]
    (entry,) = registry.entries()
    assert "a-dist 1.0 and b-dist 1.0 and c-dist 1.0" in entry.faults[0].got


def test_a_built_in_name_can_not_be_taken(install, spec) -> None:
    ours = spec("torch_reference", softcap=True)
    install(
        ("torch_reference", "aaa", plugin(spec("torch_reference"))),
        ("torch_reference", "flashdispatch", plugin(ours)),
    )
    registry = Registry()
    (entry,) = registry.entries()
    assert entry.spec is ours
    assert entry.distribution == "flashdispatch"
    assert "can't be taken" in registry.plugins()[1].problem


# Version of the contract


def test_another_version_of_the_contract_is_a_fault_with_what_to_upgrade(install, spec) -> None:
    install(
        ("new", "new-dist", plugin(spec("new", api_version=99))),
        ("old", "old-dist", plugin(spec("old", api_version=0))),
    )
    registry = Registry()
    assert codes(registry, "new") == codes(registry, "old") == [Code.API_VERSION]
    fixes = {entry.name: entry.faults[0].fix for entry in registry.entries()}
    assert fixes == {"new": "upgrade flashdispatch", "old": "upgrade old-dist"}
    assert "API_VERSION: api_version is 99; takes 1" in record_of(registry, "new").problem


# Requirements


def test_a_missing_requirement_is_a_fault_with_the_command_that_helps(install, spec) -> None:
    install(
        ("a", "outside", plugin(spec("a", requires=("surely-not-installed>=2",), install="pip install 'a[kernels]'"))),
        ("b", "outside", plugin(spec("b", requires=("surely-not-installed>=2",)))),
    )
    faults = {entry.name: entry.faults[0] for entry in Registry().entries()}
    assert (faults["a"].code, faults["a"].got) == (Code.DEP_MISSING, "not installed")
    assert faults["a"].fix == "pip install 'a[kernels]'"
    assert faults["b"].fix == "pip install 'surely-not-installed>=2'"


def test_a_requirement_of_a_newer_version_says_what_is_installed(install, spec) -> None:
    install(("a", "outside", plugin(spec("a", requires=("pluggy>=1000",)))))
    (entry,) = Registry().entries()
    assert entry.faults[0].got == f"{version('pluggy')} installed"
    assert entry.faults[0].allowed == "pluggy>=1000"


def test_of_alternatives_none_of_which_is_met_all_are_named(install, spec) -> None:
    install(("a", "outside", plugin(spec("a", requires=("pluggy>=1000 | surely-not-installed>=2",)))))
    ((fault,),) = (entry.faults for entry in Registry().entries())
    assert fault.field == "pluggy or surely-not-installed"
    assert fault.got == f"pluggy {version('pluggy')} installed"
    assert fault.fix == "pip install 'pluggy>=1000'"


@pytest.mark.parametrize(
    "requirement",
    [
        "pluggy>=1", "pluggy", "surely-not-installed; python_version < '3'", "surely-not-installed>=2 | pluggy>=1",
        "pluggy | surely-not-installed", "surely-not-installed; python_version < '3' | pluggy",
    ],
)  # fmt: skip
def test_a_met_requirement_is_no_fault(install, spec, requirement: str) -> None:
    install(("a", "outside", plugin(spec("a", requires=(requirement,)))))
    assert codes(Registry(), "a") == []


def test_a_requirement_that_can_not_be_read_breaks_only_its_plugin(install, spec) -> None:
    def load() -> object:
        return plugin(spec("a", requires=("not a requirement!",)))

    install(("a", "a-dist", load), ("b", "b-dist", plugin(spec("b"))))
    registry = Registry()
    assert record_of(registry, "a").status == "failed"
    assert codes(registry, "b") == []


# Policy


@pytest.mark.parametrize(
    ("policy", "loaded"),
    [
        (PluginPolicy(), {"ours", "one", "two"}),
        (PluginPolicy(allow=frozenset({"one"})), {"ours", "one"}),
        (PluginPolicy(allow=frozenset({"two-dist"})), {"ours", "two"}),
        (PluginPolicy(allow=frozenset()), {"ours"}),
        (PluginPolicy(autoload=False), {"ours"}),
        (PluginPolicy(autoload=False, allow=frozenset({"two"})), {"ours", "two"}),
    ],
)
def test_the_policy_says_which_outside_plugins_load(install, spec, policy: PluginPolicy, loaded: set[str]) -> None:
    imported: set[str] = set()

    def loader(name: str) -> Callable[[], object]:
        def load() -> object:
            imported.add(name)
            return plugin(spec(name))

        return load

    install(
        ("ours", "flashdispatch", loader("ours")),
        ("one", "one-dist", loader("one")),
        ("two", "Two_Dist", loader("two")),
    )
    registry = Registry(policy)
    kept_out = {name for name in names(registry) if codes(registry, name) == [Code.NOT_ALLOWED]}
    assert set(names(registry)) - kept_out == loaded == imported
    assert kept_out == {"ours", "one", "two"} - loaded
    assert {record.name for record in registry.plugins() if record.status == "not allowed"} == {
        "ours", "one", "two"
    } - loaded  # fmt: skip


@pytest.mark.parametrize(
    "text", ["failed to load: ImportError: old", "neither is used", "can't be taken", "API_VERSION"]
)
def test_strict_raises_at_the_first_broken_plugin_and_again_when_asked_again(install, spec, text: str) -> None:
    causes = {
        "failed to load: ImportError: old": [("a", "a-dist", raising(ImportError("old")))],
        "neither is used": [("a", "a-dist", plugin(spec("tiny"))), ("b", "b-dist", plugin(spec("tiny")))],
        "can't be taken": [("o", "flashdispatch", plugin(spec("o"))), ("a", "a-dist", plugin(spec("o")))],
        "API_VERSION": [("a", "a-dist", plugin(spec("a", api_version=99)))],
    }
    install(*causes[text])
    registry = Registry(PluginPolicy(strict=True))
    for _ in range(2):
        with pytest.raises(PluginError, match=text):
            registry.entries()


def test_strict_discovery_succeeds_after_the_cause_is_gone(install, spec) -> None:
    good = ("a", "a-dist", plugin(spec("a")))
    install(good, ("b", "b-dist", raising(ImportError("old"))))
    registry = Registry(PluginPolicy(strict=True))
    with pytest.raises(PluginError):
        registry.entries()
    install(good)
    assert names(registry) == ["a"]
    assert [record.problem for record in registry.plugins()] == [""]


def test_strict_is_content_with_what_works_and_with_a_missing_requirement(install, spec) -> None:
    install(("a", "outside", plugin(spec("a", requires=("surely-not-installed",)))))
    assert codes(Registry(PluginPolicy(strict=True)), "a") == [Code.DEP_MISSING]


def test_a_slow_import_is_named(install, spec, monkeypatch, caplog) -> None:
    monkeypatch.setattr(plugins, "SLOW_IMPORT_SECONDS", -1.0)
    install(("slow", "outside", plugin(spec("slow"))))
    with caplog.at_level(logging.WARNING, logger="flashdispatch"):
        assert record_of(Registry(), "slow").slow
    assert "FLASHDISPATCH_PLUGINS can leave it out" in caplog.text


# Run time


@pytest.fixture
def registry(install, spec) -> Registry:
    install(("ours", "flashdispatch", plugin(spec("ours"))))
    return Registry()


def test_a_backend_can_be_registered_and_taken_out_at_run_time(registry: Registry, spec) -> None:
    registry.register(spec("mine"))
    assert names(registry) == ["mine", "ours"]
    registry.unregister("mine")
    assert names(registry) == ["ours"]
    registry.register(spec("mine"))
    assert names(registry) == ["mine", "ours"]


def test_generation_rises_with_every_change_and_with_nothing_else(registry: Registry, spec) -> None:
    seen = [registry.generation]
    registry.entries()
    seen.append(registry.generation)
    registry.register(spec("mine"))
    seen.append(registry.generation)
    registry.unregister("mine")
    seen.append(registry.generation)
    assert seen == sorted(set(seen))
    registry.entries()
    registry.plugins()
    assert registry.generation == seen[-1]


def test_registering_a_taken_name_raises_with_its_owner_and_changes_nothing(registry: Registry, spec) -> None:
    registry.register(spec("mine"))
    before = registry.generation, registry.entries()
    with pytest.raises(PluginError, match=r"'ours' is taken by flashdispatch 1\.0"):
        registry.register(spec("ours"))
    with pytest.raises(PluginError, match="'mine' is taken by registered at run time"):
        registry.register(spec("mine"))
    assert (registry.generation, registry.entries()) == before


def test_registering_for_another_version_of_the_contract_raises(registry: Registry, spec) -> None:
    with pytest.raises(PluginError, match="API_VERSION"):
        registry.register(spec("mine", api_version=99))
    assert names(registry) == ["ours"]


def test_only_what_was_registered_at_run_time_can_be_taken_out(registry: Registry) -> None:
    registry.entries()
    with pytest.raises(PluginError, match=r"comes from flashdispatch 1\.0; FLASHDISPATCH_DISABLE=ours keeps it"):
        registry.unregister("ours")
    with pytest.raises(KeyError, match="nobody"):
        registry.unregister("nobody")
    assert names(registry) == ["ours"]


@pytest.mark.parametrize("name", ["", "Upper", "9lives", "with-dash", "auto", "a b"])
def test_a_backend_name_is_a_lower_case_identifier_and_not_reserved(spec, name: str) -> None:
    with pytest.raises(ValueError, match="backend name"):
        spec(name)


@pytest.mark.parametrize("factory", ["", "a b:c", "a:", "a..b", "a/b"])
def test_a_factory_is_a_dotted_path(spec, factory: str) -> None:
    with pytest.raises(ValueError, match="factory"):
        spec("mine", factory=factory)


# Loading the code


class Kernels:
    """A backend object that does nothing."""

    def forward(self, *_: object) -> object: ...
    def backward(self, *_: object) -> object: ...
    def prepare(self, problem: object) -> None: ...


@pytest.fixture
def kernels(monkeypatch) -> types.ModuleType:
    """An importable module ``fake_kernels`` with a backend class, an instance and the functions themselves."""
    made = types.ModuleType("fake_kernels")
    one = Kernels()
    vars(made).update(Kernels=Kernels, one=one, forward=one.forward, backward=one.backward, prepare=one.prepare, half=1)
    monkeypatch.setitem(sys.modules, "fake_kernels", made)
    return made


@pytest.mark.parametrize("factory", ["fake_kernels", "fake_kernels:Kernels", "fake_kernels:one"])
def test_a_backend_is_a_module_a_class_or_an_instance_and_loads_once(
    registry: Registry, spec, kernels, factory
) -> None:
    registry.register(spec("mine", factory=factory))
    backend = registry.load("mine")
    assert callable(backend.forward)
    assert registry.load("mine") is backend


def test_load_discovers_first(install, spec, kernels) -> None:
    install(("ours", "flashdispatch", plugin(spec("ours", factory="fake_kernels:one"))))
    assert Registry().load("ours") is kernels.one


def test_a_backend_that_fails_to_load_says_why_from_then_on(registry: Registry, spec, tmp_path, monkeypatch) -> None:
    (tmp_path / "kernels_without_a_driver.py").write_text("raise OSError('libcuda.so.1 not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.register(spec("mine", factory="kernels_without_a_driver", install="pip install mine"))
    before = registry.generation
    for _ in range(2):
        with pytest.raises(BackendLoadError, match=r"mine .*OSError: libcuda\.so\.1 not found"):
            registry.load("mine")
    assert registry.generation > before
    (entry, _) = registry.entries()
    (fault,) = entry.faults
    assert (fault.code, fault.field, fault.fix) == (Code.LOAD_FAILED, "factory", "pip install mine")
    assert "kernels_without_a_driver.py" in registry.load_traceback("mine")
    assert registry.load_traceback("ours") == ""


def test_notes_on_what_failed_say_what_would_help(registry: Registry, spec, tmp_path, monkeypatch) -> None:
    raises = "error = OSError('no nvcc')\nerror.add_note('install the toolkit')\nraise error\n"
    (tmp_path / "kernels_without_a_compiler.py").write_text(raises)
    monkeypatch.syspath_prepend(tmp_path)
    registry.register(spec("mine", factory="kernels_without_a_compiler", install="pip install mine"))
    with pytest.raises(BackendLoadError, match="no nvcc"):
        registry.load("mine")
    (fault,) = next(entry for entry in registry.entries() if entry.name == "mine").faults
    assert (fault.got, fault.fix) == ("OSError: no nvcc", "install the toolkit")


ODD = {
    "no list": ("error.__notes__ = None", "pip install mine"),
    "a string": ("error.__notes__ = 'install it'", "pip install mine"),
    "numbers": ("error.__notes__ = [1]", "pip install mine"),
    "blank": ("error.add_note(' \\n')", "pip install mine"),
    "several": ("error.add_note(' one '); error.add_note('two')", "one; two"),
}


@pytest.mark.parametrize(("line", "fix"), ODD.values(), ids=ODD)
def test_odd_notes_and_a_text_that_raises_harm_nobody(registry, spec, tmp_path, monkeypatch, line, fix) -> None:
    lines = ("class Odd(Exception):", "    def __str__(self): return 1 / 0", "error = Odd()", line, "raise error")
    (tmp_path / "odd_kernels.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_kernels", raising=False)
    registry.register(spec("mine", factory="odd_kernels", install="pip install mine"))
    with pytest.raises(BackendLoadError, match="Odd, whose text raises ZeroDivisionError"):
        registry.load("mine")
    (fault,) = next(entry for entry in registry.entries() if entry.name == "mine").faults
    assert fault.fix == fix


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("no_such_module_here", "ModuleNotFoundError"),
        ("fake_kernels:absent", "AttributeError"),
        ("fake_kernels:half", "lacks forward, backward, prepare"),
    ],
)
def test_a_factory_that_leads_nowhere_is_a_load_error(registry: Registry, spec, kernels, factory, text: str) -> None:
    registry.register(spec("mine", factory=factory))
    with pytest.raises(BackendLoadError, match=text):
        registry.load("mine")
    assert codes(registry, "mine") == [Code.LOAD_FAILED]


def test_registering_anew_forgets_an_earlier_failure(registry: Registry, spec, kernels) -> None:
    registry.register(spec("mine", factory="no_such_module_here"))
    with pytest.raises(BackendLoadError):
        registry.load("mine")
    registry.unregister("mine")
    registry.register(spec("mine", factory="fake_kernels:one"))
    assert registry.load("mine") is kernels.one
    assert registry.load_traceback("mine") == ""


def test_loading_a_plugin_that_failed_repeats_its_reason(install) -> None:
    install(("broken", "outside", raising(ImportError("no libcuda"))))
    registry = Registry()
    registry.entries()
    with pytest.raises(BackendLoadError, match="no libcuda"):
        registry.load("broken")


def test_a_plugin_that_forgot_the_hookimpl_marker_says_so(install) -> None:
    install(("silent", "silent-dist", module(flashdispatch_backends=lambda: ())))
    assert "mark flashdispatch_backends() with @hookimpl" in record_of(Registry(), "silent").problem
