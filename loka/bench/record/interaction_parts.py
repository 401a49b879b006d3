"""Prepared parts of interactions: FM and dot interactions, concat norms; rendered and by torch.compile.

Inputs are standard normal, weights of FM interactions divided by the root of the number of terms. A rendered part runs
what a generated package launches: the kernel, and after a backward the one that adds its partial sums. A compiled part
runs the model's own operations under torch.compile for the part's number of samples: its forward saves what the
gradients need; its backward is timed as the whole step less that forward. A passed-on input is a copy in both, so that
it cancels in the difference.

Results are compared with the same operations in float64, gradients with autograd's, on evenly spaced samples of up to
SAMPLED elements; sums over samples are compared only if that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.bench.record.check_numbers import (
    LEAST_PRODUCER_DB,
    LEAST_SUM_DB,
    Check,
    check_of,
    check_values,
    results_of,
    spaced,
)
from loka.bench.record.gemm_parts import DTYPES, PreparedCall
from loka.bench.record.producer_parts import SAMPLED, with_sums
from loka.bench.timing import SEED
from loka.errors import InputError
from loka.kernels.fused.interaction import interaction_specs
from loka.kernels.fused.interaction.concat_norm import ConcatNormBackward
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmForward
from loka.kernels.fused.interaction.interaction_specs import EPS
from loka.kernels.fused.matrix_kernels import Reduce
from loka.kernels.fused.rendering import AnySpec
from loka.kernels.measurements.interaction_forms import (
    BACKWARDS,
    ConcatNormForm,
    DotForm,
    FmForm,
    family,
    form_of,
)
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part

SUMMED = frozenset({"rank", "compress", "weight", "bias"})  # shared by all samples: their gradients are sums

Named = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Interaction:
    """An interaction in torch: inputs by name, the computation, and gradients of its results."""

    inputs: dict[str, Tensor]
    compute: Callable[[Named], tuple[Tensor, ...]]
    gradients: tuple[Tensor, ...]

    def at(self, places: Tensor, dtype: torch.dtype) -> Interaction:
        """The interaction on the samples `places` and in another dtype."""
        inputs = {name: (value if name in SUMMED else value[places]).to(dtype) for name, value in self.inputs.items()}
        return Interaction(inputs, self.compute, tuple(grad[places].to(dtype) for grad in self.gradients))

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs as leaves that require gradients."""
        return {name: value.detach().requires_grad_() for name, value in self.inputs.items()}


def interaction_of(part: Part, device: str) -> Interaction:
    """A part's inputs. Raises InputError if it is not an interaction or no kernel takes its dtype."""
    if part.dtype not in DTYPES:
        raise InputError(f"no kernel takes {part.dtype!r}; it can be {', '.join(DTYPES)}")
    generator = torch.Generator(device).manual_seed(SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).to(DTYPES[part.dtype])

    samples, d = part.rows, part.columns
    match form_of(part.work, part.around):
        case FmForm() as form:
            n, c = form.embeddings, form.sums
            inputs = {"x": draw(samples, n, d), "rank": draw(n, form.rank) * n**-0.5}
            inputs |= {"compress": draw(c, n) * n**-0.5} if c else {}
            gradients = [draw(samples, n, form.rank), *([draw(samples, c, d)] if c else [])]
            gradients += [draw(samples, n, d)] if form.passing else []
            return Interaction(inputs, partial(_mixed, form.passing), tuple(gradients))
        case ConcatNormForm() as form:
            inputs = {f"part_{index}": draw(samples, rows, d) for index, rows in enumerate(form.rows)}
            inputs |= {"residual": draw(samples, sum(form.rows), d)} if form.residual else {}
            inputs |= {name: draw(d) for name in ("weight", "bias") if getattr(form, name)}
            return Interaction(inputs, partial(_joined, form.norm), (draw(samples, sum(form.rows), d),))
        case DotForm() as form:
            n = form.embeddings
            return Interaction({"x": draw(samples, n, d)}, _paired, (draw(samples, n, n),))


