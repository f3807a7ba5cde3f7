"""Backends as separate pip projects: one that works and five that don't, built and installed as their users would.

The one that works is installed into a folder of its own, and the others into another, so that a test can put either on
the path of a fresh interpreter. That is all a plugin needs, and nothing here touches the environment of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
TINY = HERE / "tiny_backend"
BROKEN = [HERE / name for name in ("broken_import", "wrong_api", "duplicate_name", "shadows_built_in", "slow_import")]


@dataclass(frozen=True)
class Python:
    """Fresh interpreters, outside the clone and without our settings, with some of the projects installed."""

    folders: dict[str, Path]
    cwd: Path

    def run(self, *arguments: str, having: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FLASHDISPATCH_")}
        environ["PYTHONPATH"] = os.pathsep.join(str(self.folders[name]) for name in having)
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environ, cwd=self.cwd, capture_output=True, text=True, timeout=240)

    def ask(self, script: str, *arguments: str, having: tuple[str, ...]) -> Any:
        """What a script says, as JSON on its last line."""
        done = self.run("-c", script, *arguments, having=having)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Python:
    """Builds and installs the projects. Offline: the build backend, hatchling, is in the environment of the tests."""
    target = tmp_path_factory.mktemp("thirdparty")
    folders = {"tiny": target / "tiny", "broken": target / "broken"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environ = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for folder, projects in zip(folders.values(), ([TINY], BROKEN), strict=True):
        command = [*pip, "--target", str(folder), *map(str, projects)]
        done = subprocess.run(command, env=environ, cwd=target, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return Python(folders, target)


# The one that works

USE_TINY = """
import dataclasses, json, sys
import torch
import flashdispatch
from flashdispatch_registry.plugins import Registry

(record,) = [record for record in Registry().plugins() if record.name == "tiny"]
says = {"record": dataclasses.asdict(record)}
(status,) = [status for status in flashdispatch.backends() if status.name == "tiny"]
says["ready"] = status.ready
says["kernels_after_discovery"] = "flashdispatch_tiny.kernels" in sys.modules

generator = torch.Generator().manual_seed(7)
def draw(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)

q, k, v = draw(2, 5, 3, 16), draw(2, 9, 3, 16), draw(2, 9, 3, 24)
dout, dlse = draw(2, 5, 3, 24), draw(2, 3, 5)
says["automatic"] = flashdispatch.explain(q, k, v).chosen
says["forced"] = flashdispatch.explain(q, k, v, backend="tiny").chosen

def ours(dtype):
    x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out, lse = flashdispatch.attention(*x, causal=True, scale=0.3, return_lse=True, backend="tiny")
    return out, lse, *torch.autograd.grad((out, lse), x, (dout.to(dtype), dlse.to(lse.dtype)))

def pytorchs():
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    Q, K, V = (t.transpose(1, 2) for t in x)
    visible = torch.ones(5, 9, dtype=torch.bool).tril(9 - 5)
    out = torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=visible, scale=0.3).transpose(1, 2)
    lse = (0.3 * Q @ K.mT).masked_fill(~visible, -torch.inf).logsumexp(-1)
    return out, lse, *torch.autograd.grad((out, lse), x, (dout, dlse))

for dtype in (torch.float64, torch.float32):
    pairs = zip(("out", "lse", "dq", "dk", "dv"), ours(dtype), pytorchs(), strict=True)
    says[str(dtype)] = {name: (got.double() - true).abs().max().item() for name, got, true in pairs}
says["kernels_after_use"] = "flashdispatch_tiny.kernels" in sys.modules

long_q, few_keys = draw(1, 4, 1, 8).requires_grad_(), draw(1, 2, 1, 8)
out = flashdispatch.attention(long_q, few_keys, few_keys, causal=True, backend="tiny")
out.sum().backward()
says["rows_without_keys"] = [out[:, :2].abs().max().item(), long_q.grad[:, :2].abs().max().item()]

def refused(*tensors, **arguments):
    try:
        flashdispatch.attention(*tensors, backend="tiny", **arguments)
    except flashdispatch.BackendUnsupportedError as error:
        return [reason.code for reason in error.plan.candidate("tiny").reasons]
    return "not refused"

