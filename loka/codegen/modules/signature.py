"""The signature of a traced forward, and the check that its arguments are as planned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.layout import call
from loka.codegen.modules import statement_text
from loka.errors import LokaError
from loka.graph.expression import Ref
from loka.graph.guards import negated
from loka.graph.ir import ForwardIR
from loka.graph.patterns.region import NORMS
from loka.graph.sites.flow import ACTIVATIONS
from loka.plan.plan import PlannedBinding
from loka.templating.wrap import WIDTH

# For annotations: torch operations that return one tensor, and those that do if one operand is a tensor.
_ONE_TENSOR = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "einsum", "softmax", "cat", "stack"} | ACTIVATIONS | NORMS
)
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "neg", "clone", "contiguous"} | {"reshape", "view", "flatten", "permute"}
)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument; without a name, the mark "/" or "*" between arguments."""

    name: str
    default: str | None  # a Python expression that passed `statement_text.checked`
    mark: str = ""  # "*" or "**" before the name


def parse_argument(text: str) -> Argument:
    """Parse a printed argument: "x", "mask=None", "*inputs", "/". Raises LokaError."""
    if text in ("/", "*"):
        return Argument("", None, text)
    match = re.fullmatch(r"(\*{0,2})([^\W\d]\w*)\s*(?::[^=]*)?(?:=\s*(.+))?", text.strip())
    if match is None or not match[2].isidentifier():
        raise LokaError(f"cannot render the argument {text!r} of a forward. This is a fault in LoKA: please report it.")
    return Argument(match[2], None if match[3] is None else statement_text.checked(match[3]), match[1])


def forward_header(forward: ForwardIR, arguments: Sequence[Argument]) -> str:
    """`def forward(self, x: Tensor, mask: Any = None) -> Tensor:`; Any unless certainly a tensor."""
    tensors = _tensors(forward)
    items = ["self"]
    for argument in arguments:
        if not argument.name:
            items.append(argument.mark)
            continue
        kind = "Tensor" if argument.name in tensors and argument.default is None and not argument.mark else "Any"
        default = "" if argument.default is None else f" = {argument.default}"
        items.append(f"{argument.mark}{argument.name}: {kind}{default}")
    made = forward.result
    is_tensor = isinstance(made, Ref) and made.text in tensors
    # The module's own forward, which is called for other arguments, returns Any.
    result = "Tensor" if is_tensor and not forward.guards else "Any"
    return f"def {call('forward', items)} -> {result}:"


def _tensors(forward: ForwardIR) -> set[str]:
    """Locals that are certainly one tensor: results of such operations, and inputs of GEMMs."""
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
    """Names of the arguments of all traced forwards, which imports of modules must not use."""
    forwards = [binding.forward for binding in bindings if binding.forward is not None]
    return {parse_argument(text).name for forward in forwards for text in forward.arguments} - {""}


def own_forward_lines(guards: Sequence[str], arguments: Sequence[Argument], indent: int) -> list[str]:
    """`if mask is not None: return super().forward(x, mask)`; no lines without guards. Raises LokaError."""
    if not guards:
        return []
    names = [argument.name for argument in arguments if argument.name]
    checks = [statement_text.checked(negated(guard), [*names, "self"]) for guard in guards]
    margin = " " * indent
    condition = [f"{margin}if {' or '.join(checks)}:"]
    if len(condition[0]) > WIDTH:
        condition = [f"{margin}if (", *_one_a_line(checks, f"{margin}    "), f"{margin}):"]
    product = call("super().forward", _passed(arguments))
    said = f"{margin}# Not as planned: the module's own forward."
    return [said, *condition, f"{margin}    return {product}"]


def _one_a_line(checks: Sequence[str], margin: str) -> list[str]:
    return [f"{margin}{'or ' if number else ''}{check}" for number, check in enumerate(checks)]


def _passed(arguments: Sequence[Argument]) -> list[str]:
    """The arguments as they are passed on; those after "*" by name."""
    passed, by_name = [], False
    for argument in arguments:
        if argument.name:
            named = f"{argument.name}=" if by_name and not argument.mark else argument.mark
            passed.append(named + argument.name)
        by_name = by_name or argument.mark == "*"
    return passed
