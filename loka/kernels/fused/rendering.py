"""Renders specs as the text of Triton kernels and their operators: formatted, the same bytes on any machine.

They are two files of a generated package. `triton_kernels.py` has the kernels and the functions that launch them, and
imports Triton; `fused.py` has the operators and does not import it: each allocates its results, runs its reference on
the CPU, and loads `triton_kernels` when it is first called on a GPU.

Kernels of norms and quantizers take the width of their rows as a constant. One operator has all widths of a package: a
kernel for each structure that its template renders, such as masked or one row at a step, and a table of launches.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.cross.cross_kernel import (
    CrossBackward,
    CrossConfiguration,
    cross_backward_values,
    cross_configuration,
)
from loka.kernels.fused.interaction.concat_norm import (
    ConcatNormBackward,
    ConcatNormConfiguration,
    ConcatNormForward,
    concat_norm_configuration,
    concat_norm_values,
)
from loka.kernels.fused.interaction.fm import FmBackward, FmConfiguration, FmForward, fm_configuration, fm_values
from loka.kernels.fused.kernel_values import LARGEST_HELD, KernelValues, WidthLaunch
from loka.kernels.fused.matrix_kernels import (
    CastTranspose,
    Products,
    Reduce,
    RequantizeTranspose,
    Transpose,
    cast_transpose_values,
    products_values,
    reduce_values,
    transpose_values,
)
from loka.kernels.fused.norm.fused_cast_transpose import (
    FusedCastTranspose,
    TransposeTile,
    fused_cast_transpose_values,
    tile_of,
)
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from loka.kernels.fused.norm.norm_values import (
    WideConfiguration,
    configuration,
    norm_shapes,
    norm_values,
    wide_configuration,
    wide_norm_values,
)
from loka.kernels.fused.quantize_weights import (
    QuantizeWeights,
    WeightsConfiguration,
    weights_configuration,
    weights_values,
)
from loka.templating.templates import KERNELS, Templates

KERNELS_FILE = "triton_kernels.py"
OPERATORS_FILE = "fused.py"

AnySpec = (
    Spec
    | FusedCastTranspose
    | FmForward
    | FmBackward
    | ConcatNormForward
    | ConcatNormBackward
    | CrossBackward
    | QuantizeWeights
)
AnyConfiguration = (
    RowLaunch
    | WideConfiguration
    | TransposeTile
    | FmConfiguration
    | ConcatNormConfiguration
    | CrossConfiguration
    | WeightsConfiguration
)

_SUFFIX = ".py.j2"
_UNDIGESTED = "0" * 8  # stands for the digest
_KERNEL_LAYOUT = KERNELS + "kernel" + _SUFFIX
_LAUNCH_LAYOUT = KERNELS + "launch" + _SUFFIX
_OPERATOR_LAYOUT = KERNELS + "operator" + _SUFFIX


@dataclass(frozen=True, slots=True)
class Rendered:
    """One operator as text."""

    function: str  # name in `fused` and in `triton_kernels`
    name: str  # of the operator: the function's with a digest of the text
    text: str  # the Triton kernels and the function that launches them; no imports
    operator: str  # the operator's outputs and reference; no imports
    digest: str  # sha256 of `text`, the device functions that it calls, and `operator` without a digest
    parameters: tuple[str, ...]  # of the operator, in order; a plain forward and `Reduce` take dtypes as well
    results: tuple[str, ...]  # of the operator, in order; a single result is no tuple
    launches: tuple[WidthLaunch, ...]  # by width; none for a kernel that is rendered for one alone


def render(
    spec: AnySpec,
    templates: Templates,
    launched: AnyConfiguration | None = None,
    device: DeviceSpec = DEFAULT,
) -> Rendered:
    """`render_all` of one spec."""
    return render_all([spec], templates, launched, device)[0]


def render_all(
    specs: Iterable[AnySpec],
    templates: Templates,
    launched: AnyConfiguration | None = None,
    device: DeviceSpec = DEFAULT,
) -> list[Rendered]:
    """Renders the operators of specs for a device: one for all specs that differ in the width of their rows alone.

    `launched`, of the specs' own kind, overrides the device's launch. Raises InputError for different kernels of one
    name.
    """
    by_function: dict[str, list[KernelValues]] = {}
    for spec in dict.fromkeys(specs):
        by_function.setdefault(spec.function, []).append(_values(spec, launched, device))
    return [_render(values, templates) for values in by_function.values()]


def _render(group: Sequence[KernelValues], templates: Templates) -> Rendered:
    """Renders the operator of kernels that differ in the width alone."""
    by_width = {values.width: values for values in sorted(group, key=lambda values: values.width or 0)}
    first, function = next(iter(by_width.values())), group[0].spec.function
    template = KERNELS + first.family + _SUFFIX

    def kernel(values: KernelValues, name: str) -> str:
        return templates.render(template, {**values.context(), "layout": _KERNEL_LAYOUT, "kernel": name})

    usual = f"_{function}"
    texts = {width: kernel(values, usual) for width, values in by_width.items()}
    others = [values for values in group if values is not by_width[values.width]]
    if any(kernel(values, usual) != texts[values.width] for values in others):
        raise _two_kernels(function)
    names = _kernel_names(by_width, texts)
    kernels = {
        name: texts[width] if name == usual else kernel(by_width[width], name)
        for width, name in reversed(names.items())
    }
    launches = tuple(_launch(values, names[width]) for width, values in by_width.items() if width is not None)
    context = {**first.context(), "launches": launches}
    if len(launches) > 1 and isinstance(first.spec, NormForward | NormBackward):
        context["shapes"] = norm_shapes(first.spec, several=True)
    launch = templates.render(template, {**context, "layout": _LAUNCH_LAYOUT})
    operator = templates.render(template, {**context, "layout": _OPERATOR_LAYOUT, "digest": _UNDIGESTED})
    text = "\n\n".join([*reversed(kernels.values()), launch])
    called = used_functions([text], device_functions(templates))
    digest = hashlib.sha256("".join((*called, text, operator)).encode()).hexdigest()
    return Rendered(
        function=function,
        name=f"{function}_{digest[:8]}",
        text=text,
        operator=operator.replace(_UNDIGESTED, digest[:8], 1),
        digest=digest,
        parameters=first.spec.parameters,
        results=first.spec.results,
        launches=launches,
    )


def _kernel_names(
    by_width: Mapping[int | None, KernelValues], texts: Mapping[int | None, str]
) -> dict[int | None, str]:
    """The name of each width's kernel: one for each text, which tells what sets it apart where there are several."""
    by_text: dict[str, str] = {}
    for width, values in by_width.items():
        words = values.structure if len(set(texts.values())) > 1 else ()
        name = "_".join(["", values.spec.function, *words])
        taken = name in by_text.values()
        by_text.setdefault(texts[width], f"{name}_{width}" if taken else name)
    return {width: by_text[text] for width, text in texts.items()}


