"""What the gates were calibrated on: the z-scores of several kernels, from their reports, as numbers and as a picture.

    python tests/peers/calibration.py REPORT... --numbers calibration.json --picture calibration.svg

Only units that passed count: a fault is not what a gate is calibrated on.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

DTYPES = ("float16", "bfloat16", "float32")
TENSORS = ("out", "lse", "dq", "dk", "dv")
COLOURS = {"triton_fa2": "#1a6fb5", "torch_reference": "#444444"}
MORE_COLOURS = ("#d1702b", "#5a9e4b", "#9a5fb5")


def numbers_of(report: dict[str, Any]) -> dict[str, Any]:
    """The worst of each statistic and the histogram of z, by dtype and tensor, over units that passed."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: {"rms": 0.0, "row": 0.0, "max": 0.0, "bias": 0.0})
    for case in report["cases"]:
        if case["outcome"] != "pass":
            continue
        for name, scores in case.get("tensors", {}).items():
            at = worst[f"{case['dtype']} {name.split(' ')[0]}"]
            for statistic in ("rms", "row", "max"):
                at[statistic] = max(at[statistic], scores[statistic])
            if scores["numel"] >= 4096 and scores["rows"] >= 64:  # where the bias gate holds
                at["bias"] = max(at["bias"], abs(scores["bias"]) - scores["drift"])
    return {
        "backend": report["backend"]["name"],
        "gpu": report["device"]["name"],
        "versions": report["host"]["versions"],
        "counts": report["summary"]["counts"],
        "worst": {key: worst[key] for key in sorted(worst)},
        "histograms": {f"{one['dtype']} {one['tensor']}": one["counts"] for one in report["z_histograms"]},
    }


def draw(kernels: list[dict[str, Any]], picture: Path) -> None:
    """One panel for each dtype and tensor: the share of elements in each quarter of z."""
    edges = np.arange(-4.0, 4.25, 0.25)
    figure, axes = plt.subplots(len(DTYPES), len(TENSORS), figsize=(12, 6), sharex=True, layout="constrained")
    more = iter(MORE_COLOURS)
    colours = {one["backend"]: COLOURS.get(one["backend"]) or next(more) for one in kernels}
    for row, dtype in zip(axes, DTYPES, strict=True):
        for axis, tensor in zip(row, TENSORS, strict=True):
            for one in kernels:
                counts = np.array(one["histograms"].get(f"{dtype} {tensor}", [0] * (len(edges) + 1)))[1:-1]
                if counts.sum():
                    axis.stairs(counts / counts.sum(), edges, color=colours[one["backend"]], label=one["backend"])
            axis.set_yscale("log")
            axis.set_ylim(1e-7, 1)
            axis.axvspan(-1.5, 1.5, color="#000000", alpha=0.05)
            axis.set_title(f"{tensor}, {dtype}", fontsize=9)
    figure.supxlabel("z = (got - truth) / sigma; shaded: what RMS(z) may be; max |z| may be 8")
    figure.supylabel("share of elements")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--numbers", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    arguments = parser.parse_args()
    kernels = [numbers_of(json.loads(path.read_text(encoding="utf-8"))) for path in arguments.reports]
    arguments.numbers.write_text(json.dumps(kernels, indent=1) + "\n", encoding="utf-8")
    draw(kernels, arguments.picture)


if __name__ == "__main__":
    main()
