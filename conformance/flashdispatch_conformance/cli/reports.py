"""``flashdispatch conformance report | verify | diff | merge``: what can be done with reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashdispatch_conformance.extra import needs
from flashdispatch_registry.errors import InvalidRequestError

if TYPE_CHECKING:
    from flashdispatch_conformance.document import Document

REPORT_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance report[/] mine-sm_90-full.json

[cyan]flashdispatch conformance report[/] mine-sm_90-full.json --html -o page.html"""

VERIFY_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance verify[/] reports/*.json"""

DIFF_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance diff[/] old/mine-sm_90-full.json mine-sm_90-full.json"""

MERGE_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance run[/] --backend mine --shard 1/2 -o shards

[cyan]flashdispatch conformance run[/] --backend mine --shard 2/2 -o shards

[cyan]flashdispatch conformance merge[/] shards/*.json -o report"""

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A report.", exists=True, dir_okay=False)]
_Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports.", exists=True, dir_okay=False)]
_Json = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]


def report(
    file: _File,
    markdown: Annotated[bool, typer.Option("--md", help="The page as Markdown.")] = False,
    html: Annotated[bool, typer.Option("--html", help="The page as HTML.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the page goes.", show_default="stdout")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Show a report: its summary, or its page with --md or --html."""
    if markdown + html + as_json > 1:
        raise typer.BadParameter("one form at a time", param_hint="--md, --html, --json")
    document = _read(file)
    if as_json:
        typer.echo(json.dumps(document["summary"], indent=2))
    elif markdown or html:
        needs("jinja2", "writing a page")
        from flashdispatch_conformance import pages

        page = pages.html(document) if html else pages.markdown(document)
        if output is None:
            typer.echo(page, nl=False)
        else:
            output.write_text(page, encoding="utf-8")
    else:
        from flashdispatch_conformance.cli.summary_view import show_summary

        show_summary(document, [file])


def verify(files: _Files, as_json: _Json = False) -> None:
    """Check reports: their form, their seal, their cases, and the verdict, worked out anew.

    Exits with 1 when something in one of them does not hold. It needs the files, and no GPU.
    """
    from flashdispatch_conformance import report as reports

    needs("jsonschema", "verifying a report")
    answers = []
    for file in files:
        document = reports.read(file)
        findings = reports.verify(document)
        answers.append(
            {
                "file": str(file),
                "verdict": None if findings else document["summary"]["verdict"],
                "findings": [{"where": finding.where, "message": finding.message} for finding in findings],
                "unchecked": reports.unchecked(document),
            }
        )
        if not as_json:
            verdict = "does not hold" if findings else f"holds: {document['summary']['verdict']}"
            lines = [f"{file}: {verdict}", *(f"  {finding}" for finding in findings)]
            lines += [f"  not checked: {text}" for text in reports.unchecked(document)]
            typer.echo("\n".join(lines))
    if as_json:
        typer.echo(json.dumps(answers, indent=2))
    if any(answer["findings"] for answer in answers):
        raise typer.Exit(1)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A report.", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="A later one.", exists=True, dir_okay=False)],
    as_json: _Json = False,
) -> None:
    """Show what changed from report A to report B: outcomes, units, z-scores and times.

    Exits with 1 when anything but times has changed.
    """
    from flashdispatch_conformance import report as reports

    found = reports.diff(_read(before), _read(after))
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else found.text())
    if not found.empty:
        raise typer.Exit(1)


def merge(
    files: _Files,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the whole report.")],
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout too.")] = False,
) -> None:
    """Merge the reports of a run's shards into one, with its pages.

    Exits as run does: 0 conformant, 1 nonconformant, 4 partial.
    """
    from flashdispatch_conformance import report as reports
    from flashdispatch_conformance.cli.run import EXIT, write
    from flashdispatch_conformance.cli.summary_view import show_summary

    needs("jinja2", "writing the pages of a report")
    document = reports.merge([_read(file) for file in files])
    paths = write(document, output)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show_summary(document, paths)
    if code := EXIT[document["summary"]["verdict"]]:
        raise typer.Exit(code)


def _read(file: Path) -> Document:
    """The report in `file`, whose form is right. Raises InvalidRequestError when it is not."""
    from flashdispatch_conformance.document import read
    from flashdispatch_conformance.verify import malformed

    needs("jsonschema", "reading a report")
    document = read(file)
    if findings := malformed(document):
        said = "\n  ".join(map(str, findings))
        raise InvalidRequestError(f"{file} has not the form of a report:\n  {said}")
    return document