half = [t.half() for t in (q, k, v)]
wide = torch.zeros(1, 2, 1, 264)
says["refused"] = {
    "GQA": refused(draw(2, 5, 6, 16), k, v),
    "DTYPE": refused(*half),
    "HEAD_DIM": refused(wide, wide, wide),
    "WINDOW": refused(q, k, v, window=(2, 2)),
    "CAUSAL": refused(q, k, v, causal="top_left"),
    "ATTN_MASK": refused(q, k, v, attn_mask=torch.ones(5, 9, dtype=torch.bool)),
    "ALIBI": refused(q, k, v, alibi_slopes=torch.ones(3)),
    "SINKS": refused(q, k, v, sinks=torch.ones(3)),
    "LENGTHS": refused(q, k, v, kv_lens=torch.tensor([9, 4], dtype=torch.int32)),
    "SOFTCAP": refused(q, k, v, softcap=20.0),
    "DROPOUT": refused(q, k, v, dropout_p=0.1),
}
try:
    flashdispatch.attention(draw(2, 5, 6, 16), k, v, softcap=20.0, backend="tiny")
except NotImplementedError as error:
    says["message"] = str(error)

problem = flashdispatch.explain(q, k, v).problem
def own(**changes):
    plan = flashdispatch.explain(dataclasses.replace(problem, **changes), backend="tiny")
    return [reason.code for reason in plan.candidate("tiny").reasons]

says["why_not"] = [own(), own(seqlen_q=4096, seqlen_k=4096), own(seqlen_q=4096, seqlen_k=4096, heads_kv=1, softcap=1.0)]
print(json.dumps(says))
"""


@pytest.fixture(scope="module")
def tiny(python: Python) -> dict[str, Any]:
    return python.ask(USE_TINY, having=("tiny",))


def test_a_backend_is_found_through_its_entry_point(tiny) -> None:
    record = tiny["record"]
    assert (record["distribution"], record["version"], record["value"]) == (
        "flashdispatch-tiny", "0.3.0", "flashdispatch_tiny",
    )  # fmt: skip
    assert (record["status"], record["backends"], record["problem"]) == ("loaded", ["tiny"], "")
    assert tiny["ready"]


def test_its_kernels_are_imported_on_first_use(tiny) -> None:
    assert not tiny["kernels_after_discovery"]
    assert tiny["kernels_after_use"]


def test_it_runs_when_asked_for_and_its_priority_counts_otherwise(tiny) -> None:
    assert tiny["forced"] == "tiny"
    assert tiny["automatic"] == "torch_reference"


@pytest.mark.parametrize(("dtype", "bound"), [("torch.float64", 1e-13), ("torch.float32", 1e-5)])
def test_its_output_lse_and_gradients_are_pytorchs_in_float64(tiny, dtype: str, bound: float) -> None:
    errors = tiny[dtype]
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    assert max(errors.values()) < bound, errors


def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient(tiny) -> None:
    assert tiny["rows_without_keys"] == [0.0, 0.0]


def test_what_it_does_not_declare_is_refused_by_that_reason(tiny) -> None:
    assert tiny["refused"] == {code: [code] for code in tiny["refused"]}


def test_the_refusal_says_all_reasons_and_who_could(tiny) -> None:
    message = tiny["message"]
    assert "tiny (flashdispatch-tiny 0.3.0):" in message
    assert "GQA" in message
    assert "SOFTCAP" in message
    assert "can run it: torch_reference" in message


def test_its_own_why_not_only_adds(tiny) -> None:
    assert tiny["why_not"] == [[], ["BACKEND_LIMIT"], ["GQA", "SOFTCAP", "BACKEND_LIMIT"]]


SOME_CASES = "bfloat16 and (length or causal or window or mask) or minimum"


@pytest.fixture(scope="module")
def own_tests(python: Python) -> list[Any]:
    """The test cases of the project's own test file, the shared conformance suite, as JUnit's XML has them."""
    report = python.cwd / "report.xml"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME_CASES]
    arguments = [*command, "--junitxml", str(report), f"--rootdir={TINY}", f"--config-file={TINY}/pyproject.toml"]
    done = python.run(*arguments, str(TINY / "tests"), having=("tiny",))
    assert done.returncode == 0, done.stdout + done.stderr
    return list(ElementTree.parse(report).iter("testcase"))


def test_it_passes_the_shared_conformance_cases_that_it_declares(own_tests) -> None:
    passed = {case.get("name") for case in own_tests if len(case) == 0}
    assert "test_case[named/causal_tall-bfloat16]" in passed
    assert "test_the_minimum_is_supported" in passed
    assert len(passed) >= 10


def test_every_other_conformance_case_was_refused_as_unsupported(own_tests) -> None:
    skips = [case.find("skipped") for case in own_tests if len(case)]
    texts = [skip.get("message", "") for skip in skips if skip is not None]
    assert len(texts) == len(skips) > 10
    assert all("unsupported" in text and "refused: " in text for text in texts)


# The ones that don't

USE_ALL = """
import json, logging, sys
logging.disable()
import torch
import flashdispatch
loaded = {name.partition(".")[0] for name in sys.modules if name.startswith("flashdispatch")}
says = {"imported": sorted(loaded)}
from dataclasses import asdict
from flashdispatch_registry.plugins import Registry

