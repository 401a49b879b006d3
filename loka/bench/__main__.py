"""`python -m loka.bench`: what `loka bench` does, where typer and rich are not installed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from loka.bench.request import FORMS, ONLY, WHAT, Request, run
from loka.bench.results import to_plain, to_text, write_files
from loka.errors import LokaError


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loka.bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", metavar="|".join(WHAT))
    parser.add_argument("names", nargs="*", help="M,N,K for region; names of models; families of kernels; default: all")
    parser.add_argument("--form", help=f"of the regions: {' or '.join(FORMS)}")
    parser.add_argument("--only", help=" or ".join(ONLY))
    parser.add_argument("--variants", help="comma-separated; default: all")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results"), help="folder for the JSON and Markdown")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    request = Request(options.what, tuple(options.names), options.form, options.only, options.variants)
    try:
        report = run(request, options.out, lambda line: print(line, file=sys.stderr, flush=True))
        written = write_files(report, options.out)
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps(to_plain(report), indent=2, allow_nan=False) if options.json else to_text(report))
    print(f"wrote {written[0]} and {written[1]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
