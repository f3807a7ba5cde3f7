"""Reports: what they hold, that `verify` believes none of it, and what becomes of them together."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import FileHash, PackagePath, version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import flashdispatch
from flashdispatch_conformance import cases, catalogue, report, surroundings
from flashdispatch_conformance.document import SCHEMA, file_name, rounded, sealed, to_text
from flashdispatch_conformance.features import FEATURES, features
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.summary import OUTCOMES
from flashdispatch_conformance.tolerance import GATES, Failure, Stats
from flashdispatch_conformance.waivers import Waiver
from flashdispatch_registry.errors import InvalidRequestError, UnknownBackendError
from flashdispatch_registry.source import source_hash
from flashdispatch_registry.tile_store import cache_dir

Document = dict[str, Any]


def said(document: Document) -> str:
    return "\n".join(map(str, report.verify(document)))


def resealed(document: Document) -> Document:
    return sealed(document)


@pytest.fixture
def document(reported: Any) -> Document:
    return report.make(reported.run(), reported.all_passed())


# What a report holds


def test_a_report_is_good_as_it_is_made_written_and_read(document: Document, tmp_path: Path) -> None:
    path = report.write(document, tmp_path / "new folder")
    assert path.name == "declared_only-cpu-smoke.json"
    assert report.read(path) == document
    assert report.verify(report.read(path)) == []


def test_the_full_tier_of_a_right_backend_is_conformant(reported: Any) -> None:
    found = report.make(reported.run("full"), reported.all_passed("full"))
    assert found["summary"]["verdict"] == "conformant"
    assert found["summary"]["minimum_set"] == "pass"
    assert found["summary"]["counts"] == dict.fromkeys(OUTCOMES, 0) | {"pass": len(catalogue.units("full"))}
    assert report.verify(found) == []


def test_it_says_what_was_tested_and_with_what(document: Document, reported: Any) -> None:
    backend = document["backend"]
    assert backend["source_sha256"] == source_hash(reported.kernels)
    assert backend["factory"] == "declared_only_kernels:backend"
    assert backend["languages"] == {"numpy": version("numpy")}
    assert backend["capabilities"]["dtypes"] == ["bfloat16", "float16"]
    assert backend["capabilities"]["head_dims"] == {"minimum": 8, "maximum": 256, "multiple": 8}
    assert backend["capabilities"]["window"] is False
    assert document["suite"]["gates"] == asdict(GATES)
    assert document["suite"]["version"] == report.SUITE_VERSION
    assert document["device"]["arch"] == "cpu"
    assert document["run"]["command"] == ["flashdispatch", "conformance", "run"]
    assert document["timings"]["wall_s"] == 90


def test_a_file_has_one_unit_a_line(document: Document) -> None:
    lines = to_text(document).splitlines()
    for entry in document["cases"]:
        assert sum(json.dumps(entry["id"]) in line and '"outcome"' in line for line in lines) == 1


def test_what_json_has_no_number_for_is_a_text(reported: Any) -> None:
    results = reported.all_passed()
    wild = Stats(rms=float("nan"), row=float("inf"), max=float("inf"), bias=float("-inf"), numel=3, rows=1)
    wild = replace(wild, failures=(Failure("finite", "out[0] is nan"),), histogram=(0,) * 33 + (3,))
    results[0] = reported.failed(results[0], stats={"out": wild})
    found = report.make(reported.run(), results)
    tensor = found["cases"][0]["tensors"]["out"]
    assert [tensor[name] for name in ("rms", "row", "max", "bias")] == ["NaN", "Infinity", "Infinity", "-Infinity"]
    assert "NaN" in [one["rms"] for one in found["summary"]["worst"]]
    assert report.verify(json.loads(to_text(found))) == []


def test_numbers_have_four_digits() -> None:
    assert [rounded(value) for value in (0.123456, 12345.6, 3.0, -1e-9)] == [0.1235, 12350.0, 3.0, -1e-9]


def test_units_without_a_result_were_interrupted(reported: Any) -> None:
    results = reported.all_passed()
    found = report.make(reported.run(), results[:-2])
    assert [entry["outcome"] for entry in found["cases"]].count("not_run") == 2
    assert found["summary"]["not_run"] == {"INTERRUPTED": 2}
    assert found["summary"]["verdict"] == "partial"
    assert report.verify(found) == []


@pytest.mark.parametrize("options", [{"match": "named"}, {"shard": "1/2"}, {"dtypes": ("float16",)}])
def test_or_an_option_left_them_out(options: dict[str, Any], reported: Any) -> None:
    found = report.make(reported.run(**options), reported.all_passed()[:-2])
    assert found["summary"]["not_run"] == {"FILTERED": 2}


def test_what_was_selected_and_has_no_result_was_interrupted(reported: Any) -> None:
    results = reported.all_passed()
    selected = tuple(result.id for result in results[:-1])
    found = report.make(reported.run(match="x", selected=selected), results[:-2])
    assert found["summary"]["not_run"] == {"FILTERED": 1, "INTERRUPTED": 1}


def test_what_was_run_beyond_the_plan_is_marked_and_counts(reported: Any) -> None:
    more = reported.failed(reported.passed("fuzz/17", "float16"))
    found = report.make(reported.run(fuzz={"minutes": 1}), [*reported.all_passed(), more])
    assert found["cases"][-1]["extra"] is True
    assert found["cases"][-1]["id"] == "fuzz/17-float16"
    assert found["summary"]["verdict"] == "nonconformant"
    assert report.verify(found) == []


def test_long_messages_keep_their_ends(reported: Any) -> None:
    results = reported.all_passed()
    results[0] = reported.failed(results[0], "start" + "x" * 10_000 + "end")
    (message,) = report.make(reported.run(), results)["cases"][0]["messages"]
    assert message.startswith("start")
    assert message.endswith("end")
    assert "characters left out" in message
    assert len(message) < 4100


def test_a_message_may_have_any_bytes(reported: Any, tmp_path: Path) -> None:
    results = reported.all_passed()
    results[0] = reported.failed(results[0], "caf\udce9")
    path = report.write(report.make(reported.run(), results), tmp_path)
    assert report.read(path)["cases"][0]["messages"] == ["caf\\udce9"]


def test_a_report_is_of_one_backend_and_of_each_unit_once(reported: Any) -> None:
    results = reported.all_passed()
    with pytest.raises(InvalidRequestError, match="is a result of other, in a report of declared_only"):
        report.make(reported.run(), [replace(results[0], backend="other")])
    with pytest.raises(InvalidRequestError, match=f"two results of {results[0].id}"):
        report.make(reported.run(), [results[0], *results])
    with pytest.raises(UnknownBackendError, match=r"called 'declared_onyl'.*Did you mean 'declared_only'"):
        report.make(reported.run(backend="declared_onyl"), [])
    with pytest.raises(InvalidRequestError, match=r"Run\.ended needs a time zone"):
        report.make(reported.run(ended="2026-11-30T10:00:00"), [])


def test_histograms_are_summed_by_dtype_and_tensor(document: Document) -> None:
    counts = {(one["dtype"], one["tensor"]): one["counts"] for one in document["z_histograms"]}
    for dtype in {entry["dtype"] for entry in document["cases"]}:
        units = sum(entry["dtype"] == dtype for entry in document["cases"])
        assert counts[dtype, "out"] == [0] * 16 + [5000 * units, 3192 * units] + [0] * 16


def test_the_worst_of_each_tensor_names_its_unit(reported: Any) -> None:
    results = reported.all_passed()
    loud = Stats(rms=1.25, row=2.5, max=7.5, bias=-0.3, drift=0.1, numel=8192, rows=128)
    results[3] = replace(results[3], stats={"out (gradients call)": loud})
    found = report.make(reported.run(), results)
    (worst,) = (one for one in found["summary"]["worst"] if (one["dtype"], one["tensor"]) == (results[3].dtype, "out"))
    assert (worst["rms"], worst["row"], worst["max"], worst["bias"]) == (1.25, 2.5, 7.5, -0.2)
    assert worst["unit"] == results[3].id


def test_the_matrix_has_the_worst_outcome_of_each_feature(reported: Any) -> None:
    results = reported.all_passed()
    at = next(i for i, result in enumerate(results) if result.check == "named/gqa_8_2")
    results[at] = reported.failed(results[at])
    found = report.make(reported.run(), results)
    cells = {(one["feature"], one["dtype"]): one for one in found["capability_matrix"]}
    for feature in features("named/gqa_8_2", cases.BY_ID["named/gqa_8_2"]):
        cell = cells[feature, results[at].dtype]
        assert cell["outcome"] == "fail"
        assert cell["counts"]["fail"] == 1
    assert cells["softcap", "bfloat16"]["outcome"] == "pass"


def test_every_check_has_a_row() -> None:
    for check in catalogue.CHECKS:
        assert features(check.id, cases.BY_ID.get(check.id))
    assert features("probe/counting", None) == ("exact probes",)
    assert features("new_kind/any", None) == ("new kind",)
    assert features("named/length_65", replace(cases.BY_ID["named/length_65"], causal=False)) == tuple(FEATURES)[:1]


# Waivers in a report


def waiver(**changes: Any) -> Waiver:
    data: dict[str, Any] = {
        "id": "known", "cases": ["named/gqa_8_2"], "backend": "declared_only", "versions": "", "archs": [],
        "url": "https://example.org/7", "reason": "wrong", "expires": "2027-01-01", "owner": "us",
    }  # fmt: skip
    return Waiver.of(data | changes, "a test's waiver")


def with_gqa_failing(reported: Any) -> list[Any]:
    return [reported.failed(result) if result.check == "named/gqa_8_2" else result for result in reported.all_passed()]


def test_a_waiver_is_in_the_report_and_holds(reported: Any) -> None:
    found = report.make(reported.run(), with_gqa_failing(reported), waivers=(waiver(),))
    assert found["summary"]["counts"]["waived"] == 1
    assert found["summary"]["counts"]["fail"] == 0
    assert found["waivers"][0]["url"] == "https://example.org/7"
    assert report.verify(found) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"expires": "2026-11-29"}, "expired on 2026-11-29"), ({"cases": ["named/no_such"]}, "matches no check")],
)
def test_one_that_is_over_or_idle_makes_the_verdict(changes: dict[str, Any], why: str, reported: Any) -> None:
    found = report.make(reported.run(), reported.all_passed(), waivers=(waiver(**changes),))
    assert found["summary"]["verdict"] == "nonconformant"
    assert why in found["summary"]["waiver_faults"][0]
    assert report.verify(found) == []
    found["summary"]["waiver_faults"] = []
    found["summary"]["verdict"] = "partial"
    assert "summary: waiver_faults is []" in said(resealed(found))


def test_a_waiver_that_was_made_up_later_is_found(reported: Any) -> None:
    found = report.make(reported.run(), with_gqa_failing(reported))
    entry = next(entry for entry in found["cases"] if entry["outcome"] == "fail")
    entry |= {"outcome": "waived", "waiver": "known"}
    assert f"{entry['id']}: no waiver known that holds covers it" in said(resealed(found))


# verify


def test_one_digit_is_enough(document: Document, tmp_path: Path) -> None:
    path = report.write(document, tmp_path)
    text = path.read_text()
    digit = re.search(r'"max": 0\.(\d)', text)
    assert digit is not None
    changed = "7" if digit.group(1) != "7" else "6"
    path.write_text(text[: digit.start(1)] + changed + text[digit.end(1) :])
    assert "seal: it is not the hash of this document" in said(report.read(path))


def test_a_verdict_that_the_units_do_not_bear_out_is_found_under_a_new_seal(reported: Any) -> None:
    found = report.make(reported.run(), with_gqa_failing(reported))
    assert found["summary"]["verdict"] == "nonconformant"
    found["summary"]["verdict"] = "conformant"
    assert said(resealed(found)) == 'summary: verdict is "conformant", but the units say "nonconformant"'


def set_path(document: Document, path: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    inside: Any = document
    for part in parents:
        inside = inside[part]
    inside[last] = value


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("cases/0/tensors/out/max", 8.5, "max of z is 8.5, allowed 8"),
        ("cases/0/tensors/out/rms", "NaN", "rms of z is nan, allowed 1.5"),
        ("cases/0/tensors/out/bias", 0.3, "bias of z is 0.3, allowed 0.25"),
        ("cases/0/tensors/out/failures", [{"gate": "exact", "message": "row 3"}], "it is pass, but out says: row 3"),
        ("cases/0/outcome", "fail", "it is fail and does not say why"),
        ("cases/0/outcome", "unsupported", "it is unsupported, but no call was refused"),
        ("cases/0/outcome", "not_run", "it is not_run, with no reason for not being run"),
        ("cases/0/outcome", "waived", "it is waived, with no waiver"),
        ("cases/0/messages", ["NaN"], "it is pass, but says: NaN"),
        ("cases/0/dtype", "float64", "it names the check"),
        ("summary/counts/pass", 1000, "counts is"),
        ("summary/minimum_set", "fail", 'minimum_set is "fail"'),
        ("summary/worst/0/max", 0.001, "worst is"),
        ("summary/reasons/0", "all is well", "reasons is"),
        ("capability_matrix/0/outcome", "fail", "capability_matrix: it is not what the units say"),
        ("timings/compile_s", 0.001, "timings: they are not what"),
        ("timings/wall_s", 1, "timings: they are not what"),
        ("suite/gates/max", 80, "its gates are"),
        ("suite/case_list_sha256", "0" * 64, "case_list_sha256 is not the hash"),
        ("suite/tier", "full", "the full tier lacks"),
        ("checks/0/case", {"scale": 3.0}, "its case is another one"),
        ("checks/0/id", "named/other", "these and the units' do not agree"),
        ("run/ended", "2026-11-30T09:00:00+00:00", "before it started"),
    ],
)  # fmt: skip
def test_every_change_is_found_under_a_new_seal(path: str, value: Any, where: str, document: Document) -> None:
    set_path(document, path, value)
    assert where in said(resealed(document))


def test_a_unit_that_was_taken_out_or_put_in_is_found(document: Document) -> None:
    without = copy.deepcopy(document)
    gone = without["cases"].pop()
    assert f"cases: the smoke tier lacks 1 units: {gone['id']}" in said(resealed(without))
    document["cases"].append(
        document["cases"][0] | {"id": "named/new-float16", "check": "named/new", "dtype": "float16"}
    )
    assert "cases: the smoke tier has the unknown 1 units: named/new-float16" in said(resealed(document))


def test_a_unit_that_is_there_twice_is_found(document: Document) -> None:
    document["cases"].append(document["cases"][0])
    assert f"{document['cases'][0]['id']}: it is there twice" in said(resealed(document))


def test_the_gates_of_a_bias_leave_room_for_drift_and_few_rows(reported: Any) -> None:
    results = reported.all_passed()
    passed = results[0].stats["out"]
    wide = replace(passed, rms=0.9, row=0.9, max=0.9, bias=0.9, drift=0.7)
    few = replace(wide, drift=0.0, rows=3)
    results[0] = replace(results[0], stats={"out": wide, "lse": few})
    assert report.verify(report.make(reported.run(), results)) == []


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("cases/0/tensors/out/max", 10**400, "cases/0/tensors/out/max: 1000"),
        ("cases/0/tensors/out/numel", 10**400, "cases/0/tensors/out/numel: 1000"),
        ("cases/0/run_s", 10**400, "cases/0/run_s: 1000"),
        ("run/started", "0000-01-01T00:00:00+00:00", "run/started: '0000-01-01T00:00:00+00:00' is no time"),
        ("run/ended", "2026-11-31T00:00:00+00:00", "run/ended: '2026-11-31T00:00:00+00:00' is no time"),
        ("host/os", "\ud800", "the document: it has no canonical JSON"),
        ("suite/gates/max", float("inf"), "the document: it has no canonical JSON"),
        ("suite/version", "new", "suite/version: 'new' does not match"),
    ],
)  # fmt: skip
def test_what_no_report_can_hold_is_a_finding(path: str, value: Any, where: str, document: Document) -> None:
    set_path(document, path, value)
    assert where in said(document)


def test_so_is_a_waiver_that_no_file_could_hold(document: Document) -> None:
    document["waivers"] = [waiver().to_json() | {"expires": "2027-02-30"}]
    assert "waivers/0: waiver 'known', expires: a day such as" in said(document)


@pytest.mark.parametrize("suite", [None, "new", {}, {"version": 1}])
def test_what_is_unchecked_can_be_asked_of_anything(suite: Any, document: Document) -> None:
    assert "signs for nobody" in report.unchecked(document | {"suite": suite})[0]


@pytest.mark.parametrize("outcome", ["pass", "unexpected_pass"])
def test_a_case_that_passed_has_scores(outcome: str, document: Document) -> None:
    entry = document["cases"][0]
    entry["outcome"] = outcome
    del entry["tensors"]["out"]
    assert f"{entry['id']}: it is {outcome}, but has no scores of out" in said(resealed(document))
    del entry["tensors"]
    assert f"{entry['id']}: it is {outcome}, but has no scores of out" in said(resealed(document))


def test_of_elements_if_it_has_any(reported: Any) -> None:
    nothing = {"out": Stats(), "lse": Stats()}
    results = [replace(result, stats=nothing) for result in reported.all_passed("full")]
    found = said(report.make(reported.run("full"), results[:1]))
    assert f"{results[0].id}: it is pass, but no element was judged" in found
    empty = ("named/no_keys", "named/no_queries", "named/mask_bool_all_false")
    hidden = [result for result in results if result.check in empty]
    assert {result.check for result in hidden} == set(empty)
    assert report.verify(report.make(reported.run("full"), hidden)) == []


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"rms": -0.1}, "out has rms -0.1, row"),
        ({"rms": 1.4, "row": 1.2, "max": 3.0}, "out has rms 1.4, row 1.2 and max 3"),
        ({"row": 3.0, "max": 2.0}, "row 3 and max 2, and no z has"),
        ({"bias": 5.0, "drift": 100.0}, "out has bias 5 and rms"),
        ({"drift": 100.0}, "out has drift 100, and in"),
        ({"drift": -0.1}, "out has drift -0.1, and it is finite and not negative"),
        ({"drift": "Infinity"}, "out has drift inf, and it is finite and not negative"),
    ],
)  # fmt: skip
def test_scores_are_those_of_one_z(changes: dict[str, Any], where: str, document: Document) -> None:
    document["cases"][0]["tensors"]["out"] |= changes
    assert where in said(resealed(document))


def test_the_lse_may_drift_further(reported: Any) -> None:
    results = reported.all_passed()
    drifts = {"lse": replace(results[0].stats["lse"], drift=25.0), "out": replace(results[0].stats["out"], drift=1.0)}
    results[0] = replace(results[0], stats=drifts)
    assert report.verify(report.make(reported.run(), results)) == []


def test_histograms_count_what_was_judged(document: Document) -> None:
    one = document["z_histograms"][0]
    one["counts"][16] += 1
    count = sum(one["counts"])
    text = f"z_histograms: of {one['tensor']} in {one['dtype']} they count {count} elements, and the units judged"
    assert f"{text} {count - 1}" in said(resealed(document))
    document["z_histograms"] = []
    assert f"{text.partition(' they')[0]} they count 0 elements" in said(resealed(document))


@pytest.mark.parametrize(("kind", "arch"), [("cpu", "sm_90"), ("cuda", "cpu"), ("cpu", "gfx942")])
def test_an_architecture_is_one_of_its_device(kind: str, arch: str, document: Document) -> None:
    document["device"] |= {"type": kind, "arch": arch}
    assert f"device: its arch {arch} is one of" in said(resealed(document))


def test_an_older_report_is_held_to_the_gates_which_were_the_same(document: Document) -> None:
    document["suite"]["version"] = "0.9.0"
    old = resealed(document)
    assert report.verify(old) == []
    assert any(text.startswith("the case list: the report is of suite 0.9.0") for text in report.unchecked(old))
    old["cases"][0]["tensors"]["out"] |= {"rms": 0.9, "row": 0.9, "bias": 0.3}
    assert "bias of z is 0.3, allowed 0.25" in said(resealed(old))
    old["suite"]["gates"]["max"] = 99.0
    assert "suite: its gates are" in said(resealed(old))


def test_a_newer_one_is_held_to_its_own(document: Document) -> None:
    document["suite"] |= {"version": "99.0.0", "gates": document["suite"]["gates"] | {"max": 6.0}}
    new = resealed(document)
    assert report.verify(new) == []
    assert any(text.startswith("the case list and the gates: the report is") for text in report.unchecked(new))
    new["cases"][0]["tensors"]["out"]["max"] = 7.0
    assert "out has max 7, allowed 6" in said(resealed(new))


def test_it_says_what_nobody_can_know(document: Document) -> None:
    (only,) = report.unchecked(document)
    assert "signs for nobody" in only
    document["suite"] |= {"source_tree_sha256": "0" * 64, "modified": None}
    _, tree, modified = report.unchecked(document)
    assert "another source of suite" in tree
    assert "no repository and no wheel" in modified


def test_what_the_device_has_is_no_reason(reported: Any) -> None:
    results = reported.all_passed()
    results[0] = replace(results[0], outcome="not_run", stats={}, not_run=NotRun.NO_CUDA, messages=("no GPU",))
    found = report.make(reported.run(), results)
    assert report.verify(found) == []
    found["device"] |= {"type": "cuda", "arch": "sm_90"}
    assert "for want of a CUDA GPU, on a CUDA GPU" in said(resealed(found))


def test_the_schema_is_one_and_takes_no_unknown_field(document: Document) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for inside in (
        document, document["suite"], document["run"], document["host"], document["device"], document["backend"],
        document["summary"], document["cases"][0], document["cases"][0]["tensors"]["out"], document["seal"],
        document["checks"][0], document["timings"], document["capability_matrix"][0], document["z_histograms"][0],
    ):  # fmt: skip
        inside["new"] = 1
        assert "'new' was unexpected" in said(document)
        del inside["new"]
    assert report.verify(document) == []


@pytest.mark.parametrize("block", ["suite", "run", "summary", "cases", "seal", "checks"])
def test_the_schema_misses_nothing(block: str, document: Document) -> None:
    del document[block]
    assert f"'{block}' is a required property" in said(document)


def test_the_reasons_in_the_schema_are_those_of_the_suite() -> None:
    definitions = json.loads(SCHEMA.read_text())["$defs"]
    assert definitions["not_run"]["enum"] == [str(why) for why in NotRun]
    assert definitions["outcome"]["enum"] == list(OUTCOMES)


@pytest.mark.parametrize(
    ("text", "why"), [("{", "is no JSON"), ('{"a": NaN}', "NaN is no JSON"), ("[]", "is no conformance report")]
)
def test_what_is_no_report_is_said(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=f"some.json.*{why}"):
        report.read(path)


# merge


def shards(reported: Any, count: int) -> list[Document]:
    results = reported.all_passed()
    parts = []
    for index in range(count):
        mine = results[index::count]
        run = reported.run(
            shard=f"{index + 1}/{count}",
            selected=tuple(result.id for result in mine),
            started=f"2026-11-30T10:0{index}:00+00:00",
            ended=f"2026-11-30T10:0{index}:30+00:00",
        )
        parts.append(report.make(run, mine))
    return parts


def test_shards_make_the_whole(reported: Any) -> None:
    parts = shards(reported, 3)
    assert [file_name(part) for part in parts] == [f"declared_only-cpu-smoke-{i}of3.json" for i in (1, 2, 3)]
    assert {part["summary"]["verdict"] for part in parts} == {"partial"}
    merged = report.merge(parts)
    whole = report.make(reported.run(), reported.all_passed())
    for block in ("suite", "backend", "device", "summary", "cases", "checks", "capability_matrix", "z_histograms"):
        assert merged[block] == whole[block], block
    assert merged["timings"] == whole["timings"]
    assert report.verify(merged) == []
    assert file_name(merged) == "declared_only-cpu-smoke.json"
    assert [part["shard"] for part in merged["run"]["merged"]] == ["1/3", "2/3", "3/3"]
    assert merged["run"]["started"] == "2026-11-30T10:00:00+00:00"
    assert merged["run"]["ended"] == "2026-11-30T10:02:30+00:00"


def test_the_order_of_shards_does_not_matter(reported: Any) -> None:
    parts = shards(reported, 3)
    assert report.merge(parts)["cases"] == report.merge(parts[::-1])["cases"]


def test_a_shard_that_is_missing_leaves_its_units_out(reported: Any) -> None:
    merged = report.merge(shards(reported, 3)[:2])
    assert list(merged["summary"]["not_run"]) == ["FILTERED"]
    assert report.verify(merged) == []


def changed(part: Document, path: str, value: Any) -> Document:
    other = copy.deepcopy(part)
    set_path(other, path, value)
    return resealed(other)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (
            "backend/name",
            "other",
            "the name of backend is not the same: report 1 has 'declared_only', report 2 has 'other'",
        ),
        ("backend/source_sha256", "0" * 64, "the source_sha256 of backend is not the same"),
        ("backend/languages", {"numpy": "1.0"}, "the languages of backend is not the same"),
        ("backend/capabilities/lse", False, "report 1 has {'lse': True}, report 2 has {'lse': False}"),
        ("device/name", "NVIDIA GH200", "the name of device is not the same"),
        ("device/driver", "1", "the driver of device is not the same: report 1 has None, report 2 has '1'"),
        (
            "host/versions/torch",
            "1.0",
            f"report 1 has {{'torch': '{torch.__version__}'}}, report 2 has {{'torch': '1.0'}}",
        ),
        ("host/cuda_runtime", "1.0", "the cuda_runtime of host is not the same"),
        ("device/arch", "sm_90", "the arch of device is not the same: report 1 has 'cpu', report 2 has 'sm_90'"),
        ("suite/tier", "full", "the tier of suite is not the same"),
        ("suite/version", "2.0.0", "the version of suite is not the same"),
        ("suite/seed", 5, "the seed of suite is not the same"),
        ("waivers", [waiver().to_json()], "the waivers is not the same"),
    ],
)
def test_only_shards_of_one_run_merge(path: str, value: Any, why: str, reported: Any) -> None:
    first, second = shards(reported, 2)
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        report.merge([first, changed(second, path, value)])


def test_a_shard_that_was_edited_does_not_merge(reported: Any) -> None:
    first, second = shards(reported, 2)
    second["cases"][0]["run_s"] = 100
    with pytest.raises(InvalidRequestError, match="report 2 was changed after it was written"):
        report.merge([first, second])


def test_two_outcomes_of_one_unit_do_not_merge(reported: Any) -> None:
    results = reported.all_passed()
    one = report.make(reported.run(), results)
    other = report.make(reported.run(), [reported.failed(results[0]), *results[1:]])
    with pytest.raises(InvalidRequestError, match=f"{results[0].id} has two outcomes in these reports: fail, pass"):
        report.merge([one, other])


def test_no_run_is_merged_twice(reported: Any) -> None:
    first, second = shards(reported, 2)
    with pytest.raises(InvalidRequestError, match="report 1 and report 2 are the same report twice"):
        report.merge([first, first])
    both = report.merge([first, second])
    with pytest.raises(InvalidRequestError, match="report 1 and report 2 are the same report twice, or have it in"):
        report.merge([both, second])
    both["run"]["merged"] *= 2
    assert f"run: it was merged from the run {first['run']['id']} 2 times" in said(resealed(both))


def test_two_runs_of_one_unit_merge(reported: Any) -> None:
    one, other = (report.make(reported.run(), reported.all_passed()) for _ in range(2))
    both = report.merge([one, other])
    assert both["summary"] == one["summary"]
    assert report.verify(both) == []


def test_nothing_does_not_merge() -> None:
    with pytest.raises(InvalidRequestError, match="nothing to merge"):
        report.merge([])


# diff


def test_a_report_does_not_differ_from_itself(document: Document) -> None:
    found = report.diff(document, document)
    assert found.empty
    assert found.text().splitlines()[0] == "verdict: partial"


def test_what_changed_is_listed(reported: Any) -> None:
    results = reported.all_passed()
    before = report.make(reported.run(), results)
    louder = {
        name: replace(stats, max=stats.max * 1.5, rms=stats.rms * 1.1) for name, stats in results[1].stats.items()
    }
    after = report.make(
        reported.run(planned=tuple(result.id for result in results[:-1])),
        [
            reported.failed(results[0]),
            replace(results[1], stats=louder, run_s=2.5),
            *results[2:-1],
            reported.passed("named/new", "float16"),
        ],
    )
    found = report.diff(before, after)
    assert found.verdict == ("partial", "nonconformant")
    assert [(change.unit, change.before, change.after) for change in found.outcomes] == [
        (results[0].id, "pass", "fail")
    ]
    assert found.added == ("named/new-float16",)
    assert found.removed == (results[-1].id,)
    assert {(move.unit, move.tensor, move.gate) for move in found.moved} == {
        (results[1].id, "out", "max"),
        (results[1].id, "lse", "max"),
    }
    assert found.times.run_s[1] - found.times.run_s[0] == pytest.approx(2.0)
    assert not found.empty
    text = found.text()
    for line in ("verdict: partial -> nonconformant", f"{results[0].id}: pass -> fail", "only in the second: 1"):
        assert line in text
    assert json.loads(json.dumps(found.to_json()))["added"] == ["named/new-float16"]


def test_what_the_reports_are_about_is_compared_too(document: Document) -> None:
    other = copy.deepcopy(document)
    other["device"]["name"] = "another CPU"
    other["host"]["versions"]["torch"] = "9.9"
    setting = report.diff(document, other).setting
    assert f"device name {document['device']['name']} -> another CPU" in setting
    assert f"torch {document['host']['versions']['torch']} -> 9.9" in setting


# What the registry makes of it


@pytest.mark.parametrize(("tier", "state"), [("full", "tested"), ("smoke", "untested")])
def test_the_registry_believes_a_full_report(tier: Any, state: str, reported: Any) -> None:
    path = report.write(report.make(reported.run(tier), reported.all_passed(tier)), cache_dir() / "reports")
    flashdispatch.reload_settings()
    q = torch.zeros(1, 8, 1, 64)
    candidate = flashdispatch.explain(q, q, q).candidate("declared_only")
    assert (candidate.arch_state, candidate.report) == (state, str(path) if state == "tested" else "")


def test_and_passes_over_who_failed(reported: Any) -> None:
    report.write(report.make(reported.run(), with_gqa_failing(reported)), cache_dir() / "reports")
    flashdispatch.reload_settings()
    q = torch.zeros(1, 8, 1, 64)
    assert flashdispatch.explain(q, q, q).candidate("declared_only").arch_state == "nonconformant"


# Where it was made


def test_new_reports_do_not_change_the_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("x = 1\n")
    monkeypatch.setattr(surroundings, "PACKAGE", tmp_path)
    before = surroundings.source_tree_sha256()
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "any.json").write_text("{}")
    assert surroundings.source_tree_sha256() == before
    (tmp_path / "check.py").write_text("x = 2\n")
    assert surroundings.source_tree_sha256() != before


@pytest.fixture
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Document]:
    """The device block of a made-up GPU whose nvidia-smi is the given shell script."""
    properties = type(
        "Properties", (), {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 2**37, "uuid": "1-2"}
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr(surroundings, "arch_of", lambda _: "sm_90")
    monkeypatch.setenv("PATH", str(tmp_path))

    def block(script: str) -> Document:
        if script:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        return surroundings.device(torch.device("cuda", 0))

    return block


def test_a_gpu_is_described_as_far_as_it_tells(a_gpu: Any) -> None:
    asked = 'test "$1" = --id=GPU-1-2 || exit 6'
    block = a_gpu(f'{asked}; echo "580.95.05, Enabled, [N/A], 700.00, 1980, 3201"')
    assert (block["name"], block["arch"], block["sm_count"]) == ("NVIDIA H200", "sm_90", 132)
    assert (block["driver"], block["ecc"], block["mig"]) == ("580.95.05", "Enabled", None)
    assert (block["power_limit_w"], block["clock_sm_mhz"], block["clock_memory_mhz"]) == (700.0, 1980.0, 3201.0)
    assert block["uuid_sha256"] == hashlib.sha256(b"1-2").hexdigest()


@pytest.mark.parametrize("script", ["", "exit 9", "echo nonsense"])
def test_without_nvidia_smi_the_rest_is_there(script: str, a_gpu: Any) -> None:
    block = a_gpu(script)
    assert (block["name"], block["driver"], block["power_limit_w"]) == ("NVIDIA H200", None, None)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_git_tells_whether_the_suite_was_modified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "suite")
    monkeypatch.setattr(surroundings, "PACKAGE", tmp_path)
    assert surroundings.suite_modified() is False
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "any.json").write_text("{}")
    assert surroundings.suite_modified() is False
    (tmp_path / "new_check.py").write_text("")
    assert surroundings.suite_modified() is True


def recorded(path: Path) -> PackagePath:
    """A file of the package in `path`'s folder, as the metadata of an installed wheel lists it."""
    value = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    found = PackagePath(path.relative_to(path.parents[1]))
    found.hash = FileHash(f"sha256={value}")
    return found


