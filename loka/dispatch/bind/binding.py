"""What a generated package says about one of its classes: which modules become it, and what must hold for that."""

from __future__ import annotations

from dataclasses import dataclass

from loka.dispatch.bind.bound import Bound
from loka.graph.reads import Reads
from loka.kernels.gemm.scaled_mm import KERNEL


@dataclass(frozen=True, slots=True)
class Binding:
    """One generated class and the modules that it is for: same type, same shapes, same recipes."""

    train: type[Bound]
    infer: type[Bound] | None  # None where nothing of these modules runs in FP8 at inference
    replaces: str  # "torch.nn.modules.linear.Linear", the type of the modules
    source_hash: str  # of the forwards that were traced; "" for a plain nn.Linear
    inlined: tuple[str, ...]  # children, relative to each module, whose forward is part of the generated one
    modules: tuple[str, ...]  # qualified names; "" is the model itself
    sites: tuple[tuple[str, ...], ...]  # for each module, the names of its sites
    gemms: tuple[tuple[str, ...], ...]  # for each of a module's sites, the GEMMs that run in FP8: ("fprop", "wgrad")
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # parameters, relative to each module, and their shapes
    # For each of a module's sites and each of its `gemms`, the kernels that it may run on; () where all are
    # torch.scaled_mm.
    kernels: tuple[tuple[tuple[str, ...], ...], ...] = ()
    # What a traced forward has built in; packages that LoKA wrote before it recorded this are held to `source_hash`,
    # `inlined` and `shapes` alone.
    reads: tuple[Reads, ...] = ()  # of the modules around what it calls
    called: tuple[str, ...] = ()  # children, relative to each module, that it calls: they run as they are
    constants: tuple[tuple[str, str], ...] = ()  # global variables and the like, each with its value as text

    def generated(self, mode: str) -> type[Bound] | None:
        """The class for mode "train" or "infer"; None where the modules stay as they are."""
        return self.train if mode == "train" else self.infer

    def in_mode(self, mode: str) -> tuple[dict[str, tuple[str, ...]], ...]:
        """For each of a module's sites, the GEMMs that run in FP8 in this mode, each with its planned kernels."""
        planned = self.kernels or tuple(((KERNEL,),) * len(gemms) for gemms in self.gemms)
        return tuple(
            {gemm: names for gemm, names in zip(*site, strict=True) if mode == "train" or gemm == "fprop"}
            for site in zip(self.gemms, planned, strict=True)
        )

    def planned_kernels(self, mode: str) -> tuple[tuple[str, ...], ...]:
        """The kernels of each of a module's sites, each once."""
        return tuple(
            tuple(dict.fromkeys(name for names in site.values() for name in names)) for site in self.in_mode(mode)
        )
