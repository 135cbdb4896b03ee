"""An encoder and a decoder with attention, each with an optimizer of its own.

manner = "pytorch/tutorials, seq2seq_translation_tutorial.py"

[[fault]]
name = "both optimizers are given the encoder: a copied line"
old = "optim.Adam(decoder.parameters(), lr=learning_rate)"
new = "optim.Adam(encoder.parameters(), lr=learning_rate)"
codes = ["RCP803"]
"""
import torch
import torch.nn.functional as F
from _report import report
from torch import nn, optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

SOS, EOS, WORDS, LENGTH = 0, 1, 24, 7


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        decoder_input = torch.full((encoder_outputs.size(0), 1), SOS)
        hidden, outputs = encoder_hidden, []
        for i in range(LENGTH):
            embedded = self.dropout(self.embedding(decoder_input))
            context, _ = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            outputs.append(self.out(output))
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                decoder_input = outputs[-1].topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


def sentences(count):
    """The second language has other words for the first's, and the order is reversed."""
    generator = torch.Generator().manual_seed(4)
    words = 2 + torch.randperm(WORDS - 2, generator=generator)
    source = torch.randint(2, WORDS, (count, LENGTH - 1), generator=generator)
    target = words[source - 2].flip(1)
    end = torch.full((count, 1), EOS)
    return TensorDataset(torch.cat([source, end], 1), torch.cat([target, end], 1))


def train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion, losses):
    total_loss = 0
    for input_tensor, target_tensor in dataloader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs = decoder(encoder_outputs, encoder_hidden, target_tensor)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        losses.append(loss.detach())
        total_loss += loss.item()
    return total_loss / len(dataloader)


def main():
    torch.manual_seed(3)
    data = sentences(512)
    dataloader = DataLoader(data, sampler=RandomSampler(data), batch_size=32)
    encoder, decoder = EncoderRNN(WORDS, 32), AttnDecoderRNN(32, WORDS)
    learning_rate, losses = 1e-3, []
    encoder_optimizer = optim.Adam(encoder.parameters(), lr=learning_rate)
    decoder_optimizer = optim.Adam(decoder.parameters(), lr=learning_rate)
    criterion = nn.NLLLoss()
    for epoch in range(1, 5):
        loss = train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion, losses)
        print(f"{epoch} {loss:.4f}")
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        words = decoder(*encoder(data.tensors[0][:4])).argmax(-1)
        print(words.tolist())
    report([encoder, decoder], [encoder_optimizer, decoder_optimizer], losses)


if __name__ == "__main__":
    main()
