"""`loka init`: short, broad, and a policy that loads and plans."""

from __future__ import annotations

import json

import pytest

from loka.mods.policy_loader import load_policy
from loka.plan.draft import DraftOptions, draft_policy, identifier, policy_name


@pytest.mark.slow
def test_the_draft_loads_plans_and_keeps_until_there_is_evidence(shop, loka):
    ran = loka("init", "shopmodel:build", "-o", "policies/first.yaml", "--batch-size", "32")
    assert (ran.status, ran.out) == (0, "")
    text = (shop.folder / "policies/first.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert text.count("compute: auto") == 1
    assert json.loads((shop.folder / "policies/schema.json").read_text())["$schema"]
    assert loka("validate", "policies/first.yaml").status == 0
    plan = loka("plan", "policies/first.yaml")
    assert plan.status == 0
    assert "no evidence: run loka probe" in plan.out
    assert loka("generate", "policies/first.yaml").status == 0


@pytest.mark.slow
def test_mods_are_proposed_as_comments_that_a_policy_can_have(shop, loka):
    assert loka("init", "shopmodel:build", "-o", "policies/first.yaml", "--batch-size", "32").status == 0
    path = shop.folder / "policies/first.yaml"
    text = path.read_text()
    at = text.index("# mods:\n")
    assert text[at:].splitlines()[1:] == [
        "#   - {use: pad_alignment, optional: true} # K 13 padded to 16 in dense, N 24 padded to 32 in layers.* "
        "(2 times), K 24 padded to 32 in layers.*.up (2 times), N 1 padded to 8 in head; the same function",
        "#   - {use: no_bias} # 3 biases dropped; another model, to be trained",
        "#   - {use: block_norm} # 2 LayerNorm -> BlockNorm 32; another model, to be trained",
    ]
    assert load_policy(path).mods == ()
    commented = [line.removeprefix("# ").removeprefix("#") for line in text[at:].splitlines()]
    path.write_text(text[:at] + "\n".join(commented) + "\n")
    assert [mod.use for mod in load_policy(path).mods] == ["pad_alignment", "no_bias", "block_norm"]
    assert loka("plan", "policies/first.yaml").status == 0


def test_the_default_place_and_name_come_from_the_model(shop, loka):
    ran = loka("init", "shopmodel:build", "--inputs", "shopmodel:inputs", "--batch-size", "8")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == "policies/shop.yaml: is there already; choose another with -o, or overwrite it with --force\n"
    (shop.folder / shop.policy).unlink()
    assert loka("init", "shopmodel:build", "--inputs", "shopmodel:inputs", "--batch-size", "8").status == 0
    policy = load_policy("policies/shop.yaml")
    assert (policy.name, policy.model.inputs, policy.model.batch_size) == ("shop", "shopmodel:inputs", 8)


@pytest.mark.parametrize(
    ("factory", "model_class", "name"),
    [
        ("pkg.ranker:build", "TwoTower", "two_tower"),
        ("pkg.ranker:build_model", "DLRM_DCN", "dlrm_dcn"),
        ("pkg.ranker:build", "", "ranker"),
        ("pkg.ranker:build_wukong", "Model", "wukong"),
        ("pkg.zoo:dcnv2", "Anything", "dcnv2"),
        ("pkg.zoo:MyModel", "MyModel", "my_model"),
        ("pkg.zoo:Builders.make", "HSTUModel", "hstu_model"),
        ("pkg.zoo:build", "MMoE", "mmoe"),
        ("pkg.zoo:build", "SparseMoERanker", "sparse_moe_ranker"),
    ],
)
def test_a_policy_is_called_after_factory_class_or_module(factory, model_class, name):
    assert policy_name(factory, model_class) == name


def test_an_existing_file_is_not_overwritten_without_force(shop, loka):
    before = shop.files()
    ran = loka("init", "shopmodel:build", "-o", shop.policy)
    assert (ran.status, shop.files()) == (2, before)
    assert "--force" in ran.err
    assert loka("init", "shopmodel:build", "-o", shop.policy, "--force", "--name", "other").status == 0
    assert load_policy(shop.policy).name == "other"


@pytest.mark.parametrize(
    "model", ["shopmodel", "shopmodel:nothing", "nowhere:build", "shopmodel:raising", "shopmodel:many:x"]
)
def test_a_model_that_cannot_be_built_writes_nothing(model, refuse):
    refuse("init", model, "-o", "policies/first.yaml")


@pytest.mark.parametrize("name", ["1st", "a b", "class", "x-y", ""])
def test_a_name_that_is_no_identifier_writes_nothing(name, refuse):
    refuse("init", "shopmodel:build", "-o", "policies/first.yaml", "--name", name)


def test_names_are_made_from_anything():
    assert [identifier(text) for text in ("build", "my-ranker v2", "2nd", "class", "..", "größe")] == [
        "build",
        "my_ranker_v2",
        "model_2nd",
        "model_class",
        "model",
        "gr_e",
    ]


def test_ten_thousand_layers_make_no_longer_a_draft(shop, loka):
    from loka.graph.sites.site import GemmKind, RowCount, Site

    def site(name: str, n: int) -> Site:
        return Site(name, GemmKind.LINEAR, "", f"{name}.weight", None, RowCount(1), 64, n, 1, 1, 1e-4, True, (), (), "")

    sites = [site(f"layers.{i}", 64) for i in range(10_000)]
    text = draft_policy(DraftOptions("big", "shopmodel:build", None, 64), [*sites, site("head\n: x", 1)])
    assert len(text.splitlines()) < 40
    assert len(text) < 3000
    policy = load_policy(shop.write_policy(text))
    assert len(policy.rules) == 2  # the defaults, and the heads


def test_rules_that_would_match_nothing_are_left_out():
    assert "rules:" not in draft_policy(DraftOptions("empty", "a:b", None, 64), [])


def test_a_model_is_not_replaced_by_its_draft(refuse):
    err = refuse("init", "shopmodel:build", "-o", "shopmodel.py", "--force")
    assert "-o: shopmodel.py is there already, and is not a policy; name another file" in err


@pytest.mark.slow
def test_training_functions_on_the_command_line_need_no_edit(shop, loka):
    """Three commands from a model to a package with evidence, without an edit."""
    out = ["-o", "policies/first.yaml", "--batch-size", "32"]
    training = ["--batches", "shopmodel:batches", "--loss", "shopmodel:loss"]
    drafted = loka("init", "shopmodel:build", *out, *training)
    assert drafted.status == 0
    assert drafted.err.endswith("next: loka probe policies/first.yaml\n")
    policy = load_policy("policies/first.yaml")
    assert policy.train is not None
    assert (policy.train.batches, policy.train.loss) == ("shopmodel:batches", "shopmodel:loss")
    assert "# loka train and compare also need `test`: batches that" in policy.path.read_text()
    assert loka("probe", "policies/first.yaml", "--steps", "2", "--draws", "2", "--ne-batches", "0").status == 0
    assert "no evidence" not in loka("plan", "policies/first.yaml").out
    assert loka("generate", "policies/first.yaml").status == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--batches", "shopmodel:batches"],
            "--batches needs --loss: loka probe trains with both; name both, or neither",
        ),
        (["--loss", "shopmodel:loss"], "--loss needs --batches: loka probe trains with both; name both, or"),
        (["--batches", "shopmodel:batch", "--loss", "shopmodel:loss"], "--batches: "),
        (["--batches", "shopmodel:batches", "--loss", "loss"], "--loss: "),
    ],
)
def test_training_functions_that_cannot_be_used_are_named(options, said, shop, loka):
    ran = loka("init", "shopmodel:build", "-o", "policies/first.yaml", *options)
    assert ran.status == 2
    assert said in ran.err
    assert not (shop.folder / "policies/first.yaml").exists()
