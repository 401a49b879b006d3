"""A package as `loka generate` writes it, for the models of `dispatch_models`: written by hand, so that tests need no
code generation. Sizes: every linear is 32 wide, the head 1."""

from __future__ import annotations

import torch
from torch import nn

from loka import dispatch
from loka.graph.fingerprint import fingerprint
from tests.support.models import dispatch_models

from . import kernels, modules

STAMP = "0" * 64
dispatch.check_stamps(__name__, STAMP, kernels.STAMP, modules.STAMP)

LINEAR = "torch.nn.modules.linear.Linear"
ALL = ("fprop", "dgrad", "wgrad")


def linears(*names, shape=(32, 32), gemms=ALL, bias=True, replaces=nn.Linear):
    """A binding of plain linears, or of a class derived from nn.Linear."""
    return dispatch.Binding(
        bound=modules.Linear,
        replaces=f"{replaces.__module__}.{replaces.__qualname__}",
        inlined=(),
        modules=names,
        sites=tuple((name,) for name in names),
        gemms=(gemms,),
        shapes=(("weight", shape), ("bias", shape[:1])) if bias else (("weight", shape),),
    )


def blocks(*names, planned=None):
    """A binding of owners whose forward is generated; `planned`: with the fingerprint of their own."""
    return dispatch.Binding(
        bound=modules.Block,
        replaces="tests.support.models.dispatch_models.Block",
        fingerprint=planned,
        inlined=("up", "up.0"),
        modules=names,
        sites=tuple((f"{name}.up.0", f"{name}.down") for name in names),
        gemms=(ALL, ALL),
        shapes=(("down", (64, 32)), ("up.0.weight", (64, 32)), ("up.0.bias", (64,))),
    )


def around(bound, sites=("",), gemms=(("fprop",),)):
    """A binding of a model that is an nn.Sequential itself."""
    return dispatch.Binding(
        bound=bound,
        infer=False,
        replaces="torch.nn.modules.container.Sequential",
        inlined=(),
        modules=("",),
        sites=(sites,),
        gemms=gemms,
        shapes=(),
    )


def block_fingerprint():
    """That of the owners that `blocks` binds."""
    calls = [[((torch.randn(rows, 32),), {})] for rows in (5, 8)]
    return fingerprint(dispatch_models.Block(), ("up", "up.0"), *calls)


BLOCKS = (blocks("layers.0", "layers.1"), linears("head", shape=(1, 32)))
MLP = (linears("0", "2"), linears("4", shape=(1, 32)))


def apply(model, bindings=MLP, mode="train", target="reference"):
    """Bind this package to a model."""
    return dispatch.apply(model, __name__, bindings, target=target, mode=mode)
