"""Exported programs that run without LoKA: `loka.portable`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code
from loka.kernels import call_counters
from loka.kernels.fused import operators
from loka.kernels.gemm import gemm_operator
from loka.numerics.enums import GEMM_NAMESPACE

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_OURS = (GEMM_NAMESPACE, operators.NAMESPACE, call_counters.NAMESPACE)


def portable(program: ExportedProgram) -> ExportedProgram:
    """An exported program of a patched model without LoKA's operators, so that it runs where LoKA is not installed.

        patch = ranker.apply(model, mode="infer")
        with torch.no_grad():
            program = loka.portable(torch.export.export(model, inputs))
        torch.export.save(program, "ranker.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path="ranker-aoti.pt2")

    On the CPU each operator becomes the torch operations of its reference, with the same results to the bit. Of a model
    on a GPU, kernels become launches of Triton, and GEMMs torch's own: such a program has to be compiled by AOTInductor
    in the process that made it, as torch saves no launches. Runs are not counted.

    Args:
        program: What torch.export made of a model, bound with mode="infer"; with any `dynamic_shapes`.

    Raises:
        BindError: An operator has no such form: a GPU's kernel of another library than torch, static scales, which
            count what they do not hold, or kernels by the number of rows where that is dynamic.
    """
    counter = call_counters.new_counters(1)  # tracing a reference counts, but not for the model
    rules = {operator: _rule(operator, counter) for operator in _our_operators(program)}
    rules[torch.ops.loka_counters.increment.default] = lambda *arguments: None
    made: ExportedProgram = program.run_decompositions(rules, decompose_custom_triton_ops=True)
    call_counters.reset((counter,))
    if left := sorted({str(operator) for operator in _our_operators(made)}):
        raise BindError(
            f"portable: {', '.join(left)} can only run with LoKA here: bind a package whose plan has other kernels "
            "(kernel: torch.scaled_mm) and scales (range: dynamic), or deploy with LoKA installed",
            Code.EXPORT,
        )
    return made


def _our_operators(program: ExportedProgram) -> set[torch._ops.OpOverload]:
    return {each for node in _calls(program) for each in _operators_in(node) if each.namespace in _OURS}


def _calls(program: ExportedProgram) -> Iterator[torch.fx.Node]:
    """Calls of functions in a program and its subgraphs."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _operators_in(node: torch.fx.Node) -> Iterator[torch._ops.OpOverload]:
    """The operator that a node calls, and those that it has as arguments, as where an operator changes one in place."""
    for each in (node.target, *node.args, *node.kwargs.values()):
        if isinstance(each, torch._ops.OpOverload):
            yield each


def _rule(operator: torch._ops.OpOverload, counter: int) -> Callable[..., Any]:
    """What is traced instead of an operator; on a GPU, where AOTAutograd does not replace it, the operator itself."""
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("counter_id") if "counter_id" in names else None

    def rule(*arguments: Any, **keywords: Any) -> Any:
        if arguments[0].device.type != "cpu":
            return NotImplemented
        if "table" in names and any(type(size) is not int for size in arguments[0].shape):
            raise BindError(
                "portable: the plan chooses kernels by the number of rows, which dynamic_shapes leave open; export the "
                "model with a fixed batch",
                Code.EXPORT,
            )
        if place is not None:
            arguments = (*arguments[:place], counter, *arguments[place + 1 :])
        return reference(*arguments, **keywords)

    reference = (gemm_operator if operator.namespace == GEMM_NAMESPACE else operators).reference_of(operator)
    return rule
