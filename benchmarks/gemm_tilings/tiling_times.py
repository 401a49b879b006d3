"""Times every tiling of rendered products against `loka::scaled_mm` and torch's bfloat16 product, one JSON line each.

    python -m benchmarks.gemm_tilings [--gemm M,N,K ...] [--split M,N,K ...] [--norm M,N,K ...] [--jobs 8]

`--gemm` is out (M, N) = a (M, K) @ b (N, K).T; `--split` a grad-weight out (N, K), contracted over M; `--norm` the
product with LayerNorm and sigmoid in its epilogue, N at most 512, beside which torch's and `scaled_mm`'s times are
those of the product alone. Without any of them: a list of shapes of each. Needs a Hopper GPU. Kernels are compiled
first, in `--jobs` processes. Each call is captured in a CUDA graph, over copies of its operands that together exceed
the L2 cache; a time is the median over replays, divided by the calls in a graph. `sqnr_db` compares with float32.
"""

from __future__ import annotations

import functools
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.gemm_tilings.gemm_work import GemmWork, Shape, make_work, peers, sqnr_of
from loka.devices.launches import Tiling
from loka.errors import InputError
from loka.kernels.fused.rendering import render, render_files
from loka.kernels.fused.triton_gemm import gemm_tiling
from loka.kernels.fused.triton_gemm.gemm_spec import OPERANDS, Epilogue, SplitGemm, TiledGemm
from loka.numerics.enums import Accumulation
from loka.templating.templates import load_templates

SHAPES: Mapping[str, Sequence[Shape]] = {
    "gemm": (
        (4096, 512, 512), (16384, 512, 512), (8192, 1024, 1024), (8192, 512, 3456), (8192, 3456, 512),
        (2048, 2048, 2048), (16384, 2048, 2048),
    ),
    "split": ((4096, 512, 512), (16384, 512, 512), (8192, 1024, 1024), (8192, 512, 3456)),
    "norm": ((4096, 512, 512), (16384, 512, 512)),
}  # fmt: skip
CALLS = 40  # in a graph, at least
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class TilingCandidate:
    """A rendered product in one tiling."""

    kind: str  # gemm, split or norm
    shape: Shape
    spec: TiledGemm | SplitGemm
    tiling: Tiling

    @property
    def what(self) -> str:
        """Beside the tiling, what tells it from other candidates of the shape."""
        return self.spec.operands if self.spec.operands != "e4m3" else f"e4m3 {self.spec.accumulation.value}"


def candidates_of(kind: str, shape: Shape) -> Iterator[TilingCandidate]:
    """Every tiling of the table, precise and fast and in bfloat16."""
    _, n, k = shape
    epilogue = Epilogue()
    if kind == "norm":
        epilogue = Epilogue(add=True, norm="layer_norm", weight=True, bias=True, activation="sigmoid", keep=True)
    variants = (("e4m3", Accumulation.PRECISE), ("e4m3", Accumulation.FAST), ("bfloat16", Accumulation.PRECISE))
    for operands, accumulation in variants:
        spec: TiledGemm | SplitGemm
        if kind == "split":
            spec = SplitGemm(n, k, operands, accumulation)
        else:
            spec = TiledGemm(n, k, operands, accumulation, epilogue=epilogue)
        for tiling in gemm_tiling.candidates(spec):
            yield TilingCandidate(kind, shape, spec, tiling)


def load(candidate: TilingCandidate, folder: Path) -> Callable[..., object]:
    """The operator of a candidate, from a package of its own in `folder`."""
    templates = load_templates()
    kernel = render(candidate.spec, templates, candidate.tiling)
    package = folder / f"loka_{kernel.digest[:16]}"
    package.mkdir(exist_ok=True)
    for name, text in {**render_files([kernel], templates, "a measurement"), "__init__.py": ""}.items():
        written = package / name
        if not written.exists() or written.read_text() != text:
            written.write_text(text)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    operator: Callable[..., object] = getattr(importlib.import_module(f"{package.name}.fused"), kernel.function)
    return operator


def compile_one(candidate: TilingCandidate, folder: Path) -> str:
    """Run a candidate once, in a process of its own, so that it is compiled; what is wrong with it, or nothing."""
    try:
        load(candidate, folder)(*make_work(candidate.kind, candidate.spec, candidate.shape).sets[0])
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a compiler's or a driver's: it is reported, and the others are still measured
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def time_us(call: Callable[..., object], work: GemmWork) -> float:
    """Median time of one call over the copies of `work`, microseconds."""
    rounds = -(-CALLS // len(work.sets))
    call(*work.sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for items in work.sets:
                call(*items)
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = timed_event(), timed_event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(work.sets)))
    return statistics.median(times)


def timed_event() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def report(kind: str, shape: Shape, kernel: str, more: dict[str, object]) -> None:
    """One line of JSON."""
    m, n, k = shape
    print(json.dumps({"kind": kind, "m": m, "n": n, "k": k, "kernel": kernel, **more}), flush=True)


def measure_shape(kind: str, shape: Shape, candidates: Sequence[TilingCandidate], folder: Path) -> None:
    """The peers on this shape, then its candidates."""
    specs = {candidate.spec.operands: candidate.spec for candidate in candidates_of(kind, shape)}
    quantised, plain = (make_work(kind, specs[operands], shape) for operands in OPERANDS)
    for name, call, work in peers(kind, quantised, plain):
        report(kind, shape, name, {"us": round(time_us(call, work), 2)})
    for candidate in candidates:
        work = quantised if candidate.spec.operands == "e4m3" else plain
        operator = load(candidate, folder)
        more: dict[str, object] = {
            "us": round(time_us(operator, work), 2),
            "sqnr_db": round(sqnr_of(operator, work), 1),
            "tiling": asdict(candidate.tiling),
        }
        report(kind, shape, f"rendered {candidate.what}", more)


def measure_all(shapes: Mapping[str, Sequence[Shape]], jobs: int) -> None:
    """Compile the candidates of all shapes, by kind, and print their times. Raises InputError without a Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise InputError("benchmarks.gemm_tilings needs a Hopper GPU, and there is none")
    wanted = {(kind, shape): list(candidates_of(kind, shape)) for kind in shapes for shape in shapes[kind]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failures = compile_all([c for candidates in wanted.values() for c in candidates], folder, jobs)
        for (kind, shape), candidates in wanted.items():
            for candidate in candidates:
                if failure := failures[candidate.spec, candidate.tiling]:
                    more: dict[str, object] = {"error": failure, "tiling": asdict(candidate.tiling)}
                    report(kind, shape, f"rendered {candidate.what}", more)
            measure_shape(kind, shape, [c for c in candidates if not failures[c.spec, c.tiling]], folder)


def compile_all(
    candidates: Sequence[TilingCandidate], folder: Path, jobs: int
) -> dict[tuple[TiledGemm | SplitGemm, Tiling], str]:
    """Compile every kernel once, in `jobs` processes: what is wrong with it, or nothing, by spec and tiling."""
    kernels = {(candidate.spec, candidate.tiling): candidate for candidate in candidates}
    compiling = functools.partial(compile_one, folder=folder)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip(kernels, pool.map(compiling, kernels.values()), strict=True))
