"""Casts of a forward that tell: without them, something would have another dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from loka.graph.equivalence import NormsInFloat32
from loka.graph.expression import Arg, Call, Constant, Ref, RefKind, local, locals_in, mapped, method
from loka.graph.ir import GEMMS, CannotTraceError, ForwardIR, Statement
from loka.graph.sites.flow import ACTIVATIONS
from loka.graph.source import has_hooks
from loka.graph.trace.examples import Examples
from loka.graph.trace.observed_shapes import observed_values
from loka.graph.trace.printer import attribute, variable

CASTS = frozenset({"to", "type_as", "float", "double", "half", "bfloat16"})
_OWN_DTYPE = frozenset({"layer_norm"})  # under autocast float32, whatever it reads
_PAIRS = frozenset({"add", "sub", "mul", "div", "truediv", "addcmul", "cat", "concat", "concatenate", "stack"})
_KEEPING = frozenset(
    {
        *(*ACTIVATIONS, "contiguous", "clone"),
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "mT", "T", "squeeze", "unsqueeze"),
    }
)  # of the dtype that they read


def telling_casts(forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module]) -> frozenset[str]:
    """The targets of casts without which something would have another dtype, with or without autocast to bfloat16.

    Moves to a device that the forward names are among them: where examples run, they do nothing.

    A GEMM and a norm compute in a dtype of their own, and in a sum or a product the wider dtype wins. The forward must
    have passed the equivalence check; `copied` makes a copy of the owner.
    """
    casts = {step.target: step for step in forward.statements if step.op in CASTS and step.operands}
    names = [step.target for step in forward.statements if step.target != "_"] if casts else []
    telling = {step.target for step in forward.statements if _moves(step)}
    linears = _calls_of_linears(copied()) if casts else frozenset()
    for autocast in (False, True) if casts else ():
        try:
            for values in observed_values(forward, names, examples, copied, autocast):
                tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
                dtypes = {name: each.dtype for name, each in tensors.items()}
                telling.update(_Call(forward, casts, dtypes, linears).telling())
        except (RuntimeError, TypeError, ValueError):
            if not autocast:
                raise
            # As the module itself does: the equivalence check has compared the errors.
    return frozenset(telling)


def with_wide_results(
    forward: ForwardIR,
    traced: ForwardIR,
    examples: Examples,
    copied: Callable[[], nn.Module],
    parameters: Mapping[torch.dtype, str],
) -> ForwardIR:
    """The canonical form of a traced forward whose results have the same dtypes under autocast to bfloat16.

    `x @ weight + bias` has the dtype of the bias there, and a linear, in which both are one, does not: such a result is
    cast. `parameters` has the expression of one Parameter of each dtype. A call that raises in one form is left out.
    """
    names = sorted({*locals_in(forward.result)} & {step.target for step in forward.statements})
    dtypes: list[dict[str, torch.dtype]] = []
    for each in (traced, forward):
        try:
            with NormsInFloat32():
                values = next(observed_values(each, names, examples, copied, autocast=True))
        except (RuntimeError, TypeError, ValueError):
            return forward
        dtypes.append({name: x.dtype for name in names if isinstance(x := values.get(name), torch.Tensor)})
    statements, wider = list(forward.statements), dict[str, str]()
    taken = {*names, *(step.target for step in (*traced.statements, *statements))}
    for name, dtype in dtypes[0].items():
        now = dtypes[1].get(name, dtype)
        if now == dtype or torch.promote_types(now, dtype) != dtype or dtype not in parameters:
            continue
        wide = variable(f"{name}_wide", taken)
        made, of = local(name), Ref(RefKind.ATTRIBUTE, parameters[dtype])
        both = Call("torch.promote_types", (Call("getattr", (made, "dtype")), Call("getattr", (of, "dtype"))))
        statements.append(Statement(wide, "to", method(made, "to", both)))
        wider[name] = wide
    result = mapped(forward.result, lambda ref: local(wider[ref.text]) if ref.text in wider else ref)
    return replace(forward, statements=tuple(statements), result=result)


def _moves(step: Statement) -> bool:
    value = step.value
    if step.op != "to" or not isinstance(value, Call):
        return step.op in ("cpu", "cuda")
    return any(map(_is_device, value.args)) or any(name == "device" or _is_device(each) for name, each in value.kwargs)


def _is_device(value: Arg) -> bool:
    if isinstance(value, Call):
        return value.target == "getattr" and value.args[1:] == ("device",)
    return isinstance(value, str) or (isinstance(value, Constant) and value.text.startswith("torch.device("))


def _calls_of_linears(owner: nn.Module) -> frozenset[str]:
    """The targets of the calls of torch's own linears."""
    found = []
    for name, child in owner.named_modules():
        if name and type(child) is nn.Linear and not has_hooks(child):
            with suppress(CannotTraceError):
                found.append(attribute(owner, name))
    return frozenset(found)


