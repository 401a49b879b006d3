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

The loss of all of them is `click_loss`. Factories draw weights from torch's generator, which the caller seeds.
"""  # noqa: E501  (a table row cannot be broken)

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.zoo import clicks, movietweetings
from loka.zoo.clicks import ClickStream
from loka.zoo.dlrm import DLRM, MLPERF, DCNSizes, DCNv2
from loka.zoo.movietweetings import RatingBatches
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


def _normal(*shape: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return made.requires_grad_()