def test_the_record_of_a_wheel_tells_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "suite"
    package.mkdir()
    (package / "check.py").write_bytes(b"x = 1\n")
    monkeypatch.setattr(surroundings, "PACKAGE", package)
    installed = type("Distribution", (), {"files": [recorded(package / "check.py")]})
    monkeypatch.setattr(surroundings, "distribution", lambda _: installed)
    assert surroundings.suite_modified() is False
    (package / "check.py").write_bytes(b"x = 2\n")
    assert surroundings.suite_modified() is True


def test_nobody_can_tell_without_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surroundings, "PACKAGE", tmp_path)
    assert surroundings.suite_modified() is None


def test_reading_reports_loads_no_optional_package() -> None:
    code = (
        "import sys\nfrom flashdispatch_conformance import pages, report, verdict, waivers\n"
        "print(*(name for name in ('pytest', 'hypothesis', 'jsonschema', 'jinja2', 'pebble') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_a_traceback_in_a_report_keeps_no_more_than_two_folders(reported: Any) -> None:
    raised = 'ValueError: no\nTraceback:\n  File "/of/mine/package/kernels/forward.py", line 3\n  File "top.py", line 1'
    odd = replace(reported.passed("named/d128", "bfloat16"), outcome="error", messages=(raised,), stats={})
    document = report.make(reported.run(), [*(r for r in reported.all_passed() if r.id != odd.id), odd])
    (entry,) = [entry for entry in document["cases"] if entry["id"] == odd.id]
    assert 'File "package/kernels/forward.py", line 3' in entry["messages"][0]
    assert 'File "top.py", line 1' in entry["messages"][0]
    assert "/of/mine" not in entry["messages"][0]
