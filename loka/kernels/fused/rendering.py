"""Renders specs as the two files of a package's kernels: formatted, the same bytes on any machine.

`triton_kernels.py` has the Triton kernels that the package needs, each with flags (`tl.constexpr`) for what it may do,
and imports Triton; `fused.py` has the operators, a table of what each computes and how it is launched, and does not
import it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.errors import InputError, LokaError
from loka.kernels.fused.interaction.concat_norm import (
    ConcatNormBackward,
    ConcatNormConfiguration,
    ConcatNormForward,
    concat_norm_configuration,
    concat_norm_title,
)
from loka.kernels.fused.interaction.dot import DotConfiguration, DotSpec, dot_configuration, dot_title
from loka.kernels.fused.interaction.fm import FmBackward, FmConfiguration, FmForward, fm_configuration, fm_title
from loka.kernels.fused.interaction.interaction_operators import (
    ConcatNormOperator,
    DotOperator,
    FmOperator,
)
from loka.kernels.fused.matrix_kernels import (
    CastTranspose,
    Products,
    Reduce,
    RequantizeTranspose,
    Transpose,
    products_launch,
)
from loka.kernels.fused.matrix_operators import (
    CastTransposeOperator,
    ProductsOperator,
    QuantizeWeightsOperator,
    ReduceOperator,
    RequantizeTransposeOperator,
    TransposeOperator,
)
from loka.kernels.fused.norm.activations import GATES, name_and_constants
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose, TransposeTile, tile_of
from loka.kernels.fused.norm.norm_operator import FusedCastTransposeOperator, NormOperator
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from loka.kernels.fused.norm.norm_values import (
    configuration,
    norm_title,
    rows_launch,
)
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.fused.operators import KernelOperator
from loka.kernels.fused.quantization import ROWWISE, SCALINGS
from loka.kernels.fused.quantize_weights import QuantizeWeights
from loka.templating.templates import KERNELS, Templates
from loka.templating.wrap import WIDTH

KERNELS_FILE = "triton_kernels.py"
OPERATORS_FILE = "fused.py"

AnySpec = (
    Spec
    | FusedCastTranspose
    | FmForward
    | FmBackward
    | ConcatNormForward
    | ConcatNormBackward
    | DotSpec
    | QuantizeWeights
)
AnyConfiguration = RowLaunch | TransposeTile | FmConfiguration | ConcatNormConfiguration | DotConfiguration
T = TypeVar("T")
_KERNELS = KERNELS + "kernels/"
_SUFFIX = ".py.j2"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One operator of a package."""

    specs: tuple[AnySpec, ...]  # that it computes: they differ in the width alone, or in the number of operands
    operator: KernelOperator
    title: str  # what it computes, in a phrase
    maxima_chunk: int  # maxima that a kernel reads at a step
    backend: str  # of Triton: "cuda" or "hip"

    @property
    def function(self) -> str:
        """Its name in `fused`."""
        return self.operator.function


def render(spec: AnySpec, launched: AnyConfiguration | None = None, device: DeviceSpec = DEFAULT) -> Rendered:
    """`render_all` of one spec."""
    return render_all([spec], launched, device)[0]


def render_all(
    specs: Iterable[AnySpec], launched: AnyConfiguration | None = None, device: DeviceSpec = DEFAULT
) -> list[Rendered]:
    """The operators of specs for a device: one for all specs that differ in the width of their rows alone, or in the
    number of operands.

    `launched`, of the specs' own kind, overrides the device's launch. Raises InputError for different kernels of one
    name.
    """
    by_function: dict[str, list[AnySpec]] = {}
    for spec in dict.fromkeys(specs):
        by_function.setdefault(spec.function, []).append(spec)
    return [_rendered(group, launched, device) for group in by_function.values()]


