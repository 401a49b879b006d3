"""Declaration of a generated class: the modules it is for, and the conditions they must meet."""

from __future__ import annotations

from dataclasses import dataclass

from loka.dispatch.bind.bound import Bound
from loka.graph.reads import Reads
from loka.graph.script import script_in
from loka.kernels.gemm.scaled_mm import KERNEL


@dataclass(frozen=True, slots=True)
class Binding:
    """A generated class and its modules, which share type, shapes and recipes."""

    train: type[Bound]
    infer: type[Bound] | None  # None: the modules stay unchanged for inference
    replaces: str  # type of the modules: "torch.nn.modules.linear.Linear"
    source_hash: str  # of the traced forwards; "" for a plain nn.Linear
    inlined: tuple[str, ...]  # children, relative to each module, whose forward is part of the generated one
    modules: tuple[str, ...]  # qualified names; "" is the model itself
    sites: tuple[tuple[str, ...], ...]  # names of the sites of each module
    gemms: tuple[tuple[str, ...], ...]  # for each site of a module, its FP8 GEMMs: ("fprop", "wgrad")
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # parameters, relative to each module, and their shapes
    # For each site of a module and each of its `gemms`, the permitted kernels; () if all are torch.scaled_mm.
    kernels: tuple[tuple[tuple[str, ...], ...], ...] = ()
    # Values built into a traced forward. Packages from before these fields are checked only by `source_hash`, `inlined`
    # and `shapes`.
    reads: tuple[Reads, ...] = ()  # of the modules around those it calls
    called: tuple[str, ...] = ()  # children, relative to each module, that it calls unchanged
    constants: tuple[tuple[str, str], ...] = ()  # globals and the like, each with its value as text

    def script(self) -> str:
        """The name under which the plan knows the script that runs, whose classes are those of `__main__`."""
        return script_in((self.replaces, *(read.type for read in self.reads), *(name for name, _ in self.constants)))

    def generated(self, mode: str) -> type[Bound] | None:
        """The class for mode "train" or "infer"; None if the modules stay unchanged."""
        return self.train if mode == "train" else self.infer

    def in_mode(self, mode: str) -> tuple[dict[str, tuple[str, ...]], ...]:
        """For each site of a module: FP8 GEMM in this mode -> planned kernels."""
        planned = self.kernels or tuple(((KERNEL,),) * len(gemms) for gemms in self.gemms)
        return tuple(
            {gemm: names for gemm, names in zip(*site, strict=True) if mode == "train" or gemm == "fprop"}
            for site in zip(self.gemms, planned, strict=True)
        )

    def planned_kernels(self, mode: str) -> tuple[tuple[str, ...], ...]:
        """The distinct planned kernels of each site of a module."""
        return tuple(
            tuple(dict.fromkeys(name for names in site.values() for name in names)) for site in self.in_mode(mode)
        )
