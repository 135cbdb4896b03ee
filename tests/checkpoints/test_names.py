"""Which names of two states belong together."""

from __future__ import annotations

import pytest

from ddpdebug.checkpoints.names import LeftOut, pair

W = ("conv.weight", "conv.bias", "fc.weight")


def prefixed(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in W)


@pytest.mark.parametrize(
    "a, b, pairs, left_out",
    [
        (W, W, 3, ()),
        (W, prefixed("module."), 3, (LeftOut("b", "module.", 3),)),
        (prefixed("_orig_mod.module."), W, 3, (LeftOut("a", "_orig_mod.", 3), LeftOut("a", "module.", 3))),
        (prefixed("module."), prefixed("_orig_mod."), 3, (LeftOut("a", "module.", 3), LeftOut("b", "_orig_mod.", 3))),
        (W, ("conv._orig_mod.weight", "conv._orig_mod.bias", "fc.weight"), 3, (LeftOut("b", "_orig_mod.", 2),)),
        (prefixed("state_dict."), W, 3, (LeftOut("a", "state_dict.", 3),)),
        (
            prefixed("model.module."),
            (*W, "optimizer.step"),
            3,
            (LeftOut("a", "model.", 3), LeftOut("a", "module.", 3)),
        ),
        # a module that the user has called `module` beside one of the same name without: nothing is guessed
        (("module.w", "w"), ("module.w", "w"), 2, ()),
        (("module.w", "w"), ("w",), 1, ()),
        (("a.w", "b.w"), ("x", "y"), 0, ()),
    ],
)
def test_pairs(a: tuple[str, ...], b: tuple[str, ...], pairs: int, left_out: tuple[LeftOut, ...]) -> None:
    """Equal names, equal but for wrappers, and equal but for the prefix of one side; either way round."""
    found = pair(a, b, prefixes=True)
    assert len(found.pairs) == pairs
    assert found.left_out == left_out
    assert len(found.only_a) == len(a) - pairs
    assert len(found.only_b) == len(b) - pairs
    back = pair(b, a, prefixes=True)
    assert {other: name for name, other in back.pairs.items()} == found.pairs
    assert {item.part for item in back.left_out} == {item.part for item in left_out}


def test_a_prefix_is_not_looked_for_where_tensors_have_equal_names() -> None:
    """An entry that is missing is not that of another module."""
    found = pair(("w", "ln.weight"), ("w", "head.ln.weight"), prefixes=False)
    assert (found.only_a, found.only_b) == (("ln.weight",), ("head.ln.weight",))