def _rendered(group: Sequence[AnySpec], launched: AnyConfiguration | None, device: DeviceSpec) -> Rendered:
    """The operator of specs of one name."""
    first, launches = group[0], device.launches

    def chosen(usual: T) -> T:
        return launched if isinstance(launched, type(usual)) else usual

    def most(kind: type[Reduce | RequantizeTranspose | Transpose]) -> int:
        return max(spec.count for spec in group if isinstance(spec, kind))

    operator: KernelOperator
    match first:
        case NormForward() | NormBackward():
            by_width = {spec.width: spec for spec in _alike(group)}
            rows = {
                w: rows_launch(by_width[w], chosen(configuration(by_width[w], device)), device)
                for w in sorted(by_width)
            }
            operator, title = NormOperator(by_width[min(by_width)], rows), norm_title(first)
        case FusedCastTranspose():
            operator = FusedCastTransposeOperator(first, chosen(tile_of(first.spec, device)))
            title = f"{norm_title(first.spec)}, and transposed"
        case CastTranspose():
            operator = CastTransposeOperator(first, launches.cast_transpose)
            title = f"To {first.how.description}, and transposed"
        case Products():
            operator = ProductsOperator(first, products_launch(first, device))
            title = ("Products and sums" if first.plain else "Products") if first.adds else "Sum of matrices"
        case Reduce():
            operator, title = ReduceOperator(most(Reduce), launches.reduce), "Column sums of matrices"
        case RequantizeTranspose():
            operator = RequantizeTransposeOperator(most(RequantizeTranspose), launches.transpose)
            title = "Transposed copies of e4m3 matrices, one scale each"
        case Transpose():
            operator, title = TransposeOperator(most(Transpose), launches.transpose), "Transposed copies of matrices"
        case QuantizeWeights():
            weights = [spec for spec in group if isinstance(spec, QuantizeWeights)]
            columns = dict(sorted({(q.width, q.columns) for spec in weights for q in spec.quantizers}))
            if len(columns) != len({(q.width, q.columns) for spec in weights for q in spec.quantizers}):
                raise _two_kernels(first.function)
            count = max(len(spec.quantizers) for spec in weights)
            operator = QuantizeWeightsOperator(columns, count, launches.weights)
            title = f"Weights to {ROWWISE.description}"
        case FmForward() | FmBackward():
            operator, title = FmOperator(first, chosen(fm_configuration(first, device))), fm_title(first)
        case ConcatNormForward() | ConcatNormBackward():
            operator = ConcatNormOperator(first, chosen(concat_norm_configuration(first, device)))
            title = concat_norm_title(first)
        case DotSpec():
            operator, title = DotOperator(first, chosen(dot_configuration(first, device))), dot_title(first)
    return Rendered(tuple(group), operator, title, launches.maxima_chunk, device.triton[0])


def _alike(group: Sequence[AnySpec]) -> list[NormForward | NormBackward]:
    """Specs of rows that differ in the width alone, without what they do not read; raises InputError where they do."""
    specs = [_as_read(spec) for spec in group if isinstance(spec, NormForward | NormBackward)]
    if len({replace(spec, width=specs[0].width) for spec in specs}) > 1:
        raise _two_kernels(specs[0].function)
    return specs


def _as_read(spec: NormForward | NormBackward) -> NormForward | NormBackward:
    """The spec with the usual values where none is read: an eps without a norm, or one that is in its statistics."""
    forward = isinstance(spec, NormForward)
    unread = spec.norm is None or not (forward or spec.traits.eps_in_backward)
    kept = replace(spec, eps=1e-5) if unread else spec
    return replace(kept, save=False) if isinstance(kept, NormForward) and not kept.traits.saved else kept


def _two_kernels(function: str) -> InputError:
    return InputError(f"two different kernels are called {function}; render all widths together, in one configuration")


def render_files(kernels: Sequence[Rendered], templates: Templates, subject: str, stamp: str = "") -> dict[str, str]:
    """The two files of a package, by name. Their docstrings name the `subject`; a `stamp` becomes STAMP.

    Each kernel is written once, operators are sorted by name. Raises InputError for two different ones of one name.
    """
    by_function = {kernel.function: kernel for kernel in kernels}
    for kernel in kernels:
        if by_function[kernel.function] != kernel:
            raise _two_kernels(kernel.function)
    ordered = [by_function[function] for function in sorted(by_function)]
    texts = kernel_texts(ordered, templates)
    entries = [
        {"function": it.function, "title": it.title, "signature": _signature(it), "source": source_of(it.operator)}
        for it in ordered
    ]
    digest = hashlib.sha256("".join([*texts, *map(str, entries)]).encode()).hexdigest()[:8]
    common = {"subject": subject, "stamp": stamp}
    capitals = any(re.search(r"[A-Z]: tl\.constexpr", text) for text in texts)
    kernels_of_package = {"texts": texts, "capitals": capitals}
    table = {"entries": entries, "digest": digest, "imports": _imports(ordered)}
    return {
        KERNELS_FILE: templates.render(f"{KERNELS}{KERNELS_FILE}.j2", {**common, **kernels_of_package}),
        OPERATORS_FILE: templates.render(f"{KERNELS}{OPERATORS_FILE}.j2", {**common, **table}),
    }


