"""Speed of regions in every variant: `python -m benchmarks.region [M,N,K ...] [--form FORM]`, on a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cell_report import METHOD, BenchReport, to_markdown, to_plain, write_files
from benchmarks.region.region import DEFAULT_SHAPES, Form, Shape, check_shape, parse_shape
from benchmarks.region.region_run import run_regions
from benchmarks.study import run_study, tell
from benchmarks.variants import NAMES, VARIANTS
from loka.bench.machine import environment, require_gpu
from loka.bench.options import listed
from loka.bench.results import usable_folder, utc_minute

ONLY = ("train", "infer")
PROGRAM = "python -m benchmarks.region"
STEPS = (
    "All variants run under torch.compile (ours with fullgraph) and from CUDA graphs; weights are quantized inside a "
    "training step and frozen for inference. dB: signal to error against float32. Peak memory: of one training step, "
    "what the variant itself holds."
)


def measured(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Measure the regions and write the report; returns the text to print. Raises InputError."""
    form, shapes = Form(options.form), regions(options)
    wanted = listed("--variants", options.variants, NAMES) or NAMES
    require_gpu(PROGRAM)
    usable_folder(options.out)
    modes = tuple(mode == "train" for mode in ONLY if options.only in (None, mode))
    sections = run_regions(form, shapes, [each for each in VARIANTS if each.name in wanted], modes, tell)
    command = f"{PROGRAM} {shlex.join(arguments)}".rstrip()
    report = BenchReport("region", command, utc_minute(), environment(), sections, (METHOD, STEPS), PROGRAM)
    data, page = write_files(report, options.out)
    tell(f"wrote {data} and {page}")
    return json.dumps(to_plain(report), indent=2, allow_nan=False) if options.json else to_markdown(report)


def regions(options: argparse.Namespace) -> tuple[Shape, ...]:
    """The shapes on the command line. Raises InputError for what is none, or none of the form."""
    shapes = tuple(map(parse_shape, options.shapes)) or DEFAULT_SHAPES
    for shape in shapes:
        check_shape(Form(options.form), shape)
    return shapes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Speed of regions in every variant.")
    parser.add_argument("shapes", nargs="*", metavar="M,N,K", help="default: the seven that speed is judged by")
    parser.add_argument("--form", choices=[form.value for form in Form], default=Form.LAYER_NORM.value)
    parser.add_argument("--only", choices=ONLY, help="default: both")
    parser.add_argument("--variants", help=f"comma-separated, of {', '.join(NAMES)}; default: all")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/bench"), help="folder of the JSON and Markdown")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    return run_study(lambda: measured(options, given))


if __name__ == "__main__":
    sys.exit(main())