def _launch(values: KernelValues, kernel: str) -> WidthLaunch:
    numbers: Any = values.numbers
    launched: Any = values.launch
    return WidthLaunch(
        width=values.width or 0,
        kernel=kernel,
        constants=tuple(values.constants.values()),
        warps=launched.warps,
        least_rows=numbers["least_rows"],
        most_programs=numbers["most_programs"],
    )


def _two_kernels(function: str) -> InputError:
    return InputError(f"two different kernels are called {function}; render all widths together, in one configuration")


def _values(spec: AnySpec, launched: AnyConfiguration | None, device: DeviceSpec) -> KernelValues:
    """Template values of a spec."""
    match spec:
        case NormForward() | NormBackward():
            if spec.width > LARGEST_HELD:
                wide = launched if isinstance(launched, WideConfiguration) else wide_configuration(spec, device)
                return wide_norm_values(spec, wide, device)
            chosen = launched if isinstance(launched, RowLaunch) else configuration(spec, device)
            return norm_values(spec, chosen, device)
        case RequantizeTranspose() | Transpose():
            return transpose_values(spec, device)
        case Reduce():
            return reduce_values(spec, device)
        case Products():
            return products_values(spec, device)
        case FusedCastTranspose():
            whole = launched if isinstance(launched, TransposeTile) else tile_of(spec.spec, device)
            return fused_cast_transpose_values(spec, whole)
        case CastTranspose():
            return cast_transpose_values(spec, device)
        case FmForward() | FmBackward():
            interacting = launched if isinstance(launched, FmConfiguration) else fm_configuration(spec, device)
            return fm_values(spec, interacting)
        case ConcatNormForward() | ConcatNormBackward():
            usual = concat_norm_configuration(spec, device)
            concatenating = launched if isinstance(launched, ConcatNormConfiguration) else usual
            return concat_norm_values(spec, concatenating)
        case CrossBackward():
            crossing = launched if isinstance(launched, CrossConfiguration) else cross_configuration(spec, device)
            return cross_backward_values(spec, crossing)
        case QuantizeWeights():
            launching = launched if isinstance(launched, WeightsConfiguration) else weights_configuration(spec, device)
            return weights_values(spec, launching)