def kernel_texts(kernels: Sequence[Rendered], templates: Templates) -> list[str]:
    """The texts of the device functions and of the kernels that operators launch, with the branches that they need."""
    specs = [spec.spec if isinstance(spec, FusedCastTranspose) else spec for it in kernels for spec in it.specs]
    norms = [spec for spec in specs if isinstance(spec, NormForward | NormBackward)]
    activations = sorted({spec.activation for spec in norms if spec.activation is not None})
    scalings = {spec.how.scaling if spec.quantize else None for spec in norms}
    scalings |= {spec.how.scaling for spec in specs if isinstance(spec, CastTranspose)}
    context: dict[str, Any] = {
        "norms": [norm for norm in NORMS if norm in {spec.norm for spec in norms}],
        "activations": {each: name_and_constants(each) for each in activations},
        "gates": [name for name in GATES if name in activations],
        "scalings": [scaling for scaling in (None, *SCALINGS) if scaling in scalings],
        "backend": next((it.backend for it in kernels), ""),
        "maxima_chunk": max((it.maxima_chunk for it in kernels), default=0),
    }
    counts: dict[str, int] = {}
    for it in kernels:
        operands = getattr(it.operator, "count", 0)  # of a launch, where a kernel numbers them
        counts[it.operator.kernel] = max(counts.get(it.operator.kernel, 0), operands)
    texts = [
        templates.render(f"{_KERNELS}{kernel}{_SUFFIX}", {**context, "count": count})
        for kernel, count in sorted(counts.items())
    ]
    functions = device_functions(templates, context)
    for norm in context["norms"]:
        if not any(f'NORM == "{norm}"' in text for text in functions.values()):
            raise LokaError(f"the kernels have no branch for the norm {norm!r}: {KERNELS}device/norms.py.j2 needs one")
    return [*used_functions(texts, functions), *texts]


def _signature(it: Rendered) -> str:
    """Names of arguments and results: "x, weight -> values, scale, scale_max"."""
    if "Tensor[]" in it.operator.schema:
        return it.operator.schema.strip("()").replace(") ->", " ->")
    parameters = (*it.specs[0].parameters, *(("dtype",) if "ScalarType" in it.operator.schema else ()))
    return f"{', '.join(parameters)} -> {', '.join(it.specs[0].results)}"


def source_of(value: object) -> str:
    """A value as Python text: dataclasses by the fields that are not as usual, with names."""
    if is_dataclass(value) and not isinstance(value, type):
        given = []
        for field in fields(value):
            found = getattr(value, field.name)
            if field.default is MISSING or found != field.default:
                given.append((field.name, source_of(found)))
        # An operator is what is computed, and how it is launched.
        named = not isinstance(value, KernelOperator)
        return f"{type(value).__name__}({', '.join(f'{name}={text}' if named else text for name, text in given)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{source_of(key)}: {source_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(source_of, value))}{',' if len(value) == 1 else ''})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _imports(kernels: Iterable[Rendered]) -> list[str]:
    """Imports of the classes that the operators are made of."""
    modules: dict[str, set[str]] = {"loka.kernels.fused": {"operators"}}

    def collect(value: object) -> None:
        if is_dataclass(value) or isinstance(value, Enum):
            modules.setdefault(type(value).__module__, set()).add(type(value).__name__)
        if is_dataclass(value):
            for field in fields(value):
                found = getattr(value, field.name)
                if field.default is MISSING or found != field.default:
                    collect(found)
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)

    for it in kernels:
        collect(it.operator)
    return [_import(module, sorted(modules[module])) for module in sorted(modules)]


def _import(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else "\n".join([f"from {module} import (", *(f"    {n}," for n in names), ")"])


_DEVICE_FUNCTIONS = [f"{KERNELS}device/{part}{_SUFFIX}" for part in ("activations", "norms", "rows", "matrices")]
_CALL = re.compile(r"(?<![\w.])\w+(?=\()")
_NAME = re.compile(r"^def (\w+)\(", re.MULTILINE)


def device_functions(templates: Templates, context: Mapping[str, object]) -> dict[str, str]:
    """The text of each function, by name, in the order of the templates."""
    rendered = "\n\n\n".join(templates.render(template, context) for template in _DEVICE_FUNCTIONS)
    texts = [text.strip("\n") + "\n" for text in rendered.split("\n\n\n")]
    return {match[1]: text for text in texts if (match := _NAME.search(text)) is not None}


def used_functions(texts: Iterable[str], functions: dict[str, str]) -> tuple[str, ...]:
    """The texts of the functions that these kernels call, and of those that these call in turn."""
    used, texts = set[str](), list(texts)
    while texts:
        called = set(_CALL.findall("\n".join(texts))) & functions.keys() - used
        used |= called
        texts = [functions[name] for name in called]
    return tuple(text for name, text in functions.items() if name in used)