def specs_of(part: Part) -> tuple[AnySpec, ...]:
    """The rendered kernels of a part in the order of their launches; a forward has one."""
    forward, backward = interaction_specs.specs_of(form_of(part.work, part.around), part.columns)
    if part.work not in BACKWARDS:
        return (forward,)
    sums = len(backward.results) - 1
    return (backward, Reduce(sums)) if sums else (backward,)


@dataclass
class InteractionParts:
    """Prepares parts of interactions. `module` has the rendered kernels that `specs_of` describes."""

    module: ModuleType
    device: str = "cuda"
    _last: tuple[Part, Compiled] | None = None

    def prepare(self, part: Part) -> PreparedCall:
        """Prepare a part's call. Raises InputError if no kernel is rendered for it."""
        made = interaction_of(part, self.device)
        expected = ReferenceOutputs(made, part.columns)
        if part.kernel == COMPILED:
            return self._compiled(part, made, expected)
        if part.kernel != RENDERED:
            raise InputError(f"an interaction is {RENDERED} or {COMPILED}, not on a kernel {part.kernel!r}")
        specs = specs_of(part)
        launch = [getattr(self.module, spec.function) for spec in specs]
        given = _given(part, made)
        first = specs[0]
        if part.work not in BACKWARDS:
            dtype = () if isinstance(first, FmForward | DotSpec) else (DTYPES[part.dtype],)
            arguments = (*(given[name] for name in first.parameters), *dtype)
            return PreparedCall(launch[0], arguments, expected.check_results)
        arguments = tuple(given[name] for name in first.parameters)
        call: Callable[..., Any] = launch[0]
        if len(specs) > 1 and isinstance(specs[1], Reduce):
            call = partial(with_sums, launch[0], launch[1], specs[1].count, DTYPES[part.dtype])
        return PreparedCall(call, arguments, lambda found: expected.check_gradients(_by_input(first, found)))

    def _compiled(self, part: Part, made: Interaction, expected: ReferenceOutputs) -> PreparedCall:
        """Prepare a compiled part; forward and step of one form share a compilation if one follows the other."""
        key = replace(part, work=family(part.work))
        if self._last is None or self._last[0] != key:
            self._last = key, Compiled.of(made)
        compiled, inputs = self._last[1], tuple(made.inputs.values())
        if part.work not in BACKWARDS:
            return PreparedCall(compiled.forward, inputs, expected.check_results)

        def check(found: Sequence[Tensor]) -> Check:
            return expected.check_gradients(dict(zip(made.inputs, found, strict=True)))

        return PreparedCall(compiled.step, (*inputs, *made.gradients), check, less=compiled.forward)


