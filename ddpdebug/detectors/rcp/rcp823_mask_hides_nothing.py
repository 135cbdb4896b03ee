"""RCP823: an attention mask hides nothing."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import AddedMask

_FACT = {"step": 1, "shape": [48, 1, 1, 24], "zeros": 0.4, "location": "train.py:53"}


class MaskHidesNothing(EventRule):
    """`scaled_dot_product_attention` was given a mask of the numbers 0 and 1, which it adds to the scores.

    Only a mask of truth values chooses; one of numbers is added, and needs minus infinity where something is hidden.
    Looked for in the second forward, in host memory, for a mask of padding or a triangle, where attention is
    fused: not where it is written out, and on a CPU not where it has dropout or the mask a gradient.

    Impact: padding or the future is attended to like everything else, and results depend on how batches are padded.

    Diagnosis: print `mask.dtype` and `mask.unique()` before the call. Change a hidden position: the output must not.

    Causes:
    - a tokenizer's mask after `.float()` or `.to(x.dtype)`, which is 1 where a token stands
    - `(1 - mask)` without the factor of minus infinity that turns it into a bias
    - intended: a bias of 0 and 1
    - a mask for `masked_fill`, or for a library that converts it, passed on as it is

    Remedy:
    - pass truth values: `attn_mask=mask.bool()`, True where attention may look; for `nn.MultiheadAttention` and
      `nn.TransformerEncoder` `key_padding_mask=~mask.bool()`, True where it must not
    - or add minus infinity where something is hidden: `torch.zeros_like(scores).masked_fill(~mask.bool(), -torch.inf)`
    """

    code = "RCP823"
    severity = Severity.WARNING
    title = "a mask of zeros and ones is added to the scores of attention, so that it hides nothing"
    events = ("attention",)
    fires_on = Examples(
        lambda: Facts(topic="alone:attention", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:attention", values={1: {**_FACT, "shape": [6, 8, 24, 24]}})),
    )
    silent_on = Examples(lambda: steps(3), lambda: steps(40))

    def judge(self, fact: AddedMask) -> Fields | None:
        evidence = {"mask": list(fact.shape), "zeros": round(fact.zeros, 3)}
        return {"subject": ("scaled_dot_product_attention",), "evidence": evidence}
