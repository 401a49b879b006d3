"""Scale benchmark: time and memory of the command line on models of 10,000 linear layers.

    python -m benchmarks.cli_scale [--json]

Runs `loka --help`, `loka init`, `loka plan` and `loka generate` in separate processes and prints wall time, processor
time and peak memory of each, beside the costs of any program that builds the model: importing torch, and calling the
factory. `loka init` looks for changes by every mod; `plan no_bias` applies one of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.study import run_study
from loka.errors import CheckFailedError

LAYERS = 10_000
WIDTH = 64

POLICY = """\
version: 1
name: ten_thousand
model:
  factory: "benchmarks.cli_scale:ten_thousand"
  inputs: "benchmarks.cli_scale:ten_thousand_inputs"
  batch_size: 256
target: h100
defaults: {compute: fp8}
"""
NO_BIAS = """\
version: 1
name: no_bias
model:
  factory: "benchmarks.cli_scale:chain_of_thousand"
  inputs: "benchmarks.cli_scale:ten_thousand_inputs"
  batch_size: 256
target: h100
defaults: {compute: fp8}
mods: [{use: no_bias}]
"""
INIT_SECONDS = 15.0  # of a processor, that `loka init` may take for 10,000 linear layers
NO_BIAS_SECONDS = 5.0  # the same of `loka plan` with the mod no_bias for 1,000

BUILD = """\
import time
start = time.perf_counter()
import torch
imported = time.perf_counter()
from benchmarks.cli_scale import ten_thousand
ready = time.perf_counter()
ten_thousand()
print(imported - start, time.perf_counter() - ready)
"""

# Linux includes the memory of the parent in a child's peak, so a bare process starts it.
LAUNCHER = """\
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as report:
    json.dump([time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss], report)
os._exit(max(os.waitstatus_to_exitcode(status), 0) or (1 if status else 0))
"""

LOKA = "import sys; from loka.cli.main import run; sys.exit(run())"


class ScaleBlock(nn.Module):
    """Linear and ReLU: (B, width) -> (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Tower(nn.Module):
    """A sequence of `layers` blocks: (B, width) -> (B, width)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaleBlock(width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ten_thousand() -> Tower:
    """10,000 linear layers of 64 x 64; 166 MB of float32."""
    return Tower(LAYERS, WIDTH)


def chain() -> nn.Sequential:
    """10,000 linear layers with nothing in between: the bias of each could be folded into the next."""
    return _chain(LAYERS)


def chain_of_thousand() -> nn.Sequential:
    """1,000 linear layers with nothing in between."""
    return _chain(LAYERS // 10)


def _chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


class Towers(nn.Module):
    """`count` towers side by side, of `layers` blocks each, whose results are added: (B, width) -> (B, width)."""

    def __init__(self, count: int, layers: int, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Tower(layers, width) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


def towers() -> Towers:
    """10,000 linear layers in 1,000 towers."""
    return Towers(LAYERS // 10, 10, WIDTH)


def ten_thousand_inputs(batch_size: int) -> tuple[Tensor]:
    """Features (B, 64), float32."""
    return (torch.randn(batch_size, WIDTH, generator=torch.Generator().manual_seed(0), device="cpu"),)


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of one process."""

    name: str
    seconds: float  # wall time, start of the interpreter included
    cpu: float  # seconds of a processor, in user and kernel mode together
    peak_mib: float  # largest resident set


@dataclass(frozen=True, slots=True)
class ScaleCosts:
    """All runs, and the two costs that no command can avoid."""

    runs: tuple[Run, ...]
    import_torch_seconds: float
    build_seconds: float  # of one call of the factory


def run_process(label: str, command: list[str], folder: Path) -> tuple[Run, str]:
    """Run `command` in `folder`; returns its cost and its standard output.

    Raises CheckFailedError, with the end of its output, if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="loka-scale-") as scratch:
        report = Path(scratch) / "report.json"
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(report), *command]
        done = subprocess.run(launcher, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tail = (done.stdout + done.stderr)[-2000:]
            raise CheckFailedError(f"scale: {label} left with status {done.returncode}:\n{tail}")
        seconds, cpu, peak = json.loads(report.read_text(encoding="utf-8"))
    kib = peak / 1024 if sys.platform == "darwin" else peak  # macOS counts bytes
    return Run(label, seconds, cpu, kib / 1024), done.stdout


def run_loka(label: str, arguments: list[str], folder: Path) -> Run:
    """Run `loka` with these arguments in `folder`. Raises CheckFailedError where it fails."""
    return run_process(label, [sys.executable, "-c", LOKA, *arguments], folder)[0]


def init_arguments(factory: str) -> list[str]:
    """`loka init` of one of the models here."""
    model, inputs = (f"{ten_thousand.__module__}:{name}" for name in (factory, ten_thousand_inputs.__name__))
    return ["init", model, "--inputs", inputs, "--batch-size", "256", "-o", f"{factory}_draft.yaml", "--force"]


def no_bias_arguments(folder: Path) -> list[str]:
    """`loka plan` of a policy with the mod no_bias, which is written into `folder`."""
    (folder / "no_bias.yaml").write_text(NO_BIAS, encoding="utf-8")
    return ["plan", "no_bias.yaml"]


def measure() -> ScaleCosts:
    """Run every command once, in a temporary folder. Raises CheckFailedError if one fails."""
    with tempfile.TemporaryDirectory(prefix="loka-scale-") as name:
        folder = Path(name)
        (folder / "ten_thousand.yaml").write_text(POLICY, encoding="utf-8")
        commands = {
            "loka --help": ["--help"],
            "loka init": init_arguments("ten_thousand"),
            "init chain": init_arguments("chain"),
            "init towers": init_arguments("towers"),
            "loka plan": ["plan", "ten_thousand.yaml"],
            "plan no_bias": no_bias_arguments(folder),
            "loka generate": ["generate", "ten_thousand.yaml"],
        }
        runs = [run_loka(label, arguments, folder) for label, arguments in commands.items()]
        build, printed = run_process("build alone", [sys.executable, "-c", BUILD], folder)
        imported, built = (float(part) for part in printed.split())
        return ScaleCosts((*runs, build), imported, built)


def table(costs: ScaleCosts) -> str:
    """The costs as text; "beyond" is a run's time without building the model."""
    lines = [
        f"{LAYERS} linear layers of {WIDTH} x {WIDTH}; "
        f"import torch {costs.import_torch_seconds:.2f} s, build the model {costs.build_seconds:.2f} s",
        f"{'process':<16}{'seconds':>9}{'CPU':>9}{'beyond':>9}{'peak MiB':>10}",
    ]
    for run in costs.runs:
        beyond = "" if run.name == "loka --help" else f"{run.seconds - costs.build_seconds:.2f}"
        lines.append(f"{run.name:<16}{run.seconds:>9.2f}{run.cpu:>9.2f}{beyond:>9}{run.peak_mib:>10.0f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cli_scale", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def study() -> str:
        costs = measure()
        return json.dumps(asdict(costs), indent=2) if options.json else table(costs)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