says["plugins"] = {record.distribution: asdict(record) | {"slow": record.slow} for record in Registry().plugins()}
says["backends"] = {
    status.name: [status.distribution, [str(reason) for reason in status.reasons]]
    for status in flashdispatch.backends()
}
q = torch.ones(1, 4, 1, 8, requires_grad=True)
flashdispatch.attention(q, q, q, causal=True).sum().backward()
says["grad"] = q.grad.isfinite().all().item()
says["automatic"] = flashdispatch.explain(q, q, q).chosen

def asking_for(name):
    try:
        flashdispatch.attention(q, q, q, backend=name)
    except flashdispatch.FlashDispatchError as error:
        return [type(error).__name__, str(error)]

says["asking"] = {name: asking_for(name) for name in ("broken_import", "wrong_api", "tiny", "also_tiny")}
says["taken"] = None
try:
    flashdispatch.register(next(s.spec for s in flashdispatch.backends() if s.name == "torch_reference"))
except flashdispatch.PluginError as error:
    says["taken"] = str(error)
print(json.dumps(says))
"""


@pytest.fixture(scope="module")
def crowd(python: Python) -> dict[str, Any]:
    return python.ask(USE_ALL, having=("tiny", "broken"))


def test_importing_flashdispatch_waits_for_no_plugin(crowd) -> None:
    assert crowd["imported"] == ["flashdispatch", "flashdispatch_registry"]


def test_everything_else_works_beside_broken_plugins(crowd) -> None:
    assert crowd["automatic"] == "torch_reference"
    assert crowd["grad"] is True
    assert crowd["backends"]["slow_import"] == ["flashdispatch-slow-import", []]


def test_an_import_error_is_on_record_with_its_traceback(crowd) -> None:
    record = crowd["plugins"]["flashdispatch-broken-import"]
    assert record["status"] == "failed"
    assert record["problem"].startswith("ImportError: libtiny_kernels.so.7")
    assert "flashdispatch_broken_import.py" in record["traceback"]


def test_another_version_of_the_contract_is_on_record(crowd) -> None:
    record = crowd["plugins"]["flashdispatch-wrong-api"]
    assert record["problem"] == "wrong_api: API_VERSION: api_version is 99; takes 1 (fix: upgrade flashdispatch)"
    assert "API_VERSION" in crowd["backends"]["wrong_api"][1][0]


def test_a_duplicate_name_is_on_record_with_both_distributions(crowd) -> None:
    both = "flashdispatch-duplicate-name 1.1.0 and flashdispatch-tiny 0.3.0"
    assert both in crowd["plugins"]["flashdispatch-tiny"]["problem"]
    assert both in crowd["backends"]["tiny"][1][0]


def test_a_built_in_name_can_not_be_taken(crowd) -> None:
    assert "can't be taken" in crowd["plugins"]["flashdispatch-shadows-built-in"]["problem"]
    assert crowd["backends"]["torch_reference"] == ["flashdispatch", []]
    assert "taken by flashdispatch" in crowd["taken"]


def test_a_slow_import_is_on_record(crowd) -> None:
    record = crowd["plugins"]["flashdispatch-slow-import"]
    assert record["slow"] is True
    assert record["seconds"] > 1.0
    assert record["problem"] == ""


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("broken_import", "BackendUnsupportedError", "ImportError: libtiny_kernels.so.7"),
        ("wrong_api", "BackendUnsupportedError", "api_version is 99; takes 1"),
        ("tiny", "BackendUnsupportedError", "flashdispatch-duplicate-name 1.1.0 and flashdispatch-tiny 0.3.0"),
        ("also_tiny", "UnknownBackendError", "no backend is called 'also_tiny'"),
    ],
)
def test_asking_for_a_broken_one_says_what_is_wrong(crowd, name: str, error: str, text: str) -> None:
    kind, message = crowd["asking"][name]
    assert kind == error
    assert text in message


def test_doctor_shows_every_broken_one_and_exits_with_1(python: Python) -> None:
    done = python.run("-m", "flashdispatch", "doctor", "--json", having=("tiny", "broken"))
    assert done.returncode == 1, done.stderr
    seen = json.loads(done.stdout)
    plugins = {plugin["distribution"]: plugin for plugin in seen["plugins"]}
    assert "libtiny_kernels.so.7" in plugins["flashdispatch-broken-import"]["problem"]
    assert "flashdispatch_broken_import.py" in plugins["flashdispatch-broken-import"]["traceback"]
    assert "API_VERSION" in plugins["flashdispatch-wrong-api"]["problem"]
    assert "can't be taken" in plugins["flashdispatch-shadows-built-in"]["problem"]
    assert "neither is used" in plugins["flashdispatch-tiny"]["problem"]
    assert plugins["flashdispatch-slow-import"]["slow"] is True
    ready = {backend["name"]: backend["ready"] for backend in seen["backends"]}
    assert ready["torch_reference"] is True
    assert ready["tiny"] is ready["wrong_api"] is ready["broken_import"] is False


# Settings

# One interpreter for all of them: importing flashdispatch discovers nothing, so each child does it under its settings.
UNDER_SETTINGS = """
import json, logging, os, sys
logging.disable()
import flashdispatch

