"""A causal transformer on words with torch's own encoder layers.

manner = "pytorch/examples, word_language_model, Transformer with --use-optimizer"

[[fault]]
name = "the rate of the version with hand-written updates, 20, given to AdamW"
old = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
new = "torch.optim.AdamW(model.parameters(), lr=20)"
codes = ["HLTH710", "HLTH701", "HLTH705", "HLTH706"]
"""
import math

import torch
from _report import report
from torch import nn

BPTT, BATCH, WORDS = 16, 16, 40


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class TransformerModel(nn.Transformer):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.1):
        super().__init__(d_model=ninp, nhead=nhead, dim_feedforward=nhid, num_encoder_layers=nlayers, dropout=dropout)
        del self.decoder
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.head = nn.Linear(ninp, ntoken)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)

    def forward(self, src):
        mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        return nn.functional.log_softmax(self.head(self.encoder(src, mask=mask)), dim=-1)


def text(length, seed):
    followers = torch.randint(0, WORDS, (WORDS, 3), generator=torch.Generator().manual_seed(11))
    generator = torch.Generator().manual_seed(seed)
    words, word = [], 0
    for choice in torch.randint(0, 3, (length,), generator=generator).tolist():
        word = int(followers[word, choice])
        words.append(word)
    return torch.tensor(words)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def main():
    torch.manual_seed(1111)
    train_data, val_data = batchify(text(8000, 1), BATCH), batchify(text(1600, 2), 8)
    model = TransformerModel(WORDS, 32, 2, 64, 2)
    criterion = nn.NLLLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(1, 4):
        model.train()
        for i in range(0, train_data.size(0) - 1, BPTT):
            data, targets = get_batch(train_data, i)
            optimizer.zero_grad()
            output = model(data).view(-1, WORDS)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        total = 0.0
        with torch.no_grad():
            for i in range(0, val_data.size(0) - 1, BPTT):
                data, targets = get_batch(val_data, i)
                total += len(data) * criterion(model(data).view(-1, WORDS), targets).item()
        print(f"| end of epoch {epoch} | valid loss {total / (len(val_data) - 1):.4f}")
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
