"""The signature of a traced forward: its arguments, their defaults, and what is known to be a tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.modules import statement_text
from loka.codegen.text.layout import Code, call, lay_out
from loka.errors import LokaError
from loka.graph.ir import ForwardIR
from loka.graph.patterns.region import NORMS
from loka.plan.plan import PlannedBinding

# Operations of torch that give exactly one tensor, and those that do where one operand is a tensor: for annotations.
_ONE_TENSOR = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "einsum", "silu", "relu", "sigmoid", "tanh", "gelu", "hardswish"}
    | {"softmax", "cat", "stack"}
    | NORMS
)
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "neg", "clone", "contiguous"} | {"reshape", "view", "flatten", "permute"}
)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument, or, without a name, the mark "/" or "*" between arguments."""

    name: str
    default: str | None  # Python that `straight.checked` let pass
    mark: str = ""  # "*" or "**" before the name


def parse_argument(text: str) -> Argument:
    """One printed argument: "x", "mask=None", "*inputs", "/"."""
    if text in ("/", "*"):
        return Argument("", None, text)
    match = re.fullmatch(r"(\*{0,2})([^\W\d]\w*)\s*(?::[^=]*)?(?:=\s*(.+))?", text.strip())
    if match is None or not match[2].isidentifier():
        raise LokaError(f"cannot render the argument {text!r} of a forward. This is a fault in LoKA: please report it.")
    return Argument(match[2], None if match[3] is None else statement_text.checked(match[3]).flat(), match[1])


def forward_header(forward: ForwardIR, arguments: Sequence[Argument]) -> str:
    """`def forward(self, x: Tensor, mask: Any = None) -> Tensor:`; what is not known to be a tensor is Any."""
    tensors = _tensors(forward)
    items = [Code("self")]
    for argument in arguments:
        if not argument.name:
            items.append(Code(argument.mark))
            continue
        kind = "Tensor" if argument.name in tensors and argument.default is None and not argument.mark else "Any"
        default = "" if argument.default is None else f" = {argument.default}"
        items.append(Code(f"{argument.mark}{argument.name}: {kind}{default}"))
    result = "Tensor" if forward.result in tensors else "Any"
    return lay_out("def ", call("forward", items), f" -> {result}:", 4).removeprefix("    ")


def _tensors(forward: ForwardIR) -> set[str]:
    """The locals that are one tensor for certain: what such operations give, and what a GEMM takes as its input."""
    tensors: set[str] = set()
    for statement in forward.statements:
        read = [ref.text for ref in statement.operands]
        gives = statement.call is not None or statement.op in _ONE_TENSOR
        if gives or (statement.op in _ELEMENTWISE and any(name in tensors for name in read[:2])):
            tensors.add(statement.target)
        else:
            tensors.discard(statement.target)
        if statement.call is not None or statement.op in ("layer_norm", "linear", "matmul"):
            tensors.update(read[:1])
    return tensors


def outside_names(bindings: Sequence[PlannedBinding]) -> set[str]:
    """The arguments of all traced forwards: a module import must not carry such a name."""
    forwards = [binding.forward for binding in bindings if binding.forward is not None]
    return {parse_argument(text).name for forward in forwards for text in forward.arguments} - {""}
