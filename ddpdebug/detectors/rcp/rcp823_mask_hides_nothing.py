"""RCP823: an attention mask hides nothing."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import AddedMask, PaddingEffect

_PADDING = "outputs depend on how much padding a batch has, although the model is given a mask of it"
_FACT = {"step": 1, "shape": [48, 1, 1, 24], "zeros": 0.4, "location": "train.py:53"}


class MaskHidesNothing(EventRule):
    """`scaled_dot_product_attention` was given a mask of the numbers 0 and 1, which it adds to the scores.

    Only a mask of truth values chooses; one of numbers is added, and needs minus infinity where something is hidden.
    Looked for in the second forward, in host memory, for a mask of padding or a triangle, where attention is
    fused: not where it is written out, and on a CPU not where it has dropout or the mask a gradient.

    Or a model that is given tokens and a mask of their padding gives other outputs where a batch has less of it. Under
    `check` one rank asks each model once, in eval mode, in a copy of the process, with the last columns taken away.

    Impact: padding or the future is attended to like everything else, and results depend on how batches are padded.

    Diagnosis: print `mask.dtype` and `mask.unique()` before the call. Change a hidden position: the output must not.

    Causes:
    - a tokenizer's mask after `.float()` or `.to(x.dtype)`, which is 1 where a token stands
    - `(1 - mask)` without the factor of minus infinity that turns it into a bias
    - `padding`: a mask of the wrong sense (True hides in `nn.MultiheadAttention` and `nn.TransformerEncoder`, and shows
      in `scaled_dot_product_attention`), one that is not passed on, or a mean over all positions
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
    events = ("attention", "padding")
    padding_change = Threshold(
        1e-3,
        "change of outputs by less padding, as a share of the largest output, above which padding is seen",
        source="kernels of other sizes round otherwise: below 1e-5 in single precision",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:padding", values={0: {"step": 4, "change": 0.2, "length": 24, "kept": 21}}),
        lambda: Facts(topic="alone:attention", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:attention", values={1: {**_FACT, "shape": [6, 8, 24, 24]}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: steps(40),
        lambda: Facts(topic="alone:padding", values={0: {"step": 4, "change": 1e-6, "length": 24, "kept": 21}}),
    )

    def judge(self, fact: AddedMask | PaddingEffect) -> Fields | None:
        if isinstance(fact, PaddingEffect):
            if fact.change <= self.padding_change:
                return None
            about = {"change_of_outputs": round(fact.change, 4), "positions": fact.length, "without_padding": fact.kept}
            return {"ranks": (), "title": _PADDING, "phase": "padding", "subject": ("padding",), "evidence": about}
        evidence = {"mask": list(fact.shape), "zeros": round(fact.zeros, 3)}
        return {"subject": ("scaled_dot_product_attention",), "evidence": evidence}
