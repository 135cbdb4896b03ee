"""What looks secret is hidden in a command line and in texts that quote it; what does not stays readable."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given, strategies as st

from ddpdebug.redaction import HIDDEN, Redactor, redact

_NAMES = ["api-key", "api_key", "password", "db-passwd", "hf-token", "wandb-api-key", "client-secret", "apiKey"]
_NAMES += ["auth", "auth-token", "credentials", "session-cookie", "slack-webhook", "AWS_SECRET_ACCESS_KEY", "PWD"]
_SECRETS = st.text(string.ascii_letters + string.digits + "_.!$%^*+/", min_size=8, max_size=60).filter(
    lambda text: any(c.isalpha() for c in text) and not text.startswith("--")
)
_WORDS = st.lists(st.sampled_from(["--lr", "1e-3", "--batch-size", "32", "data/train", "-v", "model=gpt"]), max_size=4)


@given(name=st.sampled_from(_NAMES), secret=_SECRETS, before=_WORDS, after=_WORDS, form=st.integers(0, 7))
def test_the_value_of_a_name_that_looks_secret_is_hidden(
    name: str, secret: str, before: list[str], after: list[str], form: int
) -> None:
    """However it is spelled, wherever it stands."""
    forms = [
        [f"--{name}", secret],
        [f"--{name}={secret}"],
        [f"-{name}", secret],
        [f"{name}={secret}"],
        [f"+trainer.logger.{name}={secret}"],
        [json.dumps({name: secret})],
        [f"--env={name}={secret}"],
        [f"--header={name}: {secret}"],
    ]
    words = redact(["train.py", *before, *forms[form], *after])
    assert secret not in " ".join(words).replace(HIDDEN, "")
    assert any(HIDDEN in word for word in words)
    assert words[1 : 1 + len(before)] == before


@given(secret=_SECRETS.filter(lambda text: "***" not in text and text.lower() not in "exception of train.py"))
def test_a_text_that_quotes_the_line_is_hidden_too(secret: str) -> None:
    """An exception that shows the password of the command line does not bring it into the run directory."""
    redactor = Redactor(["train.py", "--password", secret])
    value = redactor.value({"a": [f"ValueError: {secret!s} is wrong", 7, None], "b": ("x", secret)})
    assert secret not in json.dumps(value, ensure_ascii=False)


_TOKENS = {
    "hugging face": "hf_" + "aBcDeFgHiJkLmNoPqRsT",
    "openai": "sk-" + "proj-abcdefghij0123456789",
    "github": "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "github fine-grained": "github_pat_" + "11ABCDEFG0abcdefghijklmnop",
    "gitlab": "glpat-" + "abcdefghij0123456789",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "slack": "xoxb-" + "123456789012-abcdefghij",
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "google": "AIza" + "SyA1234567890abcdefghijklmnopqrstu",
}


@pytest.mark.parametrize("token", _TOKENS.values(), ids=_TOKENS)
@pytest.mark.parametrize("form", ["{}", "x={}", "https://host/{}/y", "login failed for {}.", "'{}'"])
def test_a_token_is_known_by_its_shape(token: str, form: str) -> None:
    """In the line, and in a text that has nothing to do with it."""
    assert token not in redact([form.format(token)])[0]
    assert token not in Redactor().text(form.format(token))


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("https://me:pass@host/x?y=1", f"https://{HIDDEN}@host/x?y=1"),
        ("postgresql+psycopg://me:p@ss@db/x", f"postgresql+psycopg://{HIDDEN}@db/x"),
        ("https://hooks.slack.com/services/T0/B0/abc", f"https://hooks.slack.com/{HIDDEN}"),
        ("Authorization: Bearer abc.def-123", f"Authorization: {HIDDEN} {HIDDEN}"),
        ("4f3c2b1a" * 5, HIDDEN),
        ("Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MEFCQ0RFRkc=", HIDDEN),
    ],
)
def test_other_shapes_of_secrets(word: str, shown: str) -> None:
    """Users in addresses, web hooks, headers, long random words."""
    assert redact([word]) == [shown]


@pytest.mark.parametrize(
    "line",
    [
        "--max-tokens 512 --key-dim 64 --num-key-heads 8 --token-dropout 0.1 --use-auth-token false",
        "--tokenizer gpt2 --monkey banana --keyboard us --author me --passes 3 --cookiecutter x",
        "--metrics-password-file /etc/pw --key-file key.pem --token-type bpe --grafana-token-file t",
        "--out /scratch/runs/20261121T082503Z-resnet50-imagenet-bs256-lr0.1-seed42/checkpoints/last.ckpt",
        "--name resnet50_imagenet_bs256_lr0.1_wd1e-4_seed42 -p 8 --url https://host:8080/a/b?c=d",
        "model.hidden=1024 optimizer.lr=3e-4 +data.path=/mnt/a -m package.train --token",
    ],
)
def test_what_is_no_secret_stays_readable(line: str) -> None:
    """Numbers of tokens and keys, places of files, names of runs, `-p`, which is a port or a patience mostly."""
    assert redact(line.split()) == line.split()


@pytest.mark.parametrize(
    "text",
    [
        'Missing key(s) in state_dict: "fc.weight", "fc.bias"',
        "KeyError: key = tokens",
        "token embedding of token 17 is basic attention",
        "a45da74f8734348e GPU-8a7b6c5d-1234-5678-9abc-def012345678",
        "layers.1.attn.key_proj.weight: digests differ",
        "connection to tcp://10.0.0.1:29500 closed",
    ],
)
def test_findings_stay_readable(text: str) -> None:
    """Words of the field, names of parameters, fingerprints and addresses are no secrets."""
    assert Redactor(["train.py", "--sort-key", "digests"]).text(text) == text


def test_what_holds_no_secret_is_the_same_object() -> None:
    """Records are not copied where nothing is hidden."""
    value = {"a": [1, "two", {"three": None}], "b": ("c",)}
    assert Redactor(["x", "--password", "hunter22"]).value(value) is value


@pytest.mark.smoke
@given(words=st.lists(st.text(max_size=40), max_size=8))
def test_any_line_is_taken(words: list[str]) -> None:
    """As many words come out as went in, and a second time changes nothing more."""
    shown = redact(words)
    assert len(shown) == len(words)
    assert redact(shown) == shown
