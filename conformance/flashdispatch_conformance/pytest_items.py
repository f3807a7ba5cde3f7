"""One pytest item for each unit, and the report at the end. Loaded by `pytest_plugin` when a backend is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flashdispatch_conformance import catalogue, environment, report, runner, surroundings, waivers
from flashdispatch_conformance.check import Unit
from flashdispatch_conformance.cli.plugins import load
from flashdispatch_conformance.document import Document
from flashdispatch_conformance.extra import needs
from flashdispatch_conformance.journal import result_from_json, result_to_json
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.runner import Children, Settings
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.errors import FlashDispatchError

PLACE = Path(catalogue.__file__)
"""The file that items are said to lie in: ``catalogue.py::named/d128-bfloat16``."""

PROPERTY = "flashdispatch_result"
"""A result's name among the properties that travel with a test's report, from a worker of pytest-xdist too."""


class UnitFailedError(Exception):
    """A unit did not end as it must."""


class Conformance:
    """The plugin: it collects the units, runs them and writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        try:
            self.settings = _settings(config)
            path = config.getoption("--fd-waivers")
            self.waivers = waivers.read(Path(path)) if path is not None else ()
            if config.getoption("--fd-report"):
                needs("jinja2", "writing the pages of a report")
        except (FlashDispatchError, OSError) as error:
            raise pytest.UsageError(str(error)) from error
        self.tier = config.getoption("--fd-tier")
        self.config = config
        self.version = surroundings.status_of(self.settings.backend).version
        self.started = _now()
        self.results: dict[str, Result] = {}
        self.selected: tuple[str, ...] | None = None
        self.at_end = ExitStack()
        self.children: Children | None = None
        self.document: Document | None = None
        self.paths: tuple[Path, ...] = ()

    # Items

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Units stand in the place of the catalogue's file."""
        if file_path != PLACE:
            return None
        return UnitFile.from_parent(parent, path=file_path, conformance=self)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What -k and other options left of the units."""
        self.selected = tuple(item.unit.id for item in session.items if isinstance(item, UnitItem))

    def run(self, unit: Unit) -> Result:
        """The unit's result, from a child process unless that is not wanted."""
        if not self.settings.isolated:
            (result,) = runner.run([unit], self.settings)
            return result
        if self.children is None:
            self.children = self.at_end.enter_context(Children(self.settings, 1))
        (result,) = self.children.results([unit])
        return result

    def under_waivers(self, result: Result) -> Result:
        """`result`, once the waivers have been looked at; what is wrong with a waiver itself is said in the report."""
        (waived,), _ = waivers.apply(
            [result],
            self.waivers,
            backend=self.settings.backend,
            version=self.version,
            arch=arch_of(self.settings.device),
            today=datetime.now(UTC).date(),
        )
        return waived

    # The report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the results, also those that came from a worker of pytest-xdist."""
        for name, value in report.user_properties:
            if report.when == "call" and name == PROPERTY:
                result = result_from_json(json.loads(str(value)))
                self.results[result.id] = result

    def pytest_sessionfinish(self) -> None:
        """Ends the child, and writes the report where one is wanted."""
        self.at_end.close()
        folder = self.config.getoption("--fd-report")
        if hasattr(self.config, "workerinput") or not self.results:
            return  # a worker of pytest-xdist, or nothing was run
        self.document = report.make(self._run(), tuple(self.results.values()), waivers=self.waivers)
        if folder is not None:
            from flashdispatch_conformance.cli.run import write

            self.paths = write(self.document, Path(folder))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The verdict and where the report is."""
        if self.document is None:
            return
        summary = self.document["summary"]
        terminalreporter.section(f"conformance of {self.settings.backend}: {summary['verdict']}")
        for line in (*summary["reasons"], *map(str, self.paths)):
            terminalreporter.line(line)

    def _run(self) -> report.Run:
        distributed = self.config.pluginmanager.has_plugin("dsession")
        return report.Run(
            backend=self.settings.backend,
            device=self.settings.device,
            tier=self.tier,
            planned=tuple(unit.id for unit in catalogue.units(self.tier)),
            # Under pytest-xdist the items are with the workers, and only those that were run are known here.
            selected=tuple(self.results) if distributed or self.selected is None else self.selected,
            started=self.started,
            ended=_now(),
            command=("pytest", *self.config.invocation_params.args),
            match=self.config.getoption("-k") or "",
            workers=1,
        )


class UnitFile(pytest.File):
    """The catalogue as a file of tests."""

    def __init__(self, *, conformance: Conformance, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.conformance = conformance

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each unit of the tier."""
        for unit in catalogue.units(self.conformance.tier):
            yield UnitItem.from_parent(self, name=unit.id, unit=unit)


class UnitItem(pytest.Item):
    """One unit as a test."""

    def __init__(self, *, unit: Unit, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.unit = unit

    def runtest(self) -> None:
        """Passes, or raises what pytest takes for the outcome."""
        parent = self.getparent(UnitFile)
        assert parent is not None
        result = parent.conformance.run(self.unit)
        self.user_properties.append((PROPERTY, json.dumps(result_to_json(result))))
        result = parent.conformance.under_waivers(result)
        if result.outcome in ("unsupported", "not_run"):
            pytest.skip(result.report())
        if result.outcome == "waived":
            pytest.xfail(f"waiver {result.waiver}: {result.report()}")
        if result.outcome != "pass":
            raise UnitFailedError(result.report())

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What failed, and not where in pytest it was raised."""
        if isinstance(excinfo.value, UnitFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """What pytest calls the item."""
        return self.path, None, self.name


def _settings(config: pytest.Config) -> Settings:
    plugins = tuple(config.getoption("--fd-plugin"))
    load(plugins)
    (name, *others), _ = environment.backends(config.getoption("--fd-backend"))
    if others:
        raise pytest.UsageError("--fd-backend takes one backend by its name")
    return Settings(
        backend=name,
        device=environment.device(config.getoption("--fd-device")),
        timeout=config.getoption("--fd-timeout"),
        plugins=plugins,
        isolated=not config.getoption("--fd-in-process"),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