says = []
for settings in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ.update(settings)
        try:
            answer = {
                status.name: status.distribution
                for status in flashdispatch.backends()
                if "NOT_ALLOWED" not in [reason.code for reason in status.reasons]
            }
        except flashdispatch.PluginError as error:
            answer = str(error)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    says.append(json.load(os.fdopen(reader)))
    os.wait()
print(json.dumps(says))
"""
SETTINGS: dict[str, tuple[dict[str, str], set[str]]] = {
    "an allow-list of entry points": ({"FLASHDISPATCH_PLUGINS": "tiny, slow_import"}, {"tiny", "slow_import"}),
    "an allow-list of distributions": ({"FLASHDISPATCH_PLUGINS": "flashdispatch-tiny"}, {"tiny"}),
    "an empty allow-list": ({"FLASHDISPATCH_PLUGINS": ""}, set()),
    "no autoload": ({"FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD": "1"}, set()),
    "no autoload but an allow-list": (
        {"FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD": "1", "FLASHDISPATCH_PLUGINS": "tiny"},
        {"tiny"},
    ),
    "strict, and only a working one allowed": (
        {"FLASHDISPATCH_STRICT_PLUGINS": "1", "FLASHDISPATCH_PLUGINS": "tiny"},
        {"tiny"},
    ),
    "strict": ({"FLASHDISPATCH_STRICT_PLUGINS": "1"}, set()),
}


@pytest.fixture(scope="module")
def under_settings(python: Python) -> dict[str, Any]:
    asked = json.dumps([settings for settings, _ in SETTINGS.values()])
    return dict(zip(SETTINGS, python.ask(UNDER_SETTINGS, asked, having=("tiny", "broken")), strict=True))


@pytest.mark.parametrize("what", [what for what in SETTINGS if what != "strict"])
def test_settings_say_which_outside_plugins_load(under_settings, what: str) -> None:
    owners = under_settings[what]
    assert {name for name, owner in owners.items() if owner != "flashdispatch"} == SETTINGS[what][1]
    assert owners["torch_reference"] == "flashdispatch"


def test_strict_raises_for_the_first_broken_plugin(under_settings) -> None:
    start = "plugin broken_import (flashdispatch-broken-import 0.1.0) failed to load: ImportError: libtiny_kernels.so.7"
    assert under_settings["strict"].startswith(start)
