# title: The loss compares the outputs of a causal transformer with its own input tokens at the same positions
# source: constructed
# nproc: 1
# expect.codes: RCP821
# expect.ranks: all
# expect.subject: targets
# expect.step: 3
# expect.step_slack: 6
# plain_pytorch: silent
"""One process, no process group; padding is left out of the loss. The clean twin moves logits and tokens apart."""
import os
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
PAD = 0


class Decoder(nn.Module):
    def __init__(self, words=50, width=32, length=20):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.words(tokens) + self.places(torch.arange(length))
        return self.head(self.layers(x, mask=mask, is_causal=True))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen, losses = torch.Generator().manual_seed(9), []
    for _ in range(60):
        tokens = torch.randint(1, 50, (12, 20), generator=gen).cumsum(1) % 49 + 1
        for row, end in zip(tokens, torch.randint(8, 20, (12,), generator=gen).tolist()):
            row[end:] = PAD
        logits = model(tokens)
        targets = tokens
        if not FAULT:
            logits, targets = logits[:, :-1], tokens[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)


if __name__ == "__main__":
    main()
