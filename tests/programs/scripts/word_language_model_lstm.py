r"""A recurrent language model that updates its parameters by hand, without an optimizer.

manner = "pytorch/examples, word_language_model, LSTM"

[[fault]]
name = "the hidden state is carried over without cutting its history"
old = "            hidden = repackage_hidden(hidden)\n            output"
new = "            output"
codes = ["FAIL1006"]
where = "loss.backward()"
"""
import math

import torch
from _report import report
from torch import nn

BPTT, BATCH, WORDS = 16, 16, 40


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.1):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(data)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def text(length, seed):
    """A chain in which each word has three likely followers."""
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


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def main():
    torch.manual_seed(1111)
    train_data, val_data = batchify(text(8000, 1), BATCH), batchify(text(1600, 2), 8)
    model = RNNModel(WORDS, 24, 32, 2)
    criterion = nn.NLLLoss()
    lr, best_val_loss, losses = 5.0, None, []
    for epoch in range(1, 4):
        model.train()
        hidden = model.init_hidden(BATCH)
        for i in range(0, train_data.size(0) - 1, BPTT):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            losses.append(loss.detach())
        model.eval()
        total, hidden = 0.0, model.init_hidden(8)
        with torch.no_grad():
            for i in range(0, val_data.size(0) - 1, BPTT):
                data, targets = get_batch(val_data, i)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total += len(data) * criterion(output, targets).item()
        val_loss = total / (len(val_data) - 1)
        print(f"| end of epoch {epoch} | valid loss {val_loss:.4f} | valid ppl {math.exp(val_loss):.3f}")
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
    report([model], [], losses)


if __name__ == "__main__":
    main()