def render_files(kernels: Sequence[Rendered], templates: Templates, subject: str, stamp: str = "") -> dict[str, str]:
    """The two files of a package, by name. Their docstrings name the `subject`; a `stamp` becomes STAMP.

    Each kernel is written once, sorted by function name. Raises InputError for two different kernels of one name.
    """
    by_function = {kernel.function: kernel for kernel in kernels}
    for kernel in kernels:
        if by_function[kernel.function] != kernel:
            raise _two_kernels(kernel.function)
    ordered = [by_function[function] for function in sorted(by_function)]
    called = used_functions([kernel.text for kernel in ordered], device_functions(templates))
    texts = {
        KERNELS_FILE: [*called, *(kernel.text for kernel in ordered)],
        OPERATORS_FILE: [kernel.operator for kernel in ordered],
    }
    return {
        file: templates.render(
            f"{KERNELS}{file}.j2",
            {"texts": texts[file], "subject": subject, "stamp": stamp, **_imports(texts[file])},
        )
        for file in texts
    }


# Modules imported by generated kernels and operators, with their packages.
_IMPORTED = {
    "operators": "loka.kernels.fused",
    "cross_reference": "loka.kernels.fused.cross",
    "concat_norm_reference": "loka.kernels.fused.interaction",
    "fm_reference": "loka.kernels.fused.interaction",
    "norm_reference": "loka.kernels.fused.norm",
}


def _imports(texts: Sequence[str]) -> dict[str, object]:
    """Imports of a file with these texts: packages with their modules, and whether others are needed."""
    packages: dict[str, list[str]] = {}
    for module, package in _IMPORTED.items():
        if any(f"{module}." in text for text in texts):
            packages.setdefault(package, []).append(module)
    imports = [f"from {package} import {', '.join(modules)}" for package, modules in packages.items()]
    return {
        "imports": imports,
        "torch": any(re.search(r"\btorch\.", text) for text in texts),
        "any": any(": Any" in text for text in texts),
        "capitals": any(re.search(r"[A-Z]: tl\.constexpr", text) for text in texts),
    }


_DEVICE_FUNCTIONS = KERNELS + "device_functions.py.j2"
_CALL = re.compile(r"(?<![\w.])\w+(?=\()")
_NAME = re.compile(r"^def (\w+)\(", re.MULTILINE)


@cache
def device_functions(templates: Templates) -> dict[str, str]:
    """The text of each function, by name, in the order of the template."""
    texts = [text.strip("\n") + "\n" for text in templates.render(_DEVICE_FUNCTIONS, {}).split("\n\n\n")]
    return {match[1]: text for text in texts if (match := _NAME.search(text)) is not None}


def used_functions(texts: Iterable[str], functions: dict[str, str]) -> tuple[str, ...]:
    """The texts of the functions that these kernels call, and of those that these call in turn."""
    used, texts = set[str](), list(texts)
    while texts:
        called = set(_CALL.findall("\n".join(texts))) & functions.keys() - used
        used |= called
        texts = [functions[name] for name in called]
    return tuple(text for name, text in functions.items() if name in used)
