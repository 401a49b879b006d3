"""Reference recommenders and data, named by policies as "loka.zoo:NAME".

| model | factory | inputs | batches | test batches |
|---|---|---|---|---|
| a Wukong on embedded click data | `ranker` | `ranker_inputs` | `ranker_batches` | `ranker_test_batches` |
| a small one | `small_ranker` | `ranker_inputs` | `ranker_batches` | `ranker_test_batches` |
| a small one on MovieTweetings | `movietweetings_ranker` | `movietweetings_inputs` | `movietweetings_batches` | `movietweetings_test_batches` |
| a small DLRM-DCNv2 on embedded click data | `dlrm` | `dlrm_inputs` | `dlrm_batches` | `dlrm_test_batches` |
| the same on MovieTweetings | `movietweetings_dlrm` | `movietweetings_inputs` | `movietweetings_batches` | `movietweetings_test_batches` |
| Wukong's dense part, for speed | `wukong_small`, `wukong_large` | `wukong_small_inputs`, `wukong_large_inputs` | | |
| DCNv2 at MLPerf's sizes, for speed | `dcnv2` | `dcnv2_inputs` | | |

Other families, of production width, are dense parts too: `mmoe`, `ple`, `rankmixer`, `hstu`, `interformer`, `onetrans`,
`masknet`, `autoint`, `final_mlp`, `din` and `dhen`, each with its inputs (`mmoe_inputs` and so on).

The loss of all of them is `click_loss`. Factories draw weights from torch's generator, which the caller seeds.
"""  # noqa: E501  (a table row cannot be broken)

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.zoo import clicks, movietweetings
from loka.zoo.autoint import AUTOINT_SIZES, AutoInt
from loka.zoo.clicks import ClickStream
from loka.zoo.dhen import DHEN, DHEN_SIZES
from loka.zoo.din import DIN, DIN_SIZES
from loka.zoo.dlrm import DLRM, MLPERF, DCNSizes, DCNv2
from loka.zoo.final_mlp import FINAL_MLP_SIZES, FinalMLP
from loka.zoo.hstu import HSTU_SIZES, HSTURanker
from loka.zoo.interformer import INTERFORMER_SIZES, InterFormer
from loka.zoo.masknet import MASKNET_SIZES, MaskNet
from loka.zoo.movietweetings import RatingBatches
from loka.zoo.multi_task import MMOE_SIZES, PLE_SIZES, MultiTask
from loka.zoo.onetrans import ONETRANS_SIZES, OneTrans
from loka.zoo.rankmixer import RANKMIXER_SIZES, RankMixer
from loka.zoo.wukong import LARGE, SMALL, Wukong, WukongRanker, WukongSizes

RANKER = WukongSizes(embeddings=1 + len(clicks.ROWS), dim=128, layers=3, rank=16, hidden=2048)
SMALL_RANKER = WukongSizes(embeddings=1 + len(clicks.ROWS), dim=32, layers=3, rank=8, hidden=256)
MOVIETWEETINGS = WukongSizes(embeddings=1 + len(movietweetings.ROWS), dim=32, layers=2, rank=8, hidden=128)
DLRM_SMALL = DCNSizes(embeddings=1 + len(clicks.ROWS), dim=32, layers=3, rank=64, over=(256, 128, 64))
MOVIETWEETINGS_DLRM = DCNSizes(embeddings=1 + len(movietweetings.ROWS), dim=32, layers=2, rank=64, over=(128, 64))

TRAIN_SAMPLES = 128 * 4096  # of the embedded click data, in one pass
TEST_SAMPLES = 16 * 4096


def click_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits (B,) or (B, 1) against clicks (B,), in float32."""
    return nn.functional.binary_cross_entropy_with_logits(output.reshape(target.shape).float(), target.float())


def ranker() -> WukongRanker:
    """A Wukong of production width: 16 embeddings of 128, 3 layers, hidden width 2048; for batches of 16384."""
    return WukongRanker(RANKER, clicks.ROWS, clicks.DENSE)


def small_ranker() -> WukongRanker:
    """A Wukong small enough to train on a CPU: 16 embeddings of 32, 3 layers, hidden width 256."""
    return WukongRanker(SMALL_RANKER, clicks.ROWS, clicks.DENSE)


def ranker_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Dense features and ids of real rows."""
    return clicks.example(batch_size)


