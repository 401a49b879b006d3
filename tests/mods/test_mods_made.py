"""What a profile keeps of the mods that made its model, and when two models are the same."""

from __future__ import annotations

import pytest

from loka.mods.adaptation import Adaptation, mismatch_reason, mod_fingerprints

NORM = "torch.nn.modules.normalization.LayerNorm"
BLOCKS = (
    Adaptation("block_norm", ("layers.0.norm", "layers.1.norm"), NORM, (("block", 32), ("eps", 1e-5))),
    Adaptation("block_norm", ("head.norm",), NORM, (("block", 128), ("eps", 1e-5))),
)
BIASES = Adaptation("no_bias", ("layers.0.up",), "torch.nn.modules.linear.Linear", (("into", ""),))
SWISH = Adaptation("hard_swish", ("act",), "torch.nn.modules.activation.SiLU")


def test_each_mod_is_told_in_a_line_with_its_numbers():
    block_norm, no_bias = mod_fingerprints((BIASES, *BLOCKS))
    assert (block_norm.mod, no_bias.mod) == ("block_norm", "no_bias")
    assert block_norm.text == "3 modules, layers.0.norm to head.norm, block 32 or 128, eps 1e-05"
    assert no_bias.text == "layers.0.up"
    widths = [Adaptation("norm_first", (f"{n}",), NORM, (("width", n),)) for n in (64, 8, 32, 16, 128)]
    assert mod_fingerprints(widths)[0].text == "5 modules, 64 to 128, width 8, 16, 32 or 2 others"
    assert mod_fingerprints(widths[:4])[0].text == "4 modules, 64 to 16, width 8, 16, 32 or another"


def test_the_order_of_mods_and_modules_makes_no_other_model():
    assert mismatch_reason(mod_fingerprints((*BLOCKS, BIASES)), mod_fingerprints((BIASES, *reversed(BLOCKS)))) is None
    assert mismatch_reason((), ()) is None


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ((BIASES,), (BIASES, SWISH), "without hard_swish (act)"),
        ((BIASES, SWISH), (BIASES,), "with hard_swish (act)"),
        ((SWISH,), (BIASES,), "without no_bias (layers.0.up), with hard_swish (act)"),
        (
            BLOCKS[1:],
            (Adaptation("block_norm", ("head.norm",), NORM, (("block", 64), ("eps", 1e-5))),),
            "with another block_norm (there head.norm, block 128, eps 1e-05; here head.norm, block 64, eps 1e-05)",
        ),
        (
            (BIASES,),
            (Adaptation("no_bias", ("layers.1.up",), BIASES.replaces, BIASES.settings),),
            "with another no_bias (there layers.0.up; here layers.1.up)",
        ),
    ],
)
def test_what_differs_is_named(there, here, words):
    assert mismatch_reason(mod_fingerprints(there), mod_fingerprints(here)) == words
