"""Two networks against each other: two optimizers, a detached batch, a loss each, and numbers for the log."""

import torch
from torch import nn

LATENT, WIDTH = 32, 16


def weights_init(module):
    name = module.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(module.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(module.weight.data, 1.0, 0.02)
        nn.init.constant_(module.bias.data, 0)


generator = nn.Sequential(
    nn.ConvTranspose2d(LATENT, WIDTH * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(WIDTH * 4), nn.ReLU(True),
    nn.ConvTranspose2d(WIDTH * 4, WIDTH * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH * 2), nn.ReLU(True),
    nn.ConvTranspose2d(WIDTH * 2, 3, 4, 2, 1, bias=False), nn.Tanh(),
).cuda()  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(WIDTH, WIDTH * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(WIDTH * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
).cuda()  # fmt: skip
generator.apply(weights_init)
discriminator.apply(weights_init)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))


def step(batch_size=4):
    device = torch.device("cuda:0")
    discriminator.zero_grad()
    real = torch.rand(batch_size, 3, 16, 16, device=device)
    label = torch.full((batch_size,), 1.0, dtype=real.dtype, device=device)
    output = discriminator(real).view(-1)
    error_real = criterion(output, label)
    error_real.backward()
    d_x = output.mean().item()
    noise = torch.randn(batch_size, LATENT, 1, 1, device=device)
    fake = generator(noise)
    label.fill_(0.0)
    output = discriminator(fake.detach()).view(-1)
    error_fake = criterion(output, label)
    error_fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    label.fill_(1.0)
    output = discriminator(fake).view(-1)
    error_g = criterion(output, label)
    error_g.backward()
    optimizer_g.step()
    print(f"D {(error_real + error_fake).item():.4f} G {error_g.item():.4f} D(x) {d_x:.4f} D(G) {output.mean():.4f}")