def ranker_batches(batch_size: int, seed: int) -> ClickStream:
    """One pass over the training rows of `seed`."""
    return ClickStream("train", TRAIN_SAMPLES, batch_size, seed)


def ranker_test_batches(batch_size: int, seed: int) -> ClickStream:
    """Test rows, which occur in no training stream."""
    return ClickStream("test", TEST_SAMPLES, batch_size, seed)


def movietweetings_ranker() -> WukongRanker:
    """The same kind of model for MovieTweetings: 12 embeddings of 32, 2 layers, hidden width 128. Needs no data."""
    return WukongRanker(MOVIETWEETINGS, movietweetings.ROWS, movietweetings.DENSE)


def movietweetings_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Dense features and ids of the right shapes and ranges; needs no data."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(batch_size, movietweetings.DENSE, generator=generator, device="cpu")
    ids = [torch.randint(rows, (batch_size,), generator=generator, device="cpu") for rows in movietweetings.ROWS]
    return dense, torch.stack(ids, 1)


def movietweetings_batches(batch_size: int, seed: int) -> RatingBatches:
    """One pass over the training rows, in an order drawn from `seed`. Raises InputError if the data is missing."""
    train, _ = movietweetings.load(movietweetings.find_data())
    return RatingBatches(train, batch_size, seed)


def movietweetings_test_batches(batch_size: int, seed: int) -> RatingBatches:
    """The test rows in time order; `seed` is ignored. Raises InputError if the data is missing."""
    _, test = movietweetings.load(movietweetings.find_data())
    return RatingBatches(test, batch_size, seed=None)


def dlrm() -> DLRM:
    """A DLRM-DCNv2 small enough to train on a CPU: 16 embeddings of 32, 3 cross layers of rank 64."""
    return DLRM(DLRM_SMALL, clicks.ROWS, clicks.DENSE)


dlrm_inputs, dlrm_batches, dlrm_test_batches = ranker_inputs, ranker_batches, ranker_test_batches


def movietweetings_dlrm() -> DLRM:
    """The same kind of model for MovieTweetings: 12 embeddings of 32, 2 cross layers of rank 64. Needs no data."""
    return DLRM(MOVIETWEETINGS_DLRM, movietweetings.ROWS, movietweetings.DENSE)


def wukong_small() -> Wukong:
    """64 embeddings of 128, 4 layers, rank 32, hidden width 2048; measured at batch size 16384."""
    return Wukong(SMALL)


def wukong_small_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 64, 128), float32, standard normal; they require gradients, like those from a table."""
    return (_normal(batch_size, SMALL.embeddings, SMALL.dim),)


def wukong_large() -> Wukong:
    """128 embeddings of 256, 4 layers, rank 64, hidden width 4096; measured at batch size 4096."""
    return Wukong(LARGE)


def wukong_large_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 128, 256), float32, standard normal; they require gradients, like those from a table."""
    return (_normal(batch_size, LARGE.embeddings, LARGE.dim),)


def dcnv2() -> DCNv2:
    """Width 3456, 3 cross layers of rank 512, over-arch 1024-1024-512-256-1; measured at batch size 8192."""
    return DCNv2(MLPERF)