@dataclass
class ReferenceOutputs:
    """Results and gradients of an interaction in float64, on evenly spaced samples."""

    interaction: Interaction
    columns: int

    @cached_property
    def places(self) -> Tensor:
        """Indices of the samples that are compared."""
        first = next(iter(self.interaction.inputs.values()))
        most = max(SAMPLED // max(first[0].numel(), 1), 1)
        return spaced(first.shape[0], most).to(first.device)

    @cached_property
    def _exact(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        sampled = self.interaction.at(self.places, torch.float64)
        leaves = sampled.leaves
        results = sampled.compute(leaves)
        found = torch.autograd.grad(results, tuple(leaves.values()), sampled.gradients)
        return tuple(each.detach() for each in results), dict(zip(leaves, found, strict=True))

    def check_results(self, made: Any) -> Check:
        """Check a forward's results, without the statistics after them."""
        pairs = zip(results_of(made), self._exact[0], strict=False)
        return check_of(check_values("its result", each.detach()[self.places], right) for each, right in pairs)

    def check_gradients(self, found: Named) -> Check:
        """Check a backward's gradients by input name; sums only if all samples are compared."""
        exact = self._exact[1]
        parts = [gradient for name, gradient in exact.items() if name.startswith("part_")]
        if parts:
            exact = {**exact, "joined": torch.cat(parts, 1)}
        whole = len(self.places) == next(iter(self.interaction.inputs.values())).shape[0]
        wrong = []
        for name, gradient in found.items():
            if name not in SUMMED:
                wrong.append(check_values(f"d{name}", gradient[self.places], exact[name], LEAST_PRODUCER_DB))
            elif whole:
                total = gradient.double().reshape(-1, exact[name].numel()).sum(0)
                wrong.append(check_values(f"d{name}", total, exact[name].reshape(-1), LEAST_SUM_DB))
        return check_of(wrong)


@dataclass(frozen=True, slots=True)
class Compiled:
    """An interaction's own operations under torch.compile; arguments are the inputs, then gradients of the results."""

    compute: Callable[..., tuple[Tensor, ...]]
    count: int  # of the inputs

    @classmethod
    def of(cls, made: Interaction) -> Compiled:
        """Compile on the first call. Resets dynamo, which limits the number of recompilations."""
        torch._dynamo.reset()
        names, compute = tuple(made.inputs), made.compute

        def computed(*inputs: Tensor) -> tuple[Tensor, ...]:
            return compute(dict(zip(names, inputs, strict=True)))

        return cls(torch.compile(computed, fullgraph=True, dynamic=False), len(names))

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The results; autograd saves what the gradients need."""
        return self.compute(*self._leaves(arguments))

    def step(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the inputs, in their order."""
        leaves = self._leaves(arguments)
        return torch.autograd.grad(self.compute(*leaves), leaves, arguments[self.count :])

    def _leaves(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        return [value.detach().requires_grad_() for value in arguments[: self.count]]


def _given(part: Part, made: Interaction) -> dict[str, Tensor]:
    """Arguments of rendered kernels by parameter name."""
    inputs, gradients = made.inputs, made.gradients
    match form_of(part.work, part.around):
        case FmForm() as form:
            names = ["dproducts", *(["dcompressed"] if form.sums else []), *(["passed"] if form.passing else [])]
            return {**inputs, **dict(zip(names, gradients, strict=True))}
        case ConcatNormForm() as form:
            parts = [value for name, value in inputs.items() if name.startswith("part_")]
            rows = torch.cat(parts, 1).float()
            if form.residual:
                rows = rows + inputs["residual"].float()
            rows = rows.reshape(-1, part.columns)
            mean = rows.mean(1) if form.norm == "layer_norm" else rows.new_zeros(rows.shape[0])
            rstd = torch.rsqrt((rows - mean[:, None]).square().mean(1) + EPS)
            return {**inputs, "grad": gradients[0], "mean": mean, "rstd": rstd}
        case DotForm():
            return {**inputs, "dproducts": gradients[0]}


def _by_input(spec: AnySpec, found: Any) -> dict[str, Tensor]:
    """A backward kernel's results by the names of the inputs."""
    named = zip(spec.results, results_of(found), strict=True)
    joined = isinstance(spec, ConcatNormBackward)  # whose dx is the gradient of all parts
    return {"joined" if name == "dx" and joined else name.removeprefix("d"): value for name, value in named}


def _mixed(passing: bool, given: Named) -> tuple[Tensor, ...]:
    x = given["x"]
    products = torch.matmul(x, torch.matmul(x.transpose(1, 2), given["rank"]))
    sums = (torch.matmul(given["compress"], x),) if "compress" in given else ()
    return (products, *sums, *((x.clone(),) if passing else ()))


def _paired(given: Named) -> tuple[Tensor, ...]:
    return (torch.matmul(given["x"], given["x"].transpose(1, 2)),)


def _joined(norm: str, given: Named) -> tuple[Tensor, ...]:
    parts = [value for name, value in given.items() if name.startswith("part_")]
    rows = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    if "residual" in given:
        rows = rows + given["residual"]
    weight, bias = given.get("weight"), given.get("bias")
    if norm == "layer_norm":
        return (F.layer_norm(rows, rows.shape[-1:], weight, bias, EPS),)
    normed = F.rms_norm(rows, rows.shape[-1:], weight, EPS)
    return (normed if bias is None else normed + bias,)
