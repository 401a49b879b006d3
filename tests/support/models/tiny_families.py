"""The families of the zoo, tiny: a factory and example inputs of each, as policies name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loka.zoo.autoint import AutoInt, AutoIntSizes
from loka.zoo.dhen import DHEN, DHENSizes
from loka.zoo.din import DIN, DINSizes
from loka.zoo.final_mlp import FinalMLP, FinalMLPSizes
from loka.zoo.hstu import HSTURanker, HSTUSizes
from loka.zoo.interformer import InterFormer, InterFormerSizes
from loka.zoo.masknet import MaskNet, MaskNetSizes
from loka.zoo.multi_task import MultiTask, MultiTaskSizes
from loka.zoo.onetrans import OneTrans, OneTransSizes
from loka.zoo.rankmixer import RankMixer, RankMixerSizes


def _inputs(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    """A function of the batch size, of a tensor (batch, *shape) for each shape."""
    return lambda batch: tuple(torch.randn(batch, *shape) for shape in shapes)


mmoe = partial(
    MultiTask, MultiTaskSizes(32, 2, shared=3, own=0, levels=1, expert=(32, 16), tower=(16,), batch_norm=True)
)
ple = partial(
    MultiTask, MultiTaskSizes(32, 2, shared=2, own=1, levels=2, expert=(32, 16), tower=(16,), batch_norm=False)
)
mmoe_inputs = ple_inputs = _inputs((32,))

rankmixer = partial(RankMixer, RankMixerSizes(tokens=4, features=16, dim=32, hidden=64, layers=1, over=(16,)))
rankmixer_inputs = _inputs((4, 16))

hstu = partial(HSTURanker, HSTUSizes(length=6, dim=32, heads=2, layers=2))
hstu_inputs = _inputs((6, 32))

interformer = partial(
    InterFormer,
    InterFormerSizes(features=4, length=6, dim=16, heads=2, summary=2, recent=2, hidden=32, layers=1, over=(16,)),
)
interformer_inputs = _inputs((4, 16), (6, 16))

onetrans = partial(OneTrans, OneTransSizes(behaviours=5, features=2, dim=32, heads=2, hidden=64, layers=1, over=(16,)))
onetrans_inputs = _inputs((7, 32))

masknet = partial(MaskNet, MaskNetSizes(4, 16, aggregation=64, block=32, blocks=2, parallel=True, over=(16,)))
masknet_serial = partial(MaskNet, MaskNetSizes(4, 16, aggregation=64, block=32, blocks=2, parallel=False, over=(16,)))
masknet_inputs = masknet_serial_inputs = _inputs((4, 16))

autoint = partial(AutoInt, AutoIntSizes(embeddings=5, dim=16, attention=32, heads=2, layers=1, over=(32,)))
autoint_inputs = _inputs((5, 16))

final_mlp = partial(FinalMLP, FinalMLPSizes(4, 16, gate=32, first=(64, 32), second=(32,), heads=2))
final_mlp_inputs = _inputs((4, 16))

din = partial(DIN, DINSizes(length=5, dim=16, features=3, attention=(32, 16), over=(32,)))
din_inputs = _inputs((3, 16), (5, 16), (16,), (5,))

dhen = partial(DHEN, DHENSizes(embeddings=4, dim=16, layers=1, rank=16, hidden=32, over=(32,)))
dhen_inputs = _inputs((4, 16))