def dcnv2_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 27, 128), float32, standard normal; they require gradients, like those from a table."""
    return (_normal(batch_size, MLPERF.embeddings, MLPERF.dim),)


def mmoe() -> MultiTask:
    """8 experts 1344-1024-512 and two towers with BatchNorm; for batches of 16384."""
    return MultiTask(MMOE_SIZES)


def mmoe_inputs(batch_size: int) -> tuple[Tensor]:
    """Features (B, 1344), float32, standard normal; they require gradients, as those of all families below."""
    return (_normal(batch_size, MMOE_SIZES.inputs),)


def ple() -> MultiTask:
    """Two levels of 4 shared experts and 2 of each of two tasks, 1024-512 wide; for batches of 16384."""
    return MultiTask(PLE_SIZES)


ple_inputs = mmoe_inputs


def rankmixer() -> RankMixer:
    """16 tokens of 768, 2 layers, hidden width 2304; for batches of 16384."""
    return RankMixer(RANKMIXER_SIZES)


def rankmixer_inputs(batch_size: int) -> tuple[Tensor]:
    """Features of each token (B, 16, 320)."""
    return (_normal(batch_size, RANKMIXER_SIZES.tokens, RANKMIXER_SIZES.features),)


def hstu() -> HSTURanker:
    """Sequences of 256, two layers of width 1024 with 8 heads; for batches of 512."""
    return HSTURanker(HSTU_SIZES)


def hstu_inputs(batch_size: int) -> tuple[Tensor]:
    """Embedded behaviours, the candidate last (B, 256, 1024)."""
    return (_normal(batch_size, HSTU_SIZES.length, HSTU_SIZES.dim),)


def interformer() -> InterFormer:
    """64 embeddings of 128 and 64 behaviours, 3 layers, hidden width 2048; for batches of 4096."""
    return InterFormer(INTERFORMER_SIZES)


def interformer_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Embeddings of features (B, 64, 128) and of behaviours (B, 64, 128)."""
    sizes = INTERFORMER_SIZES
    both = _normal(batch_size, sizes.features + sizes.length, sizes.dim)
    return both[:, : sizes.features], both[:, sizes.features :]


def onetrans() -> OneTrans:
    """240 behaviours and 16 tokens of features, 2 blocks of width 384 with 6 heads; for batches of 4096."""
    return OneTrans(ONETRANS_SIZES)


def onetrans_inputs(batch_size: int) -> tuple[Tensor]:
    """Tokens of behaviours, then of features (B, 256, 384)."""
    return (_normal(batch_size, ONETRANS_SIZES.behaviours + ONETRANS_SIZES.features, ONETRANS_SIZES.dim),)


def masknet() -> MaskNet:
    """32 embeddings of 64, 4 parallel blocks of width 1024 whose masks are made by MLPs of 4096; for 8192 samples."""
    return MaskNet(MASKNET_SIZES)


def masknet_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 32, 64)."""
    return (_normal(batch_size, MASKNET_SIZES.embeddings, MASKNET_SIZES.dim),)


def autoint() -> AutoInt:
    """40 embeddings of 64, 3 attention layers of width 128, and an MLP 1024-512-256; for batches of 8192."""
    return AutoInt(AUTOINT_SIZES)


def autoint_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 40, 64)."""
    return (_normal(batch_size, AUTOINT_SIZES.embeddings, AUTOINT_SIZES.dim),)


def final_mlp() -> FinalMLP:
    """40 embeddings of 64, MLPs 2048-1024-512 and 1024-512, 4 heads; for batches of 8192."""
    return FinalMLP(FINAL_MLP_SIZES)


final_mlp_inputs = autoint_inputs


def din() -> DIN:
    """50 behaviours of 128, weighed by an MLP 256-128, and an over-arch 1024-512-256; for batches of 8192."""
    return DIN(DIN_SIZES)


def din_inputs(batch_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (B, 20, 128), history (B, 50, 128), target (B, 128) and a mask (B, 50), all ones."""
    features = _normal(batch_size, DIN_SIZES.features, DIN_SIZES.dim)
    history = _normal(batch_size, DIN_SIZES.length + 1, DIN_SIZES.dim)
    return features, history[:, 1:], history[:, 0], torch.ones(batch_size, DIN_SIZES.length, device="cpu")


def dhen() -> DHEN:
    """32 embeddings of 64, 3 layers that sum a cross layer of rank 512, an MLP of 2048 and inner products; for 8192."""
    return DHEN(DHEN_SIZES)


def dhen_inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings (B, 32, 64)."""
    return (_normal(batch_size, DHEN_SIZES.embeddings, DHEN_SIZES.dim),)


def _normal(*shape: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return made.requires_grad_()