class _Call:
    """The dtypes of one call; `linears` are targets of calls of linears, which compute in a dtype of their own."""

    def __init__(
        self,
        forward: ForwardIR,
        casts: Mapping[str, Statement],
        dtypes: Mapping[str, torch.dtype],
        linears: frozenset[str],
    ) -> None:
        self._casts, self._dtypes, self._linears = casts, dict(dtypes), linears
        self._made = {step.target: step for step in forward.statements}
        self._returned = {*locals_in(forward.result)} & dtypes.keys()
        self._readers: dict[str, list[Statement]] = defaultdict(list)
        for step in forward.statements:
            for name in {ref.text for ref in step.operands if ref.kind is RefKind.LOCAL}:
                self._readers[name].append(step)

    def telling(self) -> Iterator[str]:
        """The casts that tell. One that does not is left out, which the next may make up for."""
        for name, step in self._casts.items():
            source = self._dtypes.get(step.operands[0].text)
            if source is None or self._is_of_bias(step):
                continue
            if self._tells(name, source) or (step.operands[0].text not in self._made and self._feeds_a_gemm(name)):
                yield name
            else:
                self._dtypes[name] = source

    def _feeds_a_gemm(self, name: str) -> bool:
        """True if a GEMM reads a tensor, or a view of it. The cast of an argument may make that call possible."""
        for step in self._readers[name]:
            if step.op in GEMMS or self._is_linear(step):
                return True
            if (step.op in _KEEPING or step.target in self._casts) and self._feeds_a_gemm(step.target):
                return True
        return False

    def _is_linear(self, step: Statement) -> bool:
        return isinstance(step.value, Call) and step.value.target in self._linears

    def _is_of_bias(self, step: Statement) -> bool:
        """True for `product += bias`, a sum in the dtype of the product: so is a product with its bias."""
        total = self._made.get(step.operands[0].text)
        if step.op != "type_as" or total is None or total.op != "add" or len(step.operands) != 2:
            return False
        product = self._made.get(step.operands[1].text)
        kinds = {ref.kind for ref in total.operands}
        of_product = step.operands[1] in total.operands and product is not None and product.op in GEMMS
        return of_product and kinds == {RefKind.LOCAL, RefKind.ATTRIBUTE}

    def _tells(self, name: str, dtype: torch.dtype) -> bool:
        """True if this dtype of a tensor, instead of its own, makes a difference."""
        if self._dtypes.get(name) == dtype:
            return False
        return name in self._returned or any(self._reader_tells(step, name, dtype) for step in self._readers[name])

    def _reader_tells(self, step: Statement, name: str, dtype: torch.dtype) -> bool:
        if step.op in GEMMS or step.op in _OWN_DTYPE or step.op == "dtype" or self._is_linear(step):
            return False
        if step.target in self._casts:
            return step.operands[0].text == name and self._tells(step.target, dtype)
        if step.op in _PAIRS:
            for ref in step.operands:
                other = self._dtypes.get(ref.text) if ref.text != name else None
                dtype = dtype if other is None else torch.promote_types(dtype, other)
            return self._tells(step.target, dtype)
        return step.op not in _KEEPING or self._tells(step.target, dtype)
