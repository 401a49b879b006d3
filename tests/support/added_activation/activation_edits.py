"""What is written to add the activation: for each file of the checklist, text and the line that it goes before."""

from __future__ import annotations

from tests.support.edited_loka import Edit

EDITS = (
    Edit(
        "loka/kernels/fused/norm/activations.py",
        '        "tanh": ActivationTraits(',
        """\
        "softsign": ActivationTraits("softsign", F.softsign, lambda grad, z: grad / (1.0 + z.abs()).square()),
""",
    ),
    Edit(
        "templates/triton/device/activations.py.j2",
        "@triton.jit\ndef gate_sigmoid(",
        """\
@triton.jit
def softsign(z):
    return z / (1.0 + tl.abs(z))


@triton.jit
def softsign_gradient(grad, z):
    size = 1.0 + tl.abs(z)
    return grad / (size * size)


""",
    ),
)
