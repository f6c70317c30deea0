"""A word-level LSTM, state carried from step to step, weights updated by hand, gradients clipped."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, words=500, width=64, layers=2):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return torch.log_softmax(self.decoder(self.drop(output)).view(-1, 500), dim=1), hidden


def repackaged(hidden):
    return tuple(each.detach() for each in hidden)


def main():
    torch.manual_seed(1111)
    model = Model().cuda()
    criterion = nn.NLLLoss()
    corpus = torch.randint(0, 500, (33, 8)).cuda()
    weight = next(model.parameters())
    hidden = (weight.new_zeros(2, 8, 64), weight.new_zeros(2, 8, 64))
    total_loss = 0.0

    def step():
        nonlocal hidden, total_loss
        data, targets = corpus[:-1], corpus[1:].reshape(-1)
        model.zero_grad()
        hidden = repackaged(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-20.0)
        total_loss += loss.item()

    return step
